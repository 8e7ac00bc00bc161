"""The flags of all commands. Nothing heavy is imported here.

Flags of a run default to `argparse.SUPPRESS`: what the user did not give is absent, and the
dataclasses `TrainOptions` and `ModelConfig` are the one place for defaults.
"""

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPTION_FLAGS: dict[str, tuple[type, str]] = {
    "steps": (int, "optimizer steps in total [300]"),
    "seed": (int, "weights, data order and every other random draw [1]"),
    "eval_interval": (int, "optimizer steps between validations, 0 = only at the end [100]"),
    "eval_batches": (int, "validation batches per domain [4]"),
    "eval_batch_size": (int, "sequences of one rank in a validation batch [16]"),
    "save_interval": (int, "optimizer steps between checkpoints, 0 = at the end and on Ctrl-C [0]"),
    "aux_loss_coeff": (
        float,
        "factor on l_aux in the loss [0.1]; not if the config has an aux_loss_coeff of its own",
    ),
    "learning_rate": (float, "of AdamW, used when the config has no optimizer [0.002]"),
    "ep_size": (int, "expert-parallel size, 0 = as many ranks as divide the experts [0]"),
    "domain_weights": (str, "JSON file: how often each domain is sampled, by name [all equal]"),
    "reference_losses": (
        str,
        "JSON file: a loss by domain; after each validation, weights follow what is above [none]",
    ),
}
MODEL_FLAGS: dict[str, tuple[type, str]] = {
    "num_layers": (int, "transformer blocks, each with an MoE layer [3]"),
    "model_dim": (int, "width [64]"),
    "num_heads": (int, "attention heads [4]"),
    "expert_dim": (int, "hidden width of one expert [128]"),
    "num_experts": (int, "experts per layer, over all ranks [16]"),
    "top_k": (int, "experts per token [2]"),
    "sequence_length": (int, "bytes per sequence [128]"),
    "capacity_factor": (float, "slots per expert relative to an even load, 0 = never drop [0]"),
}
# What a transformers model of --model still takes; it has its own sizes.
FOLDER_MODEL_FLAGS = ("model", "sequence_length", "checkpointing")
CHECKPOINTING = ("off", "reentrant", "non_reentrant")
DOMAIN_FILES = ("domain_weights", "reference_losses")
# What may be given together with --resume; everything else is taken from the run.
RESUMABLE = ("steps", "eval_interval", "eval_batches", "save_interval")


class UsageError(Exception):
    """What the user asked for cannot be done; the message is all they need."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn the ValueErrors of reading and checking input into a :class:`UsageError`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def make_output_folder(path: Path) -> None:
    """Make the folder, and see that files can be written there, before anything is trained."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(
            f"the output folder {path} cannot be written to ({error.strerror}); give another one"
        ) from None


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="DeepSpeed JSON, or the name of a ready config")
    parser.add_argument(
        "--data",
        type=Path,
        help="folder with one sub-folder, .txt or .jsonl file per domain [text that Python and the "
        "installed packages ship]",
    )
    parser.add_argument("--output", type=Path, help="folder of the run [runs/LABEL]")
    parser.add_argument(
        "--label", help="name of the run in tables and figures [name of the config]"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on from a run's last checkpoint"
    )
    _add_run_flags(parser)


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        default="zero1_ep2_global_batch",
        help="DeepSpeed JSON or name of a ready config; only moe_load_balancing.scope is changed "
        "[%(default)s]",
    )
    parser.add_argument("--data", type=Path, help="as for train")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/compare"), help="folder [%(default)s]"
    )
    parser.add_argument("--num-ranks", type=int, default=2, help="processes per run [%(default)s]")
    _add_run_flags(parser)


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="folder of TensorBoard or csv_monitor logs of a run with the plugin, an event file, "
        "the folder of a run of `train`, or a folder that holds several of these: each is a run of "
        "the comparison",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="HTML page to write [report.html in the folder that holds the runs]",
    )
    parser.add_argument(
        "--watch",
        type=float,
        metavar="SECONDS",
        help="write the page again at this interval until Ctrl-C; an open page reloads itself",
    )


