"""launch/bench.py: its intervals and meters against hand-worked numbers, and one tiny run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.comm as dist
import pytest
import torch

from launch import bench
from launch.benchmark import meters, side_by_side
from launch.benchmark.ablations import ASYNCHRONOUS, NAMESPACE, SHARED_SOFTMAX
from launch.benchmark.meters import (
    Collectives,
    CountWaits,
    HostSyncs,
    LiveMemory,
    OtherCollectives,
    OwnTime,
)
from launch.benchmark.shape import Variant
from launch.benchmark.side_by_side import Times
from launch.benchmark.statistics import estimate
from launch.benchmark.tables import _meets, all_tables, varied
from ranks import run_ranks

SCRIPT = Path(bench.__file__)


def test_interval_is_that_of_the_sign_test():
    """n = 10: P(at most 1 of 10 below) = 11/1024, twice it 2.1%; at most 2: 56/1024, too much."""
    got = estimate([float(i) for i in (7, 1, 10, 3, 5, 2, 9, 4, 8, 6)])
    assert (got.median, got.low, got.high, got.half_width) == (5.5, 2.0, 9.0, 3.5)


def test_six_values_have_an_interval_and_five_have_none():
    """All of 6 on one side: 2/64 = 3.1%; all of 5: 2/32 = 6.3%, more than 5%."""
    assert estimate([1.0] * 5 + [2.0]).high == 2.0
    assert estimate([1.0] * 5).half_width is None
    assert "no interval" in str(estimate([1.0] * 5))


def test_host_syncs_are_those_in_the_block():
    x = torch.arange(4)
    int(x[0])
    with HostSyncs() as syncs:
        int(x[1])
        x.nonzero()
        x.tolist()
        x.sum()
    float(x[2])
    assert syncs.calls == {"aten::_local_scalar_dense": 1, "aten::nonzero": 1, "Tensor.tolist": 1}


def test_live_memory_sees_what_autograd_keeps_and_what_is_freed():
    weight = torch.ones(100, requires_grad=True)
    with LiveMemory() as memory:
        x = weight.exp()  # 400 bytes, kept for backward by autograd alone after the next line
        x = x.sum()  # 4 bytes
        assert (memory.live, memory.peak) == (404, 404)
        view = x.view(1)  # nobody's new memory
        assert memory.live == 404
        del x, view
        assert (memory.live, memory.peak) == (0, 404)


def test_own_time_leaves_out_what_the_plugin_hands_on(tmp_path: Path, monkeypatch):
    """The plugin's function works 1 s, calls the host's for 2 s, a library's for 4 s, works 8 s."""
    clock = _Clock()
    monkeypatch.setattr(meters, "time", clock)
    sources = {
        "ds_moe_lb/own.py": "def own():\n sleep(1); host(); library(); sleep(8)",
        "x/deepspeed/runtime/engine.py": "def host():\n sleep(2)\n library()",
        "x/torch/library.py": "def library():\n sleep(4)",
        "train.py": "def script():\n sleep(16); own(); host()",
    }
    names: dict[str, Any] = {"sleep": clock.sleep}
    for file, source in sources.items():
        exec(compile(source, str(tmp_path / file), "exec"), names)
    with OwnTime(tmp_path / "ds_moe_lb") as meter:
        names["script"]()
    # 1 + 4 + 8; the library called by the host is the host's.
    assert meter.seconds == 13.0


