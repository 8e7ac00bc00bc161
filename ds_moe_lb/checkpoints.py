"""Checkpoints of an engine: when the file `latest` moves on, and what rides in the client state."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist

from ds_moe_lb.config import ROUTER_SECTION, SECTION
from ds_moe_lb.routers.swap import NAME


def hide_state(engine: Any) -> None:
    """Take the plugin's entry out of the client state that an engine without it loads.

    `load_checkpoint` is wrapped and nothing else changes; an installation on this engine goes
    before.
    """
    original = engine.load_checkpoint

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        with explaining_routers():
            path, client_state = original(*args, **kwargs)
        if engine.load_balancer is None and client_state:
            client_state.pop(SECTION, None)
        return path, client_state

    engine.__dict__["load_checkpoint"] = load_checkpoint


@contextmanager
def explaining_routers() -> Iterator[None]:
    """Say what is meant where linear routers are to load a checkpoint of generated ones.

    Raises:
        ValueError: in the place of DeepSpeed's or torch's list of keys.
    """
    try:
        yield
    except RuntimeError as error:
        if f".{NAME}." not in str(error):
            raise
        raise ValueError(
            f"{ROUTER_SECTION}: the checkpoint has another kind of router than this model; set the "
            f"section to what the checkpoint was trained with. {error}"
        ) from error


def writes_latest_late(engine: Any) -> bool:
    """Whether DeepSpeed itself moves `latest` on later, when an asynchronous save has ended."""
    return bool(engine.checkpoint_engine.is_decoupled())


def move_latest(save_dir: str, tag: str) -> None:
    """Make `latest` name a checkpoint that every rank has written. Collective over the world.

    DeepSpeed writes the file in place as soon as rank 0 has saved its own part: a rank that dies
    then leaves it empty, or naming a checkpoint whose other parts never came.
    """
    _meet()  # every rank has written its part
    if dist.get_rank() == 0:
        latest = os.path.join(save_dir, "latest")
        with open(f"{latest}.part", "w") as file:
            file.write(tag)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{latest}.part", latest)
    _meet()  # whoever comes back from a save may load it at once, as with DeepSpeed


def _meet() -> None:
    if dist.get_world_size() > 1:
        dist.barrier(group=dist.get_world_group())
