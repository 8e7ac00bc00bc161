"""Generated and frozen routers: their mathematics, how they take a weight's place, the section.

Right values are worked out here, in fp64, from W = A2 relu(A1 e + b1) + b2.
"""

import copy

import pytest
import torch
from deepspeed.moe.sharded_moe import TopKGate
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ds_moe_lb.config import RouterConfig, parse_config, parse_router_config
from ds_moe_lb.routers import groups
from ds_moe_lb.routers.change import changed_routers
from ds_moe_lb.routers.swap import made_weight, replace_weight
from ds_moe_lb.routers.weights import FrozenRouterWeight, HyperRouterWeight, layer_generator
from models import TinyMoE, moe_param_groups

E, M = 8, 6


def hyper(d=4, h=16, *, scale=None, seed=0, layer=0, num_experts=E, model_dim=M):
    return HyperRouterWeight(
        num_experts=num_experts,
        model_dim=model_dim,
        embedding_dim=d,
        hidden_dim=h,
        init_scale=scale,
        generator=layer_generator(seed, stage=0, layer=layer),
    )


def by_hand(source, e=None):
    """(E, M) fp64 of the formula, entry by entry of its matrix products."""
    p = {name: tensor.detach().double() for name, tensor in source.named_parameters()}
    e = p["embedding"] if e is None else e.double()
    hidden = (p["hidden_weight"] * e).sum(dim=1) + p["hidden_bias"]
    hidden = torch.where(hidden > 0, hidden, torch.zeros_like(hidden))
    flat = (p["output_weight"] * hidden).sum(dim=1) + p["output_bias"]
    return flat.reshape(source.num_experts, -1)


# ------------------------------------------------------------------------------------------------
# The mathematics


def test_weight_is_the_formula_row_by_row():
    source = hyper()
    assert source().shape == (E, M)
    torch.testing.assert_close(source().double(), by_hand(source), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("d", "h", "rank"), [(4, 64, 4), (64, 5, None), (1, 64, 1), (16, 64, 16)])
def test_router_moves_in_min_of_embedding_and_hidden_dimensions(d, h, rank):
    """The whole idea: 48 weights, and the Jacobian's rank is that of the embedding."""
    source = hyper(d, h).double()

    def weight_of(e):
        return torch.func.functional_call(source, {"embedding": e}, ()).flatten()

    jacobian = torch.autograd.functional.jacobian(weight_of, source.embedding.detach())
    assert jacobian.shape == (E * M, d)
    found = int(torch.linalg.matrix_rank(jacobian))
    assert 1 <= found <= min(d, h)
    if rank is not None:
        assert found == rank
    else:  # as many as the hidden units that the embedding switches on
        hidden = source.hidden_weight @ source.embedding + source.hidden_bias
        assert found == int((hidden > 0).sum())


def test_with_an_orthonormal_basis_it_is_a_plain_router():
    """H = D = E M, A1 = 1, b1 lifts all units above 0, A2 = Q, b2 = -Q b1: W = Q e, any matrix."""
    n = E * M
    source = hyper(n, n).double()
    q, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))
    target = torch.randn(E, M, dtype=torch.float64)
    lift = torch.full((n,), 100.0, dtype=torch.float64)
    with torch.no_grad():
        source.embedding.copy_(q.T @ target.flatten())
        source.hidden_weight.copy_(torch.eye(n))
        source.hidden_bias.copy_(lift)
        source.output_weight.copy_(q)
        source.output_bias.copy_(-q @ lift)
    torch.testing.assert_close(source(), target, rtol=0, atol=1e-11)

    x = torch.randn(32, M, dtype=torch.float64)
    plain = target.clone().requires_grad_()
    for weight in (source(), plain):
        (x @ weight.T).softmax(dim=1).square().sum().backward()
    # A step of gradient descent on e moves W as a step on W itself does: Q Q^T = 1.
    moved = (q @ source.embedding.grad).reshape(E, M)
    torch.testing.assert_close(moved, plain.grad, rtol=0, atol=1e-12)


def test_only_the_embedding_is_trained_and_its_gradient_is_the_chain_rule():
    source = hyper().double()
    grad_of_weight = torch.randn(E, M, dtype=torch.float64)
    (source() * grad_of_weight).sum().backward()
    trained, frozen = source.split_parameters()
    assert trained == [source.embedding] and len(frozen) == 4
    assert all(parameter.grad is None for parameter in frozen)
    p = dict(source.named_parameters())
    is_on = (p["hidden_weight"] @ p["embedding"] + p["hidden_bias"]) > 0
    expected = p["hidden_weight"].T @ (is_on * (p["output_weight"].T @ grad_of_weight.flatten()))
    torch.testing.assert_close(source.embedding.grad, expected.detach(), rtol=0, atol=1e-12)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("top_k", [2, 3])
