"""What the real engine must and must not change, beside the grid of test_engine_ranks.py."""

from dataclasses import replace
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.moe.sharded_moe import TopKGate

from engine_grid import (
    ABSENT,
    BASE,
    COEFF,
    Cell,
    Section,
    WindowRecord,
    disagreements,
    finish,
    full_grad,
    main_loss,
    make_batch,
    make_engine,
    make_model,
    make_record,
    run_cell,
    run_window,
    section_of,
    used_token,
)
from models import GateRecorder
from ranks import run_ranks

pytestmark = pytest.mark.ranks

MECHANISMS = ("l_aux", "injection")
ESTIMATES = ("running", "boundary")


def _check_cells(
    runs: list[tuple[Cell, dict[str, Any], dict[str, Any]]],
) -> list[list[WindowRecord]]:
    """One engine per (cell, section, arguments of run_cell)."""
    return [run_cell(cell, section, **arguments) for cell, section, arguments in runs]


def _per_rank(results: list, index: int) -> list:
    return [rank_results[index] for rank_results in results]


# ------------------------------------------------------------------------------------------------
# More gradients against the reference


@pytest.mark.parametrize(
    "modes", [("off", "reentrant"), ("reentrant", "non_reentrant"), ("non_reentrant", "off")]
)
def test_recompute_does_not_count_twice_with_one_layer_checkpointed_and_the_other_not(modes):
    """Halving the counts, the stop-gap of others against recompute, breaks exactly here."""
    cells = [
        replace(BASE, mechanism=mechanism, estimate=estimate, top_k=4)
        for mechanism in MECHANISMS
        for estimate in ESTIMATES
    ]
    runs = [(cell, section_of(cell), {"checkpointing": modes}) for cell in cells]
    results = run_ranks(_check_cells, 2, runs, timeout_s=180)
    for index, cell in enumerate(cells):
        assert disagreements(cell, _per_rank(results, index)) == [], cell


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_token_mask_does_what_used_token_does(top_k):
    """The mask is (B, S) bool and must survive for the recompute, after its ``with`` has ended."""
    cells = [
        replace(
            BASE,
            tokens="masked",
            top_k=top_k,
            mechanism=mechanism,
            checkpointing=checkpointing,
            estimate=estimate,
        )
        for mechanism in MECHANISMS
        for checkpointing in ("off", "reentrant", "non_reentrant")
        for estimate in ESTIMATES
    ]
    runs = [(cell, section_of(cell), {"mask_by": "token_mask"}) for cell in cells]
    results = run_ranks(_check_cells, 2, runs, timeout_s=180)
    for index, cell in enumerate(cells):
        assert disagreements(cell, _per_rank(results, index)) == [], cell


@pytest.mark.parametrize(
    ("sync_group", "groups"),
    [
        # World 4, ep_size 2: DeepSpeed puts neighbours in one expert-parallel group.
        ("expert_parallel", [[0, 1], [2, 3]]),
        ("expert_data_parallel", [[0, 2], [1, 3]]),
        ("data_parallel", [[0, 1, 2, 3]]),
    ],
)
def test_smaller_sync_groups_weigh_equally(sync_group, groups):
    cells = [
        replace(
            BASE,
            world_size=4,
            ep_size=2,
            mechanism=mechanism,
            estimate=estimate,
            tokens=tokens,
            zero_stage=zero_stage,
        )
        for mechanism in MECHANISMS
        for estimate in ESTIMATES
        for tokens, zero_stage in (("uneven", 0), ("masked", 2))
    ]
    runs = [(cell, section_of(cell) | {"sync_group": sync_group}, {}) for cell in cells]
    results = run_ranks(_check_cells, 4, runs, timeout_s=180)
    for index, cell in enumerate(cells):
        assert disagreements(cell, _per_rank(results, index), groups=groups) == [], cell