def add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", required=True, help="DeepSpeed JSON, or the name of a ready config"
    )
    parser.add_argument(
        "--ep-size", type=int, default=0, help="as for train: 0 = as many ranks as possible [0]"
    )
    parser.add_argument("--top-k", type=int, default=2, help="experts per token [%(default)s]")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path("."),
        help="folder that all ranks see, for the checkpoint that the resume check writes and "
        "removes [the current one]",
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", required=True, help="DeepSpeed JSON, or the name of a ready config"
    )
    parser.add_argument(
        "--model",
        required=True,
        help="config.json of a transformers model, its folder, or a well-known name such as "
        "Qwen3-30B-A3B",
    )
    parser.add_argument("--world-size", type=int, required=True, help="ranks")
    parser.add_argument(
        "--ep-size", type=int, help="expert-parallel size [expert_parallel.autoep_size, else 1]"
    )
    for flag, text in (
        ("--tensor-parallel-size", "ranks that hold the same tokens [1]"),
        ("--sequence-parallel-size", "ranks that share each sequence [1]"),
    ):
        parser.add_argument(flag, type=int, default=1, help=text)
    for flag, text in (
        ("--sequence-length", "tokens, for the columns that count tokens"),
        ("--micro-batch-size", "where the config says auto"),
        ("--gradient-accumulation-steps", "where the config says auto"),
    ):
        parser.add_argument(flag, type=int, help=text)
    group = parser.add_argument_group("times, all three or none")
    for flag, text in (
        ("--latency-us", "of the smallest message between two ranks, microseconds"),
        ("--bandwidth-gbps", "of one rank, Gbit/s"),
        ("--step-time-ms", "one optimizer step without the plugin, milliseconds"),
    ):
        group.add_argument(flag, type=float, help=text)


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    for title, flags in (("training", OPTION_FLAGS), ("model", MODEL_FLAGS)):
        group = parser.add_argument_group(title)
        if flags is MODEL_FLAGS:
            group.add_argument(
                "--model",
                default=argparse.SUPPRESS,
                metavar="DIR",
                help="folder of a transformers causal LM, dense or MoE, to train on instead of a "
                "new model; its tokens are bytes, and of the flags below it takes "
                "--sequence-length and --checkpointing",
            )
        for name, (kind, text) in flags.items():
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--checkpointing",
        choices=CHECKPOINTING,
        default=argparse.SUPPRESS,
        help="recompute blocks in backward instead of keeping their activations [off]",
    )


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """The training flags that the user gave."""
    return {name: getattr(options, name) for name in OPTION_FLAGS if name in options}


def given_model(options: argparse.Namespace) -> dict[str, Any]:
    """The model flags that the user gave."""
    names = ("model", *MODEL_FLAGS, "checkpointing")
    return {name: getattr(options, name) for name in names if name in options}


def refuse_sizes_of_folder_model(given: Iterable[str]) -> None:
    """Refuse what cannot be chosen with --model: its config has the sizes, the JSON AutoEP's.

    Args:
        given: names of all flags of the model and of the training that the user gave.
    """
    sizes = (*MODEL_FLAGS, "ep_size")
    refused = [name for name in given if name in sizes and name not in FOLDER_MODEL_FLAGS]
    if refused:
        raise UsageError(
            f"--model has sizes of its own: drop {flag_list(refused)} (expert parallelism is "
            f"expert_parallel.autoep_size in the config)"
        )


def as_flags(values: dict[str, Any]) -> list[str]:
    """The command line that gives these values again."""
    return [
        word
        for name, value in values.items()
        for word in ("--" + name.replace("_", "-"), str(value))
    ]


def flag_list(names: Iterable[str]) -> str:
    """Names of options as the user types them, for messages."""
    return ", ".join("--" + name.replace("_", "-") for name in names)


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--module",
        dest="is_module",
        action="store_true",
        help="SCRIPT is the name of a module, as after `python -m`",
    )
    # One positional for both: one of its own for SCRIPT would swallow a "--" that follows it.
    parser.add_argument(
        "script_and_arguments",
        metavar="SCRIPT",
        nargs=argparse.PARSER,
        help="Python script that trains, and its own arguments",
    )
