"""The experiments by name: which runs each consists of, and what they are compared with."""

from typing import Any

from ds_moe_lb.experiments.experiment import Experiment, Variant
from ds_moe_lb.experiments.setting import NUM_RANKS, RunSpec, Setting

DEFAULT_SEEDS = 5
WEIGHTS = (0.003, 0.01, 0.03, 0.1, 0.3)
SWITCH_SHARES = (0.25, 0.5, 0.75)
ESTIMATES = ("running", "carry", "boundary", "exact")


def micro(setting: Setting, *, weight: float | None = None) -> dict[str, Any]:
    """The section of the usual loss."""
    return {"scope": "micro_batch", "aux_loss_coeff": weight or setting.aux_loss_coeff}


def over_global_batch(
    setting: Setting, estimate: str = "exact", *, weight: float | None = None, **more: Any
) -> dict[str, Any]:
    """The section of the global-batch loss."""
    weight = setting.aux_loss_coeff if weight is None else weight
    return {"scope": "global_batch", "estimate": estimate, "aux_loss_coeff": weight, **more}


def whole_step(setting: Setting) -> int:
    """The micro-batch size with one forward per rank and step: there `running` is `exact`, at half
    the price.
    """
    return setting.global_batch_size // NUM_RANKS


def _methods(setting: Setting) -> list[Variant]:
    hybrid = over_global_batch(setting, "running", micro_batch_weight=setting.hybrid_weight)
    rate = setting.bias_update_rate
    bias = over_global_batch(setting, "running", weight=0.0, bias_update_rate=rate)
    sections = {name: over_global_batch(setting, name) for name in ESTIMATES}
    in_paper = {"running": True, "exact": True}  # as its buffer, and as its synchronisation
    return [
        Variant(name="micro", section=micro(setting)),
        *(
            Variant(name=name, section=x, baseline="micro", paper_lowers_loss=in_paper.get(name))
            for name, x in sections.items()
        ),
        Variant(
            name="shuffle",
            section=micro(setting),
            shuffled=True,
            baseline="micro",
            paper_lowers_loss=True,
        ),
        Variant(name="hybrid", section=hybrid, baseline="micro", paper_lowers_loss=True),
        Variant(name="bias", section=bias, baseline="micro", paper_lowers_loss=True),
        # Without a coefficient the training loop adds 0.1 x DeepSpeed's own l_aux.
        Variant(name="deepspeed", section={"scope": "none"}, baseline="micro"),
        Variant(name="none", section={"scope": "none", "aux_loss_coeff": 0.0}, baseline="micro"),
    ]


def _balance_batch(setting: Setting) -> list[Variant]:
    """One sequence up to the global batch; a micro-batch is as large as the batch it balances."""
    largest = whole_step(setting)
    sequence = {"scope": "sequence", "aux_loss_coeff": setting.aux_loss_coeff}
    variants = [Variant(name="1", section=sequence, micro_batch_size=largest, at=1)]
    size = 2
    while size <= largest:
        variants.append(
            Variant(
                name=f"{size}",
                section=micro(setting),
                micro_batch_size=size,
                baseline="1",
                paper_lowers_loss=True,
                at=size,
            )
        )
        size *= 2
    whole = setting.global_batch_size
    return [
        *variants,
        Variant(
            name=f"{whole}",
            section=over_global_batch(setting, "running"),
            micro_batch_size=largest,
            baseline="1",
            paper_lowers_loss=True,
            at=whole,
        ),
    ]


def _weights(setting: Setting) -> list[Variant]:
    return [
        Variant(
            name=f"{group} {weight:g}",
            baseline=f"micro {weight:g}" if group == "global" else "",
            group=group,
            at=weight,
            **_either(group, setting, weight=weight),
        )
        for group in ("micro", "global")
        for weight in WEIGHTS
    ]


def _either(group: str, setting: Setting, *, weight: float | None = None) -> dict[str, Any]:
    """Section and cut of "micro" or "global", each as cheap as it can be had."""
    if group == "micro":
        return {"section": micro(setting, weight=weight)}
    section = over_global_batch(setting, "running", weight=weight)
    return {"section": section, "micro_batch_size": whole_step(setting)}


