"""Which neurons of an FFN form which expert. Pure functions on indices and scores.

Shape legend: E experts of M neurons, H neurons in the dense FFN.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_moe_lb.convert.clustering import balanced_k_means
from ds_moe_lb.convert.plan import ConversionOptions


@dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """The neurons of one layer.

    Attributes:
        experts_EM: int64, the neurons of each routed expert, ascending.
        shared: int64, the neurons that every token passes through, ascending; may be empty.
    """

    experts_EM: Tensor
    shared: Tensor


def split_layer(
    options: ConversionOptions,
    *,
    layer: int,
    num_neurons: int,
    rows_HD: Tensor | None = None,
    scores_EH: Tensor | None = None,
) -> LayerSplit:
    """Split one layer's neurons as `options` say.

    Args:
        options: the conversion.
        layer: number of the layer, which each layer's random draws depend on.
        num_neurons: H.
        rows_HD: the matrix to cluster; needed for split ``cluster``.
        scores_EH: importance of each neuron to each expert's domain; for ``importance``.
    """
    size = options.neurons_per_expert(num_neurons)
    num_shared = options.num_shared_experts * size
    random = np.random.default_rng([options.seed, layer])
    if options.split == "cluster":
        assert rows_HD is not None
        labels = balanced_k_means(rows_HD, num_clusters=options.num_experts, random=random)
        return _make_split(labels.argsort(stable=True).view(options.num_experts, size))
    if options.split == "random":
        order = torch.from_numpy(random.permutation(num_neurons))
        return _make_split(order[num_shared:].view(options.num_experts, size), order[:num_shared])
    assert scores_EH is not None
    shared = residual_neurons(scores_EH, size=size, num_shared=num_shared)
    is_free_H = torch.ones(num_neurons, dtype=torch.bool)
    is_free_H[shared] = False
    routed = is_free_H.nonzero().squeeze(1)
    choose = top_neurons if options.sharing == "inner" else disjoint_neurons
    return _make_split(routed[choose(scores_EH[:, routed], size=size)], shared)


def top_neurons(scores_EH: Tensor, *, size: int) -> Tensor:
    """Inner sharing: each expert's `size` highest scores, overlaps allowed: ``(E, size)``."""
    return scores_EH.argsort(dim=1, descending=True, stable=True)[:, :size]


def disjoint_neurons(scores_EH: Tensor, *, size: int) -> Tensor:
    """Hand out (expert, neuron) pairs from the highest score down, each neuron once.

    Args:
        scores_EH: with H = E * size.

    Returns:
        ``(E, size)`` int64, a partition of the H neurons.
    """
    num_experts, num_neurons = scores_EH.shape
    free = [size] * num_experts
    owner = np.full(num_neurons, -1)
    for pair in scores_EH.flatten().argsort(descending=True, stable=True).tolist():
        expert, neuron = divmod(pair, num_neurons)
        if free[expert] and owner[neuron] < 0:
            owner[neuron] = expert
            free[expert] -= 1
    return torch.from_numpy(owner.argsort(kind="stable")).view(num_experts, size)


def residual_neurons(scores_EH: Tensor, *, size: int, num_shared: int) -> Tensor:
    """The neurons that most experts want, which become the shared block.

    Repeated until there are enough: every expert names its `size` highest scores among the neurons
    left; those that the most experts named are taken out. Where these are more than are still
    needed, the ones with the highest sum of scores are taken.

    Returns:
        ``(num_shared,)`` int64.
    """
    left = torch.arange(scores_EH.shape[1])
    taken: list[Tensor] = []
    missing = num_shared
    while missing:
        scores_EL = scores_EH[:, left]
        named = top_neurons(scores_EL, size=size).flatten()
        votes_L = torch.bincount(named, minlength=len(left))
        most = (votes_L == votes_L.max()).nonzero().squeeze(1)
        sums = scores_EL[:, most].sum(dim=0)
        most = most[sums.argsort(descending=True, stable=True)[:missing]]
        taken.append(left[most])
        missing -= len(most)
        is_left_L = torch.ones(len(left), dtype=torch.bool)
        is_left_L[most] = False
        left = left[is_left_L]
    return torch.cat(taken) if taken else torch.empty(0, dtype=torch.int64)


def _make_split(experts_EM: Tensor, shared: Tensor | None = None) -> LayerSplit:
    if shared is None:
        shared = torch.empty(0, dtype=torch.int64)
    # Neurons commute; ascending ones keep the order of the dense matrix.
    return LayerSplit(experts_EM=experts_EM.sort(dim=1).values, shared=shared.sort().values)
