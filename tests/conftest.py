"""Fixtures and order of the tests: fast unit tests first, then ranks, then slow."""

import os

# Before anything imports torch: one thread, because ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import random

import numpy
import pytest
import torch

from ranks import BASE_SEED

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-grid",
        action="store_true",
        help="run every cell of the reference grid instead of the pairwise cover",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Before anything imports deepspeed, which takes a GPU where it sees one.
    wants_gpu = config.getoption("markexpr") == "gpu" and torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if wants_gpu else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = os.environ["DS_ACCELERATOR"] == "cuda" and torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("gpu") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and pytest -m gpu"))
    items.sort(key=_stage)  # stable: the order inside a stage stays


def _stage(item: pytest.Item) -> int:
    if item.get_closest_marker("slow"):
        return 2
    return 1 if item.get_closest_marker("ranks") else 0


@pytest.fixture
def full_grid(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full-grid"))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed what a test of one process draws from, as ``run_ranks`` does for rank 0."""
    random.seed(BASE_SEED)
    numpy.random.seed(BASE_SEED)
    torch.manual_seed(BASE_SEED)
    return BASE_SEED
