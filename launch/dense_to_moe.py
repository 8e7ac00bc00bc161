"""Dense to MoE and on: a tiny Llama, its conversion, and what each loss makes of it.

    bash launch/dense_to_moe.sh

One seed and one small model: the table shows what the script does and is no claim.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from ds_moe_lb.cli import main as ds_moe_lb_command
from ds_moe_lb.cli.compare import scope_configs
from ds_moe_lb.cli.launch import launch
from ds_moe_lb.cli.report import write_report
from ds_moe_lb.cli.train import load_ds_config
from ds_moe_lb.metrics import max_violation, mutual_information
from ds_moe_lb.training.run_folder import Run, read_run, versions

RECIPE = "zero1_ep2_global_batch"
LLAMA: dict[str, Any] = {
    "vocab_size": 256,  # bytes
    "hidden_size": 96,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
CONVERSION = ["--num-experts", "16", "--top-k", "4", "--split", "random", "--scale", "exact"]
AUX_LOSS_COEFF = 0.1  # of the demo
FIRST_SEED, NEXT_SEED = 1, 2  # of the text: the continued runs see other batches than the first
FAST = ["--dense-steps", "4", "--steps", "4", "--eval-batches", "1"]
DENSE, DENSE_ON, START, MICRO, GLOBAL = (
    "dense",
    "dense continued",
    "MoE at start",
    "MoE, micro_batch",
    "MoE, global_batch",
)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One model in numbers, on held-out text.

    Attributes:
        name: of the model.
        steps: optimizer steps behind it, those of the dense model included.
        loss_per_domain: nats per byte.
        mutual_information: between domain and expert, nats, mean over layers; None = dense.
        max_violation: MaxVio over all domains, mean over layers; None = dense.
    """

    name: str
    steps: int
    loss_per_domain: dict[str, float]
    mutual_information: float | None
    max_violation: float | None

    @property
    def loss(self) -> float:
        """Mean over domains, each weighted equally."""
        return sum(self.loss_per_domain.values()) / len(self.loss_per_domain)


def column(name: str, validation: dict[str, Any], *, steps_before: int) -> Column:
    """A line of validation.jsonl as a column.

    Args:
        name: of the column.
        validation: the line.
        steps_before: optimizer steps of the model that the run started from.
    """
    counts_LDE = torch.tensor(validation["tokens_per_expert_LDE"])
    is_moe = counts_LDE.numel() > 0
    return Column(
        name=name,
        steps=steps_before + validation["step"],
        loss_per_domain=validation["loss_per_domain"],
        mutual_information=sum(map(mutual_information, counts_LDE)) / len(counts_LDE)
        if is_moe
        else None,
        max_violation=float(max_violation(counts_LDE.sum(dim=1)).mean()) if is_moe else None,
    )


def markdown_table(columns: list[Column]) -> str:
    """The table, models side by side."""

    def row(name: str, cells: list[str]) -> str:
        return "| " + " | ".join([name, *cells]) + " |"

    def cells(values: list[float | None]) -> list[str]:
        return ["-" if value is None else f"{value:.4f}" for value in values]

    lines = [
        row("", [c.name for c in columns]),
        row("---", ["---:"] * len(columns)),
        row("optimizer steps", [str(c.steps) for c in columns]),
        row("validation loss (nats per byte)", cells([c.loss for c in columns])),
        row(
            "mutual information domain/expert (nats)",
            cells([c.mutual_information for c in columns]),
        ),
        row("MaxVio (0 = even)", cells([c.max_violation for c in columns])),
    ]
    for domain in columns[0].loss_per_domain:
        lines.append(row(f"loss, {domain}", cells([c.loss_per_domain[domain] for c in columns])))
    return "\n".join(lines) + "\n"


