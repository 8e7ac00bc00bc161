"""The plan as text and tables on a terminal, 80 columns wide."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from ds_moe_lb.config import SECTION, parse_section
from ds_moe_lb.plan import advice, cost
from ds_moe_lb.plan.arithmetic import chance_max_violation, conversions
from ds_moe_lb.plan.run_plan import Plan

SCALE = (8, 32, 128, 512, 2048, 4096)
# Which pairs of estimate and mechanism the table of scale shows.
_SCALE_ROWS = (("running", "l_aux"), ("running", "injected"), ("boundary", "injected"))
_SYNC_GROUPS = ("data_parallel", "expert_parallel", "expert_data_parallel")


def print_plan(plan: Plan) -> None:
    """Print everything, warnings last, where they are seen."""
    console = Console()
    _print_lines(console, [_model_line(plan), _world_line(plan), *_own_lines(plan)])
    console.print(_batch_table(plan))
    console.print(_traffic_table(plan))
    if plan.network is not None:
        console.print(_scale_table(plan))
        _print_lines(console, [_network_line(plan)])
    console.print(_coefficient_table(plan))
    _print_lines(console, _coefficient_lines(plan))
    found = advice.warnings(plan.facts, plan.world, plan.config, has_section=plan.has_section)
    _print_lines(console, [f"warning: {text}" for text in found] or ["no warnings"])


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _model_line(plan: Plan) -> str:
    facts = plan.facts
    dense = facts.num_layers - facts.num_moe_layers
    which = _ranges(facts.moe_layers)
    return (
        f"model: {facts.name}: {facts.num_moe_layers} MoE layers of {facts.num_layers} "
        f"({dense} dense; MoE: {which}), E={facts.num_experts} k={facts.top_k}"
    )


def _world_line(plan: Plan) -> str:
    world = plan.world
    return (
        f"ranks: {world.world_size}, D={world.dp_size} G={world.gas}, micro-batch "
        f"{world.micro_batch}, expert parallel {world.ep_size}, tensor parallel "
        f"{world.tensor_parallel_size}, sequence parallel {world.sequence_parallel_size}"
    )


def _own_lines(plan: Plan) -> list[str]:
    config, facts, traffic = plan.config, plan.facts, plan.own_traffic()
    how = "loss as l_aux" if config.aux_loss_coeff is None else "loss added by the plugin"
    if config.aux_loss_coeff == 0 and not config.z_loss_coeff:
        how = "no loss" + (", selection bias" if config.bias_update_rate else "")
    reports = cost.report_traffic(
        num_layers=facts.num_moe_layers,
        num_experts=facts.num_experts,
        group_size=plan.world.num_data_ranks,
    )
    lines = [
        f"{SECTION}: scope {config.scope}, estimate {config.estimate}, sync_group "
        f"{config.sync_group}, {how}: {traffic.collectives} count collectives of "
        f"{_size(traffic.message_bytes)} per optimizer step, {_size(traffic.total_bytes)} in all"
    ]
    if config.monitor.enabled:
        lines.append(
            f"reports: {reports.collectives} reduction of {_size(reports.message_bytes)} every "
            f"{config.monitor.interval} step(s)"
        )
    lines.append(
        f"memory of the plugin: about {_size(plan.memory_bytes())} per rank, whatever the tokens"
    )
    return lines


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.title_style = table.header_style = "bold"
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _batch_table(plan: Plan) -> Table:
    world, facts = plan.world, plan.facts
    columns = ["f is taken over", "ranks", "sequences"]
    if world.sequence_length:
        columns += ["tokens", "per expert", "by chance"]
    table = _table("Balance batch size of one optimizer step", columns)

    def add(name: str, sync_group: str | None, micro_steps: int) -> None:
        sequences = world.balance_batch(sync_group, micro_steps=micro_steps)
        ranks = 1 if sync_group is None else world.group_size(sync_group)
        cells = [name, str(ranks), f"{sequences:,g}" if sequences < 1e6 else f"{sequences:,.0f}"]
        if world.sequence_length:
            tokens = sequences * world.sequence_length
            cells += [f"{tokens:,.0f}", f"{tokens * facts.top_k / facts.num_experts:,.0f}"]
            cells.append(_chance(tokens, plan))
        table.add_row(*cells)

    add("micro-batch (usual)", None, 1)
    for sync_group in _SYNC_GROUPS:
        if sync_group == "data_parallel" or world.num_data_ranks % world.ep_size == 0:
            add(sync_group, sync_group, world.gas)
    if world.gas > 1 and plan.config.scope == "global_batch":
        add("micro-step 1 alone", plan.config.sync_group, 1)
    table.caption = "running grows from micro-step 1 to all; boundary sees all of the last step" + (
        ". per expert: mean selections. by chance: MaxVio of even routing at random"
        if world.sequence_length
        else ""
    )
    table.caption_justify = "left"
    return table


def _chance(tokens: float, plan: Plan) -> str:
    num_experts, top_k = plan.facts.num_experts, plan.facts.top_k
    if tokens * top_k < 10 * num_experts:  # too few for a count to be near normal
        return "-"
    return f"{chance_max_violation(tokens, num_experts=num_experts, top_k=top_k):.2g}"


def _traffic_table(plan: Plan) -> Table:
    columns = ["estimate", "loss", "number", "bytes each", "bytes"]
    if plan.network is not None:
        columns += ["exposed", "overlap"]
    group = plan.config.sync_group
    group_size = plan.world.group_size(group)
    table = _table(f"Count collectives of one optimizer step over {group}", columns)
    for estimate in cost.ESTIMATES:
        for mechanism in cost.MECHANISMS:
            traffic = plan.traffic(estimate=estimate, mechanism=mechanism, group_size=group_size)
            cells = [
                estimate + ("" if _is_available(estimate) else "*"),
                mechanism,
                f"{traffic.collectives:,}",
                f"{traffic.message_bytes:,}",
                f"{traffic.total_bytes:,}",
            ]
            if plan.network is not None:
                time = plan.time(estimate=estimate, mechanism=mechanism, group_size=group_size)
                cells += [_share(time.exposed_s, plan), _share(time.overlapped_s, plan)]
            table.add_row(*cells)
    table.caption = "boundary: its first window costs what running does"
    if not all(map(_is_available, cost.ESTIMATES)):
        table.caption += ". * refused by this version"
    table.caption_justify = "left"
    return table


def _is_available(estimate: str) -> bool:
    try:
        parse_section({"estimate": estimate})
    except ValueError:
        return False
    return True


def _scale_table(plan: Plan) -> Table:
    columns = ["ranks"]
    for what in ("exposed\nms, share", "overlap\nshare"):
        columns += [f"{estimate}\n{mechanism}\n{what}" for estimate, mechanism in _SCALE_ROWS]
    facts = plan.facts
    title = (
        f"Time of the count collectives per step: {facts.num_moe_layers} layers x "
        f"{facts.num_experts} experts, G={plan.world.gas}"
    )
    table = _table(title, columns)
    for ranks in SCALE:
        times = [plan.time(estimate=e, mechanism=m, group_size=ranks) for e, m in _SCALE_ROWS]
        table.add_row(
            f"{ranks:,}",
            *(f"{_ms(time.exposed_s)} {_share(time.exposed_s, plan)}" for time in times),
            *(_share(time.overlapped_s, plan) for time in times),
        )
    return table


def _network_line(plan: Plan) -> str:
    assert plan.network is not None
    return (
        f"assumed: latency {plan.network.latency_s * 1e6:g} us, bandwidth "
        f"{plan.network.bytes_per_s * 8 / 1e9:g} Gbit/s, step {plan.step_s * 1e3:g} ms; all-reduce "
        f"by the faster of ring and double tree. exposed: nothing hides them; overlap: what the "
        f"computation between launch and use leaves of it. Collectives and bytes do not grow with "
        f"the ranks"
    )


def _coefficient_table(plan: Plan) -> Table:
    facts = plan.facts
    table = _table(
        "aux_loss_coeff of equal strength", ["coefficient c of", "aux_loss_coeff", "= c x"]
    )
    for row in conversions(
        num_layers=facts.num_moe_layers, top_k=facts.top_k, dp_size=plan.world.dp_size
    ):
        table.add_row(row.source, row.formula, f"{row.factor:.4g}")
    return table


def _coefficient_lines(plan: Plan) -> list[str]:
    facts, ours = plan.facts, plan.config.aux_loss_coeff
    if facts.coefficient is None:
        return []
    own = facts.coefficient * facts.top_k / facts.num_moe_layers
    line = (
        f"{facts.coefficient_key} {facts.coefficient:g} of the model weighs the loss of each layer "
        f"{own:.3g} (c k / L)"
    )
    if ours:
        line += f"; aux_loss_coeff {ours:g} weighs it {ours:g}"
        line += f", {ours / own:.3g} times as much" if own else ""
    return [line]


def _size(num_bytes: float) -> str:
    unit = "B"
    for larger in ("KiB", "MiB"):
        if num_bytes >= 1024:
            num_bytes, unit = num_bytes / 1024, larger
    return f"{num_bytes:.4g} {unit}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:#.3g}".removesuffix(".")


def _share(seconds: float, plan: Plan) -> str:
    share = seconds / plan.step_s
    return "0" if share == 0 else f"{share:.2%}" if share >= 1e-4 else "<0.01%"


def _ranges(layers: Sequence[int]) -> str:
    """``0, 2-5`` for 0, 2, 3, 4, 5; even spacing as ``1, 3, .., 47``."""
    steps = {b - a for a, b in zip(layers, layers[1:], strict=False)}
    if len(layers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{layers[0]}, {layers[1]}, .., {layers[-1]}"
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
