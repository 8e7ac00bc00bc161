"""Forwards that are not a plain training step: they must neither be counted nor change one that is.

Every test tells how the fault looked: a window that ended early, a forward that raised, evaluation
with grad under checkpointing, a model that calls itself, forwards nobody follows up.
"""

import io
import threading
from contextlib import contextmanager

import deepspeed
import deepspeed.comm as dist
import pytest
import torch

import ds_moe_lb
from models import MODEL_DIM, TinyMoE, moe_param_groups
from ranks import run_ranks

pytestmark = pytest.mark.ranks

SECTIONS = {
    "running": {},
    "boundary": {"estimate": "boundary"},
    "running, injected": {"aux_loss_coeff": 0.5},
    "boundary, injected": {"aux_loss_coeff": 0.5, "estimate": "boundary"},
}


def _engine(section, *, gas=1, model=None, **config):
    model = model or _model()
    return ds_moe_lb.initialize(
        model=model,
        model_parameters=moe_param_groups(model),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": gas,
            "gradient_clipping": 0,
            "zero_optimization": {"stage": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
            "moe_load_balancing": section,
            **config,
        },
    )[0]


def _model(cls=TinyMoE, **arguments):
    torch.manual_seed(11)
    return cls(k=2, **arguments)


def _batch(seed):
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    return torch.randn(2, 4, MODEL_DIM, generator=generator)


def _backward(engine, prediction, losses):
    """Leaves only the gradient of balancing in the gates."""
    coeff = 0.5 if engine.load_balancer.config.aux_loss_coeff is None else 0.0
    engine.backward(0.0 * prediction.sum() + coeff * sum(losses))


def _gate_grads(engine):
    return [gate.wg.weight.grad.clone() for gate in engine.module.gates()]


def _micro_step(engine, seed):
    """One micro-step; the gates' gradients just before `step`."""
    _backward(engine, *engine(_batch(seed)))
    grads = _gate_grads(engine)
    engine.step()
    return grads


def _largest_difference(first, second):
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(first, second, strict=True)
    )


# ------------------------------------------------------------------------------------------------


def _check_early_boundary(section):
    engine = _engine(section, gas=4)
    for _ in range(4):
        full = _micro_step(engine, 0)
    engine.set_gradient_accumulation_boundary(True)
    _micro_step(engine, 0)  # a window of one micro-step
    engine.set_gradient_accumulation_boundary(False)
    for seed in range(4):
        if seed == 3:
            engine.set_gradient_accumulation_boundary(True)
        after_short = _micro_step(engine, 0)
    metrics = engine.load_balancer.metrics()
    return _largest_difference(after_short, full), metrics["lbl_used"] / metrics["lbl_global_batch"]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_window_after_a_short_one_is_balanced_as_strongly(name):
    """`boundary` once balanced G / m times as strongly after a window of m micro-steps."""
    for difference, used in run_ranks(_check_early_boundary, 2, SECTIONS[name]):
        assert difference < 1e-5 and used == pytest.approx(1.0, rel=1e-5)


def _check_forward_that_raises(section, fails):
    engine = _engine(section, gas=2)
    second_block = engine.module.blocks[1]

    def out_of_memory(module, args):
        raise MemoryError("planted")

    for seed in range(6):
        if fails and seed in (0, 3):
            hook = second_block.register_forward_pre_hook(out_of_memory)
            with pytest.raises(MemoryError):
                engine(_batch(seed))
            hook.remove()
            before = engine.load_balancer.counts()
            if dist.get_rank() == 0:  # not counted, and no collective: the others are not here
                engine.module.blocks[0](_batch(seed), None)
            after = engine.load_balancer.counts()
            assert all(torch.equal(before[name], after[name]) for name in before)
        grads = _micro_step(engine, seed)
    return grads, engine.load_balancer.metrics()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_forward_that_raises_leaves_no_trace(name):
    """Its counts once stayed in f, its micro-step in the divisor; later calls were counted."""
    failed, clean = (
        run_ranks(_check_forward_that_raises, 2, SECTIONS[name], fails)[0]
        for fails in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(failed[0], clean[0], strict=True))
    assert failed[1] == clean[1]


