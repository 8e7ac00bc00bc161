"""Pipelines: two stages of two data-parallel ranks against the same layers without a pipeline.

The un-pipelined run applies an explicit loss + coefficient * l_aux to the same batches on two
ranks; the pipeline gets its balancing injected. All parameters' gradients are compared, before the
step: plain DeepSpeed cannot take every one of these steps (see ``cannot_step``).
"""

from dataclasses import replace

import pytest
import torch

from pipeline_runs import (
    COEFF,
    EVERY_STAGE,
    FIRST_STAGE,
    GAS,
    LAST_STAGE,
    Case,
    Outcome,
    cannot_step,
    make_engine,
    make_pipeline,
    run_pipeline,
    run_whole,
    train_window,
)
from ranks import run_ranks

pytestmark = pytest.mark.ranks

# Gradients of three micro-steps and two ranks are rounded to 8 bits in each sum on the way; both
# runs do that, and may do so in another order.
BF16_TOLERANCE = 2 * 3 * 2**-9


def _check_pipelines(moe_on, ep_size, cases):
    # All models first: each makes groups of the whole world, which hangs in DeepSpeed once it has
    # made expert groups on some stages only.
    models = [make_pipeline(moe_on, ep_size) for _ in cases]
    return [
        run_pipeline(model, moe_on, case, case.section)
        for model, case in zip(models, cases, strict=True)
    ]


def _check_wholes(moe_on, ep_size, runs):
    return [run_whole(moe_on, ep_size, *run) for run in runs]


CASES = [
    Case(),
    Case(estimate="boundary", checkpointing="reentrant"),
    Case(zero_stage=1, checkpointing="non_reentrant", loss_scale=1024),
    Case(zero_stage=1, checkpointing="reentrant"),
    Case(zero_stage=1, estimate="boundary"),
    Case(zero_stage=1, estimate="carry", terms=(("micro_batch_weight", 0.3),)),
    Case(terms=(("scope", "sequence"), ("bias_update_rate", 0.05))),
]


def _train_both(moe_on, ep_size, cases):
    """Compares all; returns the gradients of the first case and those without balancing."""

    def run(case, coefficient=COEFF):
        takes_step = cannot_step(moe_on, case.zero_stage) is None
        plain = replace(case, zero_stage=0, checkpointing="off", loss_scale=1)
        return plain, takes_step, coefficient

    runs = list(dict.fromkeys([run(case) for case in cases] + [run(cases[0], 0.0)]))
    wholes = run_ranks(_check_wholes, 2, moe_on, ep_size, runs, timeout_s=120)
    piped = run_ranks(_check_pipelines, 4, moe_on, ep_size, cases, timeout_s=120)
    for index, case in enumerate(cases):
        for rank in range(4):
            stage, data_rank = divmod(rank, 2)
            expected = wholes[data_rank][runs.index(run(case))]
            _compare(piped[rank][index], expected, stage, moe_on, case)
    return wholes[0][0].grads, wholes[0][-1].grads


def _largest_difference(first, second, moe_on):
    """Of each layer's gate, between gradients of the first window."""
    names = [f"{layer}.moe.deepspeed_moe.gate.wg.weight" for layer in moe_on]
    return [(first[0][name] - second[0][name]).abs().max().item() for name in names]


@pytest.mark.parametrize(
    ("moe_on", "ep_size"),
    [
        pytest.param(EVERY_STAGE, 2, id="every-stage"),
        pytest.param(FIRST_STAGE, 1, id="first-stage-only"),
        pytest.param(LAST_STAGE, 2, id="last-stage-only"),
    ],
)
def test_injection_in_a_pipeline_equals_an_explicit_loss_without_one(moe_on, ep_size):
    """Install hung for ever where one stage has no MoE layer: its ranks waited for their pipeline
    peers under another name of the process group.
    """
    balanced, without = _train_both(moe_on, ep_size, CASES)
    assert min(_largest_difference(balanced, without, moe_on)) > 1e-2


@pytest.mark.parametrize(
    ("sync_group", "ep_size"), [("expert_parallel", 1), ("expert_data_parallel", 2)]
)
def test_a_smaller_sync_group_in_a_pipeline(sync_group, ep_size):
    """Groups of one rank each: every rank balances its own batches."""
    cases = [
        Case(sync_group=sync_group),
        Case(sync_group=sync_group, zero_stage=1, estimate="boundary", checkpointing="reentrant"),
    ]
    balanced, without = _train_both(EVERY_STAGE, ep_size, cases)
    assert min(_largest_difference(balanced, without, EVERY_STAGE)) > 1e-2
    of_all_ranks = run_ranks(_check_wholes, 2, EVERY_STAGE, ep_size, [(Case(), True, COEFF)])
    assert min(_largest_difference(balanced, of_all_ranks[0][0].grads, EVERY_STAGE)) > 1e-3


