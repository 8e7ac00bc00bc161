"""Numbers to DeepSpeed's monitor: one report for each window that is due, on TensorBoard, CSV or
W&B.

Sums are kept on the device while a window that will be reported is running, and reduced once at
its end; between reports the monitor does nothing.

Shape legend: L MoE layers on this rank, E experts of one layer, F = sum of E over the layers
(flat).
"""

from typing import Any

import torch
from torch import Tensor

from ds_moe_lb import loss, metrics
from ds_moe_lb.config import MonitorConfig
from ds_moe_lb.counts import CountLayout
from ds_moe_lb.metrics import TAG
from ds_moe_lb.process_groups import CountGroup
from ds_moe_lb.sync import ModelPlace, sum_over
from ds_moe_lb.window import MicroStep, Window

# More keys than this drown a dashboard: 48 layers x 128 experts would be 6,144.
MAX_EXPERT_KEYS = 1024


class BalanceMonitor:
    """Collects, reduces and writes the reports of one engine.

    Args:
        layout: the flat layout of this rank's MoE layers.
        place: where they stand among the layers of all pipeline stages, which are reported.
        config: `moe_load_balancing.monitor`.
        count_group: all data-parallel ranks.
    """

    def __init__(
        self,
        layout: CountLayout,
        config: MonitorConfig,
        *,
        place: ModelPlace,
        count_group: CountGroup,
    ) -> None:
        self._layout = layout
        self._place = place
        self._config = config
        self._count_group = count_group
        self._uses_loss = False
        self._num_reports = 0
        self._sums: _ReportSums | None = None
        self.last_report: dict[str, float] = {}
        self.last_load_F: Tensor | None = None

    def begin_window(self, *, next_step: int, uses_loss: bool) -> None:
        """A window begins that optimizer step number `next_step` will end.

        Args:
            next_step: number of the step.
            uses_loss: a loss of ours has an effect in it, so there is a `lbl_used`.
        """
        self._uses_loss = uses_loss
        due = self._config.enabled and next_step % self._config.interval == 0
        self._sums = _ReportSums(self._layout) if due else None

    def begin_micro_step(self, micro_step: MicroStep) -> None:
        """Give the micro-step the places where it notes its sums, if its window is reported."""
        if self._sums is not None:
            micro_step.prob_sum_F = self._layout.zeros(torch.float32)
            micro_step.used_L = torch.zeros_like(self._sums.used_L)

    def end_micro_step(self, micro_step: MicroStep) -> None:
        """Take in a finished forward."""
        prob_sum_F, used_L = micro_step.prob_sum_F, micro_step.used_L
        if self._sums is not None and prob_sum_F is not None and used_L is not None:
            self._sums.add(micro_step, prob_sum_F)
            # What becomes known in backward goes straight to the sums; a forward that raises never
            # gets here.
            self._sums.used_L += used_L
            micro_step.used_L = self._sums.used_L

    def close_window(self, window: Window, *, engine: Any) -> None:
        """Reduce and write the report, if one is due. Collective over all ranks with its window."""
        if self._sums is None:
            return
        place = self._place
        flat = [
            place.embed_counts(part) for part in (window.local_F.double(), self._sums.prob_sum_F)
        ]
        vector = torch.cat([*flat, *map(place.embed_layers, self._sums.per_layer())])
        sum_over(vector, count_group=self._count_group, what="a report, after the optimizer step")
        sizes = [place.layout.num_counts] * 2 + [len(place.layout.layers)] * 4
        counts_F, prob_sum_F, used_L, lbl_L, violation_L, number_L = (
            place.gather(vector).cpu().split(sizes)
        )
        load_F = counts_F.round().to(torch.int64)
        per_layer = _global_batch_metrics(place.layout, load_F, prob_sum_F)
        number_L = number_L.clamp(min=1)
        per_layer["lbl_micro_batch"] = lbl_L / number_L
        per_layer["max_violation_micro_batch"] = violation_L / number_L
        weight = self._count_group.num_ranks * max(window.num_micro_steps, 1)
        if self._uses_loss:
            per_layer["lbl_used"] = used_L / weight
        self.last_load_F = load_F
        self.last_report = self._flatten(per_layer)
        self._num_reports += 1
        self._write(engine)

    def _flatten(self, per_layer: dict[str, Tensor]) -> dict[str, float]:
        report = {name: float(value_L.double().mean()) for name, value_L in per_layer.items()}
        for name, value_L in per_layer.items():
            for index, value in enumerate(value_L.tolist()):
                report[f"{name}/layer_{index:02d}"] = float(value)
        return report

    def _write(self, engine: Any) -> None:
        if not engine.monitor.enabled or engine.global_rank != 0:
            return
        samples = engine.global_samples
        events = [
            (f"{TAG}/{name}", value, samples)
            for name, value in self.last_report.items()
            if self._config.detail != "model" or "/" not in name
        ]
        if self._config.detail == "expert":
            events += self._expert_events(samples)
        engine.monitor.write_events(events)
        interval = self._config.image_interval
        if interval and self._num_reports % interval == 0:
            self._write_image(engine, samples)

    def _expert_events(self, samples: int) -> list[tuple[str, float, int]]:
        assert self.last_load_F is not None
        loads = self.last_load_F.tolist()[:MAX_EXPERT_KEYS]
        return [
            (
                f"{TAG}/load/layer_{layer:02d}/expert_{at - where.start:03d}",
                float(loads[at]),
                samples,
            )
            for layer, where in enumerate(self._place.layout.count_slices)
            for at in range(where.start, min(where.stop, len(loads)))
        ]

    def _write_image(self, engine: Any, samples: int) -> None:
        writer = engine.monitor.tb_monitor.summary_writer
        from ds_moe_lb.report.load_image import load_heat_map

        assert self.last_load_F is not None
        loads = [self.last_load_F[where] for where in self._place.layout.count_slices]
        writer.add_figure(f"{TAG}/expert_load", load_heat_map(loads), samples)
        writer.flush()


