"""Over how many sequences and tokens f is taken, and what other coefficients come to.

Symbols: D ranks that the engine averages the router's gradient over, G gradient accumulation steps,
B sequences of a micro-batch, L MoE layers, k experts per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a run and what each of them gets.

    Attributes:
        world_size: all ranks.
        tensor_parallel_size: ranks that hold the same tokens; their counts are never added.
        sequence_parallel_size: ranks that share each sequence.
        ep_size: expert-parallel size.
        micro_batch: B, sequences; with sequence parallelism those that the ranks share.
        gas: G.
        sequence_length: tokens of a sequence; None if the user did not say.
    """

    world_size: int
    tensor_parallel_size: int
    sequence_parallel_size: int
    ep_size: int
    micro_batch: int
    gas: int
    sequence_length: int | None

    @property
    def num_data_ranks(self) -> int:
        """Ranks with tokens of their own: data x sequence parallel."""
        return self.world_size // self.tensor_parallel_size

    @property
    def dp_size(self) -> int:
        """D."""
        return self.num_data_ranks // self.sequence_parallel_size

    def group_size(self, sync_group: str) -> int:
        """Ranks whose counts are summed together."""
        if sync_group == "expert_parallel":
            return self.ep_size
        if sync_group == "expert_data_parallel":
            return self.num_data_ranks // self.ep_size
        return self.num_data_ranks

    def balance_batch(self, sync_group: str | None, *, micro_steps: int) -> float:
        """Balance batch size: sequences over which f is taken.

        Args:
            sync_group: None = this rank's own micro-batch.
            micro_steps: how many of them f sees.
        """
        ranks = 1 if sync_group is None else self.group_size(sync_group)
        return ranks * self.micro_batch * micro_steps / self.sequence_parallel_size


def make_world(
    ds_config: Mapping[str, Any],
    *,
    world_size: int,
    ep_size: int | None = None,
    tensor_parallel_size: int = 1,
    sequence_parallel_size: int = 1,
    sequence_length: int | None = None,
    micro_batch: int | None = None,
    gas: int | None = None,
) -> World:
    """Combine flags and DeepSpeed JSON.

    Args:
        ds_config: the JSON.
        world_size: ranks.
        ep_size: None = ``expert_parallel.autoep_size`` of the JSON, else 1.
        tensor_parallel_size: see :class:`World`.
        sequence_parallel_size: see :class:`World`.
        sequence_length: see :class:`World`.
        micro_batch: stands in for ``train_micro_batch_size_per_gpu`` where that is "auto".
        gas: stands in for ``gradient_accumulation_steps`` where that is "auto".

    Raises:
        ValueError: a size that is not positive or does not divide, or batch sizes that DeepSpeed
            itself would refuse.
    """
    if ep_size is None:
        section = ds_config.get("expert_parallel")
        found = section.get("autoep_size", 1) if isinstance(section, Mapping) else 1
        ep_size = found if isinstance(found, int) else 1
    sizes = {
        "--world-size": world_size,
        "--ep-size": ep_size,
        "--tensor-parallel-size": tensor_parallel_size,
        "--sequence-parallel-size": sequence_parallel_size,
        "--sequence-length": sequence_length,
        "--micro-batch-size": micro_batch,
        "--gradient-accumulation-steps": gas,
    }
    for flag, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{flag}: got {size}, expected an integer >= 1")
    inner = tensor_parallel_size * sequence_parallel_size
    if world_size % inner:
        raise ValueError(
            f"--world-size: got {world_size}, expected a multiple of tensor x sequence parallel "
            f"size = {tensor_parallel_size} x {sequence_parallel_size}"
        )
    micro_batch, gas = _batch_sizes(
        ds_config, dp_size=world_size // inner, micro_batch=micro_batch, gas=gas
    )
    return World(
        world_size=world_size,
        tensor_parallel_size=tensor_parallel_size,
        sequence_parallel_size=sequence_parallel_size,
        ep_size=ep_size,
        micro_batch=micro_batch,
        gas=gas,
        sequence_length=sequence_length,
    )