def test_gate_values_are_the_softmax_of_the_selected_logits(top_k):
    gate = TopKGate(M, E, k=top_k, drop_tokens=False, top2_2nd_expert_sampling=False)
    source = hyper(scale=1.0)
    replace_weight(gate.wg, source)
    x = torch.randn(20, M)
    _, _, _, indices, _, values, _ = gate(x, None, True)
    logits = x.double() @ by_hand(source).T
    expected_indices = logits.topk(top_k, dim=1)[1]
    for t in range(20):
        chosen = dict(zip(indices[:, t].tolist(), values[:, t].tolist(), strict=True))
        assert set(chosen) == set(expected_indices[t].tolist())
        scores = logits[t][list(chosen)].exp()
        for value, score in zip(chosen.values(), scores, strict=True):
            assert value == pytest.approx(float(score / scores.sum()), abs=1e-6)


@pytest.mark.parametrize("scale", [0.02, 0.5])
def test_initial_scale_is_the_standard_deviation_of_the_weights(scale):
    frozen = FrozenRouterWeight(
        num_experts=E, model_dim=M, init_scale=scale, generator=layer_generator(0, stage=0, layer=0)
    )
    for source in (hyper(scale=scale), frozen):
        entries = source().detach().double().flatten()
        mean = entries.sum() / len(entries)
        std = ((entries - mean).square().sum() / len(entries)).sqrt()
        assert float(std) == pytest.approx(scale, rel=1e-6)


def test_without_a_scale_both_layers_are_drawn_as_pytorch_draws_linear_layers():
    """Uniform in +-1/sqrt(n): variance 1/(3n), so that of W is (|relu|^2 + 1) / (3 H)."""
    source = hyper(32, 64, num_experts=64, model_dim=64)
    for name, fan_in in (("hidden_weight", 32), ("hidden_bias", 32), ("output_weight", 64)):
        values = getattr(source, name).detach()
        assert 0.9 * fan_in**-0.5 < float(values.abs().max()) <= fan_in**-0.5
        assert float(values.square().mean()) == pytest.approx(1 / (3 * fan_in), rel=0.5)
    hidden = torch.relu(source.hidden_weight @ source.embedding + source.hidden_bias).detach()
    expected = (float(hidden.square().sum()) + 1.0) / (3 * 64)
    assert float(source().var()) == pytest.approx(expected, rel=0.1)  # of 4096 entries: 5 sigma
    assert 0.5 < float(source.embedding.detach().std()) < 1.5


def test_draws_depend_on_seed_and_layer_and_on_nothing_else():
    torch.manual_seed(1)
    first = hyper()
    before = torch.get_rng_state()
    torch.manual_seed(2)
    again, other_layer, other_seed = hyper(), hyper(layer=1), hyper(seed=1)
    assert torch.equal(first.embedding, again.embedding) and torch.equal(first(), again())
    for other in (other_layer, other_seed):
        assert not torch.equal(first.embedding, other.embedding)
        assert not torch.equal(first.output_weight, other.output_weight)
    torch.manual_seed(1)
    hyper()
    assert torch.equal(torch.get_rng_state(), before)
    other_stage = layer_generator(0, stage=1, layer=0)
    assert other_stage.initial_seed() != layer_generator(0, stage=0, layer=0).initial_seed()


# ------------------------------------------------------------------------------------------------
# Taking a weight's place


class ToyRouter(nn.Module):
    """As transformers' routers are: the weight is its own."""

    def __init__(self, width=M):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(E, width))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def test_module_keeps_its_class_by_name_and_kind_and_fresh_instances_are_ordinary():
    router = ToyRouter()
    replace_weight(router, hyper())
    assert isinstance(router, ToyRouter) and type(router).__name__ == "ToyRouter"
    other = ToyRouter()
    replace_weight(other, hyper(seed=3))
    assert type(router) is type(other)
    fresh = type(router)(M)
    assert made_weight(fresh) is None
    assert isinstance(fresh.weight, nn.Parameter) and list(fresh.state_dict()) == ["weight"]
    assert set(router.state_dict()) == {
        f"router_weight.{name}"
        for name in ("embedding", "hidden_weight", "hidden_bias", "output_weight", "output_bias")
    }
    x = torch.randn(3, M)
    expected = x.double() @ by_hand(router.router_weight).T
    torch.testing.assert_close(router(x).double(), expected, rtol=0, atol=1e-6)