def _check_evaluation_with_grad(section, checkpointing, order):
    model = _model(checkpointing=checkpointing)
    engine = _engine(section, model=model)
    results = {}
    mask = torch.tensor([[True, True, True, False]] * 2)
    _micro_step(engine, 0)  # the window that `boundary` goes by, here and below
    plain = _micro_step(engine, 1)
    _micro_step(engine, 0)
    with engine.load_balancer.token_mask(mask):
        masked = _micro_step(engine, 1)
    for name, expected in {"plain": plain, "masked": masked}.items():

        def evaluate():
            engine.module.eval()
            prediction, losses = engine.module(_batch(5)[:, :3])
            engine.module.train()
            return 0.0 * prediction.sum() + 0.0 * sum(losses)

        _micro_step(engine, 0)
        extra = evaluate() if order == "before" else 0.0
        with engine.load_balancer.token_mask(mask) if name == "masked" else _nothing():
            prediction, losses = engine(_batch(1))
        if order == "after":
            extra = evaluate()
        coeff = 0.5 if engine.load_balancer.config.aux_loss_coeff is None else 0.0
        engine.backward(0.0 * prediction.sum() + coeff * sum(losses) + extra)
        results[name] = _largest_difference(_gate_grads(engine), expected)
        engine.step()
    return results


@contextmanager
def _nothing():
    yield


@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("name", SECTIONS)
def test_evaluation_with_grad_under_checkpointing_changes_nothing(name, checkpointing):
    """Its recompute was once taken for the training forward's: half the gradient, or an error."""
    for order in ("before", "after"):
        arguments = (SECTIONS[name], checkpointing, order)
        for differences in run_ranks(_check_evaluation_with_grad, 2, *arguments):
            assert max(differences.values()) < 1e-5, (order, differences)


class CallsItself(TinyMoE):
    """Self-conditioning: a first pass without grad, then the one that is trained."""

    def forward(self, x, used_token=None, is_outer=True):
        if is_outer and self.training:
            with torch.no_grad():
                self(x, used_token, is_outer=False)
        return super().forward(x, used_token)


def _check_model_that_calls_itself(section):
    grads = []
    for cls in (TinyMoE, CallsItself):
        engine = _engine(section, model=_model(cls), gas=2)
        for seed in range(4):
            grads.append(_micro_step(engine, seed))
        assert engine.load_balancer.metrics()["valid_tokens"] == 2 * 2 * 8
    return max(_largest_difference(a, b) for a, b in zip(grads[:4], grads[4:], strict=True))


@pytest.mark.parametrize("name", SECTIONS)
def test_a_model_that_calls_itself_counts_once(name):
    """The inner call, without grad, once ended the outer micro-step: nothing was balanced."""
    assert max(run_ranks(_check_model_that_calls_itself, 2, SECTIONS[name])) < 1e-5


def _check_nothing_seen():
    said = io.StringIO()
    deepspeed.utils.logger.handlers[0].setStream(said)
    engine = _engine({"aux_loss_coeff": 0.5})
    for seed in range(3):
        hidden = engine.module.project(_batch(seed))
        engine.backward(engine.module.head(hidden).sum())  # the engine's own forward is not run
        engine.step()
    return said.getvalue().count("without any training forward")


def test_training_past_the_root_module_is_warned_about_once():
    assert run_ranks(_check_nothing_seen, 1) == [1]


def _check_same_batch_twice():
    grads = []
    for checkpointing in ("off", "reentrant"):
        model = _model(checkpointing=checkpointing)
        engine = _engine({"aux_loss_coeff": 0.5}, model=model, gas=2)
        outputs = [engine(_batch(0)), engine(_batch(0))]
        for output in outputs:
            _backward(engine, *output)
            engine.step() if output is outputs[0] else None
        grads.append(_gate_grads(engine))
    return _largest_difference(*grads)


def test_two_forwards_of_one_batch_are_both_injected():
    """Equal counts cannot tell them apart; one of them once got both, and kept the first only."""
    assert max(run_ranks(_check_same_batch_twice, 2)) < 1e-5


def _check_equal_counts(runs):
    return [[_equal_counts(section, mode) for mode in ("off", mode)] for section, mode in runs]


def _equal_counts(section, checkpointing):
    """Two forwards, the second of which is followed up first; the gate's gradient and the counts.

    On rank 0 the second has other probabilities, but the choices of the first: its tokens are twice
    as long. On rank 1 nothing is alike, so f differs.
    """
    model = _model(num_experts=(8,), checkpointing=checkpointing)
    torch.nn.init.zeros_(model.project.bias)
    engine = _engine(section, model=model, gas=2)
    seen = []
    for _ in range(2):  # the second window is of estimate `boundary`, if any is
        batches = [_batch(0), 2.0 * _batch(0) if dist.get_rank() == 0 else _batch(1)]
        outputs, counts = [], [0]
        for batch in batches:
            outputs.append(engine(batch))
            counts.append(next(iter(engine.load_balancer.counts().values())))
        seen.append((counts[1] == counts[2] - counts[1]).all().item())
        for prediction, losses in reversed(outputs):
            # Weights of their own: a swapped f is not made up for by the other one.
            weight = 3.0 if prediction is outputs[1][0] else 1.0
            _backward(engine, prediction, [weight * loss for loss in losses])
            grads = _gate_grads(engine)
            engine.step()
    return grads, seen


