"""The bias that a transformers family itself adds to its router's scores: found, and tried out.

Shape legend: T tokens, E experts, K choices per token.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from ds_moe_lb.selection_bias import OWN_NAMES, SelectionBias, tensor_named


def find_correction_bias(
    router: nn.Module, block: nn.Module, *, num_experts: int
) -> SelectionBias | None:
    """The one that the router holds, or the block around it, which hands it over at each call.

    Args:
        router: the router.
        block: the module around it.
        num_experts: E.
    """
    for owner, key, tensor in _candidates([*router.modules(), block]):
        # ZeRO-3 leaves an empty tensor in the place of a parameter.
        if getattr(tensor, "ds_numel", tensor.numel()) == num_experts:
            return SelectionBias(owner, key)
    return None


def prefer_first_expert(probe: nn.Module, arguments: dict[str, Tensor]) -> bool:
    """Bias a probe, by its own tensors and its arguments, so that it has to choose expert 0.

    Returns:
        Whether there was anything to be biased with.
    """
    tensors = [tensor for _, _, tensor in _candidates(list(probe.modules()))]
    tensors += arguments.values()
    for tensor in tensors:
        tensor.detach().flatten()[0] = 100.0  # scores are far below
    return bool(tensors)


def _candidates(modules: list[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in modules:
        for key in OWN_NAMES:
            tensor = tensor_named(module, key)
            if tensor is not None:
                yield module, key, tensor
