"""Counts to numbers: how even the expert load is, and how specialised the experts are. Pure
functions.

Shape legend: E experts of one layer, D domains of text. Every function takes counts of one layer
over whatever batch the caller summed them, and returns 0 rather than NaN where nothing was
counted.
"""

import torch
from torch import Tensor

TAG = "Train/Samples/moe"  # under which DeepSpeed's monitor is given the numbers


def max_violation(tokens_per_expert_E: Tensor) -> Tensor:
    """MaxVio ``max_i load_i / mean load - 1`` (arXiv 2408.15664): 0 = even, E/k - 1 = collapsed.

    Args:
        tokens_per_expert_E: ``(..., E)`` integer counts.

    Returns:
        ``(...)`` fp64.
    """
    load = tokens_per_expert_E.double()
    mean = load.mean(dim=-1)
    return torch.where(
        mean > 0, load.amax(dim=-1) / mean.clamp(min=torch.finfo(mean.dtype).tiny) - 1, 0.0
    )


def load_entropy(tokens_per_expert_E: Tensor) -> Tensor:
    """Entropy of the load divided by ``log E``: 1 = even, 0 = one expert takes all.

    Args:
        tokens_per_expert_E: ``(..., E)`` integer counts.

    Returns:
        ``(...)`` fp64 in [0, 1]; 1 for a single expert.
    """
    num_experts = tokens_per_expert_E.shape[-1]
    load = tokens_per_expert_E.double()
    total = load.sum(dim=-1, keepdim=True)
    if num_experts == 1:
        return torch.ones_like(total.squeeze(-1))
    fraction = load / total.clamp(min=1)
    entropy = -torch.xlogy(fraction, fraction).sum(dim=-1)
    return entropy / torch.log(torch.tensor(float(num_experts), dtype=torch.float64))


def dead_experts(tokens_per_expert_E: Tensor) -> Tensor:
    """Number of experts that were never selected.

    Args:
        tokens_per_expert_E: ``(..., E)`` integer counts.

    Returns:
        ``(...)`` int64; 0 when nothing was counted at all.
    """
    never = (tokens_per_expert_E == 0).sum(dim=-1)
    return torch.where(tokens_per_expert_E.sum(dim=-1) > 0, never, 0)


def mutual_information(counts_DE: Tensor) -> float:
    """Mutual information between domain and expert in nats, every domain weighted equally.

    ``I = 1/D sum_d sum_e p(e|d) log(p(e|d) / p(e))`` with ``p(e) = 1/D sum_d p(e|d)``: 0 when each
    domain uses the experts alike, ``log D`` when no two domains share an expert.

    Args:
        counts_DE: ``(D, E)`` integer counts of one layer; domains without counts are left out.
    """
    counts = counts_DE.double()
    counts = counts[counts.sum(dim=1) > 0]
    if counts.shape[0] == 0:
        return 0.0
    given_domain = counts / counts.sum(dim=1, keepdim=True)
    marginal = given_domain.mean(dim=0, keepdim=True)
    ratio = torch.where(given_domain > 0, given_domain / marginal.clamp(min=1e-300), 1.0)
    return float((given_domain * ratio.log()).sum(dim=1).mean())


def max_selection_frequency(counts_DE: Tensor) -> Tensor:
    """For each domain, the share of its selections that its most used expert took.

    Args:
        counts_DE: ``(D, E)`` integer counts of one layer.

    Returns:
        ``(D,)`` fp64 in [0, 1]; uniform is 1/E.
    """
    counts = counts_DE.double()
    return counts.amax(dim=1) / counts.sum(dim=1).clamp(min=1)
