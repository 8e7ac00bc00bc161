"""What the plugin does during one accumulation window: one state of the section, ready for use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ds_moe_lb.config import LoadBalancingConfig

# When the counts of a micro-step are reduced: for each layer at its gate, for all layers when the
# forward has ended, or never.
Reduction = Literal["at_gate", "after_forward", "none"]


@dataclass(frozen=True)
class Policy:
    """One state of the section.

    Attributes:
        config: the section in this state.
        coefficients: of each layer's loss, which the plugin adds; None where a script adds `l_aux`.
        adds_loss: whether the plugin adds any. A pipeline stage without MoE layers has no
            coefficients, but goes with the others.
    """

    config: LoadBalancingConfig
    coefficients: Sequence[float] | None
    adds_loss: bool

    def describe(self) -> str:
        """The terms that are in force, in words."""
        config = self.config
        parts = [f"scope {config.scope}"]
        if config.scope == "global_batch":
            parts.append(f"estimate {config.estimate}")
        parts += [
            f"{key} {value:g}"
            for key in ("aux_loss_coeff", "micro_batch_weight", "z_loss_coeff", "bias_update_rate")
            if (value := getattr(config, key))
        ]
        return ", ".join(parts)

    @property
    def injects(self) -> bool:
        """The plugin itself adds a gradient."""
        return self.adds_loss or bool(self.coefficients is not None and self.config.z_loss_coeff)

    @property
    def micro_batch_weight(self) -> float:
        """Of the hybrid's second part; 0 where there is no first."""
        return self.config.micro_batch_weight if self.reduction != "none" else 0.0

    @property
    def adds_local_loss(self) -> bool:
        """The plugin adds a loss, or a part of one, that is a micro-batch's or sequence's own."""
        return self.adds_loss and (self.reduction == "none" or self.micro_batch_weight > 0)

    @property
    def replaces_l_aux(self) -> bool:
        """False with scope `none`, where the built-in ``l_aux`` stays."""
        return self.config.scope != "none"

    @property
    def offers_l_aux(self) -> bool:
        """A script is expected to add ``l_aux``, which is the loss."""
        return self.replaces_l_aux and self.coefficients is None

    @property
    def estimate(self) -> str:
        """`running`, `carry`, `boundary` or `exact`; "local" where f is a micro-batch's own."""
        return self.config.estimate if self.reduction != "none" else "local"

    @property
    def reduction(self) -> Reduction:
        """When this window's own micro-steps are reduced, if its estimate needs them at all."""
        if self.config.scope != "global_batch" or (
            self.coefficients is not None and not self.injects
        ):
            return "none"
        return "at_gate" if self.coefficients is None else "after_forward"

    @property
    def uses_loss(self) -> bool:
        """A loss of ours has an effect, so its value is worth a report."""
        return self.offers_l_aux or self.adds_loss


# With the global step from which each is in force; the first from step 0, steps increase.
Policies = Sequence[tuple[int, Policy]]


def policy_at(policies: Policies, *, step: int) -> Policy:
    """What is in force in a window that begins at this global step."""
    return [policy for first_step, policy in policies if first_step <= step][-1]


def make_policy(config: LoadBalancingConfig, coefficients: Sequence[float] | None) -> Policy:
    """The policy of a state of the section with these coefficients of the layers."""
    adds_loss = coefficients is not None and bool(config.aux_loss_coeff or any(coefficients))
    return Policy(config, coefficients, adds_loss)
