"""``GlobalBatchTopKGate`` beside its parent ``TopKGate``: bitwise equal in all but ``l_aux``.

A gate that is not installed on an engine is its parent, ``l_aux`` included. An installed one (here
on an engine of one rank, where LBL over the global batch is LBL over the micro-batch) differs in
``l_aux`` only; its counts are the selections that routed, before dropping.
"""

import itertools
from typing import Any

import pytest
import torch
from deepspeed.moe.sharded_moe import TopKGate, multiplicative_jitter
from torch.nn import functional

import reference
from ds_moe_lb import GlobalBatchTopKGate
from engine_grid import Cell, finish, make_engine
from models import MODEL_DIM, TinyMoE, select
from ranks import run_ranks

NUM_TOKENS, NUM_EXPERTS = 24, 8

# k, noise policy, drop_tokens, capacity factor; capacity matters only where tokens are dropped.
GATES = [
    (k, noise, drop_tokens, capacity_factor)
    for k in (1, 2, 4)
    for noise in (None, "Jitter", "RSample")
    for drop_tokens, capacity_factor in ((True, 0.25), (True, 4.0), (False, 1.0))
]
GATE_IDS = [f"k{k}-{noise}-drop{drop}-capacity{capacity}" for k, noise, drop, capacity in GATES]


def _pair(k: int, noise: str | None, drop_tokens: bool, capacity_factor: float) -> list[TopKGate]:
    """A parent and a gate of ours with the same weights."""
    gates = []
    for cls in (TopKGate, GlobalBatchTopKGate):
        torch.manual_seed(3)
        gates.append(
            cls(
                MODEL_DIM,
                NUM_EXPERTS,
                k=k,
                capacity_factor=capacity_factor,
                eval_capacity_factor=capacity_factor,
                min_capacity=1,
                noisy_gate_policy=noise,
                drop_tokens=drop_tokens,
            )
        )
    return gates


def _assert_same(ours: tuple, parents: tuple, *, but_l_aux: bool) -> None:
    assert len(ours) == len(parents)
    for index, (a, b) in enumerate(zip(ours, parents, strict=True)):
        if index == 0 and but_l_aux:
            continue
        assert type(a) is type(b), index
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype, index
            assert torch.equal(a, b), index
        else:
            assert a == b, index


# ------------------------------------------------------------------------------------------------
# Not installed


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("sparse_routes", [True, False], ids=["7-tuple", "4-tuple"])
@pytest.mark.parametrize("gate_arguments", GATES, ids=GATE_IDS)
def test_a_gate_that_is_not_installed_is_its_parent(gate_arguments, sparse_routes, is_training):
    parent, ours = _pair(*gate_arguments)
    x = torch.randn(NUM_TOKENS, MODEL_DIM)
    masks = [None]
    if gate_arguments[0] == 1:
        masks.append((torch.arange(NUM_TOKENS) % 3 != 0).long())
    for mask in masks:
        outputs, grads, states = [], [], []
        for gate in (ours, parent):
            gate.train(is_training)
            gate.zero_grad()
            torch.manual_seed(11)
            output = gate(x, mask, sparse_routes)
            gate_values = output[5] if sparse_routes else output[1]
            (output[0] + gate_values.square().sum()).backward()
            outputs.append(output)
            grads.append(gate.wg.weight.grad.clone())
            states.append(torch.get_rng_state())
        assert len(outputs[0]) == (7 if sparse_routes else 4)
        _assert_same(*outputs, but_l_aux=False)
        assert torch.equal(*grads)
        assert torch.equal(*states)


def test_parameter_and_buffer_names_are_the_parents():
    parent, ours = _pair(2, None, True, 1.0)
    assert isinstance(ours, TopKGate)
    assert list(ours.state_dict()) == list(parent.state_dict()) == ["wg.weight"]
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in parent.named_parameters()]
    ours.load_state_dict(parent.state_dict())


# ------------------------------------------------------------------------------------------------
# Installed on an engine of one rank


def _one_rank_cell(k: int) -> Cell:
    return Cell(
        world_size=1,
        ep_size=1,
        zero_stage=0,
        gradient_accumulation_steps=1,
        top_k=k,
        checkpointing="off",
        tokens="even",
        estimate="running",
        mechanism="l_aux",
    )


def _model(k: int, noise: str | None, drop_tokens: bool, capacity_factor: float) -> TinyMoE:
    torch.manual_seed(5)
    return TinyMoE(
        k=k,
        noisy_gate_policy=noise,
        drop_tokens=drop_tokens,
        capacity_factor=capacity_factor,
        top2_2nd_expert_sampling=True,
    )


