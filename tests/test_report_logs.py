"""Logs of any run with the plugin: read back, thinned, put into words, shown on one page."""

import io
import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from deepspeed.monitor import csv_monitor
from matplotlib.colors import to_rgba
from matplotlib.image import imread
from torch.utils.tensorboard import SummaryWriter

from ds_moe_lb.cli import EXIT_USAGE, main
from ds_moe_lb.cli import report as report_command
from ds_moe_lb.report.charts import expert_picture
from ds_moe_lb.report.html import html_page
from ds_moe_lb.report.run_log import SAMPLES, STEPS, Key, RunLog, Series, in_one_unit, tail
from ds_moe_lb.report.scalars import series_of
from ds_moe_lb.report.sources import find_logs
from ds_moe_lb.report.status import Mark, layer_statuses, sentences
from ds_moe_lb.report.style import DEAD_COLOUR, LOAD_MAP
from ds_moe_lb.report.thinning import columns, smoothed, thin
from test_report import SPECIALISED, _write_run

TAG = "Train/Samples/moe"
Event = tuple[str, float, int]
# Two layers of two experts; every value is exact in fp32. Layer 1 lost expert 1 at sample 16.
EVENTS: list[Event] = [
    *((f"{TAG}/max_violation_global_batch", 0.625, at) for at in (8, 16, 24)),
    *((f"{TAG}/max_violation_global_batch/layer_00", 0.25, at) for at in (8, 16, 24)),
    *((f"{TAG}/max_violation_global_batch/layer_01", 1.0, at) for at in (8, 16, 24)),
    *((f"{TAG}/dead_experts/layer_00", 0.0, at) for at in (8, 16, 24)),
    *((f"{TAG}/dead_experts/layer_01", float(at > 8), at) for at in (8, 16, 24)),
    *((f"{TAG}/load/layer_01/expert_000", 96.0 + 32 * (at > 8), at) for at in (8, 16, 24)),
    *((f"{TAG}/load/layer_01/expert_001", 32.0 * (at <= 8), at) for at in (8, 16, 24)),
    *((f"{TAG}/lbl_used", 1.5 - at / 64, at) for at in (8, 16, 24)),
    ("Train/Samples/train_loss", 2.75, 24),
    ("Train/Samples/lr", 0.001, 24),
]


def _write_tensorboard(folder: Path, events: Iterable[Event], *, start: int = 1) -> Path:
    """One event file, named as if training had started `start` seconds into the epoch."""
    writer = SummaryWriter(str(folder))
    for event in events:
        writer.add_scalar(*event)
    writer.close()
    (written,) = (path for path in folder.glob("*tfevents*") if path.suffix != ".host")
    return written.rename(folder / f"events.out.tfevents.{start:010d}.host")