def test_gradient_of_boundary_does_not_depend_on_how_ranks_and_accumulation_cut_the_window():
    """The same four micro-batches as 1 x 4, 2 x 2 and 4 x 1, after the same window."""
    kinds = [(tokens, how) for tokens in ("even", "uneven", "masked") for how in MECHANISMS]
    gradients = []  # [cut][kind][layer]
    for world_size in (1, 2, 4):
        cells = [
            replace(
                BASE,
                world_size=world_size,
                gradient_accumulation_steps=4 // world_size,
                estimate="boundary",
                tokens=tokens,
                mechanism=mechanism,
                zero_stage=0,
            )
            for tokens, mechanism in kinds
        ]
        # lr 0, because the first window (as running) does depend on the cut.
        runs = [(cell, section_of(cell), {"lr": 0.0}) for cell in cells]
        results = run_ranks(_check_cells, world_size, runs, timeout_s=180)
        gradients.append([records[1].grads for records in results[0]])
    for index, kind in enumerate(kinds):
        for layer, first in enumerate(gradients[0][index]):
            assert first.abs().max() > 1e-2
            for other in gradients[1:]:
                torch.testing.assert_close(
                    other[index][layer], first, rtol=1e-5, atol=1e-7, msg=str(kind)
                )


def _check_two_forwards(cells: list[Cell]) -> list[list[WindowRecord]]:
    """Windows of two micro-steps: both forwards, then both backwards, in the given cells."""
    return [_two_forwards_first(cell) for cell in cells]


def _two_forwards_first(cell: Cell) -> list[WindowRecord]:
    model = make_model(cell)
    engine = make_engine(cell, model, section_of(cell))
    recorder = GateRecorder(model.gates())
    records = []
    for window in range(2):
        for block in model.blocks:
            block.input_grads.clear()
        weights = [gate.wg.weight.detach().tolist() for gate in model.gates()]
        batches = [
            make_batch(cell, window=window, micro_step=m, rank=dist.get_rank()) for m in range(2)
        ]
        outputs = [engine(batch.x, used_token(batch)) for batch in batches]
        grads, counts = [], None
        for micro_step, (batch, (prediction, losses)) in enumerate(
            zip(batches, outputs, strict=True)
        ):
            balancing = sum(losses) if cell.mechanism == "l_aux" else 0.0
            engine.backward(0.0 * main_loss(batch, prediction) + COEFF * balancing)
            if micro_step == 1:
                grads = [full_grad(gate.wg.weight) for gate in model.gates()]
                counts = [n.tolist() for n in engine.load_balancer.counts().values()]
            engine.step()
        l_aux = [[losses[i].item() for _, losses in outputs] for i in range(len(model.blocks))]
        records.append(make_record(recorder, model, weights, grads, l_aux, counts))
    finish(engine)
    return records


def test_two_forwards_before_their_backwards():
    """f of each backward, and of each recompute, is that of its own forward."""
    cells = [
        replace(BASE, mechanism=mechanism, estimate=estimate, checkpointing=mode, tokens="uneven")
        for mechanism in MECHANISMS
        for estimate in ESTIMATES
        for mode in ("off", "reentrant", "non_reentrant")
    ]
    results = run_ranks(_check_two_forwards, 2, cells, timeout_s=180)
    for index, cell in enumerate(cells):
        assert disagreements(cell, _per_rank(results, index)) == [], cell


def test_counts_sum_to_k_times_the_valid_tokens():
    cells = [
        replace(BASE, tokens=tokens, top_k=top_k)
        for tokens in ("even", "uneven", "masked")
        for top_k in (1, 2, 4)
    ]
    results = run_ranks(
        _check_cells, 2, [(cell, section_of(cell), {}) for cell in cells], timeout_s=180
    )
    for rank_results in results:
        for cell, records in zip(cells, rank_results, strict=True):
            for record in records:
                for counts, valid in zip(record.counts, record.valid, strict=True):
                    assert sum(counts) == cell.top_k * sum(sum(v) for v in valid)


# ------------------------------------------------------------------------------------------------
# A real main loss, gradients flowing between layers


def _check_real_loss(runs: list[tuple[Cell, dict[str, Any] | None, float]]) -> list[list[list]]:
    """Per run the gradients of all parameters at the end of each of two windows.

    The script's loss is main + ``coefficient`` * sum of ``l_aux``.
    """
    return [_real_loss_grads(*run) for run in runs]


