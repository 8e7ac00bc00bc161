"""Generated and frozen routers on live engines: gradients, what stays frozen, checkpoints.

The balancing gradient of the weight is the reference's (fp64, one process); the embedding's has to
be its product with dW/de, which :func:`chain_rule` works out from the saved network by itself.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import pytest
import torch

import engine_grid
import families
import reference
from engine_grid import COEFF, Cell, main_loss, make_batch
from families import FAMILIES
from hf_runs import Recorder, Run, find_routers, forward, make_inputs, start_engine
from models import GateRecorder, TinyMoE, moe_param_groups
from ranks import run_ranks

pytestmark = pytest.mark.ranks

HYPER = {"type": "hyper", "embedding_dim": 5, "hidden_dim": 16, "init_scale": 0.7}
NUM_WINDOWS = 2
G = 2


def chain_rule(
    network: dict[str, torch.Tensor], weight_grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(W, dL/de) in fp64, of W = A2 relu(A1 e + b1) + b2 and dL/dW."""
    p = {name: tensor.double() for name, tensor in network.items()}
    before = p["hidden_weight"] @ p["embedding"] + p["hidden_bias"]
    weight = p["output_weight"] @ before.clamp(min=0) + p["output_bias"]
    backward = p["output_weight"].T @ weight_grad.flatten()
    return weight.view(weight_grad.shape), p["hidden_weight"].T @ (backward * (before > 0))


def full(parameter: torch.nn.Parameter) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().float().cpu().clone()


def network_of(source: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(parameter) for name, parameter in source.named_parameters()}


# ------------------------------------------------------------------------------------------------
# Native MoE layers


def cell_of(zero_stage: int) -> Cell:
    return Cell(2, 2, zero_stage, G, 2, "off", "even", "running", "l_aux")


def native_config(zero_stage: int, router: dict[str, Any], **further: Any) -> dict[str, Any]:
    config = engine_grid.ds_config(cell_of(zero_stage), {"scope": "global_batch"})
    return config | {"moe_router": router} | further


def sources(model: TinyMoE) -> list[Any]:
    return [gate.wg.router_weight for gate in model.gates()]


def _check_native(zero_stages: list[int]) -> list[list[dict[str, Any]]]:
    import ds_moe_lb

    runs = []
    for zero_stage in zero_stages:
        torch.manual_seed(42 + 1000 * dist.get_rank())  # the routers do not follow the script
        cell, model = cell_of(zero_stage), None
        with torch.random.fork_rng():
            torch.manual_seed(42)
            model = TinyMoE(k=2, ep_size=2)
        engine = ds_moe_lb.initialize(
            model=model,
            optimizer=torch.optim.SGD(moe_param_groups(model), lr=0.5, weight_decay=0.01),
            config=native_config(zero_stage, HYPER),
        )[0]
        recorder = GateRecorder(model.gates())
        windows = []
        for window in range(NUM_WINDOWS):
            record: dict[str, Any] = {
                "networks": [network_of(source) for source in sources(model)],
                "weights": [gate.wg.weight.detach().clone() for gate in model.gates()],
            }
            for micro_step in range(G):
                batch = make_batch(cell, window=window, micro_step=micro_step, rank=dist.get_rank())
                prediction, losses = engine(batch.x)
                engine.backward(0.0 * main_loss(batch, prediction) + COEFF * sum(losses))
                if micro_step == G - 1:
                    record["grads"] = [
                        engine_grid.full_grad(source.embedding) for source in sources(model)
                    ]
                    record["frozen_grads"] = [
                        parameter.grad is not None
                        for source in sources(model)
                        for parameter in source.split_parameters()[1]
                    ]
                engine.step()
            record["calls"] = recorder.take()
            windows.append(record)
        runs.append(windows)
        engine_grid.finish(engine)
        # The type of the routers is the model's: uninstall leaves it.
        assert len(sources(model)) == 2
    return runs


def test_balancing_reaches_the_embedding_by_the_chain_rule():
    """ZeRO 0, 1, 2, D = 2, G = 2, expert-parallel size 2, two windows with a step between them."""
    results = run_ranks(_check_native, 2, [0, 1, 2], timeout_s=120.0)
    for index in range(3):
        _assert_native_chain_rule([runs[index] for runs in results])


