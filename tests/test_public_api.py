"""What importing ds_moe_lb does, which is nothing, and what it offers."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ds_moe_lb

# Names as DESIGN fixes them; removing one breaks users.
PUBLIC = {
    "GlobalBatchTopKGate",
    "GlobalBatchTopKRouter",
    "LoadBalancer",
    "__version__",
    "expert_fraction",
    "initialize",
    "install",
    "load_balancing_loss",
    "max_violation",
    "router_z_loss",
}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(ds_moe_lb.__path__, "ds_moe_lb.")
    if not module.name.endswith(".__main__")
)

# Prints what an import must not have done; nothing when it is clean.
INSPECT = """
import sys
heavy = [name for name in ("torch", "deepspeed", "transformers") if name in sys.modules]
if heavy:
    print("imported:", *heavy)
import torch
if torch.distributed.is_initialized():
    print("created a process group")
if torch.cuda.is_initialized():
    print("initialised CUDA")
"""


def _side_effects_of(code: str, *, cwd: Path) -> str:
    """What `INSPECT` finds after ``code`` ran in a new interpreter."""
    checkout = Path(ds_moe_lb.__file__).parent.parent
    path = f"import sys; sys.path.insert(0, {str(checkout)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", path + code + INSPECT],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_is_what_was_promised_and_every_name_resolves() -> None:
    assert set(ds_moe_lb.__all__) >= PUBLIC
    for name in ds_moe_lb.__all__:
        assert getattr(ds_moe_lb, name) is not None, name
    assert set(ds_moe_lb.__all__) <= set(dir(ds_moe_lb))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'ds_moe_lb' has no attribute 'initialise'"):
        ds_moe_lb.initialise  # noqa: B018


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports(name: str) -> None:
    importlib.import_module(name)


def test_import_has_no_side_effect(tmp_path: Path) -> None:
    assert _side_effects_of("import ds_moe_lb, ds_moe_lb._configs", cwd=tmp_path) == ""


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import ds_moe_lb; ds_moe_lb.load_balancing_loss", "imported: torch"),
        (
            "import torch; torch.distributed.init_process_group("
            "'gloo', init_method='file://' + __import__('os').path.abspath('store'), "
            "rank=0, world_size=1)",
            "created a process group",
        ),
    ],
)
def test_the_side_effect_check_can_fail(code: str, found: str, tmp_path: Path) -> None:
    assert found in _side_effects_of(code, cwd=tmp_path)
