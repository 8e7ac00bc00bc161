"""What the plugin puts on the network: collectives and bytes of a step, and a model of their time.

The counts are exact; the time is a model with the reader's latency and bandwidth in it.

Symbols: L MoE layers, E experts of a layer, G gradient accumulation steps, p ranks that sum.
"""

from dataclasses import dataclass

# With its counts every layer sends three numbers that tell ranks which disagree; all int64. As in
# ds_moe_lb.counts, which imports torch.
HEADER = 3
_BYTES = 8

ESTIMATES = ("running", "carry", "boundary", "exact")
MECHANISMS = ("l_aux", "injected")
# As in ds_moe_lb.router: calls of a layer that are remembered at most.
MAX_RECORDS = 256
_FORWARD_SHARE = 1 / 3  # of a micro-step: backward is twice a forward


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Count collectives of one optimizer step on one rank.

    Attributes:
        collectives: all-reduces.
        message_bytes: of each.
    """

    collectives: int
    message_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that a rank hands to all-reduces in a step."""
        return self.collectives * self.message_bytes


def count_traffic(
    *,
    estimate: str,
    mechanism: str,
    num_layers: int,
    num_experts: int,
    gas: int,
    group_size: int,
) -> Traffic:
    """Count collectives of an optimizer step in a full window that has a window before it.

    `running` and `carry` reduce every micro-step: each layer at its gate where the script adds
    ``l_aux``, all layers in one message where the plugin adds the loss. `boundary` and `exact`
    reduce once per window. A group of one rank reduces nothing.

    Args:
        estimate: one of ESTIMATES.
        mechanism: "l_aux", or "injected" where ``aux_loss_coeff`` is a number above 0.
        num_layers: L of this rank.
        num_experts: E.
        gas: G.
        group_size: ranks of the sync group.
    """
    if group_size == 1:
        return Traffic(collectives=0, message_bytes=0)
    layer_bytes = (num_experts + HEADER) * _BYTES
    if estimate in ("boundary", "exact"):
        return Traffic(collectives=1, message_bytes=num_layers * layer_bytes)
    if mechanism == "l_aux":
        return Traffic(collectives=num_layers * gas, message_bytes=layer_bytes)
    return Traffic(collectives=gas, message_bytes=num_layers * layer_bytes)


def report_traffic(*, num_layers: int, num_experts: int, group_size: int) -> Traffic:
    """The fp64 reduction of one monitor report: counts and probabilities of every expert, four
    numbers of every layer.
    """
    if group_size == 1:
        return Traffic(collectives=0, message_bytes=0)
    return Traffic(
        collectives=1, message_bytes=(2 * num_layers * num_experts + 4 * num_layers) * _BYTES
    )


