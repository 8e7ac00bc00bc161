"""Putting a LoadBalancer together: process groups, layout, reducer. Changes no engine."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_moe_lb.balancer import LoadBalancer
from ds_moe_lb.config import SECTION, LoadBalancingConfig
from ds_moe_lb.counts import CountLayout, RouterLayer
from ds_moe_lb.policy import Policies
from ds_moe_lb.process_groups import (
    CountGroup,
    GroupFactory,
    data_parallel_ranks,
    expert_group_ranks,
    model_groups,
    pipeline_ranks,
)
from ds_moe_lb.sites import RouterSite
from ds_moe_lb.sync import CountReducer, ModelPlace, compare_signatures, place_among_stages


def build_balancer(
    engine: Any,
    config: LoadBalancingConfig,
    sites: Sequence[RouterSite],
    policies: Policies,
) -> LoadBalancer:
    """Make the handle of an engine. Collective: every rank must call it.

    Args:
        engine: what is trained.
        config: the section.
        sites: this rank's routers.
        policies: by the step from which each is in force.

    Raises:
        ValueError: layers without expert groups, or a pipeline without MoE layers.
        RuntimeError: the ranks were set up differently.
    """
    layers = [
        RouterLayer(index, site.name, site.num_experts, site.top_k)
        for index, site in enumerate(sites)
    ]
    factory = GroupFactory(model_groups(engine))
    everyone = factory.create(data_parallel_ranks(engine), replicas=engine.sequence_parallel_size)
    # Before the groups of single layers, which differ in number from stage to stage.
    is_pipeline = isinstance(engine, PipelineEngine)
    pipe_group = factory.create(pipeline_ranks(engine)) if is_pipeline else None
    signature = {
        "layers": [(x.name, x.num_experts, x.top_k) for x in layers],
        "config": config.model_dump(),
        "coefficients": [policy.coefficients for _, policy in policies],
    }
    compare_signatures(signature, count_group=everyone)
    groups: list[CountGroup] = [
        everyone
        if config.sync_group == "data_parallel"
        else factory.create(
            _expert_ranks(site, kind=config.sync_group),
            replicas=engine.sequence_parallel_size,
        )
        for site in sites
    ]
    layout = CountLayout(layers, torch.device(engine.device))
    place = ModelPlace(layout, slice(0, layout.num_counts), slice(0, len(layers)))
    if pipe_group is not None:
        place = place_among_stages(layout, pipe_group=pipe_group)
        if not place.layout.layers:
            raise ValueError(
                f"{SECTION}: no stage of the pipeline has deepspeed.moe.layer.MoE layers, so there "
                f"is nothing to balance; remove the section or use MoE layers"
            )
    return LoadBalancer(
        engine,
        config,
        layout=layout,
        reducer=CountReducer(layout, groups),
        place=place,
        report_group=everyone,
        policies=policies,
    )


def _expert_ranks(site: RouterSite, *, kind: str) -> list[int]:
    if site.expert_group_name is None:
        raise ValueError(
            f"{SECTION}.sync_group: got {kind!r}, but every rank holds all experts of layer "
            f"{site.name!r}, so it has no expert groups; use 'data_parallel'"
        )
    return expert_group_ranks(site.expert_group_name, kind=kind)
