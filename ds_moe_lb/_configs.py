"""Where the ready recipes are: inside the package once installed, beside it in a checkout."""

from pathlib import Path


def config_directory() -> Path:
    """The folder of ready DeepSpeed JSON files.

    Raises:
        RuntimeError: the package was copied without them.
    """
    package = Path(__file__).resolve().parent
    candidates = (package / "ds_configs", package.parent / "ds_configs")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise RuntimeError(
        f"the ready configs were not found in {candidates[0]} nor in {candidates[1]}; "
        "install ds_moe_lb with pip"
    )


def config_path(name: str) -> Path:
    """A ready recipe by name, with or without ``.json``.

    Raises:
        ValueError: listing the recipes there are.
    """
    path = config_directory() / f"{name.removesuffix('.json')}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in config_directory().glob("*.json")))
        raise ValueError(f"no ready config is named {name!r}; there are: {known}")
    return path
