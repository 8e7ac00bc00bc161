"""`ds-moe-lb verify` passes where balancing is right, and reports every planted fault.

- the fp64 reference of verify against that of the tests, which shares no code with it;
- on two ranks, one engine after the other: no fault, then every fault, in one launch per layout;
- the command line through DeepSpeed's own launcher (slow).
"""

import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import reference
from ds_moe_lb._configs import config_directory
from ds_moe_lb.verify.comparison import Verdict, half_precision_tolerance
from ds_moe_lb.verify.layout import make_layout
from ds_moe_lb.verify.reference import Call, LayerWindow, balance
from ranks import run_ranks
from verify_faults import FAULTS

DATA, EXPERT, STEPS, PADDING = "data parallel", "expert parallel", "accumulation", "padding"
RECOMPUTE = ["reentrant checkpointing", "non-reentrant checkpointing"]
EVALUATION, RESUME = "evaluation", "resume"
ALL = [DATA, EXPERT, STEPS, PADDING, *RECOMPUTE, EVALUATION, RESUME]
WITH_STEPS = [name for name in ALL if name not in (DATA, EXPERT)]
MASKED = [PADDING, *RECOMPUTE]  # the checkpointed windows have a mask too


# ------------------------------------------------------------------------------------------------
# The reference


def _random_windows(seed: int, *, top_k: int) -> tuple[list[LayerWindow], list[reference.Window]]:
    """Two windows of 4 ranks and 3 micro-steps with 6 experts, for either reference."""
    generator = random.Random(seed)
    ours, theirs = [], []
    for _ in range(2):
        weight = torch.randn(6, 5, dtype=torch.float64)
        steps = []
        for _ in range(3):
            calls = []
            for rank in range(4):
                num_tokens = generator.randint(0, 7)
                chosen = [generator.sample(range(6), top_k) for _ in range(num_tokens)]
                calls.append(
                    Call(
                        x_TM=torch.randn(num_tokens, 5, dtype=torch.float64),
                        selections_TK=torch.tensor(chosen, dtype=torch.int64).view(-1, top_k),
                        valid_T=torch.rand(num_tokens) < (0.0 if rank == 3 else 0.7),
                    )
                )
            steps.append(calls)
        ours.append(LayerWindow(weight_EM=weight, calls=steps))
        theirs.append(
            reference.Window(
                weight=weight.tolist(),
                inputs=[[call.x_TM.tolist() for call in calls] for calls in steps],
                selections=[[call.selections_TK.tolist() for call in calls] for calls in steps],
                valid=[[call.valid_T.tolist() for call in calls] for calls in steps],
                top_k=top_k,
            )
        )
    return ours, theirs


@pytest.mark.parametrize("estimate", ["running", "carry", "boundary", "exact", "micro_batch"])
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]])
@pytest.mark.parametrize("top_k", [1, 3])
def test_two_independent_references_agree(estimate, groups, top_k):
    ours, theirs = _random_windows(7 * top_k, top_k=top_k)
    for first in (True, False):
        got = balance(
            ours[1],
            estimate=estimate,
            previous=None if first else ours[0],
            groups=groups,
            top_k=top_k,
            micro_batch_weight=0.3 if top_k == 3 else 0.0,
        )
        expected = reference.balance(
            theirs[1],
            estimate=estimate,
            previous=None if first else theirs[0],
            groups=groups,
            micro_batch_weight=0.3 if top_k == 3 else 0.0,
        )
        torch.testing.assert_close(
            got.grad_EM, torch.tensor(expected.weight_grad, dtype=torch.float64)
        )
        assert got.grad_EM.abs().max() > 1e-2
        assert (got.magnitude_EM >= got.grad_EM.abs() - 1e-12).all()
        assert got.shares == [pytest.approx(shares, abs=1e-12) for shares in expected.shares]
        assert [c.tolist() for c in got.counts] == reference.window_counts(theirs[1])
        assert got.loss_used == pytest.approx(sum(expected.losses) / 3)
        assert got.num_valid_tokens == sum(c.valid_T.sum() for s in ours[1].calls for c in s)


