"""A dense checkpoint on disk: its config, its shards, and where each FFN matrix is."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_FFN_NAME = re.compile(r"model\.layers\.(\d+)\.mlp\.(gate_proj|up_proj|down_proj)\.weight")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def ffn_name(layer: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.{projection}.weight"


def parse_ffn_name(name: str) -> tuple[int, str] | None:
    """(layer, projection) of a dense FFN matrix; None for any other tensor."""
    match = _FFN_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


class DenseCheckpoint:
    """Reads one tensor or one shard at a time.

    Attributes:
        path: the folder.
        config: `PreTrainedConfig` of transformers.
        shards: the names of its tensors by file, in the order of the files' names.
    """

    def __init__(self, path: Path) -> None:
        """Read config and names, and check that all FFN matrices are there.

        Raises:
            ValueError: when the folder is no complete dense checkpoint in safetensors.
        """
        from transformers import AutoConfig

        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path}: expected the folder of a transformers checkpoint, but it has no "
                f"config.json; a model of the Hub has to be downloaded first"
            )
        self.path = path
        self.config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
        self.shards = _shards(path)
        self._file_of = {name: file for file, names in self.shards.items() for name in names}

    def check_ffn(self) -> None:
        """Raises ValueError when an FFN matrix is missing, has another shape than expected, or is
        of a layer that the config does not have.
        """
        hidden, neurons = self.config.hidden_size, self.config.intermediate_size
        num_layers = self.config.num_hidden_layers
        for name in self._file_of:
            ffn = parse_ffn_name(name)
            if ffn and ffn[0] >= num_layers:
                raise ValueError(
                    f"{self.path}: got the tensor {name}, expected {num_layers} layers by "
                    f"num_hidden_layers of config.json; a shortened model has to be saved by "
                    f"save_pretrained(...) of transformers first"
                )
        for layer in range(num_layers):
            for projection in PROJECTIONS:
                name = ffn_name(layer, projection)
                expected = [hidden, neurons] if projection == "down_proj" else [neurons, hidden]
                if name not in self._file_of:
                    raise ValueError(
                        f"{self.path}: expected the tensor {name}, but no shard has it; it has to "
                        f"be a complete causal language model"
                    )
                with self._open(self._file_of[name]) as file:
                    got = file.get_slice(name).get_shape()
                if got != expected:
                    raise ValueError(
                        f"{self.path}: {name} has the shape {got}, expected {expected} by "
                        f"config.json"
                    )

    def read(self, name: str) -> Tensor:
        """One tensor, as it is stored."""
        with self._open(self._file_of[name]) as file:
            return _checked(name, file.get_tensor(name))

    def read_shard(self, shard: str) -> Iterator[tuple[str, Tensor]]:
        """Name and content of each tensor of a shard, one at a time."""
        with self._open(shard) as file:
            for name in self.shards[shard]:
                yield name, _checked(name, file.get_tensor(name))

    @contextmanager
    def _open(self, shard: str) -> Iterator[Any]:
        from safetensors import safe_open

        with safe_open(self.path / shard, framework="pt") as file:
            yield file


def _shards(path: Path) -> dict[str, list[str]]:
    from safetensors import SafetensorError, safe_open

    if (path / INDEX_FILE).is_file():
        weight_map = json.loads((path / INDEX_FILE).read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    elif (path / SINGLE_FILE).is_file():
        files = [SINGLE_FILE]
    else:
        raise ValueError(
            f"{path}: expected {SINGLE_FILE} or {INDEX_FILE}; weights of another format become "
            f"safetensors by from_pretrained(...) and save_pretrained(...) of transformers"
        )
    shards = {}
    for file in files:
        if not (path / file).is_file():
            raise ValueError(f"{path}: the index names the shard {file}, which is not there")
        try:
            with safe_open(path / file, framework="pt") as opened:
                shards[file] = sorted(opened.keys())
        except SafetensorError as error:
            raise ValueError(
                f"{path / file}: expected a complete safetensors file, but {error}; fetch it again"
            ) from None
    return shards


def _checked(name: str, tensor: Tensor) -> Tensor:
    if parse_ffn_name(name) and tensor.dtype not in _DTYPES:
        raise ValueError(
            f"{name}: got the dtype {tensor.dtype}, expected one of "
            f"{', '.join(map(str, _DTYPES))}; convert the unquantised model"
        )
    return tensor
