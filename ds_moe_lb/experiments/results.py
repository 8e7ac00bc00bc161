"""The recorded runs of one experiment, by variant and seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_moe_lb.experiments.analysis import Frontier, Interval, interval, paired_difference
from ds_moe_lb.experiments.catalogue import seeds
from ds_moe_lb.experiments.experiment import Experiment, Variant
from ds_moe_lb.experiments.setting import Setting

# What runs are compared by: name in a record or of a function of it, title, digits, better.
LOSS = "validation_loss"
INFORMATION = "mutual_information"
VIOLATION = "max_violation_global_batch"


@dataclass(frozen=True, kw_only=True)
class Results:
    """What is recorded of an experiment.

    Attributes:
        experiment: the question.
        setting: the toy.
        num_seeds: how many were asked for.
        variants: those with at least one run, in order.
        records: by name of the variant, then by seed.
    """

    experiment: Experiment
    setting: Setting
    num_seeds: int
    variants: Sequence[Variant]
    records: Mapping[str, Mapping[int, Mapping[str, Any]]]

    def values(self, name: str, metric: str) -> dict[int, float]:
        """One number of each seed's run of a variant."""
        return {seed: metric_of(record, metric) for seed, record in self.records[name].items()}

    def mean(self, name: str, metric: str) -> Interval:
        """Over the seeds of a variant."""
        return interval(list(self.values(name, metric).values()))

    def difference(self, name: str, metric: str, *, baseline: str) -> Interval | None:
        """To another variant, paired by seed; None where no seed has both, or it is the same."""
        if name == baseline or baseline not in self.records:
            return None
        return paired_difference(self.values(name, metric), self.values(baseline, metric))

    def group(self, group: str) -> list[Variant]:
        """The variants of a group, by their place on the axis."""
        return sorted(
            (variant for variant in self.variants if variant.group == group),
            key=lambda variant: variant.at or 0.0,
        )

    def frontiers(self, group: str) -> dict[int, Frontier]:
        """Of the seeds that have every weight of the group."""
        variants = self.group(group)
        complete = set.intersection(*(set(self.records[variant.name]) for variant in variants))

        def column(metric: str, seed: int) -> list[float]:
            return [metric_of(self.records[v.name][seed], metric) for v in variants]

        return {
            seed: Frontier(
                weights=[variant.at or 0.0 for variant in variants],
                violations=column(VIOLATION, seed),
                losses=column(LOSS, seed),
                information=column(INFORMATION, seed),
            )
            for seed in sorted(complete)
        }

    def all_records(self) -> list[Mapping[str, Any]]:
        """Every run once."""
        return [record for by_seed in self.records.values() for record in by_seed.values()]


def metric_of(record: Mapping[str, Any], metric: str) -> float:
    """A number of one run."""
    if metric == INFORMATION:
        per_layer = record["mutual_information_L"]
        return float(sum(per_layer) / len(per_layer))
    return float(record[metric])


def collect(
    experiment: Experiment,
    setting: Setting,
    recorded: Mapping[str, Mapping[str, Any]],
    *,
    corpus_sha256: str,
    num_seeds: int,
) -> Results | None:
    """The runs of an experiment among all that are recorded; None without any."""
    records: dict[str, dict[int, Mapping[str, Any]]] = {}
    variants = []
    for variant in experiment.variants(setting):
        keys = {
            seed: variant.run(setting, seed=seed).key(corpus_sha256) for seed in seeds(num_seeds)
        }
        found = {seed: recorded[key] for seed, key in keys.items() if key in recorded}
        if found:
            variants.append(variant)
            records[variant.name] = found
    if not variants:
        return None
    return Results(
        experiment=experiment,
        setting=setting,
        num_seeds=num_seeds,
        variants=variants,
        records=records,
    )


def selection_share(records: Mapping[int, Mapping[str, Any]], *, seed: int) -> NDArray[np.float64]:
    """``(L, D, E)``: of each domain's selections on held-out text, the share of each expert."""
    counts_LDE = np.array(records[seed]["tokens_per_expert_LDE"], dtype=float)
    share: NDArray[np.float64] = counts_LDE / counts_LDE.sum(axis=2, keepdims=True).clip(min=1)
    return share
