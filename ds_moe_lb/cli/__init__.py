"""The command line: `ds-moe-lb train | compare | experiment | convert | report | verify | ...`.

A command's module is imported only when it runs, so that `--help` is quick and no accelerator is
chosen before the command had its say.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ds_moe_lb.cli import arguments, convert_arguments, experiment_arguments

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_HELP = {
    "train": "train a small MoE language model on text, with any DeepSpeed config",
    "compare": "train twice, with micro-batch and with global-batch loss, and show the difference",
    "experiment": "repeat an experiment of the paper on a toy model, with intervals and figures",
    "convert": "make an MoE checkpoint from a dense transformers checkpoint, as in LLaMA-MoE",
    "report": "show runs from their TensorBoard, CSV or own logs in one self-contained HTML page",
    "verify": "prove on these ranks that counts, loss and gradients equal an fp64 reference",
    "run": "run a training script as it is, with the plugin on every engine it builds",
    "plan": "say before a run what balancing will see and cost: arithmetic only, no GPU",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None = those of this process.

    Returns:
        The exit status: 0, `EXIT_USAGE` for wrong input, `EXIT_INTERRUPTED` after Ctrl-C.
    """
    options = _parser().parse_args(argv)
    command = import_module(f"ds_moe_lb.cli.{options.command}")
    try:
        return int(command.run(options))
    except arguments.UsageError as error:
        print(f"ds-moe-lb {options.command}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-moe-lb", description="Global-batch load balancing for MoE training on DeepSpeed."
    )
    # The deepspeed launcher puts this in front of everything else; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add in (
        ("train", arguments.add_train),
        ("compare", arguments.add_compare),
        ("experiment", experiment_arguments.add),
        ("convert", convert_arguments.add),
        ("report", arguments.add_report),
        ("verify", arguments.add_verify),
        ("plan", arguments.add_plan),
        ("run", arguments.add_run),
    ):
        description = f"{_HELP[name][0].upper()}{_HELP[name][1:]}."
        add(commands.add_parser(name, help=_HELP[name], description=description))
    # What `experiment` starts on its ranks; without a help text it is not listed.
    experiment_arguments.add_ranks(commands.add_parser("experiment_ranks"))
    return parser
