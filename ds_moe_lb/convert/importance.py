"""How much the loss on a domain of text depends on each FFN neuron of a dense model.

v[j] = mean over tokens of |h_j * dL/dh_j|, with h = silu(W_gate x) * (W_up x), the input of
down_proj, and L the sum of the tokens' losses, so that the size of a batch does not matter.
"""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class ImportanceRecorder:
    """While active, every backward adds |h * dL/dh| of the inputs of the given modules.

    Weights need no gradient: they may be frozen.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._sums: dict[int, Tensor] = {}
        self._num_tokens: dict[int, int] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> "ImportanceRecorder":
        for index, module in enumerate(self._modules):
            self._hooks.append(module.register_forward_pre_hook(self._watch(index)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def scores(self) -> Tensor:
        """``(L, H)`` fp64 on the CPU: the mean over tokens so far, by module."""
        means = [self._sums[i] / self._num_tokens[i] for i in range(len(self._modules))]
        return torch.stack(means)

    def _watch(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = inputs[0]
            if not hidden.requires_grad:  # frozen weights before it: the graph starts here
                hidden = hidden.detach().requires_grad_()
            value = hidden.detach()
            hidden.register_hook(lambda gradient: self._add(index, value, gradient))
            return (hidden, *inputs[1:])

        return hook

    def _add(self, index: int, value: Tensor, gradient: Tensor) -> None:
        products_TH = (value.float() * gradient.float()).abs().flatten(0, -2)
        total_H = products_TH.sum(dim=0, dtype=torch.float64).cpu()
        self._sums[index] = self._sums.get(index, torch.zeros_like(total_H)) + total_H
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(products_TH)


def domain_importance(model: Any, batches: Iterable[Tensor]) -> Tensor:
    """Importance of all neurons of a causal language model of transformers to one domain.

    Args:
        model: its decoder layers are ``model.model.layers``, each with ``mlp.down_proj``.
        batches: ``(B, S)`` int64 token ids, at least one batch.

    Returns:
        ``(L, H)`` fp64, by layer.
    """
    model.requires_grad_(False).eval()
    with ImportanceRecorder([layer.mlp.down_proj for layer in model.model.layers]) as recorder:
        for tokens_BS in batches:
            tokens_BS = tokens_BS.to(model.device)
            logits_BSV = model(input_ids=tokens_BS, use_cache=False).logits.float()
            loss = nn.functional.cross_entropy(
                logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten(), reduction="sum"
            )
            loss.backward()
    return recorder.scores()
