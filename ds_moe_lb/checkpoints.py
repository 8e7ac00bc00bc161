"""The file `latest` of a checkpoint folder, moved on only when a checkpoint is complete."""

import os
from typing import Any

import deepspeed.comm as dist


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
