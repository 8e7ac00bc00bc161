"""Who adds the balancing loss, and what it weighs in each layer."""

from collections.abc import Sequence
from typing import Protocol

from ds_moe_lb.config import SECTION, LoadBalancingConfig
from ds_moe_lb.sites import RouterSite


class ReplacedLoss(Protocol):
    """An auxiliary loss of the model's own whose place is taken."""

    @property
    def is_on(self) -> bool:
        """Whether the model adds it by default."""

    def weights(self, sites: Sequence[RouterSite]) -> list[float]:
        """What each layer's loss has to weigh instead."""


def layer_coefficients(
    config: LoadBalancingConfig, sites: Sequence[RouterSite], own_loss: ReplacedLoss | None
) -> list[float] | None:
    """The coefficient of each layer's loss where the plugin adds it, None where a script does.

    Args:
        config: the section.
        sites: the routers.
        own_loss: what the model itself would add, if it has such a thing.

    Raises:
        ValueError: nobody would apply a loss.
    """
    if config.aux_loss_coeff is not None:
        return [config.aux_loss_coeff] * len(sites)
    without = [site.name for site in sites if not site.has_l_aux]
    if not without or config.scope == "none":
        return None
    if len(without) < len(sites):
        raise ValueError(
            f"{SECTION}.aux_loss_coeff: got None, but only some of the MoE layers hand an l_aux to "
            f"the script ({without[0]!r} does not); set it to a number, and the plugin adds the "
            f"gradient in all of them"
        )
    if own_loss is not None and own_loss.is_on:
        return own_loss.weights(sites)
    why = (
        "has no auxiliary loss of its own"
        if own_loss is None
        else "adds its auxiliary loss only with output_router_logits true and router_aux_loss_coef"
        " above 0 in its config"
    )
    raise ValueError(
        f"{SECTION}.aux_loss_coeff: got None, but the model {why}, so nobody would apply a loss; "
        f"set it to a number, for instance 0.001, and the plugin adds the gradient"
    )