def _switch(setting: Setting) -> list[Variant]:
    def scheduled(name: str, first: dict[str, Any], then: str, *, share: float) -> Variant:
        step = max(1, round(share * setting.steps))
        section = {**first, "estimate": "exact", "schedule": [{"step": step, "scope": then}]}
        group = name.partition(" at ")[0]
        return Variant(
            name=name,
            section=section,
            baseline="micro",
            paper_lowers_loss=True,
            group=group,
            at=share,
        )

    to_global = [
        scheduled(f"micro to global at {share:.0%}", micro(setting), "global_batch", share=share)
        for share in reversed(SWITCH_SHARES)
    ]
    share = SWITCH_SHARES[len(SWITCH_SHARES) // 2]
    back = scheduled(
        f"global to micro at {share:.0%}", over_global_batch(setting), "micro_batch", share=share
    )
    group = to_global[0].group
    whole = over_global_batch(setting)
    return [
        Variant(name="micro", section=micro(setting), group=group, at=1.0),
        *to_global,
        Variant(
            name="global",
            section=whole,
            baseline="micro",
            paper_lowers_loss=True,
            group=group,
            at=0.0,
        ),
        back,
    ]


def _routing(setting: Setting) -> list[Variant]:
    return [
        Variant(name="micro", section=micro(setting)),
        Variant(
            name="global",
            section=over_global_batch(setting),
            baseline="micro",
            paper_lowers_loss=True,
        ),
    ]


def _routers(setting: Setting) -> list[Variant]:
    """Linear is what a model has without the section; its runs are shared with other experiments.

    No loss reaches a frozen router, so it is run with one of them only.
    """
    hyper = {"type": "hyper"}
    either = {group: _either(group, setting) for group in ("micro", "global")}
    return [
        Variant(name="linear, micro", **either["micro"]),
        Variant(
            name="linear, global",
            baseline="linear, micro",
            paper_lowers_loss=True,
            **either["global"],
        ),
        Variant(name="hyper, micro", router=hyper, baseline="linear, micro", **either["micro"]),
        Variant(name="hyper, global", router=hyper, baseline="linear, global", **either["global"]),
        Variant(
            name="frozen", router={"type": "frozen"}, baseline="linear, micro", **either["global"]
        ),
    ]


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            name="methods",
            question="What does each way of balancing do to loss, specialisation and balance?",
            source="the paper's Tables 1, 2 and 5",
            variants=_methods,
            also_against="exact",
        ),
        Experiment(
            name="weights",
            question="Is the global batch better at equal balance, and at each one's best weight?",
            source="the paper's Table 4",
            variants=_weights,
        ),
        Experiment(
            name="routers",
            question="Does a router made by a hypernetwork, or a frozen one, change the picture?",
            source="HyperRouter, arXiv 2312.07035",
            variants=_routers,
            also_against="hyper, micro",
        ),
        Experiment(
            name="balance-batch",
            question="How do loss and specialisation depend on the balance batch size?",
            source="the paper's Figure 2",
            variants=_balance_batch,
        ),
        Experiment(
            name="routing",
            question="Which experts does each domain use, and how sure is the router?",
            source="the paper's Figures 1 and 4",
            variants=_routing,
        ),
        Experiment(
            name="switch",
            question="Is it too late to switch to the global batch during training?",
            source="the paper's Table 3",
            variants=_switch,
            also_against="global",
        ),
    )
}


def seeds(number: int) -> range:
    """The seeds of an experiment, the same for all its variants."""
    return range(1, number + 1)


def runs_of(
    experiment: Experiment, setting: Setting, *, num_seeds: int
) -> list[tuple[Variant, RunSpec]]:
    """All runs, a whole set of variants for one seed after the other."""
    variants = experiment.variants(setting)
    return [
        (variant, variant.run(setting, seed=seed))
        for seed in seeds(num_seeds)
        for variant in variants
    ]
