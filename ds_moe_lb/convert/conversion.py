"""The conversion itself: the splits of all layers first, then one shard after the other."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ds_moe_lb
from ds_moe_lb.convert.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    DenseCheckpoint,
    ffn_name,
    parse_ffn_name,
)
from ds_moe_lb.convert.families import EMPTY_SHARED_SIZE, target_config, target_of
from ds_moe_lb.convert.gates import make_gate
from ds_moe_lb.convert.new_folder import copy_companions, new_folder, refuse_existing
from ds_moe_lb.convert.plan import ConversionOptions
from ds_moe_lb.convert.splits import LayerSplit, split_layer

RECORD_FILE = "conversion.json"
# What the router of a shared expert multiplies it by at first: sigmoid(0).
_SHARED_GATE_AT_ZERO = 0.5

OnProgress = Callable[[int, str], None]


class Conversion:
    """One conversion, checked and not yet run.

    Attributes:
        checkpoint: what is converted.
        options: how.
        target: the family it becomes.
        expert_size: neurons per expert.
    """

    def __init__(self, source: Path, output: Path, options: ConversionOptions) -> None:
        """Raises ValueError for anything that cannot be converted as asked."""
        refuse_existing(output)
        self.checkpoint = DenseCheckpoint(source)
        dense = self.checkpoint.config
        self.target = target_of(dense, num_shared_experts=options.num_shared_experts)
        self.checkpoint.check_ffn()
        self._output = output
        self.options = options
        self.expert_size = options.neurons_per_expert(dense.intermediate_size)

    @property
    def num_steps(self) -> int:
        """What `on_progress` counts up to: layers to split and shards to write."""
        return self.checkpoint.config.num_hidden_layers + len(self.checkpoint.shards)

    def run(
        self,
        *,
        scores_ELH: Tensor | None = None,
        on_progress: OnProgress = lambda done, what: None,
    ) -> None:
        """Convert; the output folder appears when everything is in it.

        Args:
            scores_ELH: importance of each neuron to each expert's domain, by layer; needed for
                split ``importance`` and for nothing else.
            on_progress: gets (steps done, what was done last).

        Raises:
            ValueError: when the scores do not fit, a weight leaves the range of its dtype, or the
                output folder has appeared meanwhile.
        """
        self._check_scores(scores_ELH)
        num_layers = self.checkpoint.config.num_hidden_layers
        splits = []
        for layer in range(num_layers):
            splits.append(self._split(layer, scores_ELH))
            on_progress(layer + 1, f"layer {layer} split")
        with new_folder(self._output) as folder:
            weight_map: dict[str, str] = {}
            num_bytes = 0
            for number, shard in enumerate(self.checkpoint.shards, start=1):
                written, size = self._write_shard(shard, folder, splits)
                weight_map |= written
                num_bytes += size
                on_progress(num_layers + number, f"{shard} written")
            if set(weight_map.values()) != {SINGLE_FILE}:
                index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
                (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            copy_companions(self.checkpoint.path, folder)
            self._write_record(folder)
            # Last: without it a folder is not taken for a checkpoint.
            target_config(
                self.checkpoint.config,
                self.target,
                self.options,
                expert_size=self.expert_size,
            ).save_pretrained(folder)

    def _split(self, layer: int, scores_ELH: Tensor | None) -> LayerSplit:
        rows_HD = None
        if self.options.split == "cluster":
            rows_HD = self.checkpoint.read(ffn_name(layer, self.options.cluster_rows))
        return split_layer(
            self.options,
            layer=layer,
            num_neurons=self.checkpoint.config.intermediate_size,
            rows_HD=rows_HD,
            scores_EH=None if scores_ELH is None else scores_ELH[:, layer],
        )

    def _write_shard(
        self, shard: str, folder: Path, splits: list[LayerSplit]
    ) -> tuple[dict[str, str], int]:
        """Write what becomes of one shard; returns the shard's names and its bytes."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        for name, tensor in self.checkpoint.read_shard(shard):
            ffn = parse_ffn_name(name)
            if ffn:
                layer, projection = ffn
                tensors.update(self._converted(layer, projection, tensor, splits[layer]))
            # Old checkpoints store these; models compute them.
            elif not name.endswith("rotary_emb.inv_freq"):
                tensors[name] = tensor
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return dict.fromkeys(tensors, shard), num_bytes

    def _converted(
        self, layer: int, projection: str, matrix: Tensor, split: LayerSplit
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that comes from one dense matrix."""
        target, options = self.target, self.options
        dim = 1 if projection == "down_proj" else 0
        routed_factor = options.routed_factor if projection == "down_proj" else 1.0
        for expert, neurons in enumerate(split.experts_EM):
            name = target.expert(layer, expert, projection)
            yield name, _scaled(name, matrix.index_select(dim, neurons), routed_factor)
        if target.has_shared:
            yield from self._shared(layer, projection, matrix.index_select(dim, split.shared))
        if projection == "gate_proj":
            gate_ED = make_gate(
                options, layer=layer, gate_proj_HD=matrix, experts_EM=split.experts_EM
            )
            yield target.gate(layer), gate_ED
            if target.has_shared:
                yield target.shared_gate(layer), matrix.new_zeros(1, matrix.shape[1])

    def _shared(self, layer: int, projection: str, part: Tensor) -> Iterator[tuple[str, Tensor]]:
        name = self.target.shared(layer, projection)
        if self.options.num_shared_experts == 0:
            width = self.checkpoint.config.hidden_size
            shape = (EMPTY_SHARED_SIZE, width)
            yield name, part.new_zeros(shape[::-1] if projection == "down_proj" else shape)
            return
        factor = 1 / _SHARED_GATE_AT_ZERO if projection == "down_proj" else 1.0
        yield name, _scaled(name, part, factor)

    def _check_scores(self, scores_ELH: Tensor | None) -> None:
        if self.options.split != "importance":
            if scores_ELH is not None:
                raise ValueError(f"split {self.options.split!r} takes no importance scores")
            return
        dense = self.checkpoint.config
        expected = (self.options.num_experts, dense.num_hidden_layers, dense.intermediate_size)
        got = None if scores_ELH is None else tuple(scores_ELH.shape)
        if got != expected:
            raise ValueError(
                f"importance scores: got the shape {got}, expected {expected}: one domain per "
                f"expert, every layer, every neuron"
            )

    def _write_record(self, folder: Path) -> None:
        record: dict[str, Any] = {
            "ds_moe_lb": ds_moe_lb.__version__,
            "source": self.checkpoint.path.resolve().name,
            "target": self.target.model_type,
            "neurons_per_expert": self.expert_size,
            "routed_factor": self.options.routed_factor,
            "options": vars(self.options),
        }
        (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")


def _scaled(name: str, part: Tensor, factor: float) -> Tensor:
    """`part` times `factor` in its own dtype, rounded once.

    Raises:
        ValueError: when the product does not fit the dtype.
    """
    if factor == 1.0:
        return part
    dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
    product = (part.to(dtype) * factor).to(part.dtype)
    if product.isinf().any() and not part.isinf().any():
        raise ValueError(
            f"{name}: times {factor:g} the weights leave the range of {part.dtype}; convert a "
            f"bfloat16 checkpoint or choose --scale unit"
        )
    return product