def _write_csv(folder: Path, events: Iterable[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """What DeepSpeed's own monitor leaves there, in one start of the run."""
    monkeypatch.setattr(csv_monitor, "dist", SimpleNamespace(get_rank=lambda: 0))
    config = SimpleNamespace(enabled=True, output_path=str(folder.parent), job_name=folder.name)
    csv_monitor.csvMonitor(config).write_events(list(events))


def _points(log: RunLog, *key: object) -> list[tuple[int, float]]:
    series = log.series[Key(*key)]
    return list(zip(series.at.tolist(), series.values.tolist(), strict=True))


def _series(*values: float) -> Series:
    return Series(at=np.arange(1, len(values) + 1), values=np.array(values, dtype=float))


def _log(label: str = "run", **series: Series) -> RunLog:
    """`max_violation_global_batch__3` is the series of layer 3."""
    keys = {}
    for name, one in series.items():
        metric, _, layer = name.partition("__")
        keys[Key(metric, int(layer) if layer else None)] = one
    return RunLog(label=label, path=Path(label), source="made", unit=SAMPLES, series=keys)


def _text(log: RunLog) -> str:
    return "\n".join(sentence.text for sentence in sentences(log))


@pytest.mark.parametrize("kind", ["tensorboard", "csv"])
def test_values_are_read_back_exactly(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "tensorboard":
        _write_tensorboard(tmp_path / "job", EVENTS)
    else:
        _write_csv(tmp_path / "job", EVENTS, monkeypatch)
    (log,) = find_logs([tmp_path / "job"])
    assert (log.label, log.unit, log.layers("load"), log.experts(1)) == (
        "job",
        SAMPLES,
        [1],
        [0, 1],
    )
    assert _points(log, "lbl_used") == [(8, 1.375), (16, 1.25), (24, 1.125)]
    assert _points(log, "max_violation_global_batch", 1) == [(8, 1.0), (16, 1.0), (24, 1.0)]
    assert _points(log, "load", 1, 1) == [(8, 32.0), (16, 0.0), (24, 0.0)]
    assert _points(log, "train_loss") == [(24, 2.75)]
    assert len(log.series) == 9  # and nothing for the learning rate
    at, table = log.layer_table("dead_experts")
    assert at.tolist() == [8, 16, 24] and table.tolist() == [[0, 0, 0], [0, 1, 1]]


@pytest.mark.parametrize("kind", ["tensorboard", "csv"])
def test_of_a_resumed_run_the_later_start_counts(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on from sample 16: what the first start logged beyond is of no training any more."""
    name = f"{TAG}/lbl_used"
    starts = [
        [(name, 1.0, at) for at in (8, 16, 24, 32, 40)],
        [(name, 2.0, at) for at in (24, 32)],
    ]
    for number, events in enumerate(starts, start=1):
        if kind == "tensorboard":
            _write_tensorboard(tmp_path, events, start=number)
        else:
            _write_csv(tmp_path, events, monkeypatch)
    (log,) = find_logs([tmp_path])
    assert _points(log, "lbl_used") == [(8, 1.0), (16, 1.0), (24, 2.0), (32, 2.0)]


def test_overlaps_by_hand() -> None:
    series = series_of([1, 2, 3, 2, 3, 4, 4], [0.0, 1.0, 2.0, 11.0, 12.0, 13.0, 14.0])
    assert series.at.tolist() == [1, 2, 3, 4] and series.values.tolist() == [0.0, 11.0, 12.0, 14.0]
    assert len(series_of([], []).at) == 0


def test_trainer_logs_over_steps(tmp_path: Path) -> None:
    events = [("train/moe/lbl_used", 1.5, 10), ("train/loss", 3.5, 10), ("train/epoch", 1.0, 10)]
    _write_tensorboard(tmp_path, events)
    (log,) = find_logs([tmp_path])
    assert log.unit == STEPS and len(log.series) == 2
    assert _points(log, "lbl_used") == [(10, 1.5)] and _points(log, "train_loss") == [(10, 3.5)]


def test_a_folder_of_runs_is_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_tensorboard(tmp_path / "b" / "tensorboard", EVENTS)
    _write_csv(tmp_path / "c", EVENTS, monkeypatch)
    _write_tensorboard(tmp_path / "other", [("loss", 1.0, 1)])
    _write_tensorboard(tmp_path / "a" / "x", EVENTS)
    _write_tensorboard(tmp_path / "d" / "x", EVENTS)
    labels = [log.label for log in find_logs([tmp_path])]
    assert labels == ["a/x", "b", "d/x", "c"]
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").is_file() and not (tmp_path / "figures").exists()


def test_runs_of_a_folder_come_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    """The baseline is trained first, whatever its name; a resumed run began with its first file."""
    _write_tensorboard(tmp_path / "global_batch" / "tensorboard", EVENTS, start=200)
    run = _write_run(tmp_path / "micro_batch", SPECIALISED, loss=2.3)
    events = [(f"{TAG}/max_violation_global_batch/layer_00", 0.5, 2)]
    _write_tensorboard(run / "tensorboard", events, start=100)
    _write_tensorboard(tmp_path / "resumed", EVENTS, start=300)
    _write_tensorboard(tmp_path / "resumed", EVENTS, start=50)
    labels = [log.label for log in find_logs([tmp_path])]
    assert labels == ["resumed", "micro_batch", "global_batch"]
    given = [tmp_path / "global_batch", tmp_path / "micro_batch"]
    assert [log.label for log in find_logs(given)] == ["global_batch", "micro_batch"]


def test_layers_of_our_own_runs_come_from_their_logs(tmp_path: Path) -> None:
    """Two ranks with one sequence each: a step is two samples. Step 61 is in no checkpoint."""
    run = _write_run(tmp_path / "global_batch", SPECIALISED, loss=2.3)
    name = f"{TAG}/max_violation_global_batch"
    events = [(f"{name}/layer_00", 0.5, 2), (f"{name}/layer_00", 0.25, 120), (name, 0.75, 120)]
    _write_tensorboard(run / "tensorboard", [*events, (f"{name}/layer_00", 9.0, 122)])
    (log,) = find_logs([run])
    assert log.unit == STEPS and log.num_experts == 4 and log.top_k == 2
    assert _points(log, "max_violation_global_batch", 0) == [(1, 0.5), (60, 0.25)]
    # The run's own file has every step of the mean.
    assert _points(log, "max_violation_global_batch")[-2:] == [(59, 0.3), (60, 0.3)]
    # Beside a run that was logged over samples, ours goes over samples too.
    foreign = _write_tensorboard(tmp_path / "foreign", EVENTS)
    ours, other = find_logs([run, foreign])
    assert (ours.unit, other.unit) == (SAMPLES, SAMPLES)
    assert _points(ours, "max_violation_global_batch", 0) == [(2, 0.5), (120, 0.25)]


def test_units_that_cannot_be_brought_together_are_refused() -> None:
    steps = RunLog(label="t", path=Path(), source="", unit=STEPS, series={})
    samples = RunLog(label="s", path=Path(), source="", unit=SAMPLES, series={})
    with pytest.raises(ValueError, match="t: logged over optimizer steps, but s over samples"):
        in_one_unit([samples, steps])


def _error(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", str(path)]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("ds-moe-lb report: error: ")
    return error


def test_what_is_no_log_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path / 'x'}: no such file or folder" in _error(tmp_path / "x", capsys)
    empty = tmp_path / "empty"
    empty.mkdir()
    error = _error(empty, capsys)
    assert "found no TensorBoard event files, no csv_monitor files and no run of ds-moe" in error
    assert '"tensorboard": {"enabled": true' in error and "moe_load_balancing" in error
    other = tmp_path / "other"
    _write_tensorboard(other, [(f"tag{number}", 1.0, 1) for number in range(6)])
    error = _error(other, capsys)
    assert "found TensorBoard logs without our scalars (but tag0, tag1, tag2, tag3, ...)" in error
    assert "expected scalars Train/Samples/moe/..." in error
    (tmp_path / "notes.txt").write_text("x")
    assert "neither a TensorBoard event file nor a CSV" in _error(tmp_path / "notes.txt", capsys)
    broken = tmp_path / "broken" / "Train_Samples_moe_lbl_used.csv"
    broken.parent.mkdir()
    broken.write_text("step,lbl_used\n8,1.0\n16,one\n24,")  # the last row is being written
    assert f"{broken}:3: expected a step and a number" in _error(broken, capsys)
    broken.write_text("step,lbl_used\n8,1.0\n24,")
    (broken.parent / "run.json").write_text('{"of": "another program"}')
    assert _points(find_logs([broken])[0], "lbl_used") == [(8, 1.0)]


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_tensorboard(tmp_path / "job", EVENTS)
    (tmp_path / "file").write_text("x")
    arguments = ["report", str(tmp_path / "job"), "--output", str(tmp_path / "file" / "page.html")]
    assert main(arguments) == EXIT_USAGE
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error and "--output says where to" in error


def test_a_run_before_its_first_step_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _write_run(tmp_path / "run", SPECIALISED, loss=2.3)
    (run / "history.jsonl").unlink()
    (run / "validation.jsonl").unlink()
    assert f"{run}: the run has not finished its first optimizer step" in _error(run, capsys)
    (run / "run.json").write_text('{"label": ')
    assert f"{run / 'run.json'}: not readable as JSON" in _error(run, capsys)


def test_thinning_keeps_extremes_and_ends() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    values[[77, 40_001]] = 50.0, -60.0
    values[12_345] = math.nan
    series = Series(at=np.arange(100_000) * 4, values=values)
    thinned = thin(series, max_points=500)
    assert 300 < len(thinned.at) <= 500 and (np.diff(thinned.at) > 0).all()
    assert thinned.at[0] == 0 and thinned.at[-1] == 399_996
    assert np.nanmax(thinned.values) == 50.0 and np.nanmin(thinned.values) == -60.0
    assert thinned.at[thinned.values.argmax()] == 4 * 77
    assert (thinned.values == values[thinned.at // 4]).all()
    assert thin(_series(1.0, 2.0)).values.tolist() == [1.0, 2.0]


def test_smoothing_leaves_out_what_is_not_finite() -> None:
    series = smoothed(_series(1.0, math.nan, 4.0, math.inf, 8.0), share=0.0)  # one to each side
    assert series.values.tolist() == [1.0, 2.5, 4.0, 6.0, 8.0]
    assert math.isnan(smoothed(_series(math.nan), share=0.0).values[0])


def test_columns_keep_the_farthest_report() -> None:
    table = np.array([[1.0, 5.0, math.nan, 2.0], [3.0, 0.0, 4.0, math.inf]])
    at = np.array([10, 20, 30, 40])
    edges, same = columns(at, table, distance_RN=table)
    assert edges == (5.0, 45.0)
    np.testing.assert_array_equal(same, [[1, 5, math.nan, 2], [3, 0, 4, math.nan]])
    _, halves = columns(at, table, distance_RN=table, max_columns=2)
    np.testing.assert_array_equal(halves, [[5, 2], [3, 4]])
    # Reports at unequal intervals: equal columns, each the nearest report.
    edges, grid = columns(
        np.array([0, 10, 50]),
        np.array([[1.0, 2.0, 3.0]]),
        distance_RN=np.ones((1, 3)),
        max_columns=6,
    )
    assert grid.tolist() == [[1, 2, 2, 3, 3, 3]]  # at 0, 10, ..., 50; at 30 a tie
    assert columns(np.array([7]), np.ones((2, 1)), distance_RN=np.ones((2, 1)))[0] == (6.5, 7.5)


def test_pixels_of_experts(tmp_path: Path) -> None:
    """Loads 96:32 of 128, then 128:0: 1.5, 0.5, 2 and 0 times the mean; the end is at 4."""
    _write_tensorboard(tmp_path, EVENTS)
    pixels = imread(io.BytesIO(expert_picture(find_logs([tmp_path])[0], 1)))
    assert pixels.shape[:2] == (2, 3)
    for row, column, load in ((0, 0, 1.5), (1, 0, 0.5), (0, 2, 2.0)):
        expected = LOAD_MAP(0.5 + math.log(load) / (2 * math.log(4.0)))
        assert pixels[row, column] == pytest.approx(expected, abs=1 / 255)
    assert pixels[1, 2] == pytest.approx(to_rgba(DEAD_COLOUR), abs=1 / 255)


def test_status_of_hand_made_logs(tmp_path: Path) -> None:
    _write_tensorboard(tmp_path / "job", EVENTS)
    (log,) = find_logs([tmp_path / "job"])
    text = _text(log)
    assert "2 MoE layers, 2 experts each, last report at sample 24." in text
    assert (
        "Dead experts in the last report: 1 in 1 of 2 layers: layer 1: expert 1 since 16." in text
    )
    assert "MaxVio in the global batch: 0.62, mean over layers; worst 1.00 in layer 1" in text
    assert "2.00 times the mean load; 0 of 2 layers above 1." in text
    assert "Balance loss as it is applied: 1.375 at sample 8, 1.125 at the end." in text
    assert "Training loss: 2.750" in text
    marks = {sentence.text.split(" ")[0]: sentence.mark for sentence in sentences(log)}
    assert marks["Dead"] is Mark.LOOK and marks["MaxVio"] is Mark.FINE


def test_status_tells_since_when() -> None:
    status = {"max_violation_global_batch": _series(0.5)}
    came_back = _log(
        **status, max_violation_global_batch__0=_series(0.5), dead_experts__0=_series(3, 1, 0, 0)
    )
    assert "Dead experts: none since sample 3." in _text(came_back)
    never = _log(
        **status, max_violation_global_batch__0=_series(0.5), dead_experts__0=_series(0, 0, 0)
    )
    assert "Dead experts: none in any report." in _text(never)
    again = _log(
        **status, max_violation_global_batch__0=_series(0.5), dead_experts__0=_series(2, 0, 1, 3)
    )
    assert "layer 0: 3, some in every report since 3." in _text(again)
    assert layer_statuses(again)[0].dead_since == 3
    model = _log(**status, dead_experts=_series(0.5, 0.0, 0.0))
    assert _text(model).startswith("Last report at sample 3.")
    assert "0 per layer (mean over layers), none since sample 2." in _text(model)
    assert 'Set monitor.detail to "layer"' in _text(model)


def test_status_counts_what_is_not_finite() -> None:
    log = _log(
        max_violation_global_batch=_series(0.5, 0.5, math.inf, 0.25), lbl_used=_series(1, math.nan)
    )
    assert "2 logged values are NaN or infinite, first lbl_used at sample 2;" in _text(log)
    assert tail(_series(1.0, math.nan)).tolist() == []
    assert "No balance loss" not in _text(log)
    assert "No balance loss is applied" in _text(_log(max_violation_global_batch=_series(0.5)))


def test_end_of_a_run_is_its_last_quarter_and_at_most_fifty_reports() -> None:
    assert tail(_series(*range(8))).tolist() == [6.0, 7.0]
    assert tail(_series(*range(1000))).tolist() == list(range(950, 1000))
    assert tail(_series(5.0)).tolist() == [5.0]


def test_page_shows_what_was_logged_and_loads_nothing(tmp_path: Path) -> None:
    for name in ("first", "<second>", "third"):
        _write_tensorboard(tmp_path / name, EVENTS)
    page = html_page(find_logs([tmp_path]))
    for shown in ("0.625", "1.125", "2.7500", "since 16", "sample 8 (left) to 24", "TensorBoard"):
        assert shown in page
    for title in ("MaxVio of the worst layer, global batch", "first: MaxVio in the global batch"):
        assert f'aria-label="{title}"' in page
    assert "first: Dead experts" in page and "not in the logs" not in page
    assert "&lt;second&gt;" in page and "<second>" not in page
    for reference in ("<script", "http", 'src="/', "<link", "@import", "xmlns"):
        assert reference not in page
    assert str(tmp_path) not in page
    # Every reference inside a figure is to an id of its own.
    assert "http-equiv" not in page and page.count("<svg") == page.count("</svg>")


def test_page_of_wild_numbers(tmp_path: Path) -> None:
    """48 layers, one report, nothing finite, and a metric that a later version may bring."""
    wild = _log(
        **{f"max_violation_global_batch__{layer}": _series(math.nan) for layer in range(48)},
        max_violation_global_batch=_series(math.inf),
        of_the_future=_series(1.0),
    )
    tame = _log("tame", max_violation_global_batch=_series(0.5), train_loss=_series(*[2.0] * 100))
    page = html_page([wild, tame])
    assert "49 logged values are NaN or infinite" in page and len(page) < 1_000_000


def test_watching_rewrites_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "job" / "Train_Samples_moe_lbl_used.csv"
    log.parent.mkdir()
    log.write_text("step,lbl_used\n8,1.5\n")
    rounds: list[str] = []

    def sleep(seconds: float) -> None:
        """One round with a new report, one with a log that cannot be read, and Ctrl-C."""
        rounds.append((tmp_path / "report.html").read_text())
        log.write_text("step,lbl_used\n8,1.5\n16,1.375\n" + "24,x\n" * (len(rounds) == 2))
        if len(rounds) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(report_command.time, "sleep", sleep)
    assert main(["report", str(log.parent), "--watch", "7"]) == 0
    assert '<meta http-equiv="refresh" content="7">' in rounds[0]
    assert ["1.375" in page for page in rounds] == [False, True, True]
    assert "not rewritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]
    assert main(["report", str(log.parent), "--watch", "0"]) == EXIT_USAGE