def _real_loss_grads(
    cell: Cell, section: dict[str, Any] | None, coefficient: float
) -> list[list[torch.Tensor]]:
    model = make_model(cell, isolate=False)
    engine = make_engine(cell, model, section)
    windows = []
    for window in range(2):
        for micro_step in range(cell.gradient_accumulation_steps):
            batch = make_batch(cell, window=window, micro_step=micro_step, rank=dist.get_rank())
            prediction, losses = engine(batch.x, used_token(batch))
            loss = main_loss(batch, prediction)
            if coefficient:
                loss = loss + coefficient * sum(losses)
            engine.backward(loss)
            if micro_step == cell.gradient_accumulation_steps - 1:
                windows.append([full_grad(p) for p in model.parameters()])
            engine.step()
    finish(engine)
    return windows


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_injection_equals_an_explicit_loss(estimate):
    """All parameters, with the balancing of the second layer flowing back into the first."""
    cells = [
        replace(
            BASE, ep_size=2, estimate=estimate, checkpointing=mode, zero_stage=stage, tokens=tokens
        )
        for mode, stage, tokens in (
            ("off", 0, "masked"),
            ("reentrant", 1, "even"),
            ("non_reentrant", 2, "uneven"),
        )
    ]
    runs: list = []
    for cell in cells:
        runs.append((cell, {"estimate": estimate}, COEFF))
        runs.append((cell, {"estimate": estimate, "aux_loss_coeff": COEFF}, 0.0))
        runs.append((cell, {"estimate": estimate, "aux_loss_coeff": 0.0}, 0.0))
    for rank_results in run_ranks(_check_real_loss, 2, runs, timeout_s=180):
        for index, cell in enumerate(cells):
            explicit, injected, without = rank_results[3 * index : 3 * index + 3]
            moved = 0.0
            for window in range(2):
                for a, b, c in zip(
                    explicit[window], injected[window], without[window], strict=True
                ):
                    torch.testing.assert_close(b, a, rtol=1e-5, atol=2e-7, msg=str(cell))
                    moved = max(moved, (a - c).abs().max().item())
            assert moved > 1e-2, cell


@pytest.mark.parametrize("tokens", ["even", "masked"])
def test_coefficient_zero_is_bit_equal_to_no_balancing(tokens):
    cells = [
        replace(BASE, tokens=tokens, checkpointing=mode, zero_stage=stage, ep_size=2)
        for mode, stage in (("off", 0), ("reentrant", 1), ("non_reentrant", 2))
    ]
    runs: list = []
    for cell in cells:
        runs.append((cell, None, 0.0))
        runs += [(cell, {"estimate": e, "aux_loss_coeff": 0.0}, 0.0) for e in ESTIMATES]
        # A script that multiplies the l_aux of 0 by something adds nothing either.
        runs.append((cell, {"aux_loss_coeff": 0.0}, 3.0))
    for rank_results in run_ranks(_check_real_loss, 2, runs, timeout_s=180):
        for index, cell in enumerate(cells):
            plain, *others = rank_results[4 * index : 4 * index + 4]
            for other in others:
                assert _all_equal(plain[0], other[0]), cell
                assert _all_equal(plain[1], other[1]), cell


def _all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------
# Bit-identical training where nothing may change


@pytest.fixture(scope="module")
def bit_cells() -> list[tuple[Cell, dict[str, Any]]]:
    """Cells with everything random that a gate can do."""
    return [
        (replace(BASE, ep_size=2, top_k=1), {"noisy_gate_policy": "RSample"}),
        (replace(BASE, ep_size=2, top_k=1, zero_stage=2), {"noisy_gate_policy": "Jitter"}),
        (replace(BASE, top_k=1, tokens="masked", zero_stage=0), {"use_rts": True}),
        (
            replace(BASE, ep_size=2, checkpointing="reentrant"),
            {"top2_2nd_expert_sampling": True, "capacity_factor": 0.5},
        ),
        (
            replace(BASE, ep_size=2, checkpointing="non_reentrant", zero_stage=2),
            {"top2_2nd_expert_sampling": True, "noisy_gate_policy": "Jitter"},
        ),
        (replace(BASE, ep_size=2, top_k=4, zero_stage=0), {"drop_tokens": False}),
    ]


def _check_training(
    runs: list[tuple[Cell, dict[str, Any], Section, int | None]],
) -> list[dict[str, Any]]:
    """Per run three steps of a script that applies the gates' own l_aux.

    The last entry of a run is the step before which the plugin is taken off; None = never.
    """
    return [_train(*run) for run in runs]