class _ReportSums:
    """Sums over the micro-steps of one window on this rank, on the device."""

    def __init__(self, layout: CountLayout) -> None:
        num_layers = len(layout.layers)
        self._layout = layout
        self.prob_sum_F = layout.zeros(torch.float64)
        self.used_L = torch.zeros(num_layers, dtype=torch.float64, device=layout.device)
        self._lbl_L = torch.zeros_like(self.used_L)
        self._violation_L = torch.zeros_like(self.used_L)
        self._number_L = torch.zeros_like(self.used_L)

    def add(self, micro_step: MicroStep, prob_sum_F: Tensor) -> None:
        layout, counts_F = self._layout, micro_step.counts_F
        self.prob_sum_F += prob_sum_F
        self._lbl_L += _lbl(layout, counts_F, prob_sum_F.double())
        selections_L = layout.per_layer_sum(counts_F).double()
        mean_L = selections_L / layout.num_experts_L
        peak_L = layout.per_layer_max(counts_F).double()
        has_tokens_L = selections_L > 0
        self._violation_L += torch.where(has_tokens_L, peak_L / mean_L.clamp(min=1e-30) - 1, 0.0)
        self._number_L += has_tokens_L

    def per_layer(self) -> list[Tensor]:
        """The sums per layer, in the order of `close_window`."""
        return [self.used_L, self._lbl_L, self._violation_L, self._number_L]


def _lbl(layout: CountLayout, counts_F: Tensor, prob_sum_F: Tensor) -> Tensor:
    """``E sum_i f_i P_i`` of every layer, ``(L,)``: counts and probabilities of the same tokens."""
    tokens_L = layout.num_tokens(counts_F)
    weight_L = torch.where(tokens_L > 0, 1.0 / tokens_L.clamp(min=1), 0.0)
    return layout.per_layer_sum(layout.slopes(counts_F, weight_L).double() * prob_sum_F)


def _global_batch_metrics(
    layout: CountLayout, counts_F: Tensor, prob_sum_F: Tensor
) -> dict[str, Tensor]:
    """Metrics of the whole batch: name to ``(L,)``; everything on the CPU."""
    loads = [counts_F[where] for where in layout.count_slices]
    tokens = [
        int(load.sum()) // layer.top_k for load, layer in zip(loads, layout.layers, strict=True)
    ]
    lbl = [
        loss.load_balancing_loss(
            expert_fraction_E=loss.expert_fraction(load, dtype=torch.float64),
            mean_prob_E=prob_sum_F[where] / max(num_tokens, 1),
        )
        for load, where, num_tokens in zip(loads, layout.count_slices, tokens, strict=True)
    ]
    return {
        "lbl_global_batch": torch.stack(lbl),
        "max_violation_global_batch": torch.stack([metrics.max_violation(load) for load in loads]),
        "load_entropy": torch.stack([metrics.load_entropy(load) for load in loads]),
        "dead_experts": torch.stack([metrics.dead_experts(load) for load in loads]),
        "valid_tokens": torch.tensor(tokens),
    }
