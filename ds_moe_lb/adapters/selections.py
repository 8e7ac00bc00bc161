"""Which experts a transformers model selects in evaluation, with and without the plugin or AutoEP.

Shape legend: T tokens of this micro-batch on this rank, L layers, E experts, K choices per token.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_moe_lb.adapters.transformers import find_transformers_sites
from ds_moe_lb.counts import count_selections


@dataclass(frozen=True)
class _Reader:
    """A router, and how its selections ``(T, K)`` are read from its output."""

    module: nn.Module
    num_experts: int
    selected: Callable[[Any], Tensor]


class Selections:
    """Counts what the routers of a model select; of a dense model nothing."""

    def __init__(self, model: nn.Module) -> None:
        """Look at the model as it is: after the engine was built, if AutoEP replaces layers.

        Raises:
            ValueError: a router cannot be read, or the layers have different numbers of experts.
        """
        self._readers = _find_readers(model)
        self._device = next(model.parameters()).device
        sizes = sorted({reader.num_experts for reader in self._readers})
        if len(sizes) > 1:
            raise ValueError(
                f"--model: its MoE layers have {', '.join(map(str, sizes))} experts, expected the "
                f"same number in all, because the counts of a validation are one table"
            )

    @contextmanager
    def counted(self) -> Iterator[Callable[[], Tensor]]:
        """Count in the forwards inside the block.

        Yields:
            A function for the counts so far, ``(L, E)`` local int64; ``(0, 0)`` of a dense model.
        """
        counts = [
            torch.zeros(reader.num_experts, dtype=torch.int64, device=self._device)
            for reader in self._readers
        ]
        handles = [
            reader.module.register_forward_hook(_adding(reader, counts_E))
            for reader, counts_E in zip(self._readers, counts, strict=True)
        ]
        try:
            none = torch.zeros(0, 0, dtype=torch.int64, device=self._device)
            yield lambda: torch.stack(counts) if counts else none
        finally:
            for handle in handles:
                handle.remove()


def _adding(reader: _Reader, counts_E: Tensor) -> Callable[..., None]:
    def after_router(module: nn.Module, args: Any, output: Any) -> None:
        counts_E.add_(count_selections(reader.selected(output), num_experts=reader.num_experts))

    return after_router


def _find_readers(model: nn.Module) -> list[_Reader]:
    modules = list(model.named_modules())
    replaced: dict[str, Any] = {}
    if "deepspeed.module_inject.auto_ep_layer" in sys.modules:
        from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

        replaced = {name: block for name, block in modules if isinstance(block, AutoEPMoELayer)}
    readers = [
        # It returns (top_scores, selected_experts, tokens_per_expert).
        _Reader(block.router, block.num_experts, lambda output: output[1])
        for block in replaced.values()
    ]
    readers += [
        _Reader(site.module, site.num_experts, site.selected)
        for site in find_transformers_sites(modules, replaced=list(replaced))
    ]
    order = {module: index for index, (_, module) in enumerate(modules)}
    return sorted(readers, key=lambda reader: order[reader.module])
