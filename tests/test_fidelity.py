"""launch/fidelity.py: its estimates by hand, its gradient against autograd, and a small run."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

LAUNCH = Path(__file__).resolve().parent.parent / "launch"


@pytest.fixture(scope="module")
def fidelity() -> Any:
    spec = importlib.util.spec_from_file_location("fidelity", LAUNCH / "fidelity.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_slopes_of_every_estimate_by_hand(fidelity: Any) -> None:
    # G = 2 micro-steps of one rank, k = 1, E = 2; then the window before: 1 and 3 of 4 tokens.
    counts = torch.tensor([[[4, 0]], [[2, 2]]])
    previous = torch.tensor([1, 3])
    # w E f, with w = D / N_m = 1 / 4 or D G / N = 2 / 8 (boundary: 2 / 4) and E = 2
    expected = {
        "micro_batch": [[0.5, 0.0], [0.25, 0.25]],
        "running": [[0.5, 0.0], [0.5 * 6 / 8, 0.5 * 2 / 8]],
        # 2 x (4, 0) + 1 x (1, 3) = (9, 3); 2 x (6, 2) + 0
        "carry": [[0.5 * 9 / 12, 0.5 * 3 / 12], [0.5 * 6 / 8, 0.5 * 2 / 8]],
        "boundary": [[0.25, 0.75], [0.25, 0.75]],
        "exact": [[0.5 * 6 / 8, 0.5 * 2 / 8]] * 2,
    }
    for estimate, slopes_GE in expected.items():
        slopes_GDE = fidelity.slopes(estimate, counts, previous, top_k=1)
        assert slopes_GDE[:, 0].tolist() == slopes_GE, estimate


def test_weight_gradient_is_that_of_autograd(fidelity: Any) -> None:
    torch.manual_seed(0)
    x_TM, slope_E = torch.randn(7, 5).double(), torch.rand(4).double()
    weight_EM = torch.randn(4, 5).double().requires_grad_()
    ((x_TM @ weight_EM.T).softmax(1).sum(0) @ slope_E).backward()
    ours = fidelity.weight_gradient(x_TM, weight_EM.detach(), slope_E)
    assert torch.allclose(ours, weight_EM.grad, rtol=1e-12, atol=1e-12)


def test_error_and_cosine(fidelity: Any) -> None:
    exact = torch.tensor([[[3.0, 4.0]], [[0.0, 5.0]]])
    seen = fidelity.compare(exact * torch.tensor([2.0, 1.0]).view(2, 1, 1), exact)
    assert seen["error_step"] == pytest.approx(0.5)  # 1 and 0
    assert seen["cosine_step"] == pytest.approx(1.0)
    # (6, 13) against (3, 9): off by (3, 4)
    assert seen["error_window"] == pytest.approx(5 / 90**0.5)


@pytest.mark.slow
def test_a_small_run_writes_its_table_and_figure(tmp_path: Path) -> None:
    arguments = ["--seeds", "2", "--looks", "1", "--max-steps", "2", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(LAUNCH / "fidelity.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=LAUNCH.parent,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads((tmp_path / "fidelity.json").read_text())["rows"]
    by_key = {(row["G"], row["estimate"]): row for row in rows}
    # With one micro-step `running` and `carry` have seen the whole window.
    assert by_key[1, "running"]["error_step"][0] == pytest.approx(0.0, abs=1e-12)
    assert by_key[1, "carry"]["error_step"][0] == pytest.approx(0.0, abs=1e-12)
    assert by_key[2, "micro_batch"]["error_step"][0] > 0.0
    assert (tmp_path / "fidelity.png").stat().st_size > 10_000
