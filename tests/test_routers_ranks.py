"""Generated and frozen routers on live engines: gradients, what stays frozen, checkpoints.

The balancing gradient of the weight is the reference's (fp64, one process); the embedding's has to
be its product with dW/de, which :func:`chain_rule` works out from the saved network by itself.
"""

from typing import Any

import deepspeed
import deepspeed.comm as dist
import pytest
import torch

import engine_grid
import reference
from engine_grid import COEFF, Cell, main_loss, make_batch
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


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_balancing_reaches_the_embedding_by_the_chain_rule(zero_stage):
    """D = 2, G = 2, expert-parallel size 2, two windows; a step lies between them."""
    per_rank = [runs[0] for runs in run_ranks(_check_native, 2, [zero_stage])]
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