def _train(
    cell: Cell, model_arguments: dict[str, Any], section: Section, remove_at: int | None
) -> dict[str, Any]:
    model = make_model(cell, isolate=False, **model_arguments)
    engine = make_engine(cell, model, section)
    torch.manual_seed(7 + dist.get_rank())
    l_aux, exp_counts = [], []
    for step in range(3):
        if step == remove_at:
            engine.load_balancer.uninstall()
        for micro_step in range(cell.gradient_accumulation_steps):
            batch = make_batch(cell, window=step, micro_step=micro_step, rank=dist.get_rank())
            prediction, losses = engine(batch.x, used_token(batch))
            exp_counts += [b.moe.deepspeed_moe.exp_counts.tolist() for b in model.blocks]
            l_aux += [loss.item() for loss in losses]
            engine.backward(main_loss(batch, prediction) + COEFF * sum(losses))
            engine.step()
    result = {
        "weights": [p.detach().clone() for p in model.parameters()],
        "names": list(engine.module.state_dict()),
        "l_aux": l_aux,
        "exp_counts": exp_counts,
        "random_state": torch.get_rng_state(),
        "gate_types": {type(gate) for gate in model.gates()},
    }
    if remove_at is None:
        finish(engine)
    else:
        engine.destroy()
    return result


@pytest.mark.parametrize(
    ("section", "remove_at"),
    [
        pytest.param({"enabled": False}, None, id="enabled-false"),
        pytest.param({"enabled": False, "aux_loss_coeff": 0.5}, None, id="enabled-false-injection"),
        pytest.param(ABSENT, None, id="section-absent"),
        pytest.param({"scope": "none"}, None, id="scope-none"),
        pytest.param({}, 0, id="uninstalled-at-once"),
        pytest.param(
            {"aux_loss_coeff": 0.5, "estimate": "boundary"}, 0, id="uninstalled-injection"
        ),
        pytest.param({"scope": "none"}, 1, id="uninstalled-later"),
    ],
)
def test_training_is_bit_identical_to_plain_deepspeed(section, remove_at, bit_cells):
    cells = bit_cells
    runs: list = [(cell, arguments, None, None) for cell, arguments in cells]
    runs += [(cell, arguments, section, remove_at) for cell, arguments in cells]
    for rank_results in run_ranks(_check_training, 2, runs, timeout_s=180):
        for index, (cell, arguments) in enumerate(cells):
            plain, ours = rank_results[index], rank_results[index + len(cells)]
            case = f"{cell} {arguments}"
            assert _all_equal(plain["weights"], ours["weights"]), case
            assert plain["l_aux"] == ours["l_aux"], case
            assert plain["exp_counts"] == ours["exp_counts"], case
            assert plain["names"] == ours["names"], case
            assert torch.equal(plain["random_state"], ours["random_state"]), case
            if remove_at is not None:
                assert ours["gate_types"] == {TopKGate}, case


# ------------------------------------------------------------------------------------------------
# Evaluation inside a window


def _check_evaluation(runs: list[tuple[Cell, str | None]]) -> list[list[WindowRecord]]:
    return [_run_with_evaluation(*run) for run in runs]


def _run_with_evaluation(cell: Cell, how: str | None) -> list[WindowRecord]:
    """Two windows; round each forward and backward rank 0, alone, evaluates something else."""
    model = make_model(cell)
    engine = make_engine(cell, model, section_of(cell))
    recorder = GateRecorder(model.gates())

    def evaluate() -> None:
        if how is None or dist.get_rank() != 0:
            return
        other = make_batch(replace(cell, tokens="uneven"), window=77, micro_step=0, rank=0)
        random_state = torch.get_rng_state()
        with recorder.paused(), torch.no_grad():
            if how == "eval":
                engine.eval()
            engine(other.x)
            engine.train()
        torch.set_rng_state(random_state)

    records = [run_window(cell, engine, recorder, w, interrupt=evaluate) for w in range(2)]
    finish(engine)
    return records


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_evaluation_inside_a_window_changes_nothing(how):
    """In eval mode, or in train mode under no_grad, on one rank only: a collective would hang."""
    cells = [
        replace(BASE, mechanism=mechanism, estimate=estimate, checkpointing=mode, zero_stage=stage)
        for mechanism in MECHANISMS
        for estimate in ESTIMATES
        for mode, stage in (("off", 0), ("reentrant", 1), ("non_reentrant", 2))
    ]
    runs = [(cell, None) for cell in cells] + [(cell, how) for cell in cells]
    for rank_results in run_ranks(_check_evaluation, 2, runs, timeout_s=180):
        for index, cell in enumerate(cells):
            undisturbed, disturbed = rank_results[index], rank_results[index + len(cells)]
            for a, b in zip(undisturbed, disturbed, strict=True):
                assert a.counts == b.counts, cell
                assert a.l_aux == b.l_aux, cell
                assert _all_equal(a.grads, b.grads), cell
                assert a.weights == b.weights, cell
