"""The flags of `ds-moe-lb convert`; their defaults are those of `ConversionOptions`."""

import argparse
from pathlib import Path

from ds_moe_lb.convert.plan import CLUSTER_ROWS, GATE_INITS, SCALES, SHARINGS, SPLITS

_FLAGS: dict[str, tuple[type, str]] = {
    "num_experts": (int, "routed experts per layer"),
    "top_k": (int, "experts per token"),
    "num_shared_experts": (int, "blocks of an expert's size that every token passes through [0]"),
    "expert_size": (int, "neurons per expert, for --sharing inner [H / (experts + shared)]"),
    "gate_std": (float, "standard deviation of the gate's entries [0.02]"),
}
_CHOICES: dict[str, tuple[tuple[str, ...], str]] = {
    "split": (
        SPLITS,
        "how neurons become experts: at random, balanced k-means on weight rows, or by gradient "
        "importance to one domain of --data per expert [random]",
    ),
    "cluster_rows": (CLUSTER_ROWS, "matrix whose rows are clustered [up_proj]"),
    "sharing": (
        SHARINGS,
        "importance only; inner: each expert takes its own most important neurons, which may "
        "overlap and leave others out [none]",
    ),
    "scale": (
        SCALES,
        "factor on the routed output: experts/k, experts (keeps the mean), or 1 [paper]",
    ),
    "gate_init": (
        GATE_INITS,
        "first router weights: normal, 0, or each expert's mean gate_proj row [random]",
    ),
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, help="folder of a Llama, Mistral, Qwen2 or Qwen3 model"
    )
    parser.add_argument("output", type=Path, help="folder to make; it must not exist")
    for flags in (_FLAGS, {"seed": (int, "every random draw [1]")}):
        for name, (kind, text) in flags.items():
            flag = "--" + name.replace("_", "-")
            required = name in ("num_experts", "top_k")
            parser.add_argument(
                flag, type=kind, required=required, default=argparse.SUPPRESS, help=text
            )
    for name, (allowed, text) in _CHOICES.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, choices=allowed, default=argparse.SUPPRESS, help=text)
    group = parser.add_argument_group("--split importance")
    group.add_argument(
        "--data", type=Path, help="folder with one sub-folder, .txt or .jsonl file per expert"
    )
    group.add_argument(
        "--domain-sequences", type=int, default=64, help="sequences per domain [%(default)s]"
    )
    group.add_argument(
        "--sequence-length", type=int, default=512, help="tokens per sequence [%(default)s]"
    )