def _assert_native_chain_rule(per_rank: list[list[dict[str, Any]]]) -> None:
    for layer in range(2):
        for window in range(NUM_WINDOWS):
            records = [rank[window] for rank in per_rank]
            network = records[0]["networks"][layer]
            calls = [[record["calls"][layer][m] for record in records] for m in range(G)]
            shape = records[0]["weights"][layer].shape
            weight, _ = chain_rule(network, torch.zeros(shape, dtype=torch.float64))
            expected = reference.balance(
                reference.Window(
                    weight.tolist(),
                    [[call.x.tolist() for call in at] for at in calls],
                    [[call.selections.tolist() for call in at] for at in calls],
                    [[call.valid_mask.tolist() for call in at] for at in calls],
                    top_k=2,
                ),
                estimate="running",
                coeff=COEFF,
            )
            weight_grad = torch.tensor(expected.weight_grad, dtype=torch.float64)
            _, right = chain_rule(network, weight_grad)
            assert right.abs().max() > 1e-3
            for record in records:
                got = record["grads"][layer].double()
                assert ((got - right).abs() <= 1e-5 * right.abs().clamp(min=1e-2)).all(), (
                    f"layer {layer} window {window}: {got.tolist()} != {right.tolist()}"
                )
                difference = (record["weights"][layer].double() - weight).abs().max()
                assert float(difference) < 1e-6
                assert not any(record["frozen_grads"])
    _assert_only_embeddings_move(per_rank)


def _assert_only_embeddings_move(per_rank: list[list[dict[str, Any]]]) -> None:
    """Equal on all ranks and in all windows, to the bit, but for an embedding that has moved."""
    first = per_rank[0][0]["networks"]
    for records in per_rank:
        for number, record in enumerate(records):
            for layer, network in enumerate(record["networks"]):
                for name, tensor in network.items():
                    if name != "embedding":
                        assert torch.equal(tensor, first[layer][name]), (layer, name)
                same_window = per_rank[0][number]["networks"][layer]["embedding"]
                assert torch.equal(network["embedding"], same_window)
                moved = not torch.equal(network["embedding"], first[layer]["embedding"])
                assert moved == (number > 0)


# ------------------------------------------------------------------------------------------------
# transformers' routers, with and without AutoEP


def _linear_of(router: torch.nn.Module) -> torch.nn.Module:
    return getattr(router, "gate", router)


def _train_all(runs: list[Run]) -> list[list[dict[str, Any]]]:
    return [_train_hf(run) for run in runs]


def _train_hf(run: Run) -> list[dict[str, Any]]:
    """The windows of a run, with the networks in the place of weights."""
    engine = start_engine(run)
    routers = find_routers(engine.module)
    recorder = Recorder(routers, engine.load_balancer.layout.layers[0].top_k)
    for window in range(run.num_windows):
        networks = {n: network_of(_linear_of(r).router_weight) for n, r in routers.items()}
        for micro_step in range(run.gradient_accumulation_steps):
            inputs = make_inputs(run, window=window, micro_step=micro_step)
            recorder.valid.append(inputs["valid"].flatten().tolist())
            engine.backward(0.0 * forward(run, engine, inputs).loss)
            if micro_step == run.gradient_accumulation_steps - 1:
                grads = {
                    name: engine_grid.full_grad(_linear_of(router).router_weight.embedding)
                    for name, router in routers.items()
                }
                recorder.close_window(networks, grads)
            engine.step()
    engine.load_balancer.uninstall()
    engine.destroy()
    return recorder.windows


HF = Run("qwen3_moe", num_windows=NUM_WINDOWS, extra={"moe_router": HYPER})


@pytest.mark.parametrize(
    "runs",
    [
        [
            replace(HF, zero_stage=3, padding="right"),
            replace(HF, family="deepseek_v3", zero_stage=2, num_windows=1),
        ],
        [
            replace(HF, zero_stage=1, autoep_size=2),
            replace(HF, zero_stage=3, autoep_size=2, checkpointing="non_reentrant"),
        ],
    ],
    ids=["transformers", "autoep"],
)
def test_transformers_routers_get_the_chain_rules_gradient(runs: list[Run]) -> None:
    results = run_ranks(_train_all, 2, runs, timeout_s=180.0)
    for index, run in enumerate(runs):
        _assert_chain_rule(run, [rank[index] for rank in results])