def test_uniform_routing_gives_one_and_collapse_gives_e_over_k():
    """Hand-worked: zero weights make p = 1/4; f does not matter then. With saturated logits it is
    p = 1 on the expert that all tokens choose: E f p = 4."""
    x_TM = torch.ones(4, 1, dtype=torch.float64)
    valid_T = torch.ones(4, dtype=torch.bool)
    for weight, chosen, value in (
        ([[0.0]] * 4, [[0], [1], [2], [3]], 1.0),
        ([[50.0], [0.0], [0.0], [0.0]], [[0]] * 4, 4.0),
    ):
        call = Call(x_TM=x_TM, selections_TK=torch.tensor(chosen), valid_T=valid_T)
        window = LayerWindow(weight_EM=torch.tensor(weight).double(), calls=[[call]])
        expected = balance(window, estimate="running", previous=None, groups=[[0]], top_k=1)
        assert expected.loss_used == pytest.approx(value)
        assert expected.loss_global_batch == pytest.approx(value)


# ------------------------------------------------------------------------------------------------
# The layout that is taken from the config


def test_ready_configs_give_a_layout():
    # Those for transformers leave the steps to Trainer ("auto"), and may have ZeRO 3.
    for path in sorted(config_directory().glob("zero*.json")):
        layout = make_layout(json.loads(path.read_text()), world_size=4, ep_size=2)
        config = layout.engine_config(gas=layout.gas)
        assert layout.gas == 8 and "optimizer" not in config and "tensorboard" not in config
        make_layout(config, world_size=4)  # what is handed to the engine parses itself


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({}, {}, "absent or not enabled"),
        ({"moe_load_balancing": {"enabled": False}}, {}, "absent or not enabled"),
        ({"moe_load_balancing": {"skope": "none"}}, {}, "Did you mean 'scope'"),
        ({"zero_optimization": {"stage": 3}}, {}, "stage is 3"),
        ({"torch_autocast": {"enabled": True}}, {}, "torch_autocast"),
        ({}, {"ep_size": 3}, "--ep-size: got 3, expected a divisor of the number of ranks .4."),
        ({}, {"top_k": 9}, "--top-k: got 9"),
    ],
)
def test_what_cannot_be_verified_is_refused(config, arguments, message):
    if arguments or "zero_optimization" in config or "torch_autocast" in config:
        config = {"moe_load_balancing": {}, **config}
    with pytest.raises(ValueError, match=message):
        make_layout(config, world_size=4, **arguments)


def test_accumulation_steps_follow_from_the_batch_sizes_and_auto_is_dropped():
    config: dict[str, Any] = {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
        "moe_load_balancing": {"sync_group": "expert_data_parallel"},
    }
    layout = make_layout(config, world_size=4, ep_size=2)
    assert layout.gas == 6 and layout.kept["zero_optimization"] == {"stage": 1}
    assert layout.groups(ep_size=2) == [[0, 2], [1, 3]]
    assert layout.groups(ep_size=1) == [[0, 1, 2, 3]]


def test_what_verify_leaves_out_is_named():
    section = {"aux_loss_coeff": 0.01, "z_loss_coeff": 0.001}
    config = {"moe_load_balancing": section, "moe_router": {"type": "hyper"}}
    layout = make_layout(config, world_size=1)
    assert layout.not_covered == ("z_loss_coeff", "moe_router")
    assert "moe_router" not in layout.engine_config(gas=1)
    with pytest.raises(ValueError, match="moe_router.type"):
        make_layout({**config, "moe_router": {"type": "hyperr"}}, world_size=1)


def test_loss_scales_are_kept_within_what_the_small_model_can_take():
    for given, expected in (
        ({}, {"loss_scale": 0, "initial_scale_power": 12}),
        ({"loss_scale": 65536}, {"loss_scale": 4096, "initial_scale_power": 12}),
        ({"initial_scale_power": 4}, {"loss_scale": 0, "initial_scale_power": 4}),
    ):
        config = {"fp16": {"enabled": True, **given}, "moe_load_balancing": {}}
        layout = make_layout(config, world_size=1)
        assert layout.precision == "fp16"
        assert layout.kept["fp16"] == {"enabled": True, **expected}


