"""What a GPU adds: real fp16, NCCL, asynchronous kernels, memory. `pytest -m gpu` runs it there.

Every check runs on the CPU too, in the same words, where fp32 with a loss scale stands in for fp16,
which DeepSpeed refuses there. **The variants on a GPU have not been run yet.**
"""

import gc
import warnings
from dataclasses import replace
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ds_moe_lb
from engine_grid import BASE, ds_config, make_model, section_of
from models import MODEL_DIM, moe_param_groups
from ranks import run_ranks
from window_runs import Script, batches, of_run, ways, wrong

pytestmark = pytest.mark.ranks


def _ranks_of(device: str, world_size: int) -> Any:
    missing = device == "cuda" and torch.cuda.device_count() < world_size
    marks = [pytest.mark.gpu] if device == "cuda" else []
    if device == "cuda":
        marks.append(pytest.mark.skipif(missing, reason=f"needs {world_size} GPUs"))
    return pytest.param(device, world_size, marks=marks, id=f"{device}-{world_size}")


# One rank for each GPU; on the CPU two are enough, and one where ranks make no difference.
DEVICES = pytest.mark.parametrize(
    ("device", "world_size"), [_ranks_of("cpu", 2), _ranks_of("cuda", 1), _ranks_of("cuda", 2)]
)
ONE_RANK = pytest.mark.parametrize(
    ("device", "world_size"), [_ranks_of("cpu", 1), _ranks_of("cuda", 1), _ranks_of("cuda", 2)]
)
TIMEOUT_S = 240.0  # on a GPU every rank imports torch anew


def _cells(device: str) -> list[Any]:
    """Every way to add the loss and to estimate f; two of the four on a CPU, which has others."""
    cells = ways(tokens="masked", zero_stage=2)
    return cells if device == "cuda" else cells[::3]


def _script(cell: Any, device: str, precision: str) -> Script:
    extra = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
    }[precision]
    is_stand_in = precision == "fp16" and device == "cpu"
    script = Script(cell, unscales=precision == "fp16", **({} if is_stand_in else extra))
    if is_stand_in:
        script.engine.optimizer.override_loss_scale(2**8)
    assert torch.device(script.engine.device).type == device
    return script


# ------------------------------------------------------------------------------------------------
# Gradients


def _check_gradients(device: str, precision: str) -> list[Any]:
    results = []
    for cell in _cells(device):
        cell = replace(cell, world_size=dist.get_world_size())
        script = _script(cell, device, precision)
        records = [script.window(batches(cell, window=window, num=2)) for window in range(2)]
        results.append(records)
        script.finish()
    return results


@DEVICES
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    # Of half precision: see test_recompute_precision_ranks.py; fp16 keeps 11 bits where bf16 has 8.
    [("fp32", 0.0), ("bf16", 8 * 2**-9), ("fp16", 8 * 2**-12)],
)
def test_gradients_equal_the_reference(device, world_size, precision, tolerance):
    results = run_ranks(_check_gradients, world_size, device, precision, timeout_s=TIMEOUT_S)
    for index, cell in enumerate(_cells(device)):
        assert wrong(cell, of_run(results, index), tolerance=tolerance) == [], str(cell)


# ------------------------------------------------------------------------------------------------
# Overflow


def _check_overflow(device: str) -> list[Any]:
    return [_train_overflow(cell, device) for cell in _cells(device)]


def _train_overflow(cell: Any, device: str) -> list[Any]:
    """Three windows with fp16's dynamic loss scale; a NaN in the second, whose step is skipped."""
    cell = replace(cell, world_size=dist.get_world_size())
    script = _script(cell, device, "fp16")
    records = []
    for window in range(3):
        window_batches = batches(cell, window=window, num=2)
        if window == 1 and dist.get_rank() == dist.get_world_size() - 1:
            window_batches[0].x[0, 0] = float("nan")
        scale = float(script.engine.optimizer.loss_scale)
        records.append(script.window(window_batches))
        assert script.engine.skipped_steps == (window > 0)
        lowers = window == 1 and device == "cuda"  # the stand-in's scale is fixed
        assert (float(script.engine.optimizer.loss_scale) < scale) == lowers
        assert all(torch.isfinite(p).all() for p in script.model.parameters())
    script.finish()
    return records


