"""What a training run is asked to do, and the checks that need no process group."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SECTION = "moe_load_balancing"
DEFAULT_AUX_LOSS_COEFF = 0.1


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `ds-moe-lb train` that the DeepSpeed JSON does not hold.

    Attributes:
        steps: optimizer steps in total, counted over resumed runs.
        seed: weights, data order and every other random draw.
        eval_interval: optimizer steps between validations; 0 = only at the end.
        eval_batches: validation batches per domain.
        eval_batch_size: sequences of one rank in one validation batch.
        save_interval: optimizer steps between checkpoints; 0 = at the end and when interrupted.
        aux_loss_coeff: factor of the script on `l_aux`; None = `DEFAULT_AUX_LOSS_COEFF`, or nothing
            when the JSON has its own coefficient.
        learning_rate: for the AdamW that is made when the JSON has no optimizer.
        ep_size: expert-parallel size; 0 = as many ranks as divide the experts.
        domain_weights: how often each domain is sampled, by name; None = equally often.
        reference_losses: validation loss of each domain that the weights are to follow, by name, at
            every `eval_interval`; None = the weights stay.
    """

    steps: int = 300
    seed: int = 1
    eval_interval: int = 100
    eval_batches: int = 4
    eval_batch_size: int = 16
    save_interval: int = 0
    aux_loss_coeff: float | None = None
    learning_rate: float = 2e-3
    ep_size: int = 0
    domain_weights: dict[str, float] | None = None
    reference_losses: dict[str, float] | None = None

    def __post_init__(self) -> None:
        lowest = {"steps": 1, "eval_interval": 0, "eval_batches": 1, "eval_batch_size": 1}
        lowest |= {"save_interval": 0, "seed": 0, "ep_size": 0}
        for name, minimum in lowest.items():
            value = getattr(self, name)
            if value < minimum:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag}: got {value}, expected a number >= {minimum}")
        if self.reference_losses is not None and self.eval_interval == 0:
            raise ValueError(
                "--eval-interval: got 0, expected a number >= 1 with --reference-losses, because "
                "the weights of the domains follow the validations"
            )


def script_aux_loss_coeff(options: TrainOptions, ds_config: Mapping[str, Any]) -> float:
    """The factor on `l_aux` in the loss of the training loop.

    Raises:
        ValueError: when both the flag and the JSON give a coefficient.
    """
    section = ds_config.get(SECTION) or {}
    in_json = section.get("aux_loss_coeff") if section.get("enabled", True) else None
    if in_json is None:
        return DEFAULT_AUX_LOSS_COEFF if options.aux_loss_coeff is None else options.aux_loss_coeff
    if options.aux_loss_coeff is not None:
        raise ValueError(
            f"--aux-loss-coeff {options.aux_loss_coeff}: the config has {SECTION}.aux_loss_coeff "
            f"{in_json}, so the plugin adds the loss itself and l_aux is 0. Drop the flag, or set "
            f"{SECTION}.aux_loss_coeff to null."
        )
    return 0.0


def with_aux_loss_coeff(options: TrainOptions, ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the flag's coefficient in it, for models that hand no `l_aux` to the loop.

    Raises:
        ValueError: when both the flag and the JSON give a coefficient, or there is no section.
    """
    given = options.aux_loss_coeff
    if given is None:
        return dict(ds_config)
    section = ds_config.get(SECTION)
    if section is None:
        raise ValueError(
            f"--aux-loss-coeff {given}: with --model the plugin adds the loss, but the config has "
            f"no section {SECTION}. Drop the flag, or add the section."
        )
    script_aux_loss_coeff(options, ds_config)  # refuses two coefficients
    return {**ds_config, SECTION: {**section, "aux_loss_coeff": given}}