def _check_installed(cases: list[tuple]) -> None:
    for case in cases:
        try:
            _check_installed_gate(*case)
        except Exception as error:
            raise AssertionError(f"gate {case}") from error


def _check_installed_gate(k: int, noise: str | None, drop: bool, capacity_factor: float) -> None:
    model = _model(k, noise, drop, capacity_factor)
    names = list(model.state_dict())
    engine = make_engine(_one_rank_cell(k), model, {})
    assert list(model.state_dict()) == names

    for gate in model.gates():
        assert type(gate) is GlobalBatchTopKGate
    parents = [_parent_of(gate) for gate in model.gates()]

    seen: dict[int, dict[str, Any]] = {}
    for layer, gate in enumerate(model.gates()):

        def before(module: Any, args: tuple, layer: int = layer) -> None:
            seen[layer] = {"args": args, "state": torch.get_rng_state()}

        def after(module: Any, args: tuple, output: tuple, layer: int = layer) -> None:
            seen[layer] |= {"output": output, "state_after": torch.get_rng_state()}

        gate.register_forward_pre_hook(before)
        gate.register_forward_hook(after)

    x = torch.randn(2, NUM_TOKENS // 2, MODEL_DIM)
    masks = [None] + [(torch.arange(NUM_TOKENS) % 3 != 0).long()] * (k == 1)
    for mask, is_training, grad in itertools.product(masks, (True, False), (True, False)):
        engine.train(is_training)
        torch.manual_seed(13)
        with torch.set_grad_enabled(grad):
            _, l_aux = engine(x, mask)
        counts = list(engine.load_balancer.counts().values())
        is_micro_step = is_training and grad
        for layer, parent in enumerate(parents):
            call = seen[layer]
            parent.train(is_training)
            torch.set_rng_state(call["state"])
            with torch.no_grad():
                expected = parent(*call["args"])
            assert torch.equal(torch.get_rng_state(), call["state_after"])
            assert len(expected) == 7
            _assert_same(call["output"], expected, but_l_aux=True)
            exp_counts = expected[-1]
            # A micro-step balances what was counted; an evaluation shows its own micro-batch.
            torch.set_rng_state(call["state"])
            lbl = _expected_loss(parent, call["args"][0], call["args"][1], exp_counts)
            assert l_aux[layer].item() == pytest.approx(lbl, rel=1e-5)
            if is_micro_step:
                assert counts[layer].dtype == torch.int64
                assert counts[layer].tolist() == exp_counts.tolist()
        if is_micro_step:
            engine.backward(sum(l_aux))
            engine.step()

    # The 4-tuple, by a direct call.
    x = torch.randn(NUM_TOKENS, MODEL_DIM)
    for gate, parent in zip(model.gates(), parents, strict=True):
        outputs = []
        for one in (gate, parent):
            one.eval()
            torch.manual_seed(17)
            with torch.no_grad():
                outputs.append(one(x, None, False))
        assert len(outputs[0]) == 4
        _assert_same(*outputs, but_l_aux=True)
    finish(engine)
    assert {type(gate) for gate in model.gates()} == {TopKGate}


def _parent_of(gate: TopKGate) -> TopKGate:
    """A plain gate with the same settings that shares the weight."""
    parent = TopKGate(
        MODEL_DIM,
        gate.wg.weight.shape[0],
        k=gate.k,
        capacity_factor=gate.capacity_factor,
        eval_capacity_factor=gate.eval_capacity_factor,
        min_capacity=gate.min_capacity,
        noisy_gate_policy=gate.noisy_gate_policy,
        drop_tokens=gate.drop_tokens,
        use_rts=gate.use_rts,
        ep_group=gate.ep_group,
        top2_2nd_expert_sampling=gate.top2_2nd_expert_sampling,
    )
    parent.wg = gate.wg
    return parent


def _expected_loss(
    gate: TopKGate, x_TM: torch.Tensor, used_token: torch.Tensor | None, counts_E: torch.Tensor
) -> float:
    """LBL from the probabilities of the clean logits: after jitter, before selection noise."""
    x_TM = x_TM.detach().float()
    if gate.noisy_gate_policy == "Jitter" and gate.training:
        x_TM = multiplicative_jitter(x_TM, device=x_TM.device)
    probs_TE = functional.linear(x_TM, gate.wg.weight.detach()).double().softmax(dim=1)
    if used_token is not None:
        probs_TE = probs_TE[used_token.bool()]
    fraction_E = counts_E.double() / counts_E.sum()
    return (len(counts_E) * fraction_E @ probs_TE.mean(dim=0)).item()


@pytest.mark.ranks
@pytest.mark.parametrize("k", [1, 2, 4])
def test_an_installed_gate_differs_in_l_aux_only(k):
    run_ranks(_check_installed, 1, [case for case in GATES if case[0] == k], timeout_s=180)


def _check_balancing(k: int, capacity_factor: float, mask: list[int] | None) -> list[dict]:
    """Counts, l_aux and the balancing gradient of each layer after one micro-step."""
    torch.manual_seed(5)
    model = TinyMoE(k=k, capacity_factor=capacity_factor)
    engine = make_engine(_one_rank_cell(k), model, {})
    inputs: list[torch.Tensor] = []
    for gate in model.gates():
        gate.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    torch.manual_seed(13)
    # Layers are isolated but not equal: feed the second what does not depend on dropping.
    x = torch.randn(2, NUM_TOKENS // 2, MODEL_DIM) + 1.0
    prediction, l_aux = engine(x, None if mask is None else torch.tensor(mask))
    engine.backward(0.0 * prediction.sum() + sum(l_aux))
    counts = list(engine.load_balancer.counts().values())
    return [
        {
            "x": inputs[layer],
            "weight": gate.wg.weight.detach(),
            "counts": counts[layer].tolist(),
            "l_aux": l_aux[layer].item(),
            "grad": gate.wg.weight.grad.clone(),
        }
        for layer, gate in enumerate(model.gates())
    ]


def _window(layer: dict, k: int, mask: list[int] | None) -> reference.Window:
    valid = [True] * NUM_TOKENS if mask is None else [bool(m) for m in mask]
    return reference.Window(
        weight=layer["weight"].tolist(),
        inputs=[[layer["x"].tolist()]],
        selections=[[select(layer["x"], layer["weight"], k=k).tolist()]],
        valid=[[valid]],
        top_k=k,
    )


@pytest.mark.ranks
@pytest.mark.parametrize("has_mask", [False, True], ids=["all", "used_token"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_all_choices_count_masked_tokens_do_not_and_capacity_is_irrelevant(k, has_mask):
    """Built-in ``l_aux`` sees first choices only for k = 2 and ignores used_token for k >= 2."""
    mask = [int(t % 3 != 1) for t in range(NUM_TOKENS)] if has_mask else None
    small = run_ranks(_check_balancing, 1, k, 0.25, mask)[0]
    large = run_ranks(_check_balancing, 1, k, 4.0, mask)[0]
    for layer in small + large:
        expected = reference.balance(_window(layer, k, mask), estimate="running")
        assert layer["counts"] == expected.counts[0][0]
        assert sum(layer["counts"]) == k * (sum(mask) if mask else NUM_TOKENS)
        assert layer["l_aux"] == pytest.approx(expected.losses[0], rel=1e-5)
        ref = torch.tensor(expected.weight_grad, dtype=torch.float64)
        assert ((layer["grad"] - ref).abs() <= 1e-5 * ref.abs().clamp(min=1e-2)).all()
    # The first layer's input does not depend on what was dropped: all bitwise equal.
    assert torch.equal(small[0]["x"], large[0]["x"])
    assert small[0]["counts"] == large[0]["counts"]
    assert small[0]["l_aux"] == large[0]["l_aux"]
    assert torch.equal(small[0]["grad"], large[0]["grad"])


def _check_second_choices() -> list[float]:
    """First choices balanced over experts 0 to 3, all second choices on expert 7."""
    torch.manual_seed(5)
    model = TinyMoE(k=2, num_experts=(8,), isolate=False, capacity_factor=4.0)
    with torch.no_grad():
        model.project.weight.copy_(torch.eye(MODEL_DIM))
        model.project.bias.zero_()
        model.gates()[0].wg.weight.copy_(torch.eye(MODEL_DIM))
    engine = make_engine(_one_rank_cell(2), model, {})
    x = torch.zeros(1, 8, MODEL_DIM)
    for t in range(8):
        x[0, t, t % 4] = 2.0
        x[0, t, 7] = 1.0
    _, l_aux = engine(x)
    (counts,) = engine.load_balancer.counts().values()
    return [l_aux[0].item(), *counts.tolist()]


@pytest.mark.ranks
def test_second_choices_count():
    l_aux, *counts = run_ranks(_check_second_choices, 1)[0]
    assert counts == [2, 2, 2, 2, 0, 0, 0, 8]
    # f = (1/8 four times, 0, 0, 0, 1/2). Every token has e^2, e^1 and six times 1 in its softmax,
    # so P_7 = e / Z and P_0..3 = (e^2 + 3) / 4 Z, Z = e^2 + e + 6: LBL = 8 (4 P_0 / 8 + P_7 / 2).
    e = 2.718281828459045
    z = e**2 + e + 6
    assert l_aux == pytest.approx(8 * (4 / 8 * (e**2 + 3) / (4 * z) + e / (2 * z)), rel=1e-6)