def _assert_chain_rule(run: Run, per_rank: list[list[dict[str, Any]]]) -> None:
    first = per_rank[0][0]["weights"]
    assert len(first) == 2
    for number, records in enumerate(zip(*per_rank, strict=True)):
        for name, network in records[0]["weights"].items():
            inputs = [[r["inputs"][name][m] for r in records] for m in range(G)]
            num_experts = len(network["output_bias"]) // len(inputs[0][0][0])
            weight, _ = chain_rule(network, torch.zeros(num_experts, len(inputs[0][0][0])).double())
            selections = [[r["selections"][name][m] for r in records] for m in range(G)]
            expected = reference.balance(
                reference.Window(
                    weight.tolist(),
                    inputs,
                    selections,
                    [[r["valid"][m] for r in records] for m in range(G)],
                    top_k=len(selections[0][0][0]),
                    score_function=FAMILIES[run.family].score_function,
                ),
                estimate="running",
                coeff=COEFF,
            )
            weight_grad = torch.tensor(expected.weight_grad, dtype=torch.float64)
            _, right = chain_rule(network, weight_grad)
            assert right.abs().max() > 1e-3
            for record in records:
                got = record["grads"][name].double()
                assert ((got - right).abs() <= 1e-5 * right.abs().clamp(min=1e-2)).all(), (
                    f"{name} window {number}: {got.tolist()} != {right.tolist()}"
                )
                for key, tensor in record["weights"][name].items():
                    is_same = torch.equal(tensor, first[name][key])
                    assert is_same == (key != "embedding" or number == 0), (name, key, number)


# ------------------------------------------------------------------------------------------------
# The optimizer, checkpoints, and who may build the engine


def _optimizer_of(zero_stage: int) -> dict[str, Any]:
    """What an engine with AdamW from the JSON holds after a step."""
    import ds_moe_lb

    adam = {"lr": 0.1, "weight_decay": 0.5, "torch_adam": True}
    model = TinyMoE(k=2)
    engine = ds_moe_lb.initialize(
        model=model,
        model_parameters=moe_param_groups(model),
        config=native_config(zero_stage, HYPER, optimizer={"type": "AdamW", "params": adam}),
    )[0]
    for micro_step in range(G):
        batch = make_batch(cell_of(zero_stage), window=0, micro_step=micro_step, rank=0)
        prediction, losses = engine(batch.x)
        engine.backward(main_loss(batch, prediction) + sum(losses))
        engine.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = engine.optimizer
    held = [group["params"] for group in optimizer.param_groups]
    inner = optimizer
    if zero_stage:
        held, inner = optimizer.bit16_groups, optimizer.optimizer
    return {
        "trainable": [name for name, p in model.named_parameters() if p.requires_grad],
        "num_trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "held": [names[id(parameter)] for group in held for parameter in group],
        "decay": {
            names[id(parameter)]: group["weight_decay"]
            for group, parameters in zip(inner.param_groups, held, strict=True)
            for parameter in parameters
        },
        "state": sum(state["exp_avg"].numel() for state in inner.state.values()),
        "num_groups": len(held),
    }


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_nothing_frozen_costs_optimizer_state_and_embeddings_do_not_decay(zero_stage: int) -> None:
    (found,) = run_ranks(_optimizer_of, 1, zero_stage)
    assert sorted(found["held"]) == sorted(found["trainable"])
    embeddings = [name for name in found["held"] if name.endswith("wg.router_weight.embedding")]
    assert len(embeddings) == 2
    assert all((rate == 0.0) == (name in embeddings) for name, rate in found["decay"].items())
    padding = found["state"] - found["num_trainable"]
    assert 0 <= padding <= 8 * found["num_groups"]  # ZeRO aligns the buffers of its groups