def memory_bytes(
    *,
    num_layers: int,
    num_experts: int,
    gas: int,
    estimate: str,
    mechanism: str,
    reports: bool,
) -> int:
    """Tensors that the plugin holds on a rank at the end of a window; independent of tokens.

    For F = L E counts: the window so far and where each count stands in the messages (40 F bytes);
    for `boundary` and `carry` the last window and its slopes (12 F), for `exact` what was counted
    before, here and in all, and its slopes (20 F); with reports their sums and
    the last load (16 F). Besides, of each micro-step whose calls are remembered: its counts (24 F)
    and slopes (4 F), with reports its sums (4 F), and the message of each layer's own reduction (8
    F). Calls are remembered until the plugin has seen their backward, which it does where it adds
    the loss; otherwise until the window ends.

    Args:
        num_layers: L of this rank.
        num_experts: E.
        gas: G.
        estimate: one of ESTIMATES.
        mechanism: one of MECHANISMS, or "none" where nothing is reduced or added.
        reports: ``monitor.enabled``.
    """
    f = num_layers * num_experts
    keeps_previous = mechanism != "none" and estimate in ("boundary", "carry")
    per_window = 40 * f + 80 * num_layers
    per_window += 12 * f if keeps_previous else 0
    is_exact = mechanism != "none" and estimate == "exact"
    per_window += 20 * f if is_exact else 0
    per_window += 16 * f + 32 * num_layers if reports else 0
    per_micro_step = 24 * f + (4 * f + 8 * num_layers if reports else 0)
    per_micro_step += 0 if is_exact or (estimate == "boundary" and keeps_previous) else 4 * f
    if mechanism == "l_aux" and estimate in ("running", "carry"):
        per_micro_step += 8 * (f + HEADER * num_layers)
    remembered = 1 if mechanism == "injected" else min(gas, MAX_RECORDS)
    return per_window + remembered * per_micro_step


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network in the latency-bandwidth model.

    Attributes:
        latency_s: time of the smallest message between two ranks, in seconds.
        bytes_per_s: bandwidth of one rank.
    """

    latency_s: float
    bytes_per_s: float

    def ring_s(self, num_bytes: float, num_ranks: int) -> float:
        """Ring all-reduce: ``2 (p - 1) (a + n / (p b))``.

        Reduce-scatter and all-gather of p - 1 steps each with 1/p of the n bytes: Thakur,
        Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", Int.
        J. High Perf. Comp. Appl. 19(1), 2005; a = latency, b = bandwidth.
        """
        steps = 2 * (num_ranks - 1)
        return steps * (self.latency_s + num_bytes / num_ranks / self.bytes_per_s)

    def tree_s(self, num_bytes: float, num_ranks: int) -> float:
        """Double binary tree, reduce then broadcast: ``2 ceil(log2 p) a + 2 n / b``.

        The pipelined two-tree of Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth
        broadcast, reduction and scan", Parallel Computing 35(12), 2009, without its lower-order
        term; what NCCL calls Tree.
        """
        depth = (num_ranks - 1).bit_length()
        return 2 * depth * self.latency_s + 2 * num_bytes / self.bytes_per_s if depth else 0.0

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        """The faster of the two, as communication libraries choose by size."""
        return min(self.ring_s(num_bytes, num_ranks), self.tree_s(num_bytes, num_ranks))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of the count collectives in one optimizer step, in seconds.

    Attributes:
        exposed_s: if nothing hides them.
        overlapped_s: what is left of it behind the computation that runs meanwhile.
    """

    exposed_s: float
    overlapped_s: float


def step_time(
    traffic: Traffic,
    *,
    network: Network,
    group_size: int,
    estimate: str,
    mechanism: str,
    num_layers: int,
    gas: int,
    step_s: float,
) -> StepTime:
    """How long the collectives of a step take, and how much of it computation can hide.

    Each collective is hidden by what runs between its launch and where it is awaited, with a
    forward taken as a third of a micro-step and all layers as equally long:

    - ``l_aux``, `running` and `carry`: from the gate to the end of its layer, one layer's forward.
    - injected, `running` and `carry`: from the end of the forward to the first router of the
      backward: taken as nothing.
    - `boundary`: from the end of the step to where the next window needs it first: its first layer
      for ``l_aux``, the whole first forward for an injected gradient.
    - `exact`: from the counting pass to the first backward, taken as nothing. The counting pass
      itself, one more forward, is not in this time.

    Args:
        traffic: from :func:`count_traffic`.
        network: latency and bandwidth.
        group_size: ranks that sum.
        estimate: one of ESTIMATES.
        mechanism: one of MECHANISMS.
        num_layers: L.
        gas: G.
        step_s: duration of an optimizer step without the plugin.
    """
    one_s = network.all_reduce_s(traffic.message_bytes, group_size)
    forward_s = step_s / gas * _FORWARD_SHARE
    cover_s = 0.0
    if estimate != "exact" and mechanism == "l_aux":
        cover_s = forward_s / num_layers
    elif estimate == "boundary":
        cover_s = forward_s
    return StepTime(
        exposed_s=traffic.collectives * one_s,
        overlapped_s=traffic.collectives * max(0.0, one_s - cover_s),
    )
