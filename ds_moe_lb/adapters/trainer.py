"""A callback that puts the balance of the experts into the log of transformers' Trainer."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ds_moe_lb.of_model import load_balancer_of


class LoadBalancingCallback(TrainerCallback):
    """Adds ``moe/<metric>`` (means over layers) to every line of Trainer's log that has a loss.

    ``Trainer(..., callbacks=[LoadBalancingCallback()])``; under ``ds_moe_lb run`` and
    ``import ds_moe_lb.auto`` it is there already. The numbers are those of the last report, see
    ``moe_load_balancing.monitor.interval``; each layer's are in DeepSpeed's monitor.
    """

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add the metrics to the line; callbacks after this one see them too."""
        balancer = load_balancer_of(model)
        if balancer is None or logs is None or "loss" not in logs:
            return
        metrics = {
            f"moe/{name}": value for name, value in balancer.metrics().items() if "/" not in name
        }
        logs.update(metrics)
        # Trainer has put a copy of the line there before it called anybody.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)