def test_nan_fails_and_half_precision_tolerances_can_fail():
    verdict = Verdict()
    verdict.note("gradient", float("nan"), 1e-5, "here")
    assert verdict.failures == ["here: off by inf, allowed 1e-05"]
    # A gradient of 1/D or 1/G would deviate by a half or more.
    for precision in ("bf16", "fp16"):
        assert half_precision_tolerance(precision, num_ranks=8, num_steps=32) < 0.15
        assert half_precision_tolerance(precision, num_ranks=1024, num_steps=8) < 0.7


# ------------------------------------------------------------------------------------------------
# On ranks: no fault, then every fault


def _config(section: dict[str, Any], *, stage: int = 1, **more: Any) -> dict[str, Any]:
    return {
        **more,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "moe_load_balancing": section,
    }


def _check_verify(
    runs: list[tuple[dict[str, Any], str | None]], ep_size: int
) -> list[dict[str, list[str] | str]]:
    """Per run (config, fault) every line: what failed in words, or why it does not apply."""
    import deepspeed.comm as dist

    from ds_moe_lb.verify.checks import Verification
    from ds_moe_lb.verify.session import Session

    original = Session.__init__

    def scaled(self: Session, layout: Any, **arguments: Any) -> None:
        original(self, layout, **arguments)
        if layout.precision == "bf16":  # stands in for fp16, which is refused on CPU
            self.engine.optimizer.override_loss_scale(1024)

    Session.__init__ = scaled  # type: ignore[method-assign]
    outcomes: list[dict[str, list[str] | str]] = []
    for config, fault in runs:
        layout = make_layout(config, world_size=dist.get_world_size(), ep_size=ep_size)
        with FAULTS[fault]() if fault else nullcontext():
            lines = Verification(layout, scratch=Path(tempfile.gettempdir())).run()
        outcomes.append({x.name: x.verdict.failures if x.verdict else x.reason for x in lines})
    return outcomes


def _failed(outcome: dict[str, list[str] | str]) -> list[str]:
    return [name for name, failures in outcome.items() if isinstance(failures, list) and failures]


def _expect(
    section: dict[str, Any],
    expected: dict[str, list[str]],
    world_size: int,
    ep_size: int | None = None,
    **config: Any,
) -> list[dict[str, list[str] | str]]:
    """Run with no fault and with each fault; the lines that fail must be these and no others."""
    faults = [None, *expected]
    results = run_ranks(
        _check_verify,
        world_size,
        [(_config(section, **config), fault) for fault in faults],
        ep_size or world_size,
        timeout_s=300,
    )
    assert all(result == results[0] for result in results), "ranks disagree on the verdict"
    wanted = {None: [], **expected}
    got = {fault: _failed(outcome) for fault, outcome in zip(faults, results[0], strict=True)}
    assert got == wanted
    return results[0]


@pytest.mark.ranks
def test_faults_are_reported_where_the_script_adds_l_aux():
    outcomes = _expect(
        {},
        {
            "f_divided_by_d": ALL,
            "gradient_divided_by_d": ALL,
            "missing_k": ALL,
            "own_rank_only": ALL,
            "wrong_factor_of_g": WITH_STEPS,
            "recompute_counts_again": RECOMPUTE,
            "evaluation_counts": [EVALUATION],
            "mask_ignored": MASKED,
            "window_never_reset": ALL,
        },
        world_size=2,
    )
    # 1/D of the gradient only: counts and losses are right.
    assert all("router gradient" in text for text in outcomes[2][DATA])
    assert any("counts" in text for text in outcomes[6][RECOMPUTE[0]])


@pytest.mark.ranks
def test_faults_are_reported_where_the_plugin_adds_the_gradient():
    _expect(
        {"aux_loss_coeff": 1e-4},
        {
            "f_divided_by_d": ALL,
            "gradient_divided_by_d": ALL,
            "recompute_counts_again": RECOMPUTE,
            "evaluation_counts": [EVALUATION],
        },
        world_size=2,
        stage=2,
    )