def _batch_sizes(
    ds_config: Mapping[str, Any], *, dp_size: int, micro_batch: int | None, gas: int | None
) -> tuple[int, int]:
    """B and G as DeepSpeed works them out from its three keys, of which two are enough."""
    train_batch = _given(ds_config, "train_batch_size")
    micro_batch = _filled(ds_config, "train_micro_batch_size_per_gpu", micro_batch)
    gas = _filled(ds_config, "gradient_accumulation_steps", gas)
    if train_batch is None and micro_batch is None:
        raise ValueError(
            "--config: neither train_batch_size nor train_micro_batch_size_per_gpu is a number; "
            "write one of them or give --micro-batch-size"
        )
    if micro_batch is None:
        assert train_batch is not None
        micro_batch = max(train_batch // dp_size // (gas or 1), 1)
    if gas is None:
        gas = 1 if train_batch is None else max(train_batch // micro_batch // dp_size, 1)
    if train_batch is not None and train_batch != micro_batch * gas * dp_size:
        raise ValueError(
            f"--config: train_batch_size is {train_batch}, but micro-batch x accumulation x "
            f"data-parallel ranks = {micro_batch} x {gas} x {dp_size} = "
            f"{micro_batch * gas * dp_size}; DeepSpeed refuses that"
        )
    return micro_batch, gas


def _given(ds_config: Mapping[str, Any], key: str) -> int | None:
    value = ds_config.get(key)
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"--config: {key}: got {value!r}, expected an integer >= 1")
    return value


def _filled(ds_config: Mapping[str, Any], key: str, flag_value: int | None) -> int | None:
    value = _given(ds_config, key)
    if value is not None and flag_value is not None and value != flag_value:
        flag = "--" + key.replace("train_", "").replace("_per_gpu", "").replace("_", "-")
        raise ValueError(f"{flag}: got {flag_value}, but {key} is {value} in the config; keep one")
    return flag_value if value is None else value


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """One coefficient of another system as an ``aux_loss_coeff``.

    Attributes:
        source: where the coefficient is used.
        formula: as the README states it.
        factor: ``aux_loss_coeff`` = factor x the other coefficient.
    """

    source: str
    formula: str
    factor: float


def conversions(*, num_layers: int, top_k: int, dp_size: int) -> list[Conversion]:
    """What keeps the strength of a coefficient c.

    transformers' term is k x (loss of all layers pooled) and weighs each of L layers 1/L of that;
    Megatron's global loss makes a gradient 1/D of the intended one.
    """
    return [
        Conversion(source="DeepSpeed c * sum(l_aux)", formula="c", factor=1.0),
        Conversion(source="Megatron aux_loss", formula="c", factor=1.0),
        Conversion(source="Megatron global_aux_loss", formula="c / D", factor=1 / dp_size),
        Conversion(
            source="transformers router_aux_loss_coef",
            formula="c k / L",
            factor=top_k / num_layers,
        ),
    ]


def chance_max_violation(num_tokens: float, *, num_experts: int, top_k: int) -> float:
    """The MaxVio that even routing shows by chance: of tokens that each choose k experts at random.

    A count is binomial, T draws with p = k/E, and near normal; the E counts add up to k T, so any
    two correlate by -1/(E-1). Their expected maximum lies sqrt(T p (1-p)) sqrt(E/(E-1)) m above
    the mean T p, with m the expected maximum of E independent standard normals. Tokens of one text
    resemble each other, so real routing that is even in expectation lies above it.

    Args:
        num_tokens: T, over which the load is counted.
        num_experts: E.
        top_k: k.
    """
    if num_experts == top_k:
        return 0.0
    share = top_k / num_experts
    deviation = sqrt((1 - share) / (share * num_tokens)) * sqrt(num_experts / (num_experts - 1))
    return deviation * _expected_maximum(num_experts)


def _expected_maximum(number: int) -> float:
    """E[max] of independent standard normals: the mean of their quantiles' ``u ** (1 / n)``."""
    normal, steps = NormalDist(), 2000
    # The maximum is the inverse distribution at u^(1/n) of a uniform u; midpoints avoid both ends.
    return sum(normal.inv_cdf(((i + 0.5) / steps) ** (1 / number)) for i in range(steps)) / steps
