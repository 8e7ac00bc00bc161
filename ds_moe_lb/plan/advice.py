"""What a user should know before the run: one sentence for each thing that is likely not meant."""

from ds_moe_lb.config import SECTION, LoadBalancingConfig
from ds_moe_lb.plan.arithmetic import World
from ds_moe_lb.plan.model_facts import MoeFacts

# As in ds_moe_lb.monitor, which imports torch and DeepSpeed.
MAX_EXPERT_KEYS = 1024
# arXiv 2501.11873: perplexity 8.167 with 4 sequences, 8.062 with 32, 8.038 with 512 (3.4B, 64
# experts, 120B tokens); 7.199 with a buffer of 128 against 7.198 with 512 (400B tokens).
_SMALL, _AMPLE = 32, 128
_EVIDENCE = (
    "arXiv 2501.11873 saw perplexity 8.167 with 4 sequences, 8.062 with 32 and 8.038 with 512, and "
    "no more difference between 128 and 512"
)


def warnings(
    facts: MoeFacts, world: World, config: LoadBalancingConfig, *, has_section: bool
) -> list[str]:
    """Everything worth a warning, the most serious first."""
    found = []
    if not has_section:
        found.append(
            f"{SECTION} is absent from the config, so the plugin would stay off; planned with its "
            f"defaults"
        )
    elif not config.enabled:
        found.append(f"{SECTION}.enabled is false: the plugin stays off; planned as if it were on")
    return [
        *found,
        *_expert_parallel(facts, world),
        *_coefficient(facts, config),
        *_balance_batch(world, config),
        *_monitor(facts, config),
    ]


def _expert_parallel(facts: MoeFacts, world: World) -> list[str]:
    found = []
    for number, what in (
        (world.num_data_ranks, "the data-parallel ranks"),
        (facts.num_experts, "the experts of a layer"),
    ):
        if number % world.ep_size:
            divisors = [n for n in range(1, number + 1) if number % n == 0 and n <= world.ep_size]
            found.append(
                f"expert-parallel size {world.ep_size} does not divide {what} ({number}), which "
                f"DeepSpeed needs; the next smaller that does is {divisors[-1]}"
            )
    return found


def _coefficient(facts: MoeFacts, config: LoadBalancingConfig) -> list[str]:
    coefficient, key = facts.coefficient, facts.coefficient_key
    if config.scope == "none":
        return ["scope none only measures: no loss of ours, and l_aux stays DeepSpeed's"]
    if config.aux_loss_coeff == 0 and (config.z_loss_coeff or config.bias_update_rate):
        return []
    if config.aux_loss_coeff == 0:
        return ["aux_loss_coeff 0 adds nothing: metrics only"]
    if config.aux_loss_coeff is not None:
        return []
    found = [
        "aux_loss_coeff is null: the loss works only if the script adds coefficient * l_aux of "
        "every MoE layer, and PipelineEngine refuses it"
    ]
    if coefficient is not None and facts.has_own_term is not True:
        found.append(
            f"{key} {coefficient:g} of the model would be ignored: "
            + (
                "transformers adds its term only with output_router_logits true"
                if key in ("router_aux_loss_coef", "aux_loss_coef")
                else "transformers does not use that key"
            )
            + "; for its strength set aux_loss_coeff to "
            f"{coefficient * facts.top_k / facts.num_moe_layers:.3g} (c k / L)"
        )
    return found


def _balance_batch(world: World, config: LoadBalancingConfig) -> list[str]:
    if config.scope != "global_batch":
        return []
    own = world.balance_batch(None, micro_steps=1)
    sequences = world.balance_batch(config.sync_group, micro_steps=world.gas)
    if sequences <= own:
        return [
            f"f is taken over {sequences:g} sequences, the micro-batch itself, so nothing changes; "
            f"raise gradient_accumulation_steps or the ranks of the sync group"
        ]
    if sequences < _SMALL:
        return [
            f"balance batch size {sequences:g} sequences is small: {_EVIDENCE}; raise "
            f"gradient_accumulation_steps or sync over more ranks"
        ]
    if sequences < _AMPLE:
        return [f"balance batch size {sequences:g} sequences leaves a little: {_EVIDENCE}"]
    return []


def _monitor(facts: MoeFacts, config: LoadBalancingConfig) -> list[str]:
    loads = facts.num_moe_layers * facts.num_experts
    if config.monitor.enabled and config.monitor.detail == "expert" and loads > MAX_EXPERT_KEYS:
        return [
            f"monitor.detail expert: only the loads of the first {MAX_EXPERT_KEYS} experts are "
            f"written, of {loads:,}; use layer, or image_interval for a picture of all"
        ]
    return []
