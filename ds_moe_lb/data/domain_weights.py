"""How often each domain is sampled: fixed weights, or weights that follow the excess loss.

Shape legend: D domains, in the order of the corpus.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Every domain keeps this share of the uniform distribution, so that none dies out.
_UNIFORM_SHARE = 1e-4


class DomainWeights:
    """Sampling weights of the domains of a corpus. The same on all ranks.

    With reference losses they are dynamic, as in Sheared LLaMA (arXiv 2310.06694): after each
    validation w <- softmax(log w + loss - reference), mixed with a little of the uniform
    distribution. A domain that is further above its reference is sampled more.

    Attributes:
        weights_D: fp64, sums to 1.
        updated_at: optimizer step of the last update; -1 = none.
    """

    def __init__(
        self,
        domain_names: Sequence[str],
        *,
        weights: Mapping[str, float] | None,
        reference_losses: Mapping[str, float] | None,
    ) -> None:
        """Check names and values.

        Args:
            domain_names: of the corpus.
            weights: by domain, >= 0, in any unit; None = equal.
            reference_losses: by domain, in the unit of the losses; None = the weights stay.

        Raises:
            ValueError: when names do not fit or a value is out of range.
        """
        given = dict.fromkeys(domain_names, 1.0) if weights is None else weights
        weights_D = _in_order(given, domain_names, flag="--domain-weights")
        if weights_D.min() < 0 or weights_D.sum() <= 0:
            raise ValueError(
                f"--domain-weights: got {dict(given)}, expected numbers >= 0 and one > 0"
            )
        self.weights_D = weights_D / weights_D.sum()
        self.updated_at = -1
        self._names = list(domain_names)
        self._references_D: NDArray[np.float64] | None = None
        if reference_losses is not None:
            self._references_D = _in_order(
                reference_losses, domain_names, flag="--reference-losses"
            )
            if self.weights_D.min() == 0:
                raise ValueError(
                    f"--domain-weights: got {dict(given)}, expected numbers > 0 with "
                    f"--reference-losses: a domain that is never sampled has no place in an update"
                )

    @property
    def is_dynamic(self) -> bool:
        """Whether updates change anything."""
        return self._references_D is not None

    @property
    def by_name(self) -> dict[str, float]:
        return dict(zip(self._names, self.weights_D.tolist(), strict=True))

    def update(self, losses: Sequence[float], *, step: int) -> None:
        """Follow the losses of a validation; nothing happens to fixed weights.

        Args:
            losses: by domain, in the order of the corpus; the same on all ranks.
            step: optimizer steps done.
        """
        if self._references_D is None:
            return
        logits_D = np.log(self.weights_D) + np.asarray(losses, dtype=float) - self._references_D
        unnormalised_D = np.exp(logits_D - logits_D.max())
        softmax_D = unnormalised_D / unnormalised_D.sum()
        self.weights_D = (1 - _UNIFORM_SHARE) * softmax_D + _UNIFORM_SHARE / len(softmax_D)
        self.updated_at = step

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"weights": self.by_name, "updated_at": self.updated_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: when it has other domains.
        """
        self.weights_D = _in_order(state["weights"], self._names, flag="checkpoint")
        self.updated_at = int(state["updated_at"])


def _in_order(
    values: Mapping[str, float], names: Sequence[str], *, flag: str
) -> NDArray[np.float64]:
    if set(values) != set(names):
        raise ValueError(
            f"{flag}: got the domains {', '.join(sorted(values))}, expected exactly "
            f"{', '.join(sorted(names))}"
        )
    ordered = [values[name] for name in names]
    for name, value in zip(names, ordered, strict=True):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not np.isfinite(value):
            raise ValueError(f"{flag}: got {value!r} for {name!r}, expected a finite number")
    return np.array(ordered, dtype=np.float64)
