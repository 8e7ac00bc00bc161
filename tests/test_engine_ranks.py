"""The real engine against the fp64 reference, over the grid that DESIGN.md section 2 promises.

In every cell, for both layers and both windows:

- the gates' gradients before the step: |g - ref| <= 1e-5 * max(|ref|, 1e-2), elementwise;
- the gradient that balancing sends into each gate's input, same tolerance;
- the counts of each rank, exactly;
- native ``l_aux``, to 1e-5.

CI runs a cover of the grid that holds every combination of three levels; ``--full-grid`` (or
DS_MOE_LB_FULL_GRID=1) runs every cell.
"""

import os
from collections.abc import Iterable

import pytest

from engine_grid import (
    STRENGTH,
    Cell,
    WindowRecord,
    all_cells,
    combinations,
    cover,
    disagreements,
    run_cell,
    runnable_cells,
    section_of,
    why_plain_deepspeed_cannot,
)
from ranks import run_ranks

pytestmark = pytest.mark.ranks

CELLS_PER_CALL = 60


def _is_full_grid(option: bool) -> bool:
    return option or os.environ.get("DS_MOE_LB_FULL_GRID") == "1"


def _by_groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that may share processes (same world and expert-parallel size), in bounded pieces."""
    together: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        together.setdefault((cell.world_size, cell.ep_size), []).append(cell)
    return [
        chunk[start : start + CELLS_PER_CALL]
        for chunk in together.values()
        for start in range(0, len(chunk), CELLS_PER_CALL)
    ]


def _check_cells(cells: list[Cell], with_plugin: bool) -> list[list[WindowRecord]]:
    """Per cell the records of its windows on this rank."""
    return [run_cell(cell, section_of(cell) if with_plugin else None) for cell in cells]


def _run_cells(cells: list[Cell], with_plugin: bool) -> dict[Cell, list[str]]:
    """The disagreements of each cell; all cells share world and expert-parallel size."""
    results = run_ranks(
        _check_cells, cells[0].world_size, cells, with_plugin, timeout_s=60.0 + 5.0 * len(cells)
    )
    return {
        cell: disagreements(cell, [records[index] for records in results], check_l_aux=with_plugin)
        for index, cell in enumerate(cells)
    }


def test_the_cover_covers():
    for strength in (2, STRENGTH):
        wanted = {c for cell in runnable_cells() for c in combinations(cell, strength)}
        assert {c for cell in cover() for c in combinations(cell, strength)} == wanted
    assert len(cover()) < 130


def test_cells_that_plain_deepspeed_cannot_run_are_listed(capsys):
    reasons: dict[str, int] = {}
    for cell in all_cells():
        reason = why_plain_deepspeed_cannot(cell)
        if reason is not None:
            reasons[reason] = reasons.get(reason, 0) + 1
    with capsys.disabled():
        print(f"\nreference grid: {len(all_cells())} cells, {len(runnable_cells())} can run, not:")
        for reason, number in reasons.items():
            print(f"  {number:5d} cells: {reason}")
    # One (world, ep) pair has 3^5 * 2 * 2 = 972 cells. ep 2 and 4 on one rank and 4 on two: 3
    # pairs. Of the other six, three have ep > 1, each with 972 / 9 uneven cells of k = 1.
    assert len(all_cells()) == 9 * 972
    assert len(runnable_cells()) == 6 * 972 - 3 * 108
    assert sum(reasons.values()) == 3 * 972 + 3 * 108


WORLD_AND_EP = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world_size", "ep_size"), WORLD_AND_EP)
def test_gradients_equal_the_reference(world_size, ep_size, full_grid):
    cells = runnable_cells() if _is_full_grid(full_grid) else cover()
    cells = [c for c in cells if (c.world_size, c.ep_size) == (world_size, ep_size)]
    assert cells
    failures = {}
    for chunk in _by_groups(cells):
        failures |= {cell: bad for cell, bad in _run_cells(chunk, True).items() if bad}
    assert not failures, _report(failures, len(cells))


def _report(failures: dict[Cell, list[str]], number: int) -> str:
    lines = [f"{len(failures)} of {number} cells disagree with the reference"]
    for cell, bad in failures.items():
        lines += [f"{cell}: {len(bad)} disagreements"] + [f"    {text}" for text in bad[:4]]
    return "\n".join(lines)


def plain_deepspeed_is_right(cell: Cell) -> bool:
    """Where the built-in loss is the global-batch loss: one micro-batch is the whole window.

    Not for k = 2, where it sees first choices only; not with masks; not with ``boundary``, whose
    second window uses the counts of the first; and never with a coefficient that nobody applies.
    """
    return (
        cell.world_size == 1
        and cell.gradient_accumulation_steps == 1
        and cell.top_k != 2
        and cell.tokens != "masked"
        and cell.estimate == "running"
        and cell.mechanism == "l_aux"
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world_size", "ep_size"), WORLD_AND_EP)
def test_a_wrapper_of_plain_deepspeed_fails_the_grid(world_size, ep_size, full_grid):
    """Proves that the grid can fail: it refuses DeepSpeed's own loss in every cell but the few."""
    cells = runnable_cells() if _is_full_grid(full_grid) else cover()
    cells = [c for c in cells if (c.world_size, c.ep_size) == (world_size, ep_size)]
    if world_size == 1:  # the cover holds few or none of these
        cells += [c for c in runnable_cells() if plain_deepspeed_is_right(c) and c not in cells]
    wrong = {}
    for chunk in _by_groups(cells):
        for cell, bad in _run_cells(chunk, False).items():
            if plain_deepspeed_is_right(cell) != (not bad):
                wrong[cell] = bad
    assert not wrong, _report(wrong, len(cells))
