"""Pipelines: two stages of two data-parallel ranks against the same layers without a pipeline.

The un-pipelined run applies an explicit loss + coefficient * l_aux to the same batches on two
ranks; the pipeline gets its balancing injected. All parameters' gradients are compared, before the
step: plain DeepSpeed cannot take every one of these steps (see ``cannot_step``).
"""

from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from torch import nn

import ds_moe_lb
from models import MODEL_DIM, moe_param_groups
from ranks import run_ranks

pytestmark = pytest.mark.ranks

COEFF = 0.5
GAS = 3
NUM_WINDOWS = 2
NUM_LAYERS = 4  # two on each stage
# Where the MoE layers are, with the expert-parallel size: number of experts by layer.
EVERY_STAGE = {1: 8, 3: 12}
FIRST_STAGE = {0: 8, 1: 12}
LAST_STAGE = {2: 8}


@dataclass(frozen=True)
class Case:
    """One engine; two windows."""

    zero_stage: int = 0
    estimate: str = "running"
    checkpointing: str = "off"
    loss_scale: int = 1


def cannot_step(moe_on: dict[int, int], zero_stage: int) -> str | None:
    """Why plain DeepSpeed has no optimizer step for this pipeline, or None where it has."""
    if zero_stage > 0 and len({layer // 2 for layer in moe_on}) == 1:
        return (
            "MoE on one stage only with ZeRO 1: the norm of the gradients is summed over the "
            "stages once by a stage without experts, twice by one with experts; it hangs"
        )
    return None


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MODEL_DIM, MODEL_DIM)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Sparse(nn.Module):
    def __init__(self, num_experts: int, ep_size: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(MODEL_DIM, MODEL_DIM), nn.Tanh())
        self.moe = MoE(MODEL_DIM, expert, num_experts, ep_size, k=2, top2_2nd_expert_sampling=False)
        self.l_aux: Any = None
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.mul_(2.0)  # uneven routing

    def forward(self, x):
        output, self.l_aux, _ = self.moe(x)
        return x + output


def _layers(moe_on: dict[int, int], ep_size: int) -> list[nn.Module]:
    torch.manual_seed(42)
    return [
        Sparse(moe_on[index], ep_size) if index in moe_on else Dense()
        for index in range(NUM_LAYERS)
    ]


def _loss(output, label):
    return (output - label).square().mean()


def _batch(window: int, micro_step: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = (window * GAS + micro_step) * 10 + data_rank
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, MODEL_DIM, generator=generator)
    return x + torch.randn(MODEL_DIM, generator=generator), torch.randn(
        x.shape, generator=generator
    )


def _engine(model: nn.Module, case: Case, section: dict[str, Any] | None) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": case.zero_stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    if isinstance(model, PipelineModule):
        config["pipeline"] = {
            "activation_checkpoint_interval": int(case.checkpointing != "off"),
            "use_reentrant": case.checkpointing != "non_reentrant",
        }
    if section is not None:
        config["moe_load_balancing"] = section
    engine = ds_moe_lb.initialize(
        model=model, optimizer=torch.optim.SGD(moe_param_groups(model), lr=0.1), config=config
    )[0]
    if case.loss_scale != 1:
        engine.optimizer.override_loss_scale(case.loss_scale)
    return engine


def _watch_steps(engine: Any, *, takes_step: bool, scale: int) -> list[dict[str, torch.Tensor]]:
    """Record all gradients before each optimizer step, which may be left out."""
    windows: list[dict[str, torch.Tensor]] = []
    step = engine._take_model_step

    def watched(*args: Any) -> None:
        windows.append(
            {
                name.removeprefix("layers."): deepspeed.utils.safe_get_full_grad(p).clone() / scale
                for name, p in engine.module.named_parameters()
            }
        )
        if takes_step:
            step(*args)
        else:
            engine.optimizer.zero_grad()
            for accumulated in getattr(engine.optimizer, "averaged_gradients", {}).values():
                accumulated.clear()
            engine.global_steps += 1

    engine._take_model_step = watched
    return windows


@dataclass
class Outcome:
    """What one rank saw: gradients by window and name, losses and the last report."""

    grads: list[dict[str, torch.Tensor]]
    losses: list[float]
    report: dict[str, float]


def _pipeline(moe_on: dict[int, int], ep_size: int) -> PipelineModule:
    return PipelineModule(
        _layers(moe_on, ep_size), num_stages=2, loss_fn=_loss, partition_method="uniform"
    )


def _run_pipeline(
    model: PipelineModule, moe_on: dict[int, int], case: Case, section: dict[str, Any] | None
) -> Outcome:
    engine = _engine(model, case, section)
    takes_step = cannot_step(moe_on, case.zero_stage) is None
    grads = _watch_steps(engine, takes_step=takes_step, scale=case.loss_scale)
    data_rank = engine.grid.get_data_parallel_rank()
    losses = [
        engine.train_batch(iter([_batch(window, m, data_rank) for m in range(GAS)])).item()
        for window in range(NUM_WINDOWS)
    ]
    balancer = engine.load_balancer
    return Outcome(grads, losses, balancer.metrics() if balancer is not None else {})


class Whole(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x), sum(x.l_aux for x in self.layers if isinstance(x, Sparse))


def _run_whole(
    moe_on: dict[int, int], ep_size: int, case: Case, takes_step: bool, coefficient: float
) -> Outcome:
    engine = _engine(Whole(_layers(moe_on, ep_size)), case, {"estimate": case.estimate})
    grads = _watch_steps(engine, takes_step=takes_step, scale=1)
    losses = []
    for window in range(NUM_WINDOWS):
        total = torch.zeros(())
        for micro_step in range(GAS):
            x, label = _batch(window, micro_step, dist.get_rank())
            output, l_aux = engine(x)
            loss = _loss(output, label)
            total += loss.detach() / GAS
            engine.backward(loss + coefficient * l_aux)
            engine.step()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return Outcome(grads, losses, engine.load_balancer.metrics())


def _check_pipelines(moe_on, ep_size, cases):
    # All models first: each makes groups of the whole world, which hangs in DeepSpeed once it has
    # made expert groups on some stages only.
    models = [_pipeline(moe_on, ep_size) for _ in cases]
    return [
        _run_pipeline(model, moe_on, case, {"estimate": case.estimate, "aux_loss_coeff": COEFF})
        for model, case in zip(models, cases, strict=True)
    ]


def _check_wholes(moe_on, ep_size, runs):
    return [
        _run_whole(moe_on, ep_size, Case(estimate=estimate), takes_step, coefficient)
        for estimate, takes_step, coefficient in runs
    ]


CASES = [
    Case(),
    Case(estimate="boundary", checkpointing="reentrant"),
    Case(zero_stage=1, checkpointing="non_reentrant", loss_scale=1024),
    Case(zero_stage=1, checkpointing="reentrant"),
    Case(zero_stage=1, estimate="boundary"),
]


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
    steps = {case: cannot_step(moe_on, case.zero_stage) is None for case in CASES}
    runs = sorted({(case.estimate, steps[case], COEFF) for case in CASES})
    runs.append((CASES[0].estimate, steps[CASES[0]], 0.0))
    wholes = run_ranks(_check_wholes, 2, moe_on, ep_size, runs, timeout_s=120)
    piped = run_ranks(_check_pipelines, 4, moe_on, ep_size, CASES, timeout_s=120)
    for index, case in enumerate(CASES):
        expected = [whole[runs.index((case.estimate, steps[case], COEFF))] for whole in wholes]
        for rank in range(4):
            stage, data_rank = divmod(rank, 2)
            ours = piped[rank][index]
            _compare(ours, expected[data_rank], stage, moe_on, case)
    without = wholes[0][-1].grads[0]
    with_balancing = wholes[0][runs.index((CASES[0].estimate, steps[CASES[0]], COEFF))].grads[0]
    for layer in moe_on:
        name = f"{layer}.moe.deepspeed_moe.gate.wg.weight"
        assert (with_balancing[name] - without[name]).abs().max() > 1e-2


def _compare(
    ours: Outcome, expected: Outcome, stage: int, moe_on: dict[int, int], case: Case
) -> None:
    assert ours.losses == pytest.approx(expected.losses, rel=1e-5)
    for window, grads in enumerate(ours.grads):
        names = {n for n in expected.grads[window] if int(n.split(".")[0]) // 2 == stage}
        assert set(grads) == names
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad,
                expected.grads[window][name],
                rtol=1e-5,
                atol=2e-7,
                msg=lambda text, name=name, window=window: f"{case} {name} {window}: {text}",
            )
    # Reports cover the layers of all stages, in the model's order, on every rank.
    assert f"lbl_used/layer_{len(moe_on) - 1:02d}" in ours.report
    assert f"lbl_used/layer_{len(moe_on):02d}" not in ours.report
    assert ours.report == pytest.approx(expected.report, rel=1e-5)


def _check_scope_none():
    models = [_pipeline(EVERY_STAGE, 2) for _ in range(3)]
    case = Case(zero_stage=1)
    plain = _run_pipeline(models[0], EVERY_STAGE, case, None)
    measured = _run_pipeline(models[1], EVERY_STAGE, case, {"scope": "none"})
    try:
        _run_pipeline(models[2], EVERY_STAGE, case, {})
    except ValueError as error:
        return plain, measured, str(error)


def test_scope_none_measures_only_and_a_missing_coefficient_is_refused():
    for plain, measured, message in run_ranks(_check_scope_none, 4):
        assert measured.losses == plain.losses
        for ours, theirs in zip(measured.grads, plain.grads, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert measured.report["valid_tokens/layer_01"] == 2 * GAS * 2 * 5
        assert "moe_load_balancing.aux_loss_coeff: got None" in message
        assert "PipelineEngine" in message
