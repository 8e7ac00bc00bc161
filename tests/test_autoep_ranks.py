"""AutoEP: the router gradient against the fp64 reference, over its presets and layouts."""

from dataclasses import replace

import pytest

from hf_runs import Run
from ranks import run_ranks  # noqa: F401
from test_transformers_ranks import of_runs

pytestmark = pytest.mark.ranks

BASE = Run("qwen3_moe", autoep_size=2, padding="right")


def test_every_preset_gives_the_references_gradient() -> None:
    families = ("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3")
    of_runs([replace(BASE, family=family) for family in families])


def test_zero_stage_and_checkpointing_do_not_change_the_gradient() -> None:
    of_runs(
        [
            replace(BASE, zero_stage=stage, checkpointing=mode, num_windows=3)
            for stage in (1, 2, 3)
            for mode in ("off", "reentrant", "non_reentrant")
        ]
    )
