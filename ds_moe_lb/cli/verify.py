"""`ds-moe-lb verify`: proof on these very ranks that balancing is what it should be."""

import argparse
import contextlib
import logging
import os
import warnings

from ds_moe_lb.cli.arguments import UsageError, usage_errors
from ds_moe_lb.cli.train import load_ds_config

EXIT_FAILED = 1


def run(options: argparse.Namespace) -> int:
    """Verify; returns 0 when every property holds, 1 on all ranks when one does not."""
    require_rich()
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    from ds_moe_lb.training import process_group
    from ds_moe_lb.verify.checks import Verification
    from ds_moe_lb.verify.layout import make_layout
    from ds_moe_lb.verify.table import print_table

    # DeepSpeed prints and logs on every rank; torch's deprecations are addressed to it.
    warnings.filterwarnings("ignore", category=FutureWarning)
    logger.setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        process_group.join()
        rank, world_size = process_group.rank_and_world_size()
        with usage_errors():
            layout = make_layout(
                load_ds_config(options.config),
                world_size=world_size,
                ep_size=options.ep_size,
                top_k=options.top_k,
            )
        device = get_accelerator().device_name()
        for precision, is_supported in (
            ("fp16", get_accelerator().is_fp16_supported),
            ("bf16", get_accelerator().is_bf16_supported),
        ):
            if layout.precision == precision and not is_supported():
                raise UsageError(
                    f"--config {options.config}: {precision} is on, which DeepSpeed does not "
                    f"support on this device ({device})"
                )
        lines = Verification(layout, scratch=options.scratch).run()
    if rank == 0:
        print_table(lines, layout)
    process_group.leave()
    return EXIT_FAILED if any(line.has_failed for line in lines) else 0


def require_rich() -> None:
    """Say how to get the one package that tables on a terminal need."""
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError("rich is missing: pip install 'ds_moe_lb[report]'") from None
