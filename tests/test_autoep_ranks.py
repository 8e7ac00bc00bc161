"""AutoEP: the router gradient against the fp64 reference, over its presets and layouts.

CI runs a cover of the grid in which every level meets every family; ``--full-grid`` runs all of it.
"""

import itertools
from dataclasses import replace

import pytest

from families import PRESETS
from hf_runs import Run
from test_transformers_ranks import of_runs

pytestmark = pytest.mark.ranks

BASE = Run("qwen3_moe", autoep_size=2, padding="right")

GRID_FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
LEVELS = {
    "zero_stage": (1, 2, 3),
    "autoep_size": (1, 2, 4),
    "gradient_accumulation_steps": (1, 2, 4),
    "checkpointing": ("off", "reentrant", "non_reentrant"),
    "padding": ("none", "right", "left"),
    "estimate": ("running", "boundary"),
}


def grid_runs(family: str, *, world_size: int, is_full: bool) -> list[Run]:
    """The grid's cells that a world of this size can run."""
    cells = list(itertools.product(*LEVELS.values()))
    if not is_full:  # a Latin square in the three-valued levels: every pair of zero, ep, G, ...
        cells = [
            (LEVELS["zero_stage"][a], LEVELS["autoep_size"][b], *_third(a, b), estimate)
            for a in range(3)
            for b in range(3)
            for estimate in [LEVELS["estimate"][(a + b) % 2]]
        ]
    runs = []
    for cell in cells:
        levels = dict(zip(LEVELS, cell, strict=True))
        section = {"aux_loss_coeff": 0.5, "estimate": levels.pop("estimate")}
        if world_size % levels["autoep_size"] == 0:
            runs.append(Run(family, section=section, num_windows=2, **levels))
    return runs


def _third(a: int, b: int) -> tuple[int, str, str]:
    return (
        LEVELS["gradient_accumulation_steps"][(a + b) % 3],
        LEVELS["checkpointing"][(a + 2 * b) % 3],
        LEVELS["padding"][(2 * a + b + 1) % 3],
    )


def test_every_preset_gives_the_references_gradient() -> None:
    of_runs([replace(BASE, family=family) for family in PRESETS])


@pytest.mark.timeout(4100)  # of the full grid; the cover takes seconds
@pytest.mark.parametrize("family", GRID_FAMILIES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_no_level_of_the_grid_changes_the_gradient(
    family: str, world_size: int, full_grid: bool
) -> None:
    runs = grid_runs(family, world_size=world_size, is_full=full_grid)
    if not full_grid:  # two ranks for the small sizes, four only where they are needed
        runs = [run for run in runs if (run.autoep_size == 4) == (world_size == 4)]
    of_runs(runs, world_size=world_size, timeout_s=4000.0 if full_grid else 200.0)


def test_router_weight_that_zero_3_releases_is_still_balanced_in_the_third_step() -> None:
    run = replace(BASE, zero_stage=3, num_windows=3)  # persistence threshold 0: released each time
    of_runs([replace(run, checkpointing=mode) for mode in ("off", "reentrant", "non_reentrant")])


def test_frozen_embeddings_and_offloaded_optimizers_do_not_change_the_gradient() -> None:
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    offload["zero_force_ds_cpu_optimizer"] = False
    of_runs(
        [
            replace(BASE, freeze_embeddings=True, zero_stage=2, num_windows=2),
            replace(BASE, freeze_embeddings=True, zero_stage=3, checkpointing="non_reentrant"),
            replace(BASE, extra=offload, zero_stage=2, num_windows=2),
            replace(BASE, extra=offload, zero_stage=3, num_windows=2),
        ]
    )
