"""The runner of multi-rank tests itself: names the guilty rank, ends on time, leaves nothing."""

import os
import time

import deepspeed.comm as dist
import pytest
import torch

from ranks import BASE_SEED, RankError, run_ranks

pytestmark = pytest.mark.ranks


def _check_returns(value: int) -> dict[str, int]:
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return {
        "rank": dist.get_rank(),
        "total": int(total),
        "seed": torch.initial_seed(),
        "threads": torch.get_num_threads(),
    }


def _check_fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"the cause is rank {rank}")
    dist.barrier()  # fails too, but later: its peer is gone


def _check_dies_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.abort()
    dist.barrier()


def _check_hangs_on(rank: int, pid_directory: str) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    with open(os.path.join(pid_directory, f"{dist.get_rank()}"), "w") as file:
        file.write(f"{os.getpid()} {child}")
    if dist.get_rank() == rank:
        _wait_for_ever()


def _wait_for_ever() -> None:
    time.sleep(3600)


def _check_misses_a_collective() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(3600)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank_and_every_rank_has_its_seed(world_size: int) -> None:
    results = run_ranks(_check_returns, world_size, 10)
    assert results == [
        {
            "rank": rank,
            "total": 10 * world_size + sum(range(world_size)),
            "seed": BASE_SEED + rank,
            "threads": 1,
        }
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("guilty", [0, 1])
def test_failure_shows_the_traceback_of_the_rank_that_failed_first(guilty: int) -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(_check_fails_on, 2, guilty)
    text = str(failure.value)
    assert text.startswith(f"rank {guilty} failed first")
    assert f"ValueError: the cause is rank {guilty}" in text
    assert "in _check_fails_on" in text


def test_a_rank_that_dies_of_a_signal_is_named() -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(_check_dies_on, 2, 1)
    text = str(failure.value)
    assert text.startswith("rank 1 failed first")
    assert "died of SIGABRT" in text
    assert "in _check_dies_on" in text


def test_a_hang_ends_at_the_deadline_and_leaves_no_process(tmp_path) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as failure:
        run_ranks(_check_hangs_on, 2, 1, str(tmp_path), timeout_s=16.0)
    assert time.monotonic() - started < 40.0
    text = str(failure.value)
    # Rank 0 waits for rank 1 in the last barrier: either its group gives up or the parent does.
    assert "_wait_for_ever" in text or "rank 0 failed first" in text
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    for _ in range(50):  # the kernel may take a moment
        if not any(_is_running(pid) for pid in pids):
            break
        time.sleep(0.1)
    assert [pid for pid in pids if _is_running(pid)] == []


def test_a_hang_of_every_rank_shows_where_each_one_is(tmp_path) -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(_check_hangs_on, 1, 0, str(tmp_path), timeout_s=12.0)
    text = str(failure.value)
    assert text.startswith("no end after 12 s; still running: ranks [0]")
    assert "in _wait_for_ever" in text


def test_a_collective_that_one_rank_misses_fails_inside_the_other() -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(_check_misses_a_collective, 2, timeout_s=16.0)
    text = str(failure.value)
    assert text.startswith("rank 0 failed first (later: ranks []; still running: ranks [1])")
    assert "in _check_misses_a_collective" in text


def _is_running(pid: int) -> bool:
    """A killed process may stay in the table as a zombie until its parent collects it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _check_engine() -> float:
    """A real engine with expert parallelism: groups, all-to-all and a ZeRO step all work here."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    moe = MoE(8, torch.nn.Linear(8, 8), num_experts=4, ep_size=dist.get_world_size(), k=2)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(moe.parameters()), "name": "all"}
    )
    engine, *_ = deepspeed.initialize(
        model=moe,
        model_parameters=groups,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 0.0,
        },
    )
    output, l_aux, _ = engine(torch.randn(4, 8))
    engine.backward(output.square().mean() + l_aux)
    engine.step()
    return float(engine.global_steps)


def test_the_real_engine_works_in_the_ranks() -> None:
    assert run_ranks(_check_engine, 2, timeout_s=180.0) == [1.0, 1.0]
