"""`ds-moe-lb report`: one HTML page from the logs of runs, whoever trained them."""

import argparse
import os
import sys
import time
from pathlib import Path

from ds_moe_lb.cli.arguments import UsageError, usage_errors


def run(options: argparse.Namespace) -> int:
    """Write the page, once or until Ctrl-C; returns 0."""
    require_report_packages()
    watch: float | None = options.watch
    if watch is not None and watch <= 0:
        raise UsageError(f"--watch: got {watch:g}, expected seconds above 0")
    try:
        with usage_errors():
            page = write_report(options.paths, output=options.output, reload_seconds=watch)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; --output says where to") from None
    print(f"wrote {page}")
    if watch is not None:
        _watch(options.paths, page, seconds=watch)
    return 0


def write_report(
    paths: list[Path],
    *,
    output: Path | None,
    reload_seconds: float | None = None,
    quiet: bool = False,
) -> Path:
    """Print status and tables, write the page.

    Args:
        paths: folders or files with logs, in the order in which they are shown.
        output: the page; None = report.html in the folder that holds the runs.
        reload_seconds: how often a browser loads the page again; None = never.
        quiet: print nothing.

    Returns:
        The page. For runs of our own trainer the figures are in `figures` beside it.

    Raises:
        ValueError: when there is no run with the plugin at one of the paths.
    """
    from ds_moe_lb.report.figures import draw_figures, save_figures
    from ds_moe_lb.report.html import html_page
    from ds_moe_lb.report.sources import find_logs
    from ds_moe_lb.report.tables import print_tables

    logs = find_logs(paths)
    if not quiet:
        print_tables(logs)
    page = output or _beside(paths, first=logs[0].path, several=len(logs) > 1)
    page.parent.mkdir(parents=True, exist_ok=True)
    if reload_seconds is None and any(log.run is not None for log in logs):
        save_figures(draw_figures(logs), page.parent / "figures")
    # A browser that reloads at this moment sees the old page or the new one.
    new = page.with_name(f".{page.name}.{os.getpid()}")
    new.write_text(html_page(logs, reload_seconds=reload_seconds), encoding="utf-8")
    new.replace(page)
    return page


def _beside(paths: list[Path], *, first: Path, several: bool) -> Path:
    folder = first.resolve().parent
    if several and len(paths) == 1:  # the folder that holds the runs, however deep they lie in it
        folder = paths[0].resolve()
    return folder / "report.html"


def require_report_packages() -> None:
    """Ask for the extra before the work is done rather than after it."""
    try:
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is missing: pip install 'ds_moe_lb[report]'") from None


def _watch(paths: list[Path], page: Path, *, seconds: float) -> None:
    """Rewrite the page until Ctrl-C; the last page stays while the logs cannot be read."""
    print(f"rewriting it every {seconds:g} s; Ctrl-C ends that")
    try:
        while True:
            time.sleep(seconds)
            try:
                write_report(paths, output=page, reload_seconds=seconds, quiet=True)
            except (ValueError, OSError) as error:
                print(f"{time.strftime('%H:%M:%S')} not rewritten: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print()
