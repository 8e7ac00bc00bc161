"""transformers models without AutoEP: every family's router gradient against the fp64 reference."""

from dataclasses import replace

import pytest

from families import FAMILIES
from hf_runs import Run, check, train_on_rank, vary
from ranks import run_ranks

pytestmark = pytest.mark.ranks


BASE = Run("qwen3_moe", padding="right")


def of_runs(runs: list[Run], *, world_size: int = 2, timeout_s: float = 240.0) -> None:
    """Train all runs on the same ranks and check each."""
    results = run_ranks(train_on_rank, world_size, runs, timeout_s=timeout_s)
    for index, run in enumerate(runs):
        check(run, [rank_results[index] for rank_results in results])


def test_router_gradient_of_every_family_equals_the_reference() -> None:
    of_runs([Run(family, zero_stage=stage) for family in FAMILIES for stage in (1, 3)])


def test_zero_stage_and_checkpointing_do_not_change_the_gradient() -> None:
    of_runs(
        [
            replace(BASE, zero_stage=stage, checkpointing=mode, num_windows=3)
            for stage in (0, 2, 3)
            for mode in ("off", "reentrant", "non_reentrant")
        ]
    )


@pytest.mark.parametrize(("world_size", "gas"), [(1, 4), (4, 1)])
def test_ranks_and_accumulation_cut_the_batch_without_changing_the_gradient(
    world_size: int, gas: int
) -> None:
    of_runs(
        [
            replace(BASE, gradient_accumulation_steps=gas, zero_stage=stage, family=family)
            for stage, family in ((2, "qwen3_moe"), (3, "mixtral"), (3, "deepseek_v3"))
        ],
        world_size=world_size,
    )


def test_padding_tokens_are_not_counted_however_the_mask_is_passed() -> None:
    of_runs(
        vary(
            BASE,
            padding=["left", "right", "none"],
            pass_mask=["positional", "4d_bool", "4d_additive"],
        )
        + [replace(BASE, valid_tokens="labels"), replace(BASE, valid_tokens="all")]
    )


def test_boundary_uses_the_last_window() -> None:
    section = {"aux_loss_coeff": 0.5, "estimate": "boundary"}
    of_runs([replace(BASE, section=section, num_windows=3)])


def test_the_models_own_term_is_replaced_at_k_over_layers_of_its_coefficient() -> None:
    # k = 2 of L = 3 layers
    own = {"output_router_logits": True, "router_aux_loss_coef": 0.75, "num_hidden_layers": 3}
    of_runs(
        [
            replace(BASE, family=family, section={}, model=own)
            for family in ("qwen3_moe", "mixtral", "gpt_oss")
        ]
    )


def test_the_models_own_term_is_off_when_the_section_has_a_coefficient() -> None:
    own = {"output_router_logits": True, "router_aux_loss_coef": 100.0}
    of_runs([replace(BASE, model=own)])