@pytest.mark.parametrize("mode", ["reentrant", "non_reentrant"])
def test_two_waiting_forwards_with_equal_counts_do_not_swap_f_in_their_recompute(mode):
    """Recomputes were told apart by their counts: the second forward got f of the first one."""
    runs = [(section, mode) for section in ({}, {"aux_loss_coeff": 0.5})]
    results = run_ranks(_check_equal_counts, 2, runs, timeout_s=90.0)
    for index in range(len(runs)):
        for rank, rank_results in enumerate(results):
            (expected, equal), (grads, _) = rank_results[index]
            assert equal == [rank == 0] * 2
            assert expected[0].abs().max() > 1e-3
            assert _largest_difference(grads, expected) < 1e-6, (index, rank)


def _check_repeated_installation():
    engine = _engine({})
    for _ in range(3):
        engine.load_balancer.uninstall()
        ds_moe_lb.install(engine)
    threads = threading.active_count()
    groups = len(torch.distributed.distributed_c10d._world.pg_names)
    for _ in range(5):
        engine.load_balancer.uninstall()
        ds_moe_lb.install(engine)
        _micro_step(engine, 0)
    assert len(torch.distributed.distributed_c10d._world.pg_names) == groups
    assert threading.active_count() == threads


def test_installing_again_makes_no_new_process_groups():
    run_ranks(_check_repeated_installation, 2)


def _check_forwards_without_step(section):
    engine = _engine(section)
    for seed in range(300):
        engine(_batch(seed % 7))
    balance = engine.load_balancer.balance
    return len(balance._arrivals)


def test_forwards_that_nobody_follows_up_do_not_pile_up():
    for section in SECTIONS.values():
        assert max(run_ranks(_check_forwards_without_step, 2, section)) <= 64


def _check_used_loss_with_a_masked_micro_step(section):
    engine = _engine({"scope": "micro_batch", **section}, gas=2)
    with engine.load_balancer.token_mask(torch.zeros(2, 4, dtype=torch.bool)):
        _micro_step(engine, 0)
    _micro_step(engine, 1)
    return engine.load_balancer.metrics()["lbl_used"]


def test_used_loss_has_one_meaning():
    """An all-masked micro-step supplies 0, whoever adds the loss."""
    native, injected = (
        run_ranks(_check_used_loss_with_a_masked_micro_step, 2, section)[0]
        for section in ({}, {"aux_loss_coeff": 0.5})
    )
    assert native == pytest.approx(injected, rel=1e-5)


def _check_unfrozen_later():
    model = _model()
    model.gates()[1].wg.weight.requires_grad_(False)
    engine = _engine({"aux_loss_coeff": 0.5}, model=model)
    weight = model.gates()[1].wg.weight
    _backward(engine, *engine(_batch(0)))
    assert weight.grad is None
    engine.step()
    weight.requires_grad_(True)
    _backward(engine, *engine(_batch(0)))
    return float(weight.grad.abs().max())


def test_a_router_that_is_unfrozen_later_is_balanced():
    assert min(run_ranks(_check_unfrozen_later, 1)) > 1e-4


def _check_mask_against_all():
    engine = _engine({"valid_tokens": "all"})
    with pytest.raises(ValueError, match="valid_tokens is 'all'"):
        with engine.load_balancer.token_mask(torch.ones(2, 4, dtype=torch.bool)):
            pass


def test_a_mask_that_would_be_ignored_is_refused():
    run_ranks(_check_mask_against_all, 1)


def _check_autocast():
    grads = []
    for config in ({}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}):
        engine = _engine({"aux_loss_coeff": 0.5}, **config)
        seen = []
        gate = engine.module.gates()[0]
        gate.register_forward_hook(
            lambda gate, args, out, seen=seen: seen.append(gate.lb_open_call.probs_TE)
        )
        grads.append(_micro_step(engine, 0))
        assert seen[0].dtype == torch.float32
    return _largest_difference(*grads)


def test_autocast_leaves_the_softmax_of_the_loss_in_fp32():
    # bf16 has 8 bits: logits of size 4 are off by up to 4 * 2^-9, and so are the probabilities
    assert max(run_ranks(_check_autocast, 1)) < 0.02
