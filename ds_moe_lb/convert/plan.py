"""What a conversion is asked to do, the sizes and the factor that follow, and what is refused."""

from dataclasses import dataclass
from typing import Literal, get_args

Split = Literal["random", "cluster", "importance"]
Sharing = Literal["none", "inner"]
Scale = Literal["paper", "exact", "unit"]
GateInit = Literal["random", "zero", "expert_mean"]
ClusterRows = Literal["up_proj", "gate_proj"]
SPLITS: tuple[Split, ...] = get_args(Split)
SHARINGS: tuple[Sharing, ...] = get_args(Sharing)
SCALES: tuple[Scale, ...] = get_args(Scale)
GATE_INITS: tuple[GateInit, ...] = get_args(GateInit)
CLUSTER_ROWS: tuple[ClusterRows, ...] = get_args(ClusterRows)


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """How the neurons of each FFN become experts.

    Attributes:
        num_experts: E, routed experts per layer.
        top_k: k, experts per token.
        split: which neurons form an expert. ``random``; ``cluster``: balanced k-means on weight
            rows; ``importance``: gradient importance, one domain of text per expert.
        cluster_rows: the matrix whose rows are clustered.
        sharing: ``none``: every neuron is in one place; ``inner``: each expert takes the neurons
            most important to its domain, so that experts may overlap and neurons may be lost.
        num_shared_experts: R, blocks as large as an expert that every token passes through.
        expert_size: neurons per expert for sharing ``inner``; None = H / (E + R).
        scale: factor on the routed output, whose weights sum to 1 over the k selected experts.
            ``paper``: E/k; ``exact``: E, keeps the mean; ``unit``: 1.
        gate_init: ``random``: normal; ``zero``; ``expert_mean``: mean gate_proj row of the
            expert's neurons, centred over experts.
        gate_std: standard deviation of the entries of the gate, where they are not zero.
        seed: every random draw.
    """

    num_experts: int
    top_k: int
    split: Split = "random"
    cluster_rows: ClusterRows = "up_proj"
    sharing: Sharing = "none"
    num_shared_experts: int = 0
    expert_size: int | None = None
    scale: Scale = "paper"
    gate_init: GateInit = "random"
    gate_std: float = 0.02
    seed: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (
            ("split", SPLITS),
            ("cluster_rows", CLUSTER_ROWS),
            ("sharing", SHARINGS),
            ("scale", SCALES),
            ("gate_init", GATE_INITS),
        ):
            if getattr(self, name) not in allowed:
                raise _refusal(name, getattr(self, name), f"one of {', '.join(allowed)}")
        if self.num_experts < 2:
            raise _refusal("num_experts", self.num_experts, "a number >= 2")
        if not 1 <= self.top_k <= self.num_experts:
            raise _refusal("top_k", self.top_k, f"1 to {self.num_experts} (--num-experts)")
        if self.num_shared_experts < 0:
            raise _refusal("num_shared_experts", self.num_shared_experts, "a number >= 0")
        if not self.gate_std > 0:
            raise _refusal(
                "gate_std", self.gate_std, "a number > 0; --gate-init zero makes the gate 0"
            )
        if self.seed < 0:
            raise _refusal("seed", self.seed, "a number >= 0")
        if self.sharing == "inner" and self.split != "importance":
            raise _refusal(
                "sharing",
                self.sharing,
                f"'none' with --split {self.split}; sharing needs --split importance",
            )
        if self.num_shared_experts and self.split == "cluster":
            raise _refusal(
                "num_shared_experts",
                self.num_shared_experts,
                "0 with --split cluster, where no cluster is the natural one to share; use --split "
                "random or importance",
            )
        if self.expert_size is not None and self.sharing != "inner":
            raise _refusal(
                "expert_size",
                self.expert_size,
                "it only with --sharing inner; else it is H / (E + R)",
            )

    @property
    def routed_factor(self) -> float:
        """What the routed experts' output is multiplied by."""
        return {
            "paper": self.num_experts / self.top_k,
            "exact": float(self.num_experts),
            "unit": 1.0,
        }[self.scale]

    def neurons_per_expert(self, intermediate_size: int) -> int:
        """Width m of one expert, also of one shared block.

        Raises:
            ValueError: when the FFN cannot be cut that way.
        """
        blocks = self.num_experts + self.num_shared_experts
        if self.expert_size is not None:
            free = intermediate_size - self.num_shared_experts * self.expert_size
            if not 1 <= self.expert_size <= free:
                largest = intermediate_size // (self.num_shared_experts + 1)
                raise _refusal("expert_size", self.expert_size, f"1 to {largest}")
            return self.expert_size
        if intermediate_size % blocks:
            counts = [n for n in range(2, 129) if intermediate_size % n == 0]
            raise ValueError(
                f"--num-experts {self.num_experts} plus --num-shared-experts "
                f"{self.num_shared_experts}: the FFN has {intermediate_size} neurons "
                f"(intermediate_size), which {blocks} does not divide; choose numbers that add up "
                f"to one of {', '.join(map(str, counts)) or 'none: it has no divisor below 129'}"
            )
        return intermediate_size // blocks


def _refusal(name: str, got: object, expected: str) -> ValueError:
    return ValueError(f"--{name.replace('_', '-')}: got {got!r}, expected {expected}")
