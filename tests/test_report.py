"""Runs on disk: written, read back, reduced to numbers, drawn."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_moe_lb.cli import EXIT_USAGE, main
from ds_moe_lb.report.html import html_page
from ds_moe_lb.report.sources import find_logs
from ds_moe_lb.report.summary import Row, difference, overview_rows, summarise
from ds_moe_lb.report.tables import format_difference, is_better
from ds_moe_lb.training.run_folder import RunFolder, read_run

# One layer, two domains, four experts: separate experts, or all experts alike.
SPECIALISED = [[[8, 8, 0, 0], [0, 0, 8, 8]]]
UNIFORM = [[[4, 4, 4, 4], [4, 4, 4, 4]]]
LOG_2 = 0.6931


def _info(label: str) -> dict[str, Any]:
    return {
        "label": label,
        "status": "finished",
        "world_size": 2,
        "options": {"seed": 1},
        "model": {"num_layers": 1, "num_experts": 4, "top_k": 2, "ep_size": 2}
        | {"sequence_length": 16},
        "ds_config": {"train_micro_batch_size_per_gpu": 1, "moe_load_balancing": {"scope": label}},
        "corpus": {"sha256": "0" * 64, "domains": [{"name": "code"}, {"name": "<prose>"}]},
        "versions": {"torch": "2"},
    }


def _write_run(path: Path, counts_LDE: list[list[list[int]]], *, loss: float) -> Path:
    folder = RunFolder(path, writes=True)
    folder.write_info(_info(path.name))
    for step in range(1, 61):
        record = {"step": step, "lm_loss": 6.0 - 0.05 * step, "tokens_per_second": 100.0}
        record |= {
            "lbl_global_batch": 1.5 if step <= 10 else 1.1,
            "max_violation_global_batch": 0.3,
        }
        folder.append_history(record)
    folder.append_validation(
        {
            "step": 60,
            "loss": loss,
            "loss_per_domain": {"code": loss - 0.5, "<prose>": loss + 0.5},
            "tokens_per_expert_LDE": counts_LDE,
        }
    )
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        _write_run(tmp_path / "micro_batch", UNIFORM, loss=2.4),
        _write_run(tmp_path / "global_batch", SPECIALISED, loss=2.3),
    ]


def test_summary_of_hand_made_counts(runs: list[Path]) -> None:
    uniform, specialised = (summarise(read_run(path)) for path in runs)
    assert uniform.mutual_information == pytest.approx(0.0, abs=1e-12)
    assert specialised.mutual_information == pytest.approx(LOG_2, abs=1e-4)
    assert uniform.selection_frequency == {"code": 0.25, "<prose>": 0.25}
    assert specialised.selection_frequency == {"code": 0.5, "<prose>": 0.5}
    assert specialised.validation_max_violation == pytest.approx(0.0)
    rows = {row.name: row for row in overview_rows(find_logs(runs))}
    loss = rows["validation loss (nats per byte)"]
    assert difference(loss) == pytest.approx(-0.1)
    assert is_better(loss) is True and format_difference(loss) == "-0.1000"
    # The first ten of sixty steps are not "the end".
    assert rows["LBL over the global batch (1 = even)"].values == pytest.approx((1.1, 1.1))
    # Steps 46 to 60 of a loss that falls by 0.05 a step: the mean is that of step 53.
    assert rows["training loss"].values == pytest.approx((3.35, 3.35))


def test_a_dense_model_beside_moe_models_has_no_experts_to_show(runs: list[Path]) -> None:
    """And a model of a folder has no expert-parallel size of its own."""
    dense = _write_run(runs[0].parent / "dense", [], loss=2.5)
    info = json.loads((dense / "run.json").read_text())
    for name in ("ep_size", "num_experts", "top_k", "num_layers"):
        del info["model"][name]
    info["ds_config"]["expert_parallel"] = {"enabled": True, "autoep_size": 4}
    (dense / "run.json").write_text(json.dumps(info))
    page = runs[0].parent / "page.html"
    assert main(["report", *map(str, [*runs, dense]), "--output", str(page)]) == 0
    assert "<td>2</td><td>2</td><td>4</td>" in page.read_text()
    rows = {row.name: row for row in overview_rows(find_logs([*runs, dense]))}
    assert rows["MaxVio on held-out text"].values[2] is None


def test_which_direction_is_better() -> None:
    assert is_better(Row(name="x", values=(1.0, 2.0), better="low")) is False
    assert is_better(Row(name="x", values=(1.0, 2.0), better="high")) is True
    assert is_better(Row(name="x", values=(1.0, 1.0001), better="low")) is None
    assert is_better(Row(name="x", values=(1.0, 2.0))) is None
    assert is_better(Row(name="x", values=(1.0, None), better="low")) is None
    same = Row(name="x", values=(1.0, 0.9999), better="low")
    assert is_better(same) is None and format_difference(same) == "0.000"
    three = Row(name="x", values=(1.0, 0.5, 2.0), better="low")
    assert [is_better(three, run) for run in range(3)] == [None, True, False]
    assert [format_difference(three, run) for run in range(3)] == ["", "-0.500", "+1.000"]


def test_report_writes_figures_and_a_self_contained_page(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *map(str, runs)]) == 0
    folder = runs[0].parent
    assert {path.name for path in (folder / "figures").iterdir()} == {
        "training_curves.png",
        "domain_expert_heatmaps.png",
        "expert_load.png",
    }
    page = (folder / "report.html").read_text()
    for title in ("Training loss", "Domains and experts", "Expert load"):
        assert f'<svg role="img" aria-label="{title}"' in page
    for reference in ("<script", "http:", "https:", 'src="/', "<link", "@import"):
        assert reference not in page
    assert "&lt;prose&gt;" in page and "<prose>" not in page
    assert str(folder) not in page
    printed = capsys.readouterr().out
    assert "validation loss" in printed and "2.3000" in printed


def test_report_of_one_run_has_no_difference(runs: list[Path]) -> None:
    assert main(["report", str(runs[0]), "--output", str(runs[0] / "page.html")]) == 0
    page = (runs[0] / "page.html").read_text()
    assert "difference" not in page and (runs[0] / "figures" / "expert_load.png").is_file()


def test_heat_maps_of_many_layers_are_folded(tmp_path: Path) -> None:
    """Six layers: four in sight, two folded away; every layer's title is drawn once."""
    run = _write_run(tmp_path / "deep", SPECIALISED * 6, loss=2.3)
    page = html_page(find_logs([run]))
    assert "<summary>Layers 4 to 5</summary>" in page and page.count("<summary>Layers ") == 1
    titles = re.findall(r"layer (\d): mutual information 0.693 nats", page)
    assert sorted(titles) == list("012345")


def test_a_folder_that_is_no_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert f"{tmp_path}: found no TensorBoard event files, no csv_monitor files and no run" in error


def test_lines_after_the_checkpoint_are_forgotten(runs: list[Path]) -> None:
    with (runs[0] / "history.jsonl").open("a") as file:
        file.write('{"step": 61, "lm_')  # a crash while writing
    RunFolder(runs[0], writes=True).forget_after(40)
    run = read_run(runs[0])
    assert [record["step"] for record in run.history] == list(range(1, 41))
    assert run.validations == []


def test_only_rank_0_writes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", writes=False)
    folder.write_info({})
    folder.append_history({"step": 1})
    assert not (tmp_path / "run").exists()


def test_status_keeps_the_rest(runs: list[Path]) -> None:
    RunFolder(runs[0], writes=True).set_status("interrupted")
    info = json.loads((runs[0] / "run.json").read_text())
    assert info == {**_info("micro_batch"), "status": "interrupted"}
