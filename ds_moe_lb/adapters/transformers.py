"""Routers of transformers models: found, read and observed with no change to the model.

Shape legend: T tokens of this micro-batch on this rank, E experts, K choices per token.
"""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_moe_lb.adapters.correction_bias import find_correction_bias
from ds_moe_lb.adapters.observing import observe
from ds_moe_lb.adapters.router_facts import RouterFacts, read_router
from ds_moe_lb.config import SECTION
from ds_moe_lb.sites import RouterSite

if TYPE_CHECKING:
    from ds_moe_lb.router import Router


class TransformersSite(RouterSite):
    """A router module of a transformers model, observed by a forward hook."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        facts: RouterFacts,
        *,
        block: nn.Module,
        wrapped: nn.Module,
    ) -> None:
        super().__init__(
            name,
            module,
            block=block,
            num_experts=facts.num_experts,
            top_k=facts.top_k,
            expert_group_name=None,
        )
        self.has_logits = facts.score_function != "probabilities"
        if facts.takes_bias:
            self.bias = find_correction_bias(module, block, num_experts=facts.num_experts)
        self._facts = facts
        self._wrapped = wrapped  # the router, or what peft put around it
        self._handle: Any = None

    @property
    def is_trainable(self) -> bool:
        # With peft's target_parameters the adapter stands beside the router and not inside.
        return any(parameter.requires_grad for parameter in self._wrapped.parameters())

    def attach(self, router: "Router") -> None:
        facts = self._facts

        def after_router(module: nn.Module, args: Any, output: Any) -> Any:
            if module is not self.module:  # of a deep copy of the model
                return output
            outputs = list(output) if isinstance(output, tuple) else [output]
            outputs[facts.scores_at] = observe(
                router,
                outputs[facts.scores_at],
                logits_TE=outputs[facts.logits_at].flatten(0, -2),
                selected_TK=self.selected(output),
                score_function=facts.score_function,
            )
            return tuple(outputs) if isinstance(output, tuple) else outputs[0]

        self._handle = self.module.register_forward_hook(after_router)

    def detach(self) -> None:
        self._handle.remove()

    def selected(self, output: Any) -> Tensor:
        """The experts that were chosen, ``(T, K)`` int64, in an output of the router."""
        outputs = output if isinstance(output, tuple) else (output,)
        facts = self._facts
        if facts.selected_at is None:
            logits_TE = outputs[facts.logits_at].flatten(0, -2)
            return torch.topk(logits_TE.detach(), facts.top_k, dim=-1)[1]
        selected_TK: Tensor = outputs[facts.selected_at].flatten(0, -2)
        return selected_TK


def find_transformers_sites(
    modules: Sequence[tuple[str, nn.Module]], *, replaced: Sequence[str] = ()
) -> list[TransformersSite]:
    """The routers that the model's own classes name as the source of their router logits.

    Args:
        modules: the model's named modules.
        replaced: names of blocks that AutoEP has put in the place of the family's own; it points
            the model's record of router logits at the gates inside.

    Raises:
        ValueError: a router of a class that cannot be read; says which and why.
    """
    sites: list[TransformersSite] = []
    models = [(name, m) for name, m in modules if isinstance(m, PreTrainedModel)]
    recorders = [recorder for _, model in models for recorder in _recorders(model)]
    facts: dict[tuple[type, int], RouterFacts] = {}
    by_name = dict(modules)
    for name, module in modules:
        if any(f"{name}.".startswith(f"{block}.") for block in replaced):
            continue
        if name.endswith(".original_module"):  # peft trains a copy in its place (modules_to_save)
            continue
        if not any(recorder.matches(name, module) for recorder in recorders):
            continue
        # The innermost model around a router has the config that it was built from.
        around = [m for outer, m in models if not outer or f"{name}.".startswith(f"{outer}.")]
        config = around[-1].config
        key = (type(module), id(config))
        if key not in facts:
            facts[key] = read_router(module, config, name=name)
        outermost = _without_peft(name)
        block = by_name[outermost.rpartition(".")[0]]
        wrapped = by_name[outermost]
        sites.append(TransformersSite(name, module, facts[key], block=block, wrapped=wrapped))
    return sites


def _without_peft(name: str) -> str:
    """The name that a router had before peft wrapped it."""
    return re.sub(r"(\.base_layer|\.modules_to_save\.[^.]+)+$", "", name)


@dataclass(frozen=True)
class _Recorder:
    """Where a model class says that its router logits come from, whether or not it returns them."""

    target_class: type[nn.Module]
    layer_name: str | None

    def matches(self, name: str, module: nn.Module) -> bool:
        """As transformers itself looks for them."""
        if not isinstance(module, self.target_class):
            return False
        return self.layer_name is None or f".{self.layer_name.strip('.')}." in f".{name}."


def _recorders(model: PreTrainedModel) -> list[_Recorder]:
    declared = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", [])
    several = declared if isinstance(declared, list | tuple) else [declared]
    return [
        _Recorder(getattr(one, "target_class", None) or one, getattr(one, "layer_name", None))
        for one in several
    ]


@dataclass(frozen=True)
class OwnLoss:
    """A model's own auxiliary loss, which it would add to the loss that it returns.

    Attributes:
        models: the models that add it; more than one if the engine's model is made of several.
        coefficient: the `router_aux_loss_coef` of the first that is on.
        is_on: it is added by default.
    """

    models: tuple[PreTrainedModel, ...]
    coefficient: float
    is_on: bool

    def weights(self, sites: Sequence[RouterSite]) -> list[float]:
        """What each layer's LBL has to weigh in its place: coefficient x k / L.

        The model's loss pools the layers and is k when balanced.

        Raises:
            ValueError: several models add one, and nothing tells which layers it is to weigh.
        """
        if len(self.models) > 1:
            names = ", ".join(type(model).__name__ for model in self.models)
            raise ValueError(
                f"{SECTION}.aux_loss_coeff: got None, but the model holds several models with an "
                f"auxiliary loss of their own ({names}); set it to a number, for instance 0.001, "
                f"and the plugin adds the gradient in all of them and switches their own off"
            )
        return [self.coefficient * site.top_k / len(sites) for site in sites]


def find_own_loss(model: nn.Module) -> OwnLoss | None:
    """The auxiliary loss of the outermost transformers models that have one."""
    models: list[PreTrainedModel] = []
    coefficients: list[tuple[bool, float]] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or module in inside:
            continue
        if "output_router_logits" not in _parameters(module):
            continue
        config = module.config.get_text_config()
        coefficient = getattr(module, "router_aux_loss_coef", None)
        if coefficient is None:
            coefficient = getattr(config, "router_aux_loss_coef", None)
        if coefficient is not None:
            is_on = bool(getattr(config, "output_router_logits", False)) and coefficient != 0
            models.append(module)
            coefficients.append((is_on, float(coefficient)))
            inside.update(module.modules())
    if not models:
        return None
    is_on, coefficient = next((pair for pair in coefficients if pair[0]), coefficients[0])
    return OwnLoss(tuple(models), coefficient, is_on)


def _parameters(model: nn.Module) -> Sequence[str]:
    return list(inspect.signature(model.forward).parameters)