def save_llama(folder: Path) -> None:
    """A Llama of random weights on bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(FIRST_SEED)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)


class Experiment:
    """All runs in one folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.output: Path = options.output
        self._done = 0

    def train(self, name: str, model: Path, config: dict[str, Any], *flags: str) -> Run:
        """One run on ranks; exits when it fails or is interrupted."""
        self._done += 1
        print(f"[{self._done}/4] training: {name}", flush=True)
        options = self._options
        file = self.output / f"{name}.json"
        file.write_text(json.dumps(config, indent=2) + "\n")
        words = [
            "train",
            "--config",
            str(file),
            "--output",
            str(self.output / name),
            "--label",
            name,
        ]
        words += ["--model", str(model), "--eval-batches", str(options.eval_batches), *flags]
        if options.data is not None:
            words += ["--data", str(options.data)]
        status = launch(words, num_ranks=options.num_ranks)
        if status != 0:
            print(f"the run {name!r} ended with exit status {status}", file=sys.stderr)
            sys.exit(status)
        return read_run(self.output / name)


def run(options: argparse.Namespace) -> list[Column]:
    """Train, convert, train on; returns the columns of the table."""
    experiment = Experiment(options)
    output = experiment.output
    output.mkdir(parents=True)  # a folder that exists is an earlier run's
    llama, moe = output / "llama", output / "moe"
    save_llama(llama)
    recipe = load_ds_config(RECIPE)
    without = {key: value for key, value in recipe.items() if key != "moe_load_balancing"}
    first = ["--steps", str(options.dense_steps), "--seed", str(FIRST_SEED)]
    first += ["--eval-interval", str(max(1, options.dense_steps // 2))]
    dense = experiment.train("dense", llama, without, *first)
    status = ds_moe_lb_command(["convert", str(dense.path / "model"), str(moe), *CONVERSION])
    if status != 0:
        sys.exit(status)
    then = ["--steps", str(options.steps), "--seed", str(NEXT_SEED)]
    then += ["--eval-interval", str(max(1, options.steps // 3))]
    dense_on = experiment.train("dense_continued", dense.path / "model", without, *then)
    then += ["--aux-loss-coeff", str(AUX_LOSS_COEFF)]
    runs = {
        scope: experiment.train(scope, moe, config, *then)
        for scope, config in scope_configs(recipe).items()
    }
    write_report([run.path for run in runs.values()], output=output / "report.html")
    before = options.dense_steps
    micro, full = runs["micro_batch"], runs["global_batch"]
    return [
        column(DENSE, dense.validations[-1], steps_before=0),
        column(DENSE_ON, dense_on.validations[-1], steps_before=before),
        column(START, micro.validations[0], steps_before=before),
        column(MICRO, micro.validations[-1], steps_before=before),
        column(GLOBAL, full.validations[-1], steps_before=before),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--data", type=Path, help="as for `ds-moe-lb train` [built-in corpus]")
    parser.add_argument("--num-ranks", type=int, default=2, help="processes [%(default)s]")
    parser.add_argument(
        "--dense-steps", type=int, default=400, help="of the dense model [%(default)s]"
    )
    parser.add_argument(
        "--steps", type=int, default=150, help="of each continued model [%(default)s]"
    )
    parser.add_argument(
        "--eval-batches", type=int, default=4, help="validation batches per domain [%(default)s]"
    )
    parser.add_argument("--fast", action="store_true", help=f"the same as {' '.join(FAST)}")
    given = sys.argv[1:]
    return parser.parse_args([*FAST, *given] if "--fast" in given else given)


def main() -> None:
    started = time.perf_counter()
    options = _arguments()
    columns = run(options)
    table = markdown_table(columns)
    (options.output / "table.md").write_text(table)
    content = {
        "columns": [{**vars(c), "loss": c.loss} for c in columns],
        "conversion": CONVERSION,
        "llama": LLAMA,
        "aux_loss_coeff": AUX_LOSS_COEFF,
        "versions": versions(),
    }
    (options.output / "table.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"\n{table}\none seed: it shows what the script does and is no claim")
    print(f"done in {(time.perf_counter() - started) / 60:.1f} minutes")
    print(f"table        {options.output / 'table.md'} and table.json")
    print(f"page         {options.output / 'report.html'} (the two MoE runs) and figures/")
    print(f"tensorboard  tensorboard --logdir {options.output}")


if __name__ == "__main__":
    main()