def test_own_time_ends_with_a_frame_that_raises(tmp_path: Path, monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(meters, "time", clock)
    names: dict[str, Any] = {"sleep": clock.sleep}
    source = "def own():\n sleep(3)\n raise ValueError"
    exec(compile(source, str(tmp_path / "ds_moe_lb/own.py"), "exec"), names)
    with OwnTime(tmp_path / "ds_moe_lb") as meter:
        with pytest.raises(ValueError):
            names["own"]()
        clock.sleep(5)
    assert meter.seconds == 3.0


def _check_meters() -> dict[str, Any]:
    counts, other = torch.ones(5, dtype=torch.int64), torch.ones(3)
    with Collectives() as reductions, OtherCollectives() as everything:
        dist.all_reduce(counts)
        dist.all_reduce(other)
        dist.broadcast(other, src=0)
    with CountWaits() as meter:
        dist.all_reduce(other, async_op=True).wait()  # no counts
        dist.all_reduce(counts)  # not asynchronous
        dist.all_reduce(counts, async_op=True).wait()
    return {
        "reductions": (reductions.calls, reductions.nbytes),
        "everything": dict(everything.calls),
        "waits": (meter.calls, meter.waited_s > 0),
        "sum": counts[0].item(),
    }


@pytest.mark.ranks
def test_meters_count_on_two_ranks():
    """5 int64 and 3 fp32 are 52 bytes."""
    for got in run_ranks(_check_meters, 2):
        assert got["reductions"] == (2, 52)
        assert got["everything"] == {"c10d::allreduce_": 2, "c10d::broadcast_": 1}
        assert got["waits"] == (1, True)
        assert got["sum"] == 8  # 1 doubled by each of three sums


class _Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("busy_s, exposed_s", [(0.0, 5.0), (3.0, 2.0), (8.0, 1.0)])
def test_delay_shows_as_far_as_work_does_not_hide_it(
    busy_s: float, exposed_s: float, monkeypatch: pytest.MonkeyPatch
):
    """Launched at 0, delayed by 5 s, awaited after busy_s; the reduction's own wait takes 1 s."""
    clock = _Clock()
    work = SimpleNamespace(wait=lambda: clock.sleep(1.0))
    monkeypatch.setattr(meters, "time", clock)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **options: work)
    with CountWaits(delay_s=5.0) as meter:
        held = dist.all_reduce(torch.ones(1, dtype=torch.int64), async_op=True)
        clock.sleep(busy_s)
        held.wait()
    assert meter.waited_s == exposed_s


class _Engines:
    """Engines that are slower than each other for good, and a lane whose time says who took part.

    A micro-step of variant v on engine e takes v + 0.1 e s, where v is 10 or 20.
    """

    def __init__(self) -> None:
        self.made = 0
        self.turns: list[tuple[str, int]] = []

    def make(self) -> int:
        self.made += 1
        return self.made - 1

    def lane(self, engine: int, variant: Variant) -> Iterator[Times]:
        seconds = {"plain": 10.0, "ours": 20.0}[variant.name] + 0.1 * engine
        while True:
            self.turns.append((variant.name, engine))
            yield Times(wall_s=seconds, cpu_s=2 * seconds)


def _interleave(monkeypatch: pytest.MonkeyPatch, engines: _Engines, **options: Any) -> Any:
    monkeypatch.setattr(side_by_side, "any_rank", lambda condition: condition)
    monkeypatch.setattr(side_by_side, "sum_over_ranks", lambda numbers: [3 * n for n in numbers])
    monkeypatch.setattr(side_by_side, "say", lambda text: None)
    variants = [Variant("plain"), Variant("ours")]
    plan = {"micro_steps": 3, "blocks": 20, "seconds": 1e9, "seed": 1} | options
    return side_by_side.interleave("x", variants, engines.make, engines.lane, **plan)


def test_variants_take_turns_and_are_dealt_out_to_the_engines_anew(monkeypatch):
    """In a block of 3 micro-steps a variant takes 3 v, and 0.3 s more on the second engine."""
    engines = _Engines()
    measured = _interleave(monkeypatch, engines)
    assert engines.made == 2 and len(engines.turns) == 20 * 3 * 2
    dealings, orders = set(), set()
    for block in range(20):
        turns = engines.turns[6 * block : 6 * block + 6]
        engine = dict(turns)
        assert sorted(engine) == ["ours", "plain"] and set(engine.values()) == {0, 1}
        dealings.add(engine["ours"])
        for first in (0, 2, 4):
            assert {turn for turn in turns[first : first + 2]} == set(engine.items())
            orders.add(turns[first][0])
        assert measured["wall_s"]["ours"][block] == pytest.approx(60 + 0.3 * engine["ours"])
        assert measured["wall_s"]["plain"][block] == pytest.approx(30 + 0.3 * engine["plain"])
        for name in engine:  # twice the wall time on each of three ranks
            assert measured["cpu_s"][name][block] == pytest.approx(
                6 * measured["wall_s"][name][block]
            )
    assert dealings == {0, 1} and orders == {"plain", "ours"}


def test_blocks_end_when_time_is_over(monkeypatch):
    """The first block is measured whatever the time."""
    measured = _interleave(monkeypatch, _Engines(), seconds=-1.0)
    assert [len(times) for times in measured["wall_s"].values()] == [1, 1]


