"""The first weights of a router."""

import numpy as np
import torch
from torch import Tensor

from ds_moe_lb.convert.plan import ConversionOptions

# Draws of the gate are independent of those of the split.
_GATE_STREAM = 1


def make_gate(
    options: ConversionOptions, *, layer: int, gate_proj_HD: Tensor, experts_EM: Tensor
) -> Tensor:
    """A router weight ``(E, D)`` in the dtype of `gate_proj_HD`.

    ``expert_mean`` sends a token to the expert whose neurons it opens most: row e is the mean
    gate_proj row of expert e, minus the mean over experts, which a softmax does not see, all scaled
    to `gate_std`.
    """
    num_experts, model_dim = options.num_experts, gate_proj_HD.shape[1]
    if options.gate_init == "zero":
        gate_ED = torch.zeros(num_experts, model_dim)
    elif options.gate_init == "random":
        random = np.random.default_rng([options.seed, layer, _GATE_STREAM])
        draws = random.standard_normal((num_experts, model_dim)) * options.gate_std
        gate_ED = torch.from_numpy(draws)
    else:
        means_ED = torch.stack([gate_proj_HD[expert].float().mean(dim=0) for expert in experts_EM])
        centred_ED = means_ED - means_ED.mean(dim=0)
        # The floor keeps experts that are all alike at zero.
        gate_ED = centred_ED * (options.gate_std / centred_ED.std().clamp_min(1e-12))
    return gate_ED.to(gate_proj_HD.dtype)
