"""Faults that users of other frameworks have reported, each by its smallest input.

Those whose input is a whole window or a layout have their tests beside others of their kind.
"""

from dataclasses import replace
from typing import Any

import deepspeed
import deepspeed.comm as dist
import pytest
import torch

import ds_moe_lb
from ds_moe_lb import monitor
from engine_grid import BASE, ds_config, full_grad, make_batch, make_engine, make_model
from models import MODEL_DIM, TinyMoE
from ranks import run_ranks

pytestmark = pytest.mark.ranks

GAS = BASE.gradient_accumulation_steps


def _train_window(coefficient: float, *, l_aux_weight: float = 0.0) -> dict[str, Any]:
    """One window with no other loss; the client's optimizer was built before the engine."""
    model = make_model(BASE)
    engine = make_engine(BASE, model, {"aux_loss_coeff": coefficient})
    before = [gate.wg.weight.detach().clone() for gate in model.gates()]
    for micro_step in range(GAS):
        batch = make_batch(BASE, window=0, micro_step=micro_step, rank=dist.get_rank())
        prediction, losses = engine(batch.x)
        engine.backward(0.0 * prediction.sum() + l_aux_weight * sum(losses))
        if micro_step == GAS - 1:
            grads = {name: full_grad(p) for name, p in model.named_parameters()}
        engine.step()
    after = [gate.wg.weight.detach() for gate in model.gates()]
    return {
        "gates": [grad for name, grad in grads.items() if "gate" in name],
        "experts": [grad for name, grad in grads.items() if "experts" in name],
        "moved": [not torch.equal(a, b) for a, b in zip(before, after, strict=True)],
    }


def _check_coefficients() -> list[dict[str, Any]]:
    runs = [(0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (0.5, 10.0)]
    return [_train_window(coefficient, l_aux_weight=weight) for coefficient, weight in runs]


@pytest.fixture(scope="module")
def coefficients() -> list[list[dict[str, Any]]]:
    """By rank: coefficient 0, 0.5, 1, and 0.5 in a script that adds ten times l_aux by itself."""
    return run_ranks(_check_coefficients, 2)


def test_the_gradient_reaches_the_router_and_doubles_with_the_coefficient(coefficients):
    """The result of an injection was thrown away elsewhere, and training looked normal."""
    for none, half, one, _ in coefficients:
        for layer in range(2):
            assert one["gates"][layer].abs().max() > 1e-2
            assert torch.equal(one["gates"][layer], 2 * half["gates"][layer])
            assert not none["gates"][layer].any()


def test_the_clients_optimizer_moves_the_routers_weight(coefficients):
    """An optimizer that was built before kept parameters which had been replaced since."""
    for none, half, one, _ in coefficients:
        assert [run["moved"] for run in (none, half, one)] == [[False] * 2, [True] * 2, [True] * 2]


def test_balancing_adds_nothing_to_expert_weights(coefficients):
    for run in (run for rank_runs in coefficients for run in rank_runs):
        assert len(run["experts"]) == 2 * 20
        assert not any(grad.any() for grad in run["experts"])


def test_a_script_that_adds_l_aux_too_does_not_balance_twice(coefficients):
    for _, half, _, twice in coefficients:
        for ours, expected in zip(twice["gates"], half["gates"], strict=True):
            assert torch.equal(ours, expected)


NUM_EXPERTS = 8


def _check_idle_experts(injects: bool) -> dict[str, Any]:
    """Every token chooses among experts 0 to 3, which are those of rank 0; rank 1's are idle."""
    torch.manual_seed(42)
    model = TinyMoE(k=2, ep_size=2, num_experts=(NUM_EXPERTS,), drop_tokens=False)
    with torch.no_grad():
        model.project.weight.copy_(torch.eye(MODEL_DIM))
        model.project.bias.zero_()
        weight = model.gates()[0].wg.weight
        weight.mul_(0.05)
        weight[:4] += 0.1
        weight[4:] -= 0.1
    cell = replace(BASE, ep_size=2)
    engine = make_engine(cell, model, {"aux_loss_coeff": 1.0} if injects else {}, 0.2)
    counts, loss_values = [], []
    for step in range(8 * GAS):
        generator = torch.Generator().manual_seed(10 * (step % GAS) + dist.get_rank())
        x = 1.0 + 0.3 * torch.randn(2, 6, MODEL_DIM, generator=generator)
        prediction, losses = engine(x)
        loss = 0.0 * prediction.sum() + (0.0 if injects else 1.0) * sum(losses)
        engine.backward(loss)
        counts.append(next(iter(engine.load_balancer.counts().values())))
        loss_values.append(loss.item())
        engine.step()
    of_idle = [int(n[NUM_EXPERTS // 2 :].sum()) for n in counts[GAS - 1 :: GAS]]
    return {
        "counts": counts[GAS - 1].tolist(),
        "of idle experts": of_idle,
        "is_finite": bool(torch.tensor(loss_values).isfinite().all())
        and all(bool(p.isfinite().all()) for p in model.parameters()),
    }


@pytest.mark.parametrize("injects", [False, True])
def test_a_rank_whose_experts_get_no_token_stays_in_backward_and_gets_tokens_back(injects):
    for seen in run_ranks(_check_idle_experts, 2, injects):
        assert seen["is_finite"]
        assert seen["of idle experts"][0] == 0 < max(seen["of idle experts"])


def test_counts_are_of_global_experts_under_expert_parallelism():
    """Every rank numbered its own experts from 0 elsewhere."""
    for seen in run_ranks(_check_idle_experts, 2, False):
        assert len(seen["counts"]) == NUM_EXPERTS
        assert sum(seen["counts"][:4]) == GAS * 2 * 2 * 6 and not any(seen["counts"][4:])


def _check_unmarked_groups() -> list[str]:
    """Plain parameters, where DeepSpeed wants groups that are marked as MoE."""
    messages = []
    for section in (None, {}):
        model = make_model(BASE)
        config = ds_config(replace(BASE, zero_stage=2), section)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        initialize = deepspeed.initialize if section is None else ds_moe_lb.initialize
        try:
            initialize(model=model, optimizer=optimizer, config=config)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_deepspeeds_own_message_about_moe_parameter_groups_is_kept():
    (messages,) = run_ranks(_check_unmarked_groups, 1)
    assert len(messages) == 2 and messages[0] == messages[1]
    assert "moe" in messages[0].lower() and "param" in messages[0]


def _check_cap() -> list[str]:
    monitor.MAX_EXPERT_KEYS = 9
    section = {"scope": "none", "monitor": {"detail": "expert"}}
    engine = make_engine(BASE, make_model(BASE), section)
    written: list[Any] = []
    engine.monitor.enabled = True
    engine.monitor.write_events = written.extend
    for micro_step in range(GAS):
        batch = make_batch(BASE, window=0, micro_step=micro_step, rank=dist.get_rank())
        engine.backward(engine(batch.x)[0].square().mean())
        engine.step()
    return [name for name, *_ in written if "/expert_" in name]


def test_the_number_of_keys_in_a_report_is_capped():
    """8 and 12 experts: with 9 keys allowed all of the first layer and one of the second."""
    first, second = run_ranks(_check_cap, 2)
    assert second == []  # rank 0 alone writes
    assert len(first) == 9 and first[-1].endswith("/layer_01/expert_000")
