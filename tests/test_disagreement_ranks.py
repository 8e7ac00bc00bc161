"""Ranks that no longer do the same: an error within the timeout of the group, and never a hang.

A rank makes one micro-step less than the others in one of two ways. `step`: it tells the engine
that its window ends one micro-step early and trains on. `stop`: its data has run out and it goes on
to the end of the script.
"""

import re
import time
from datetime import timedelta

import deepspeed.comm as dist
import pytest
import torch
from torch.distributed import distributed_c10d

import ds_moe_lb
from models import MODEL_DIM, TinyMoE, moe_param_groups
from ranks import run_ranks

pytestmark = pytest.mark.ranks

# The group's timeout is half of what run_ranks is given. A rank that fails ends the wait of the
# others, but some may find out only when their own collective gives up.
GROUP_TIMEOUT_S = 8.0
SLACK_S = 20.0


def _engine(section, *, gas, ep_size):
    torch.manual_seed(7)
    model = TinyMoE(k=2, ep_size=ep_size)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "moe_load_balancing": section,
    }
    return ds_moe_lb.initialize(
        model=model, model_parameters=moe_param_groups(model), config=config
    )[0]


def _micro_step(engine, seed, *, native):
    batch = torch.randn(2, 4, MODEL_DIM, generator=torch.Generator().manual_seed(seed))
    prediction, losses = engine(batch)
    engine.backward(prediction.square().mean() + (0.1 if native else 0.0) * sum(losses))
    engine.step()


def _check_group_timeout():
    engine = _engine({"sync_group": "expert_parallel"}, gas=1, ep_size=2)
    made = {group.group for group in engine.load_balancer.balance.reducer.groups}
    groups = [distributed_c10d.group.WORLD, *made]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_counts_wait_no_longer_than_the_scripts_timeout():
    """A rank waited half an hour for counts, with a timeout of 12 s: torch gave our group its own
    default."""
    timeouts = run_ranks(_check_group_timeout, 4, timeout_s=50.0)
    assert timeouts == [[timedelta(seconds=25)] * 2] * 4


def _check_one_micro_step_less(section, gas, how, guilty):
    """Returns this rank's error and how long it took after the disagreement began."""
    # DeepSpeed makes its groups with torch's default timeout, which is 30 minutes.
    distributed_c10d.default_pg_timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.barrier()
    distributed_c10d._set_pg_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
    engine = _engine(section, gas=gas, ep_size=1)
    native = "aux_loss_coeff" not in section
    for seed in range(2 * gas):  # the second window can be of estimate `boundary`
        _micro_step(engine, seed, native=native)
    began = time.monotonic()
    steps = gas
    if dist.get_rank() == guilty:
        steps -= 1
    try:
        for number in range(steps):
            if dist.get_rank() == guilty and how == "step" and number == steps - 1:
                engine.set_gradient_accumulation_boundary(True)
            _micro_step(engine, 100 + number, native=native)
        if how == "step":
            engine.set_gradient_accumulation_boundary(None)
            engine.micro_steps = 3 * gas
            for number in range(gas):
                _micro_step(engine, 200 + number, native=native)
        dist.barrier()
        error = None
    except RuntimeError as caught:
        error = str(caught)
    return error, time.monotonic() - began


def _run(world_size, section, gas, how, guilty):
    """Errors and times by rank; the ranks' own barrier at the end would wait for nobody."""
    return run_ranks(_check_and_leave, world_size, section, gas, how, guilty, timeout_s=90.0)


def _check_and_leave(*arguments):
    result = _check_one_micro_step_less(*arguments)
    # Not through the runner's barrier: the groups are broken by now.
    dist.barrier = lambda: None
    dist.destroy_process_group = lambda: None
    return result


@pytest.mark.parametrize(
    ("how", "gas", "world_size", "section"),
    [
        ("step", 2, 2, {}),
        ("step", 4, 2, {"aux_loss_coeff": 0.1}),
        ("stop", 2, 2, {"aux_loss_coeff": 0.1}),
        ("stop", 4, 4, {}),
    ],
)
def test_one_micro_step_less_is_an_error_within_the_timeout_that_names_the_place(
    how, gas, world_size, section
):
    """`running` reduces at each micro-step: the others wait for counts that never come.

    The error was the backend's alone, which tells neither rank nor micro-step nor layer.
    """
    what = "all layers" if section else "layer 'blocks.0.moe'"
    for rank, (error, seconds) in enumerate(_run(world_size, section, gas, how, 1)):
        assert error is not None
        assert seconds < GROUP_TIMEOUT_S + SLACK_S
        if rank != 1:  # who makes less waits elsewhere, in DeepSpeed's or the script's collective
            assert (
                f"moe_load_balancing: rank {rank} got no sum of the counts of {what} at micro-step "
                f"{gas} over the ranks {list(range(world_size))}. One of them has died" in error
            ), error
            assert "The backend says: " in error and "gloo" in error


@pytest.mark.parametrize(
    ("gas", "world_size", "section"),
    [(2, 2, {}), (4, 2, {"aux_loss_coeff": 0.1}), (2, 4, {"aux_loss_coeff": 0.1}), (4, 4, {})],
)
def test_a_shorter_window_is_named_where_counts_meet(gas, world_size, section):
    """`boundary` reduces once a window: there the ranks meet, and see who counted less."""
    results = _run(world_size, {"estimate": "boundary", **section}, gas, "step", 1)
    less, more = f"micro-step {gas - 1}, call {gas - 1} ", f"micro-step {gas}, call {gas} "
    for rank, (error, seconds) in enumerate(results):
        assert seconds < GROUP_TIMEOUT_S
        assert f"the ranks {list(range(world_size))} disagree at layer 'blocks.0.moe'" in error
        if rank != 1:
            assert re.search(rf"rank 1 was at {less}of .*, rank {rank} at {more}of", error), error
        else:  # who is alone cannot know who is right
            assert f"rank 1 was at {less}" in error or f"rank 1 at {less}" in error, error
