"""`ds-moe-lb plan`: batch sizes, collectives, bytes, memory and warnings before a run."""

import argparse

from ds_moe_lb.cli.arguments import UsageError, usage_errors
from ds_moe_lb.cli.train import load_ds_config
from ds_moe_lb.cli.verify import require_rich
from ds_moe_lb.config import SECTION, LoadBalancingConfig, parse_config
from ds_moe_lb.plan.arithmetic import make_world
from ds_moe_lb.plan.cost import Network
from ds_moe_lb.plan.model_facts import read_model
from ds_moe_lb.plan.run_plan import Plan


def run(options: argparse.Namespace) -> int:
    """Print the plan; returns 0, also where it warns."""
    require_rich()
    from ds_moe_lb.plan.table import print_plan

    with usage_errors():
        ds_config = load_ds_config(options.config)
        section = parse_config(ds_config)
        world = make_world(
            ds_config,
            world_size=options.world_size,
            ep_size=options.ep_size,
            tensor_parallel_size=options.tensor_parallel_size,
            sequence_parallel_size=options.sequence_parallel_size,
            sequence_length=options.sequence_length,
            micro_batch=options.micro_batch_size,
            gas=options.gradient_accumulation_steps,
        )
        plan = Plan(
            facts=read_model(options.model),
            world=world,
            config=section or LoadBalancingConfig(),
            has_section=SECTION in ds_config,
            network=_network(options),
            step_s=(options.step_time_ms or 0.0) / 1e3,
        )
    print_plan(plan)
    return 0


def _network(options: argparse.Namespace) -> Network | None:
    given = {
        "--latency-us": options.latency_us,
        "--bandwidth-gbps": options.bandwidth_gbps,
        "--step-time-ms": options.step_time_ms,
    }
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise UsageError(f"{', '.join(given)} belong together; missing: {', '.join(missing)}")
    for flag, value in given.items():
        if not 0 < value < float("inf"):
            raise UsageError(f"{flag}: got {value:g}, expected a finite number > 0")
    return Network(
        latency_s=options.latency_us * 1e-6, bytes_per_s=options.bandwidth_gbps * 1e9 / 8
    )