@pytest.mark.ranks
def test_half_precision_with_a_loss_scale():
    """Bounds are wide in half precision: the faults must still be outside."""
    _expect(
        {"aux_loss_coeff": 0.01},
        {"loss_scale_forgotten": ALL, "gradient_divided_by_d": ALL, "mask_ignored": MASKED},
        world_size=2,
        stage=2,
        bf16={"enabled": True},
    )


@pytest.mark.ranks
def test_faults_are_reported_with_counts_of_the_window_before():
    _expect(
        {"estimate": "boundary"},
        {
            "stale_previous_window": ALL,
            "resume_keeps_old_counts": [RESUME],
            "missing_factor_of_g": WITH_STEPS,
        },
        world_size=2,
        stage=0,
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sync_group", "estimate"),
    [("expert_parallel", "boundary"), ("expert_data_parallel", "running")],
)
def test_smaller_sync_groups_and_the_wrong_one(sync_group, estimate):
    """With `boundary` the window after a resume is as `running`: such counts are not saved."""
    section = {"sync_group": sync_group, "estimate": estimate}
    _expect(section, {"expert_groups_swapped": ALL}, world_size=4, ep_size=2)


@pytest.mark.ranks
def test_carry_exact_and_the_hybrid_are_covered():
    _expect({"estimate": "exact", "micro_batch_weight": 0.3}, {"f_divided_by_d": ALL}, world_size=2)
    _expect({"estimate": "carry", "aux_loss_coeff": 0.1}, {}, world_size=2)


@pytest.mark.ranks
def test_one_rank_alone():
    (outcome,) = _expect({"aux_loss_coeff": 0.01}, {}, world_size=1)
    assert outcome[DATA] == outcome[EXPERT] == "not applicable at this world size"


# ------------------------------------------------------------------------------------------------
# The command


def _check_exit(config: str, fault: str | None) -> tuple[int, str]:
    """Exit status and output of the command on this rank."""
    from ds_moe_lb.cli import main
    from ds_moe_lb.training import process_group

    output = io.StringIO()
    with (
        mock.patch.object(process_group, "leave"),  # the launcher of the tests does it
        redirect_stdout(output),
        FAULTS[fault]() if fault else nullcontext(),
    ):
        status = main(["verify", "--config", config, "--scratch", tempfile.gettempdir()])
    return status, output.getvalue()


@pytest.mark.ranks
def test_a_failure_is_the_exit_status_of_every_rank(tmp_path):
    config = tmp_path / "mine.json"
    config.write_text(json.dumps(_config({}, stage=2)))
    results = run_ranks(_check_exit, 2, str(config), "mask_ignored", timeout_s=120)
    assert [status for status, _ in results] == [1, 1]
    assert re.search(r"^\W*padding\W+FAIL", results[0][1], re.MULTILINE), results[0][1]
    assert re.search(r"^\W*evaluation\W+pass", results[0][1], re.MULTILINE)
    assert f"FAILED: {len(MASKED)} of {len(ALL)}" in results[0][1]
    assert "padding: window 1, layer 0, rank 0: counts: off by" in results[0][1]
    assert results[1][1] == ""  # one table, not one for each rank


def _run_command(config: Path, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    from ds_moe_lb.training.free_port import free_port

    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment |= {"PYTHONPATH": str(Path(__file__).resolve().parent.parent), "COLUMNS": "80"}
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "error"]
    launcher += ["--num_accelerators", "2", "--master_port", str(free_port())]
    command = [*launcher, "--module", "ds_moe_lb", "verify", "--config", str(config)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_command_through_the_deepspeed_launcher(tmp_path):
    config = tmp_path / "mine.json"
    config.write_text(json.dumps(_config({"estimate": "boundary"})))
    process = _run_command(config, cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "2 ranks, ep_size 2, ZeRO 1" in process.stdout
    for name in ALL:
        assert re.search(rf"^\W*{name}\W+pass", process.stdout, re.MULTILINE), process.stdout
    assert "all properties hold" in process.stdout
    assert list(tmp_path.iterdir()) == [config]  # the checkpoint is gone

    config.write_text("{}")
    process = _run_command(config, cwd=tmp_path)
    assert process.returncode != 0 and "nothing is to verify" in process.stdout + process.stderr