def test_bf16_in_a_pipeline():
    cases = [Case(bf16=True, zero_stage=1), Case(bf16=True, estimate="boundary")]
    balanced, without = _train_both(EVERY_STAGE, 2, cases)
    differences = _largest_difference(balanced, without, EVERY_STAGE)
    for layer, difference in zip(EVERY_STAGE, differences, strict=True):
        largest = balanced[0][f"{layer}.moe.deepspeed_moe.gate.wg.weight"].abs().max().item()
        assert difference > 10 * BF16_TOLERANCE * largest


def _compare(
    ours: Outcome, expected: Outcome, stage: int, moe_on: dict[int, int], case: Case
) -> None:
    rel = BF16_TOLERANCE if case.bf16 else 1e-5
    assert ours.losses == pytest.approx(expected.losses, rel=rel)
    for window, grads in enumerate(ours.grads):
        names = {n for n in expected.grads[window] if int(n.split(".")[0]) // 2 == stage}
        assert set(grads) == names
        for name, grad in grads.items():
            of_whole = expected.grads[window][name]
            rounding = BF16_TOLERANCE * of_whole.abs().max().item() if case.bf16 else 0.0
            torch.testing.assert_close(
                grad,
                of_whole,
                rtol=1e-5,
                atol=2e-7 + rounding,
                msg=lambda text, name=name, window=window: f"{case} {name} {window}: {text}",
            )
    # Reports cover the layers of all stages, in the model's order, on every rank.
    assert f"lbl_used/layer_{len(moe_on) - 1:02d}" in ours.report
    assert f"lbl_used/layer_{len(moe_on):02d}" not in ours.report
    assert ours.report == pytest.approx(expected.report, rel=rel)


EXACT = {"estimate": "exact", "aux_loss_coeff": COEFF}


def _check_scope_none():
    models = [make_pipeline(EVERY_STAGE, 2) for _ in range(4)]
    case = Case(zero_stage=1)
    plain = run_pipeline(models[0], EVERY_STAGE, case, None)
    measured = run_pipeline(models[1], EVERY_STAGE, case, {"scope": "none"})
    refused = []
    for model, section in zip(models[2:], ({}, EXACT), strict=True):
        with pytest.raises(ValueError) as caught:
            run_pipeline(model, EVERY_STAGE, case, section)
        refused.append(str(caught.value))
    return plain, measured, refused


def test_scope_none_measures_only_and_what_a_pipeline_cannot_do_is_refused():
    for plain, measured, (message, of_exact) in run_ranks(_check_scope_none, 4):
        assert measured.losses == plain.losses
        for ours, theirs in zip(measured.grads, plain.grads, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert measured.report["valid_tokens/layer_01"] == 2 * GAS * 2 * 5
        assert "moe_load_balancing.aux_loss_coeff: got None" in message
        assert "PipelineEngine" in message
        assert "estimate: got 'exact', but PipelineEngine fetches its batches itself" in of_exact


def _check_resume(folder, moe_on, case):
    """Two windows, a save, two more; and the last two again after loading, by fresh engines."""
    models = [make_pipeline(moe_on, 1) for _ in range(3)]
    straight = make_engine(models[0], case, case.section)
    for window in range(2):
        train_window(straight, case, window)
    straight.save_checkpoint(folder, client_state={"epoch": 3})
    with open(f"{folder}/latest") as latest:
        assert latest.read() == "global_step2"
    tail = [train_window(straight, case, window) for window in (2, 3)]
    again = []
    for model in models[1:]:
        resumed = make_engine(model, case, case.section)
        path, client_state = resumed.load_checkpoint(folder)
        assert path is not None
        assert client_state["epoch"] == 3 and "moe_load_balancing" not in client_state
        balance = resumed.load_balancer.balance
        assert balance.previous is not None
        if model is models[2]:  # as if the window before had been forgotten
            balance.previous = None
        again.append([train_window(resumed, case, window) for window in (2, 3)])
    pairs = list(zip(models[0].parameters(), models[1].parameters(), strict=True))
    return tail, again, all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("moe_on", "zero_stage"),
    [
        pytest.param(EVERY_STAGE, 0, id="every-stage-zero0"),
        pytest.param(EVERY_STAGE, 1, id="every-stage-zero1"),
        pytest.param(LAST_STAGE, 0, id="last-stage-only"),
    ],
)
def test_a_pipeline_resumed_at_a_boundary_is_bit_identical(tmp_path, moe_on, zero_stage):
    """Also that the window before, which `boundary` needs, is what makes it so."""
    case = Case(zero_stage=zero_stage, estimate="boundary")
    results = run_ranks(_check_resume, 4, str(tmp_path), moe_on, case, timeout_s=90)
    for tail, (resumed, forgetful), has_same_weights in results:
        assert resumed == tail and has_same_weights
        assert forgetful != tail
