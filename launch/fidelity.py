"""How near each estimate's router gradient is to that of the exact global batch.

    python launch/fidelity.py

Trains the demo's small model on its text (one process; the D ranks are simulated by taking D
micro-batches for one micro-step), and stops at a few steps to look. There, for each G, one window
is run and one optimizer step taken with its gradient; the window after it gives the recorded router
inputs and counts, from which the balancing gradient of the router's weight under every estimate
follows in fp64. `exact` has f over the whole window; the others are compared with it, for each
micro-step and for the sum over the window. Prints a table, writes JSON and a figure.

Shape legend: G micro-steps, D ranks, T tokens of one micro-batch, E experts, M model width.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.nn import functional

from ds_moe_lb.data.batches import BatchPlan, training_micro_batches
from ds_moe_lb.data.builtin import builtin_corpus
from ds_moe_lb.training import process_group
from ds_moe_lb.training.model import ByteMoEModel, ModelConfig, initialise_experts
from ds_moe_lb.training.run_folder import versions
from ds_moe_lb.training.trainable import language_model_loss
from launch.fidelity_report import ESTIMATES, NAMES, draw, print_table, summarise

COEFF, LEARNING_RATE = 0.1, 1e-3
MICRO_BATCH_SIZE = 2


# the estimates, from counts alone


def slopes(estimate: str, counts_GDE: Tensor, previous_E: Tensor, *, top_k: int) -> Tensor:
    """``w E f`` of every micro-step and rank, ``(G, D, E)`` fp64; see ds_moe_lb/loss.py.

    Args:
        estimate: one of ``ESTIMATES`` or "exact".
        counts_GDE: selections in each micro-batch of the window.
        previous_E: selections of the whole window before.
        top_k: selections of each token.
    """
    counts_GDE, previous_E = counts_GDE.double(), previous_E.double()
    num_steps, num_ranks, num_experts = counts_GDE.shape
    step_GE = counts_GDE.sum(dim=1)
    tokens_G = step_GE.sum(dim=1) / top_k
    running_GE = step_GE.cumsum(dim=0)
    whole_E = step_GE.sum(dim=0)
    if estimate == "micro_batch":
        tokens_GD = counts_GDE.sum(dim=2) / top_k
        return num_experts * _share(counts_GDE) / tokens_GD.unsqueeze(2)
    if estimate in ("exact", "boundary"):
        seen_E = whole_E if estimate == "exact" else previous_E
        weight = num_ranks * num_steps / (seen_E.sum() / top_k)
        return (weight * num_experts * _share(seen_E)).expand(num_steps, num_ranks, -1)
    seen_GE = running_GE
    if estimate == "carry":
        left_G = num_steps - torch.arange(1, num_steps + 1, dtype=torch.float64)
        seen_GE = num_steps * running_GE + left_G.unsqueeze(1) * previous_E
    weight_G = num_ranks / tokens_G
    slopes_GE = weight_G.unsqueeze(1) * num_experts * _share(seen_GE)
    return slopes_GE.unsqueeze(1).expand(-1, num_ranks, -1)


def _share(counts: Tensor) -> Tensor:
    return counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)


def weight_gradient(x_TM: Tensor, weight_EM: Tensor, slope_E: Tensor) -> Tensor:
    """``(E, M)`` gradient of ``sum_e slope_e sum_t p_te`` in the router's weight."""
    probs_TE = functional.linear(x_TM, weight_EM).softmax(dim=1)
    mean_T1 = (probs_TE @ slope_E).unsqueeze(1)
    return (probs_TE * (slope_E - mean_T1)).T @ x_TM


def compare(estimate_GEM: Tensor, exact_GEM: Tensor) -> dict[str, float]:
    """Relative error and cosine, mean over micro-steps and of the window's sum."""
    whole, exact_whole = estimate_GEM.sum(dim=0), exact_GEM.sum(dim=0)
    return {
        "error_step": _mean(_error(a, b) for a, b in zip(estimate_GEM, exact_GEM, strict=True)),
        "cosine_step": _mean(_cosine(a, b) for a, b in zip(estimate_GEM, exact_GEM, strict=True)),
        "error_window": _error(whole, exact_whole),
        "cosine_window": _cosine(whole, exact_whole),
    }


def _error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def _mean(values: Iterator[float]) -> float:
    return statistics.fmean(values)


# the model, and what its routers saw