def test_a_deep_copy_has_an_embedding_of_its_own():
    router = ToyRouter()
    replace_weight(router, hyper())
    twin = copy.deepcopy(router)
    with torch.no_grad():
        twin.router_weight.embedding.add_(1.0)
    assert not torch.equal(twin.weight, router.weight)
    torch.testing.assert_close(twin.weight.double(), by_hand(twin.router_weight), rtol=0, atol=1e-6)


def frozen_router(seed=0):
    router = ToyRouter()
    generator = layer_generator(seed, stage=0, layer=0)
    source = FrozenRouterWeight(num_experts=E, model_dim=M, init_scale=None, generator=generator)
    replace_weight(router, source)
    return router


def hyper_router(seed=0):
    router = ToyRouter()
    replace_weight(router, hyper(seed=seed))
    return router


def test_checkpoints_restore_what_is_frozen():
    for make in (hyper_router, frozen_router):
        saved, router = make(seed=5), make(seed=6)
        assert not torch.equal(saved.weight, router.weight)
        router.load_state_dict(saved.state_dict())
        assert torch.equal(saved.weight, router.weight)


@pytest.mark.parametrize(
    ("saved", "router", "message"),
    [
        (
            ToyRouter,
            hyper_router,
            r"another kind of router at '' \(it holds weight\) than this mod",
        ),
        (ToyRouter, frozen_router, r"it holds weight\) .* needs router_weight.frozen_weight; set"),
        (hyper_router, frozen_router, r"it holds router_weight.embedding, .* remove it for linear"),
        (frozen_router, hyper_router, r"it holds router_weight.frozen_weight\) than"),
    ],
)
def test_a_checkpoint_of_another_kind_of_router_is_refused(saved, router, message):
    with pytest.raises(ValueError, match=f"^moe_router: the checkpoint has .*{message}"):
        router().load_state_dict(saved().state_dict(), strict=False)


# ------------------------------------------------------------------------------------------------
# The section


def parse(section):
    return parse_router_config({"train_batch_size": 4, "moe_router": section})


def test_defaults_are_the_documented_ones_and_change_nothing():
    assert parse({}) == parse_router_config({"train_batch_size": 4}) == RouterConfig()
    assert parse({}).model_dump() == {
        "type": "linear",
        "embedding_dim": None,
        "hidden_dim": 256,
        "init_scale": None,
        "seed": 0,
        "replace_trained": False,
    }


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"typ": 1}, r"moe_router.typ: unknown key. Did you mean 'type'\? Allowed keys: 'type', "),
        (
            {"type": "hyperr"},
            r"moe_router.type: got 'hyperr', expected one of 'linear', 'hyper', 'frozen' "
            r"\(nearest: 'hyper'\)",
        ),
        ({"embedding_dim": 0}, "moe_router.embedding_dim: got 0, expected null or an integer >= 1"),
        ({"embedding_dim": 2.0}, "embedding_dim: got 2.0, expected null or an integer >= 1"),
        ({"hidden_dim": None}, "moe_router.hidden_dim: got None, expected an integer >= 1"),
        (
            {"init_scale": 0.0},
            "moe_router.init_scale: got 0.0, expected null or a finite number > ",
        ),
        ({"init_scale": float("inf")}, "init_scale: got inf, expected null or a finite number > 0"),
        ({"seed": -1}, r"moe_router.seed: got -1, expected an integer from 0 to 2\^63 - 1"),
        ({"replace_trained": 1}, "moe_router.replace_trained: got 1, expected true or false"),
        ("hyper", 'moe_router: got \'hyper\', expected an object such as {"type": "hyper"'),
        ({1: 2}, "moe_router: got the key 1, expected one of 'type', 'embedding_dim'"),
        ({"seed": 3}, "seed: got 3, which means nothing with type 'linear'; leave it out, or set"),
        (
            {"type": "frozen", "hidden_dim": 8},
            "hidden_dim: got 8, which means nothing with type 'frozen'; .* set type to 'hyper'$",
        ),
    ],
)
def test_wrong_section_says_what_where_and_what_is_allowed(section, message):
    with pytest.raises(ValueError, match=message):
        parse(section)


@pytest.mark.parametrize(
    "name", ["moe_ruoter", "moe-router", "MoE_Routers", "router", "hyper_router"]
)
def test_misspelt_section_is_caught_beside_a_right_one(name):
    ds_config = {"moe_load_balancing": {}, name: {"type": "hyper"}}
    assert parse_config(ds_config) is not None
    with pytest.raises(ValueError, match=f"the section '{name}' is unknown; did you mean 'moe_rou"):
        parse_router_config(ds_config)


# ------------------------------------------------------------------------------------------------
# Applying it to a model and its optimizer