def _autoep_optimizers() -> list[Any]:
    import ds_moe_lb

    results = []
    for kind in ("groups", "optimizer", "none"):
        # DeepSpeed's ZeRO 1 and 2 want MoE groups, which a client's optimizer cannot have yet.
        run = replace(HF, autoep_size=2, zero_stage=0 if kind == "optimizer" else 1)
        torch.manual_seed(7)
        model = families.make_model(run.family)
        is_matrix = {True: [], False: []}
        for parameter in model.parameters():
            is_matrix[parameter.dim() > 1].append(parameter)
        groups = [
            {"params": is_matrix[True], "weight_decay": 0.5, "lr": 0.5, "name": "matrices"},
            {"params": is_matrix[False], "weight_decay": 0.0, "lr": 0.5, "name": "others"},
        ]
        config = run.config()
        arguments: dict[str, Any] = {"model_parameters": groups}
        if kind != "groups":
            arguments = {}
        if kind == "optimizer":
            del config["optimizer"]
            arguments = {"optimizer": torch.optim.SGD(groups, lr=0.5)}
        engine = ds_moe_lb.initialize(model=model, config=config, **arguments)[0]
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        param_groups = engine.optimizer.param_groups
        held = [group["params"] for group in param_groups]
        if run.zero_stage:
            held = engine.optimizer.bit16_groups
        decay = {
            names[id(parameter)]: group["weight_decay"]
            for group, parameters in zip(param_groups, held, strict=True)
            for parameter in parameters
        }
        trainable = [name for name, p in engine.module.named_parameters() if p.requires_grad]
        results.append((kind, sorted(trainable) == sorted(decay), decay))
        engine.load_balancer.uninstall()
        engine.destroy()
    return results


def test_autoep_engines_train_the_embeddings_whoever_made_the_groups() -> None:
    for kind, holds_all, decay in run_ranks(_autoep_optimizers, 2, timeout_s=120.0)[0]:
        assert holds_all, (kind, sorted(decay))
        embeddings = [name for name in decay if name.endswith("gate.router_weight.embedding")]
        assert len(embeddings) == 2 and all(decay[name] == 0.0 for name in embeddings)
        if kind != "none":
            assert all(decay[name] == 0.5 for name in decay if name.endswith("experts.w1"))


def _native_engine(router: dict[str, Any]) -> Any:
    import ds_moe_lb

    model = TinyMoE(k=2, ep_size=2)
    groups = moe_param_groups(model)
    optimizer = {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}}
    return ds_moe_lb.initialize(
        model=model,
        model_parameters=groups,
        config=native_config(1, router, optimizer=optimizer),
    )[0]


def _hf_engine(router: dict[str, Any]) -> Any:
    return start_engine(replace(HF, zero_stage=3, autoep_size=2, extra={"moe_router": router}))


def _networks(engine: Any) -> dict[str, Any]:
    return {
        name: network_of(module)
        for name, module in engine.module.named_modules()
        if name.endswith("router_weight")
    }


def _save_and_load(directory: str, kind: str, router: dict[str, Any]) -> dict[str, Any]:
    """Train a step, save, load into an engine with another seed, and into one of another type."""
    make = {"native": _native_engine, "hf": _hf_engine}[kind]
    engine = make(router)
    for micro_step in range(G):
        if kind == "native":
            batch = make_batch(cell_of(1), window=0, micro_step=micro_step, rank=dist.get_rank())
            prediction, losses = engine(batch.x)
            loss = main_loss(batch, prediction) + sum(losses)
        else:
            loss = forward(HF, engine, make_inputs(HF, window=0, micro_step=micro_step)).loss
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(directory)
    found: dict[str, Any] = {"saved": _networks(engine)}
    engine_grid.finish(engine)
    other = make({**router, "seed": 9})
    found["drawn"] = _networks(other)
    other.load_checkpoint(directory)
    found["loaded"] = _networks(other)
    engine_grid.finish(other)
    linear = make({"type": "linear"})
    try:
        linear.load_checkpoint(directory)
    except Exception as error:
        found["into_linear"] = f"{type(error).__name__}: {error}"
    linear_directory = f"{directory}/linear"
    linear.save_checkpoint(linear_directory)
    engine_grid.finish(linear)
    third = make(router)
    try:
        third.load_checkpoint(linear_directory)
    except Exception as error:
        found["from_linear"] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_checkpoints_hold_the_network_and_those_of_another_type_are_refused(
    kind: str, tmp_path: Path
) -> None:
    results = run_ranks(_save_and_load, 2, str(tmp_path), kind, HYPER, timeout_s=180.0)
    for found in results:
        assert len(found["saved"]) == 2
        for name, network in found["saved"].items():
            for key, tensor in network.items():
                assert torch.equal(tensor, found["loaded"][name][key]), (name, key)
                assert not torch.equal(tensor, found["drawn"][name][key]), (name, key)
        for way in ("from_linear", "into_linear"):
            assert found[way].startswith("ValueError: moe_router: the checkpoint has another kind")


