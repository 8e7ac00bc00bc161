"""launch/dense_to_moe.sh: its numbers by hand, and the whole of it with a few steps."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
RUNS = ("dense", "dense_continued", "micro_batch", "global_batch")
TIMEOUT_S = 840.0  # four times the start of two ranks, on a busy machine too


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dense_to_moe", LAUNCH / "dense_to_moe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_columns_are_what_the_counts_say(script: ModuleType) -> None:
    """Layer 0: each domain has an expert of its own, log 2 and even. Layer 1: all on one of two."""
    validation = {
        "step": 5,
        "loss_per_domain": {"a": 1.0, "b": 2.0},
        "tokens_per_expert_LDE": [[[8, 0], [0, 8]], [[8, 0], [8, 0]]],
    }
    moe = script.column("moe", validation, steps_before=10)
    assert (moe.steps, moe.loss) == (15, 1.5)
    assert moe.mutual_information == pytest.approx(math.log(2) / 2)
    assert moe.max_violation == pytest.approx((0 + 1) / 2)
    dense = script.column("dense", {**validation, "tokens_per_expert_LDE": []}, steps_before=0)
    assert (dense.mutual_information, dense.max_violation) == (None, None)
    table = script.markdown_table([dense, moe]).splitlines()
    assert table[0] == "|  | dense | moe |"
    assert table[2:5] == [
        "| optimizer steps | 5 | 15 |",
        "| validation loss (nats per byte) | 1.5000 | 1.5000 |",
        "| mutual information domain/expert (nats) | - | 0.3466 |",
    ]
    assert table[-1] == "| loss, b | 2.0000 | 2.0000 |"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_runs_as_a_whole(tmp_path: Path) -> None:
    """What launch/dense_to_moe.sh runs once it has an environment, which a test leaves alone."""
    texts, output = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    (texts / "digits.txt").write_text("".join(f"{i * i:08d} " for i in range(3000)))
    (texts / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 600)
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    process = subprocess.Popen(
        [sys.executable, str(LAUNCH / "dense_to_moe.py"), "--fast", "--data", str(texts)]
        + ["--output", str(output)],
        env={**environment, "PYTHONPATH": str(LAUNCH.parent), "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        printed, _ = process.communicate(timeout=30.0)
        pytest.fail(f"did not end within {TIMEOUT_S:g} s\n{printed[-6000:]}")
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert process.returncode == 0, printed[-6000:]
    table = (output / "table.md").read_text()
    assert table in printed and "no claim" in printed
    columns = json.loads((output / "table.json").read_text())["columns"]
    assert [column["steps"] for column in columns] == [4, 8, 4, 8, 8]
    assert (output / "figures" / "domain_expert_heatmaps.png").is_file()
    validations = {name: _lines(output / name / "validation.jsonl") for name in RUNS}
    # The dense model comes back from its folder as it was; both MoE runs start from one model.
    assert validations["dense_continued"][0]["loss_per_domain"] == pytest.approx(
        validations["dense"][-1]["loss_per_domain"], rel=1e-6
    )
    assert validations["micro_batch"][0] == validations["global_batch"][0]
    sizes = json.loads((output / "micro_batch" / "run.json").read_text())["model"]
    assert (sizes["num_layers"], sizes["num_experts"], sizes["top_k"]) == (3, 16, 4)
    first = [_lines(output / name / "history.jsonl")[0] for name in RUNS]
    assert first[2]["lm_loss"] == first[3]["lm_loss"]  # the same text
    sections = [
        json.loads((output / name / "run.json").read_text())["ds_config"]["moe_load_balancing"]
        for name in RUNS[2:]
    ]
    assert [section["scope"] for section in sections] == ["micro_batch", "global_batch"]