@DEVICES
def test_an_overflow_of_fp16_skips_the_step_and_discards_its_window(device, world_size):
    """The window after it takes nothing from it: neither counts nor the old loss scale."""
    results = run_ranks(_check_overflow, world_size, device, timeout_s=TIMEOUT_S)
    for index, cell in enumerate(_cells(device)):
        found = wrong(cell, of_run(results, index), discarded=[1], tolerance=8 * 2**-12)
        assert found == [], str(cell)


# ------------------------------------------------------------------------------------------------
# No waiting in forward


class _HostReads(TorchDispatchMode):
    """Counts the operations that hand a number of the device to the host, which waits for it."""

    READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.name().split("::")[1].split(".")[0] in self.READS
        return func(*args, **kwargs or {})


def _engine(section: dict[str, Any] | None, **changes: Any) -> Any:
    cell = replace(BASE, world_size=dist.get_world_size(), **changes)
    model = make_model(cell, isolate=False)
    return ds_moe_lb.initialize(
        model=model,
        optimizer=torch.optim.SGD(moe_param_groups(model), lr=0.1),
        config=ds_config(cell, section),
    )[0]


def _forward(engine: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    prediction, losses = engine(torch.randn(2, 6, MODEL_DIM, generator=generator).to(engine.device))
    return prediction.square().mean() + 0.1 * sum(losses)


def _waits(section: dict[str, Any] | None, plant: bool = False) -> list[tuple[int, int]]:
    """Reads by the host, and what CUDA itself calls a synchronisation, in each forward."""
    engine = _engine(section)
    if plant:
        engine.module.blocks[0].register_forward_hook(
            lambda *seen: seen[2][0].sum().item() and None
        )
    seen = []
    for seed in range(6):  # three windows: `boundary` has a previous one from the second on
        on_gpu = torch.device(engine.device).type == "cuda"
        with warnings.catch_warnings(record=True) as said, _HostReads() as reads:
            warnings.simplefilter("always")
            if on_gpu:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                loss = _forward(engine, seed)
            finally:
                if on_gpu:
                    torch.cuda.set_sync_debug_mode("default")
        seen.append((reads.number, sum("synchroniz" in str(w.message) for w in said)))
        engine.backward(loss)
        engine.step()
    return seen[1:]  # what is made once in the first forward may wait


def _check_waits(device: str) -> None:
    plain = _waits(None)
    for cell in _cells(device):
        section = section_of(cell)
        for (reads, syncs), (plain_reads, plain_syncs) in zip(_waits(section), plain, strict=True):
            assert reads <= plain_reads and syncs <= plain_syncs, section
    assert _waits({}, plant=True)[0][0] == plain[0][0] + 1
    if device == "cuda":
        assert _waits({}, plant=True)[0][1] > plain[0][1]


@ONE_RANK
def test_forward_makes_the_host_wait_no_more_than_plain_deepspeed(device, world_size):
    """DeepSpeed's own gate does wait, so nothing can be asked but not to add to it."""
    run_ranks(_check_waits, world_size, device, timeout_s=TIMEOUT_S)


# ------------------------------------------------------------------------------------------------
# Memory


def _bytes_in_use(device: str) -> int:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return sum(x.numel() * x.element_size() for x in tensors)


def _check_memory(device: str) -> list[list[int]]:
    seen = []
    for cell in _cells(device):
        engine = _engine(section_of(cell), gradient_accumulation_steps=2, checkpointing="reentrant")
        of_cell = []
        for seed in range(16):
            engine.backward(_forward(engine, seed))
            engine.step()
            if seed % 2 and seed > 5:
                of_cell.append(_bytes_in_use(device))
        seen.append(of_cell)
        engine.load_balancer.uninstall()
        engine.destroy()
    return seen


@ONE_RANK
def test_memory_does_not_grow_over_steps(device, world_size):
    for of_rank in run_ranks(_check_memory, world_size, device, timeout_s=TIMEOUT_S):
        for of_cell in of_rank:
            assert len(of_cell) == 5 and max(of_cell) == of_cell[0], of_cell
