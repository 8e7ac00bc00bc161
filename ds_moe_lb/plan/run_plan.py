"""One run that is planned: model, ranks and section, and what follows from the three together."""

from dataclasses import dataclass

from ds_moe_lb.config import LoadBalancingConfig
from ds_moe_lb.plan import cost
from ds_moe_lb.plan.arithmetic import World
from ds_moe_lb.plan.model_facts import MoeFacts


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is printed follows from these.

    Attributes:
        facts: the model.
        world: the ranks.
        config: the section.
        has_section: whether the JSON has it.
        network: latency and bandwidth; None = no times.
        step_s: duration of a step, in seconds; with a network only.
    """

    facts: MoeFacts
    world: World
    config: LoadBalancingConfig
    has_section: bool
    network: cost.Network | None
    step_s: float

    @property
    def mechanism(self) -> str:
        """How the section adds a loss over the global batch; "none" where it does not."""
        config = self.config
        adds_nothing = config.aux_loss_coeff == 0 and not config.z_loss_coeff
        if config.scope != "global_batch" or adds_nothing:
            return "none"
        return "l_aux" if self.config.aux_loss_coeff is None else "injected"

    def traffic(self, *, estimate: str, mechanism: str, group_size: int) -> cost.Traffic:
        """Collectives of a step with this model and G."""
        return cost.count_traffic(
            estimate=estimate,
            mechanism=mechanism,
            num_layers=self.facts.num_moe_layers,
            num_experts=self.facts.num_experts,
            gas=self.world.gas,
            group_size=group_size,
        )

    def own_traffic(self) -> cost.Traffic:
        """Collectives of a step with the section as it is."""
        if self.mechanism == "none":
            if not self.config.bias_update_rate:
                return cost.Traffic(collectives=0, message_bytes=0)
            # The counts of a whole window, as with `boundary`.
            group_size = self.world.group_size("data_parallel")
            return self.traffic(estimate="boundary", mechanism="none", group_size=group_size)
        return self.traffic(
            estimate=self.config.estimate,
            mechanism=self.mechanism,
            group_size=self.world.group_size(self.config.sync_group),
        )

    def memory_bytes(self) -> int:
        """What the plugin holds on a rank with the section as it is."""
        return cost.memory_bytes(
            num_layers=self.facts.num_moe_layers,
            num_experts=self.facts.num_experts,
            gas=self.world.gas,
            estimate=self.config.estimate,
            mechanism=self.mechanism,
            reports=self.config.monitor.enabled,
        )

    def time(self, *, estimate: str, mechanism: str, group_size: int) -> cost.StepTime:
        """Time of these collectives; needs a network."""
        assert self.network is not None
        return cost.step_time(
            self.traffic(estimate=estimate, mechanism=mechanism, group_size=group_size),
            network=self.network,
            group_size=group_size,
            estimate=estimate,
            mechanism=mechanism,
            num_layers=self.facts.num_moe_layers,
            gas=self.world.gas,
            step_s=self.step_s,
        )
