"""`ds-moe-lb run` and `import ds_moe_lb.auto`: scripts that know nothing of the plugin."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ds_moe_lb
from ds_moe_lb.cli import EXIT_USAGE, main

CHECKOUT = Path(ds_moe_lb.__file__).parent.parent
TRAINER = str(CHECKOUT / "launch" / "finetune_with_trainer.py")


def _python(*arguments: str, cwd: Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess:
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment |= {"PYTHONPATH": str(CHECKOUT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_auto_imports_neither_torch_nor_deepspeed(tmp_path: Path) -> None:
    code = "import sys, ds_moe_lb.auto; print({'torch', 'deepspeed'} & set(sys.modules))"
    done = _python("-c", code, cwd=tmp_path)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


IS_CAUGHT = "print('caught', hasattr(deepspeed.DeepSpeedEngine.__init__, '__wrapped__'))"


@pytest.mark.parametrize(
    "code",
    [
        "import ds_moe_lb.auto; import deepspeed",
        "import deepspeed; from deepspeed import initialize; import ds_moe_lb.auto",
        # Libraries ask whether there is a DeepSpeed long before they import it.
        "import ds_moe_lb.auto, importlib.util; importlib.util.find_spec('deepspeed')\n"
        "import deepspeed",
    ],
)
def test_engines_are_caught_whatever_is_imported_first(code: str, tmp_path: Path) -> None:
    done = _python("-c", f"{code}\n{IS_CAUGHT}", cwd=tmp_path)
    assert "caught True" in done.stdout, done.stderr


def test_the_script_sees_its_own_arguments_and_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\nprint(__name__, sys.argv[1:], beside.VALUE)\nsys.exit(5)\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # As the deepspeed launcher calls a module: its own argument comes first.
    arguments = ["--local_rank=1", "run", str(script), "--local", "--", "x"]
    done = _python("-m", "ds_moe_lb", *arguments, cwd=elsewhere)
    assert done.stdout.strip() == "__main__ ['--local_rank=1', '--local', '--', 'x'] 7"
    assert done.returncode == 5, done.stderr
    done = _python("-m", "ds_moe_lb", "run", "--module", "script", "y", cwd=tmp_path)
    assert done.stdout.strip() == "__main__ ['y'] 7", done.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], ["--", "--x"]),
        ([], ["--", "--", "y", "--"]),
        ([], ["--module", "--help", "-h", "--local_rank", "3"]),
        ([], []),
        (["--"], ["--", "x"]),
    ],
)
def test_everything_after_the_script_is_passed_on_untouched(
    before: list[str],
    after: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """argparse took a `--` right after SCRIPT for its own and dropped it."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["run", *before, str(script), *after]) == 0
    assert capsys.readouterr().out.strip() == str(after)


def test_a_script_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.argv
    try:
        assert main(["run", "no_such_script.py"]) == EXIT_USAGE
    finally:
        sys.argv = before
    assert "no_such_script.py: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no_such_module", "no_such_package.module", "json.no_such_part"])
def test_a_module_that_is_not_there_is_one_line(name: str, tmp_path: Path) -> None:
    done = _python("-m", "ds_moe_lb", "run", "--module", name, cwd=tmp_path)
    assert done.returncode == EXIT_USAGE
    assert done.stderr.splitlines()[-1].startswith(f"ds-moe-lb run: error: {name}: no such module")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("launcher", "config", "weights"),
    [
        ("deepspeed", "hf_zero2", r"0\.01 \(router_aux_loss_coef 0\.01 x k / L\)"),
        ("torchrun", "hf_zero3_autoep2", r"aux_loss_coeff 0\.01, instead of router_aux_loss_coef"),
    ],
)
def test_the_readmes_trainer_example_runs_as_written(
    launcher: str, config: str, weights: str, tmp_path: Path
) -> None:
    started = {
        "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--module"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"],
    }[launcher]
    json = str(CHECKOUT / "ds_configs" / f"{config}.json")
    script = [TRAINER, "--deepspeed", json, "--max-steps", "5", "--output-dir", str(tmp_path)]
    done = _python(*started, "ds_moe_lb", "run", *script, cwd=tmp_path, timeout_s=300.0)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    assert "2 MoE layers (E=8 k=2)" in output and "D x G = 2 x 4" in output
    assert re.search(weights, output), output[-6000:]
    # The script prints its history; Trainer's console has the same line with strings for numbers.
    lines = [line for line in done.stdout.splitlines() if re.match(r"\{'loss': \d", line)]
    assert len(lines) == 1 and "'moe/max_violation_global_batch'" in lines[0]
