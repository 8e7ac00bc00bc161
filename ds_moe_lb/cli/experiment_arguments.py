"""The flags of `ds-moe-lb experiment`. Nothing heavy is imported here."""

import argparse
from pathlib import Path

from ds_moe_lb.experiments.catalogue import DEFAULT_SEEDS, EXPERIMENTS


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="+",
        choices=(*EXPERIMENTS, "all"),
        metavar="NAME",
        help="; ".join(f"{name}: {x.source}" for name, x in EXPERIMENTS.items()) + "; or all",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/experiments"),
        help="folder of the records, runs.jsonl, which experiments share, tables and figures; runs "
        "that it has are not done again [%(default)s]",
    )
    parser.add_argument("--data", type=Path, help="as for train")
    parser.add_argument(
        "--seeds", type=int, default=DEFAULT_SEEDS, help="seeds 1, 2, ... [%(default)s]"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps of a run [those of the setting]")
    parser.add_argument(
        "--draw",
        action="store_true",
        help="train nothing: tables and figures from the runs that are recorded in --output",
    )


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pending", type=Path, metavar="FILE", help="runs that are to be done")
