"""Hand-made model-parallel units, as Megatron-like scripts give them to DeepSpeed."""

from typing import Any

import deepspeed.comm as dist
import torch


class Mpu:
    """Four ranks: pairs of neighbours share a model (tensor) or their sequences (sequence)."""

    def __init__(self, kind: str) -> None:
        rank = dist.get_rank()
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        everyone, alone = dist.new_group(range(4)), [dist.new_group([r]) for r in range(4)]
        self._provide("data_parallel", across[rank % 2])
        self._provide("model_parallel", alone[rank] if kind == "sequence" else pairs[rank // 2])
        self._provide("tensor_model_parallel", self.get_model_parallel_group())
        if kind == "sequence":
            self._provide("sequence_parallel", pairs[rank // 2])
            self._provide("sequence_data_parallel", everyone)

    def _provide(self, name: str, group: Any) -> None:
        setattr(self, f"get_{name}_group", lambda: group)
        setattr(self, f"get_{name}_world_size", lambda: dist.get_world_size(group))
        setattr(self, f"get_{name}_rank", lambda: dist.get_rank(group))
        setattr(self, f"get_{name}_group_ranks", lambda: dist.get_all_ranks_from_group(group))


def make_mpu(kind: str | None) -> Any:
    if kind != "deepspeed_sequence":
        return Mpu(kind) if kind is not None else None
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(2)
    return parallel_state_sp


def let_gloo_gather_tokens() -> None:
    """NCCL does not look at shapes; gloo refuses the flat buffer of MOELayer's gather_tokens."""
    gather = dist.all_gather_into_tensor

    def flat(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return gather(output.view(-1), tensor.reshape(-1), *args, **kwargs)

    dist.all_gather_into_tensor = flat