@pytest.mark.slow
def test_tiny_run_counts_what_the_plugin_promises(tmp_path: Path):
    """2 layers of 8 experts, G = 2: one message is 8 counts and 3 numbers of 8 bytes for a layer.

    `running` and `carry` sum each layer in each micro-step (4), or all layers once in each (2);
    `boundary` and `exact` all layers once in an optimizer step, in both ways; a report is one more
    reduction.
    """
    arguments = ["--quick", "--measure", "counts,waits,own,steps,gates,savings"]
    arguments += ["--blocks", "2", "--gate-blocks", "1", "--delay-ms", "5"]
    arguments += ["--tokens", "64", "--model-dim", "16", "--expert-dim", "8", "--layers", "2"]
    arguments += ["--num-experts", "8", "--top-k", "2", "--gas", "2", "--output", str(tmp_path)]
    process = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=280
    )
    assert process.returncode == 0, process.stdout + process.stderr
    run = json.loads((tmp_path / "bench.json").read_text())
    (result,) = run["results"]
    rows = result["variants"]
    plain = rows["plain DeepSpeed"]["counted"]
    added = {
        name: (
            row["counted"]["all_reduces"] - plain["all_reduces"],
            row["counted"]["all_reduce_bytes"] - plain["all_reduce_bytes"],
        )
        for name, row in rows.items()
        if "counted" in row
    }
    message = 2 * (8 + 3) * 8
    message_count = {"running, l_aux": 2 * 2, "running, aux_loss_coeff": 2}
    for kind in ("running", "carry"):
        assert added[f"{kind}, l_aux"] == (2 * 2, 2 * message)
        assert added[f"{kind}, aux_loss_coeff"] == (2, 2 * message)
    for kind in ("boundary", "exact"):
        assert added[f"{kind}, l_aux"] == (1, message)
        assert added[f"{kind}, aux_loss_coeff"] == (1, message)
    assert added["running, l_aux, report each step"][0] == 2 * 2 + 1
    for name, row in rows.items():
        assert len(row["wall_s"]) == len(row["cpu_s"]) == 2
        assert min(row["wall_s"] + row["cpu_s"]) > 0
        if "counted" not in row:
            continue
        # No wait of the host that plain DeepSpeed does not make, and no other collective; but the
        # counting pass of `exact` is 2 more forwards of 2 layers with 2 all-to-alls each.
        assert row["counted"]["host_syncs_in_forward"] == plain["host_syncs_in_forward"], name
        expected = {k: v for k, v in plain["collectives"].items() if "allreduce" not in k}
        if name.startswith("exact"):
            expected["c10d::alltoall_base_"] += 2 * 2 * 2
        others = {k: v for k, v in row["counted"]["collectives"].items() if "allreduce" not in k}
        assert others == expected, name
        # What the plugin keeps does not grow with the tokens.
        kept = {
            memory["at_rest"] - rows["plain DeepSpeed"]["memory"][tokens]["at_rest"]
            for tokens, memory in row["memory"].items()
        }
        assert set(row["memory"]) == {"16", "64"} and len(kept) == 1, name
        # The second forward of `exact` is the model's work, of which the profiler knows nothing.
        assert ("own" in row) == (name.split(",")[0] in ("running", "boundary", "carry")), name
        if "own" in row:
            own = row["own"]
            assert all(0 < a < b for a, b in zip(own["own_s"], own["wall_s"], strict=True)), name
    assert "| running, aux_loss_coeff " in process.stdout
    assert set(result["gate_wall_s"]) == set(rows)
    savings = result["savings"]
    assert set(savings["gate_wall_s"]) == {savings["baseline"], SHARED_SOFTMAX, NAMESPACE}
    for name, waits in savings["waits"].items():  # what overlap hides is exposed without it
        assert waits[ASYNCHRONOUS]["5"] > 4e-3 * message_count[name], name
        assert f"| {name} " in process.stdout