def change(model, section=None, **arguments):
    arguments = {"model": model, **arguments}
    ds_config = {"moe_router": {"type": "hyper", **(section or {})}}
    with changed_routers(ds_config, arguments):
        return arguments


def routers_of(model):
    return [gate.wg.router_weight for gate in model.gates()]


def everything_but_routers(model):
    own = {id(p) for source in routers_of(model) for p in source.parameters()}
    return [p for p in model.parameters() if id(p) not in own]


def same(parameters, others):
    return [id(p) for p in parameters] == [id(p) for p in others]


def test_linear_type_leaves_model_and_arguments_alone():
    model, parameters = TinyMoE(k=2), object()
    names = list(model.state_dict())
    arguments = change(model, {"type": "linear"}, model_parameters=parameters)
    assert arguments["model_parameters"] is parameters
    assert list(model.state_dict()) == names


def test_layers_get_networks_of_their_own_with_the_dimensions_asked_for():
    model = TinyMoE(k=2)
    change(model, {"embedding_dim": 3, "hidden_dim": 5, "init_scale": 0.125})
    first, second = routers_of(model)
    assert first.hidden_weight.shape == (5, 3) and first.output_weight.shape == (8 * 8, 5)
    assert second.output_weight.shape == (12 * 8, 5)
    assert not torch.equal(first.embedding, second.embedding)
    assert [gate.wg.weight.shape for gate in model.gates()] == [(8, 8), (12, 8)]
    assert float(second().std(correction=0)) == pytest.approx(0.125, rel=1e-5)
    wide = TinyMoE(k=2)
    change(wide)
    assert routers_of(wide)[0].hidden_weight.shape == (256, 8)  # null: the model's width


@pytest.mark.parametrize("given", ["none", "list", "generator"])
def test_parameters_become_groups_with_the_embeddings_free_of_decay(given):
    model = TinyMoE(k=2)
    parameters = {
        "none": None,
        "list": list(model.parameters()),
        "generator": model.parameters(),
    }[given]
    plain, embeddings = change(model, model_parameters=parameters)["model_parameters"]
    assert same(plain["params"], everything_but_routers(model))
    assert same(embeddings["params"], [source.embedding for source in routers_of(model)])
    assert embeddings["weight_decay"] == 0.0 and "weight_decay" not in plain


def test_frozen_routers_leave_no_parameter_behind():
    model = TinyMoE(k=2)
    arguments = change(model, {"type": "frozen"}, model_parameters=list(model.parameters()))
    assert same(arguments["model_parameters"], everything_but_routers(model))
    assert all(not p.requires_grad for source in routers_of(model) for p in source.parameters())


def test_groups_of_moe_models_keep_their_keys_and_the_callers_are_not_touched():
    model = TinyMoE(k=2)
    given = moe_param_groups(model)
    for group in given:
        group["weight_decay"] = 0.1
    sizes = [len(group["params"]) for group in given]
    repaired = change(model, model_parameters=given)["model_parameters"]
    assert [len(group["params"]) for group in given] == sizes
    assert [{k: v for k, v in group.items() if k != "params"} for group in repaired] == [
        {"name": "all", "weight_decay": 0.1},
        {"name": "ep_size_1", "moe": True, "weight_decay": 0.1},
        {"name": "all_router_embeddings", "weight_decay": 0.0},
    ]
    assert same(repaired[1]["params"], given[1]["params"])
    assert same(repaired[2]["params"], [source.embedding for source in routers_of(model)])
    assert len(repaired[0]["params"]) == sizes[0] - 2


