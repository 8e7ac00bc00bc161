"""`ds-moe-lb report`: figures and one HTML page from the folders of runs."""

import argparse
from pathlib import Path

from ds_moe_lb.cli.arguments import UsageError, usage_errors


def run(options: argparse.Namespace) -> int:
    """Redraw; returns 0."""
    require_report_packages()
    with usage_errors():
        page = write_report(options.runs, output=options.output)
    print(f"wrote {page} and the figures beside it")
    return 0


def write_report(folders: list[Path], *, output: Path | None) -> Path:
    """Print the tables, write the figures and the page.

    Args:
        folders: runs, in the order in which they are shown.
        output: the page; None = report.html in the folder that holds the first run.

    Returns:
        The page; the figures are in `figures` beside it.

    Raises:
        ValueError: when a folder is not a run or has no validation.
    """
    from ds_moe_lb.report.figures import draw_figures, save_figures
    from ds_moe_lb.report.html import html_page
    from ds_moe_lb.report.summary import common_folder, summarise
    from ds_moe_lb.report.tables import print_tables
    from ds_moe_lb.training.run_folder import read_run

    runs = [read_run(folder) for folder in folders]
    print_tables([summarise(run) for run in runs])
    page = output or common_folder(runs) / "report.html"
    save_figures(draw_figures(runs), page.parent / "figures")
    page.write_text(html_page(runs), encoding="utf-8")
    return page


def require_report_packages() -> None:
    """Ask for the extra before the work is done rather than after it."""
    try:
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is missing: pip install 'ds_moe_lb[report]'") from None