def test_picture_and_tables_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs of different layers are one factor; ratios are taken block by block.

    Blocks of 1, 2, ... 6 s with the plugin 10% slower: every ratio is 1.1, however the blocks
    differ.
    """
    files = []
    for layers in (4, 16):
        result = _result(layers=layers)
        file = tmp_path / f"layers_{layers}.json"
        environment = dict.fromkeys(("date", "deepspeed", "torch", "processor", "cores"), "x")
        environment["command"] = f"python launch/bench.py --layers {layers}"
        # Peers were those of the last run, which had measured none.
        peers = {"a peer": {"not_run": "it is not there"}} if layers == 4 else {}
        run = {"environment": environment, "results": [result], "peers": peers}
        file.write_text(json.dumps(run))
        files.append(str(file))
    assert bench.main(["--draw", *files, "--output", str(tmp_path), "--name", "both"]) == 0
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "python launch/bench.py --layers 4, x" in printed  # of every run that is drawn
    assert "python launch/bench.py --layers 16, x" in printed
    assert printed.count("| 1.1000 [1.1000, 1.1000] ") == 2
    assert printed.count("step MISSED (1.01)") == 2
    assert "a peer: not run: it is not there" in printed
    # 9 ms of the plugin in each 1 s of the rest; `running` may cost 1%.
    assert printed.count("| 0.900% [0.900%, 0.900%] | met (1.0%) ") == 2


def test_factor_is_found_among_shapes_that_differ_in_it_alone():
    results = [_result(layers=4), _result(layers=16), _result(layers=1), _result(gas=64, layers=16)]
    found = varied(results)
    assert set(found) == {"layers", "gas"}
    assert [result["shape"]["layers"] for result in found["layers"]] == [1, 4, 16]
    assert [result["shape"]["gas"] for result in found["gas"]] == [4, 64]
    for row in results[3]["variants"].values():  # as without --measure counts
        del row["counted"]
    tables = all_tables(results, {})
    assert "G 64" in tables and tables.count("added in an optimizer step") == 3


def test_runs_of_one_shape_vary_nothing():
    """Each factor was drawn as a panel of its own, with one value on its axis."""
    assert varied([_result(), _result(), _result()]) == {}
    runs = [_result(), _result(), _result(), _result(gas=64), _result(gas=64, layers=16)]
    found = varied(runs)
    assert set(found) == {"gas", "layers"}
    assert [result["shape"]["gas"] for result in found["gas"]] == [4, 4, 4, 64]
    assert [result["shape"]["layers"] for result in found["layers"]] == [4, 16]


@pytest.mark.parametrize(
    "ratios, verdict",
    [
        ([1.03, 1.031, 1.032] * 4, "met (1.05)"),
        ([1.02, 1.03, 1.045] * 4, "met (1.05)"),  # wide, and below the target as a whole
        ([1.02, 1.04, 1.06] * 4, "too noisy to tell"),
        ([1.05, 1.051, 1.052] * 4, "MISSED (1.05)"),
        ([1.06, 1.08, 1.10] * 4, "MISSED (1.05)"),
        ([1.0] * 5, "too noisy to tell"),  # no interval
    ],
)
def test_verdict_looks_at_the_interval(ratios: list[float], verdict: str):
    assert _meets("gate", estimate(ratios), 1.05) == f"gate {verdict}"


@pytest.mark.parametrize(
    "shares, verdict",
    [
        ([0.009] * 6, "met"),
        ([0.011] * 6, "MISSED"),
        ([0.004] * 5 + [0.02], "too noisy to tell"),
        ([0.009] * 3, "too noisy to tell"),  # no interval
    ],
)
def test_verdict_on_the_plugins_own_time_needs_an_interval(shares: list[float], verdict: str):
    """Three windows below the target were met, and one slow window of six made it missed."""
    result = _result()
    own = {"own_s": shares, "wall_s": [1.0 + share for share in shares]}
    result["variants"]["running, l_aux"]["own"] = own
    assert f"| {verdict} (1.0%) " in all_tables([result], {})


def test_runs_of_one_shape_are_laid_side_by_side():
    """Steps 10% slower, the plugin's own 9 ms in each 1 s of the rest, gates 10% slower: twice."""
    runs = [_result(), _result()]
    for run in runs:
        run["gate_wall_s"] = {name: row["wall_s"] for name, row in run["variants"].items()}
    table = all_tables(runs, {})
    assert "### 2 runs: 8 tokens" in table
    ratio, share = "1.100 +- 0.000", "0.90% +- 0.00%"
    assert f"| {ratio}, {ratio} | {share}, {share} | {ratio}, {ratio} |" in " ".join(table.split())
    assert "2 runs" not in all_tables([_result(), _result(layers=16)], {})


def _result(**changed: int) -> dict[str, Any]:
    shape = {"tokens": 8, "model_dim": 8, "num_experts": 8, "top_k": 2, "layers": 4, "gas": 4}
    own = {"own_s": [0.009 * i for i in range(1, 9)], "wall_s": [1.009 * i for i in range(1, 9)]}
    counted = {
        "all_reduces": 3,
        "all_reduce_bytes": 24,
        "collectives": {},
        "host_syncs_in_forward": {},
    }
    plain, ours = [float(i) for i in range(1, 7)], [1.1 * i for i in range(1, 7)]
    return {
        "shape": {**shape, "ranks": 2, **changed},
        "refused": {},
        "variants": {
            "plain DeepSpeed": {"wall_s": plain, "cpu_s": plain, "counted": counted},
            "running, l_aux": {"wall_s": ours, "cpu_s": plain, "counted": counted, "own": own},
        },
    }
