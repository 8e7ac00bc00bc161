"""The wheel holds all that the command line needs, and finds it after installation."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parent.parent
SHIPPED = ["ds_moe_lb", "ds_configs", "setup.py", "pyproject.toml", "LICENSE", "README.md"]
EXTRAS = {"mpi", "hf", "monitor", "report", "dev", "all"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout gets no build folder."""
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        if (CHECKOUT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(CHECKOUT / name, source / name, ignore=ignored)
        elif (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_holds_every_module_and_recipe_and_nothing_of_the_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(path.relative_to(CHECKOUT))
        for path in (CHECKOUT / "ds_moe_lb").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    expected |= {
        f"ds_moe_lb/ds_configs/{path.name}" for path in (CHECKOUT / "ds_configs").glob("*.json")
    }
    assert expected <= names
    rest = {name for name in names - expected if ".dist-info/" not in name}
    assert rest == set()
    assert any(name.endswith("LICENSE") for name in names)


def test_metadata_states_pythons_extras_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith("/METADATA")).rsplit("/")[0]
    metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert metadata["Name"] == "ds_moe_lb"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    assert set(metadata.get_all("Provides-Extra")) == EXTRAS
    requirements = metadata.get_all("Requires-Dist")
    assert any(r.startswith("deepspeed") and "<0.20" in r for r in requirements)
    assert any(r.startswith("transformers") and "<5.23" in r for r in requirements)
    commands = archive.read(f"{info}/entry_points.txt").decode()
    assert "ds-moe-lb = ds_moe_lb.cli:main" in commands


def test_installed_wheel_finds_its_recipes_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    _pip("install", "--no-deps", "--target", str(target), str(wheel))
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "from ds_moe_lb._configs import config_path\n"
        "print(config_path('zero1_ep2_global_batch'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    expected = target / "ds_moe_lb" / "ds_configs" / "zero1_ep2_global_batch.json"
    assert done.stdout.strip() == str(expected), done.stderr