class Probe:
    """A model in training, and records of its routers' inputs."""

    def __init__(self, corpus: Any, *, seed: int, num_ranks: int, config: ModelConfig) -> None:
        torch.manual_seed(seed)
        self.model = ByteMoEModel(config)
        initialise_experts(self.model, ep_rank=0, seed=seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.gates = [block.moe.deepspeed_moe.gate for block in self.model.blocks]
        self.inputs: list[Tensor] = []
        for gate in self.gates:
            gate.register_forward_pre_hook(lambda module, args: self.inputs.append(args[0]))
        self._corpus, self._seed, self._num_ranks = corpus, seed, num_ranks
        self.step = 0

    def window(self, num_steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """One window of G micro-steps and its optimizer step, balanced as `running` does.

        Returns:
            For each layer the routers' inputs ``(G, D, T, M)`` and counts ``(G, D, E)``.
        """
        plan = BatchPlan(
            sequence_length=self.model.config.sequence_length,
            micro_batch_size=MICRO_BATCH_SIZE,
            gradient_accumulation_steps=num_steps * self._num_ranks,
            dp_world_size=1,
            seed=self._seed,
        )
        batches = list(training_micro_batches(self._corpus, plan, step=self.step, dp_rank=0))
        seen: list[list[Tensor]] = []  # [micro-batch][layer]
        counts: list[Tensor] = []  # (L, E)
        self.optimizer.zero_grad()
        for first in range(0, len(batches), self._num_ranks):
            loss = torch.zeros(())
            graphs = []
            for tokens in batches[first : first + self._num_ranks]:
                self.inputs.clear()
                output = self.model(tokens[:, :-1])
                loss = loss + language_model_loss(output.logits_BSV, tokens[:, 1:])
                graphs.append(list(self.inputs))
                seen.append([x.detach().double() for x in self.inputs])
                counts.append(output.tokens_per_expert_LE)
            for layer, gate in enumerate(self.gates):
                so_far_E = torch.stack(counts)[:, layer].sum(dim=0)
                probs = [functional.linear(x[layer], gate.wg.weight).softmax(1) for x in graphs]
                mean_prob_E = torch.cat(probs).mean(dim=0) * self._num_ranks
                loss = loss + COEFF * len(so_far_E) * (_share(so_far_E.float()) @ mean_prob_E)
            (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        shape = (num_steps, self._num_ranks)
        layers = range(len(self.gates))
        return (
            [torch.stack([x[i] for x in seen]).unflatten(0, shape) for i in layers],
            [torch.stack(counts)[:, i].unflatten(0, shape) for i in layers],
        )

    def look(self, num_steps: int) -> list[dict[str, dict[str, float]]]:
        """Compare the estimates at this point of training, per layer; leaves no trace."""
        saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict())), self.step
        _, before = self.window(num_steps)
        weights = [gate.wg.weight.detach().double().clone() for gate in self.gates]
        inputs, counts = self.window(num_steps)
        (model, optimizer), self.step = saved
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        top_k = self.model.config.top_k
        layers = []
        for x_GDTM, counts_GDE, before_GDE, weight_EM in zip(
            inputs, counts, before, weights, strict=True
        ):
            previous_E = before_GDE.sum(dim=(0, 1))
            grads = {
                name: torch.stack(
                    [
                        sum(map(weight_gradient, xs, [weight_EM] * len(xs), slopes_DE))
                        for xs, slopes_DE in zip(
                            x_GDTM, slopes(name, counts_GDE, previous_E, top_k=top_k), strict=True
                        )
                    ]
                )
                for name in (*ESTIMATES, "exact")
            }
            layers.append({name: compare(grads[name], grads["exact"]) for name in ESTIMATES})
        return layers


def main(argv: list[str] | None = None) -> int:
    """Train, look, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="D, simulated in one process")
    parser.add_argument("--max-steps", type=int, default=64, help="largest G, a power of two")
    parser.add_argument("--looks", type=int, nargs="+", default=[20, 100, 300])
    parser.add_argument("--output", type=Path, default=Path("runs/fidelity"))
    options = parser.parse_args(argv)
    started = time.perf_counter()
    process_group.join()
    corpus = builtin_corpus()
    config = ModelConfig()
    sizes = [2**i for i in range(options.max_steps.bit_length())]
    records = []
    for seed in range(1, options.seeds + 1):
        probe = Probe(corpus, seed=seed, num_ranks=options.ranks, config=config)
        for look in options.looks:
            while probe.step < look:
                probe.window(8)
            for num_steps in sizes:
                for layer, by_estimate in enumerate(probe.look(num_steps)):
                    where = {"seed": seed, "step": look, "G": num_steps, "layer": layer}
                    records.append({**where, **by_estimate})
            print(f"seed {seed}, step {look}: {time.perf_counter() - started:.0f} s", flush=True)
    rows = summarise(records, NAMES)
    print_table(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": " ".join(["python launch/fidelity.py", *(argv or sys.argv[1:])]),
        "versions": versions(),
        "corpus": corpus.sha256,
        "seconds": round(time.perf_counter() - started),
        "rows": rows,
        "records": records,
    }
    (options.output / "fidelity.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(rows, options.output / "fidelity.png")
    print(f"{facts['seconds']} s; {options.output}/fidelity.json, fidelity.png")
    process_group.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