def split_by_decay(model, decay=0.1):
    """As Trainer does: matrices with decay, the others without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay, "lr": 0.5},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.5},
    ]


def test_optimizers_group_without_decay_takes_the_embeddings():
    model = TinyMoE(k=2)
    optimizer = torch.optim.AdamW(split_by_decay(model))
    arguments = change(model, optimizer=optimizer)
    assert "model_parameters" not in arguments
    assert len(optimizer.param_groups) == 2
    embeddings = [source.embedding for source in routers_of(model)]
    assert same(optimizer.param_groups[1]["params"][-2:], embeddings)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in held} == {id(p) for p in trainable} and len(held) == len(trainable)


def test_optimizer_with_decay_only_gets_a_group_unless_a_scheduler_counts_its_groups():
    model = TinyMoE(k=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.1)
    change(model, optimizer=optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert same(
        optimizer.param_groups[1]["params"], [source.embedding for source in routers_of(model)]
    )

    model = TinyMoE(k=2)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(
        ValueError, match="^moe_router: the embeddings take no weight decay, .* lr_s"
    ):
        change(model, optimizer=optimizer, lr_scheduler=scheduler)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("router", [{"type": "hyper"}, {"type": "frozen"}])
@pytest.mark.parametrize("make", [lambda o: LambdaLR(o, lambda step: 1.0), WarmupLR])
def test_a_group_of_routers_alone_is_refused_only_if_a_scheduler_counts_it(router, make):
    """DeepSpeed drops the empty group: torch's scheduler then failed in its first step, and
    DeepSpeed's own gave the other parameters the learning rate of the routers.
    """
    model = TinyMoE(k=2)
    weights = [gate.wg.weight for gate in model.gates()]
    rest = [p for p in model.parameters() if all(p is not weight for weight in weights)]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    scheduler = make(optimizer)
    with pytest.raises(ValueError, match="^moe_router: a group of the optimizer holds nothing but"):
        change(model, router, optimizer=optimizer, lr_scheduler=scheduler)
    assert same(optimizer.param_groups[0]["params"], weights)
    change(model, router, optimizer=optimizer, lr_scheduler=make)
    assert optimizer.param_groups[0]["params"] == []


def test_a_scheduler_of_deepspeed_counts_groups_too():
    """It gave no learning rate to the group of the embeddings, which kept that of the start."""
    model = TinyMoE(k=2)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    with pytest.raises(ValueError, match="^moe_router: the embeddings take no weight decay"):
        change(model, optimizer=optimizer, lr_scheduler=WarmupLR(optimizer))


def test_what_was_kept_out_of_the_optimizer_stays_out():
    model = TinyMoE(k=2)
    left_out = model.gates()[0].wg.weight
    optimizer = torch.optim.SGD([p for p in model.parameters() if p is not left_out], lr=1.0)
    change(model, optimizer=optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert [id(source.embedding) in held for source in routers_of(model)] == [False, True]


def test_trained_routers_are_replaced_only_if_asked_for():
    model = TinyMoE(k=2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(1, 4, 8))[0].sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    message = (
        r"^moe_router.type: got 'hyper', which would throw away trained routers: 'blocks.0.moe', "
        r"'blocks.1.moe'; the optimizer has stepped them. Set replace_trained to true"
    )
    with pytest.raises(ValueError, match=message):
        change(model, optimizer=optimizer)
    assert [name for name, _ in model.named_parameters()] == names
    change(model, {"replace_trained": True}, optimizer=optimizer)
    assert len(optimizer.state) == len(names) - 2
    assert len(routers_of(model)) == 2


def test_embedding_of_a_frozen_weight_is_not_trained():
    model = TinyMoE(k=2)
    model.gates()[0].wg.weight.requires_grad_(False)
    change(model)
    assert [source.embedding.requires_grad for source in routers_of(model)] == [False, True]


def test_weights_that_were_loaded_are_trained_and_those_of_a_config_are_not(tmp_path):
    transformers = pytest.importorskip("transformers")
    from families import make_model, routers

    make_model("qwen3_moe").save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layers.0.mlp.gate', .* were loaded by from_pretrained"):
        change(loaded)
    change(loaded, {"replace_trained": True})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    fresh = transformers.AutoModelForCausalLM.from_config(config)
    change(fresh)
    for model in (loaded, fresh):
        assert all(made_weight(router) is not None for router in routers(model).values())


def test_applied_twice_it_is_the_same_and_another_section_is_refused():
    model = TinyMoE(k=2)
    first = change(model, model_parameters=moe_param_groups(model))["model_parameters"]
    sources = routers_of(model)
    again = change(model, model_parameters=first)["model_parameters"]
    assert [a is b for a, b in zip(routers_of(model), sources, strict=True)] == [True, True]
    assert [len(group["params"]) for group in again] == [len(group["params"]) for group in first]
    with pytest.raises(ValueError, match="router of 'blocks.0.moe' was changed before, by another"):
        change(model, {"seed": 1}, model_parameters=first)


def test_model_without_routers_is_refused_where_something_is_trained():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^moe_router: the model \(Linear\) has no deepspeed.moe"):
        change(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    change(model)  # an engine that trains nothing, such as a reward model's


def test_marks_that_deepspeed_reads_go_over_to_the_new_parameters():
    model = TinyMoE(k=2)
    for gate in model.gates():
        gate.wg.weight.allreduce = True
        gate.wg.weight.use_muon = True
    change(model, model_parameters=moe_param_groups(model))
    for source in routers_of(model):
        assert all(p.allreduce and not p.use_muon for p in source.parameters())


def test_repair_of_nothing_is_nothing():
    assert groups.repaired([], []) == []