def _ways_to_an_engine() -> dict[str, Any]:
    import ds_moe_lb

    found: dict[str, Any] = {}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("DeepSpeed").addHandler(handler)

    def build(initialize: Any, config: dict[str, Any]) -> Any:
        torch.manual_seed(42 + dist.get_rank())
        model = TinyMoE(k=2)
        optimizer = torch.optim.SGD(moe_param_groups(model), lr=0.5)
        return initialize(model=model, optimizer=optimizer, config=config)[0]

    plain = build(deepspeed.initialize, native_config(1, HYPER))
    try:
        ds_moe_lb.install(plain)
    except ValueError as error:
        found["install"] = str(error)
    plain.destroy()

    config = native_config(1, HYPER)
    del config["moe_load_balancing"]
    alone = build(ds_moe_lb.initialize, config)
    found["alone"] = (len(_networks(alone)), alone.load_balancer is None)
    alone.destroy()

    section = {"scope": "global_batch", "aux_loss_coeff": 0.5}
    frozen = {"type": "frozen", "init_scale": 0.5}
    config = native_config(1, frozen, moe_load_balancing=section)
    engine = build(ds_moe_lb.initialize, config)
    before = _networks(engine)
    for micro_step in range(G):
        batch = make_batch(cell_of(1), window=0, micro_step=micro_step, rank=dist.get_rank())
        engine.backward(main_loss(batch, engine(batch.x)[0]))
        engine.step()
    found["frozen"] = (before, _networks(engine))
    found["warnings"] = [line for line in lines if "are frozen" in line]
    found["valid_tokens"] = engine.load_balancer.metrics()["valid_tokens"]
    engine_grid.finish(engine)

    run = replace(HF, zero_stage=3, section={"aux_loss_coeff": 0.0}, extra={"moe_router": frozen})
    engine = start_engine(run)
    before = _networks(engine)
    for micro_step in range(G):
        inputs = make_inputs(run, window=0, micro_step=micro_step)
        engine.backward(forward(run, engine, inputs).loss)
        engine.step()
    found["frozen zero3"] = (before, _networks(engine))
    engine_grid.finish(engine)

    import ds_moe_lb.auto

    for name, initialize in (("auto", deepspeed.initialize), ("both", ds_moe_lb.initialize)):
        engine = build(initialize, native_config(1, HYPER))
        sizes = [len(group) for group in engine.optimizer.bit16_groups]
        found[name] = (len(_networks(engine)), engine.load_balancer is not None, sizes)
        engine_grid.finish(engine)
        run = replace(HF, autoep_size=2)
        engine = initialize(
            model=families.make_model(run.family), model_parameters=None, config=run.config()
        )[0]
        trainable = [
            parameter for parameter in engine.module.parameters() if parameter.requires_grad
        ]
        held = [parameter for group in engine.optimizer.bit16_groups for parameter in group]
        found[f"{name} autoep"] = (
            len(_networks(engine)),
            engine.load_balancer is not None,
            {id(parameter) for parameter in held} == {id(parameter) for parameter in trainable},
        )
        engine_grid.finish(engine)
    return found


def test_whoever_builds_the_engine_gets_the_routers_of_the_section() -> None:
    results = run_ranks(_ways_to_an_engine, 2, timeout_s=180.0)
    found = results[0]
    assert re.match(
        r"moe_router.type: got 'hyper', but this engine has the model's own routers "
        r"\('blocks.0.moe', 'blocks.1.moe'\), and its optimizer holds .* by ds_moe_lb.initialize",
        found["install"],
    )
    assert found["alone"] == (2, True)
    assert found["auto"] == found["both"]
    assert found["auto"][:2] == (2, True)
    for name in ("auto autoep", "both autoep"):
        assert found[name] == (2, True, True)

    for way in ("frozen", "frozen zero3"):
        before, after = found[way]
        for name, network in before.items():
            (weight,) = network.values()
            assert torch.equal(weight, after[name]["frozen_weight"])
            assert torch.equal(weight, results[1][way][1][name]["frozen_weight"])
            assert float(weight.double().std(correction=0)) == pytest.approx(0.5, rel=1e-6)
    assert len(found["warnings"]) == 1 and "blocks.0.moe, blocks.1.moe" in found["warnings"][0]
    assert found["valid_tokens"] > 0
