"""What a model's own arguments say to the plugin: which tokens count, and that its own loss is off.

Shape legend: B sequences of this micro-batch on this rank, S tokens each, Q and K queries and keys.
"""

import inspect
import weakref
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ds_moe_lb.balancer import LoadBalancer
from ds_moe_lb.config import SECTION
from ds_moe_lb.router_call import Masks

_IGNORED_LABEL = -100  # of torch.nn.functional.cross_entropy and of transformers
# Additive masks hold 0 where a key is attended, and something from -1e4 down to -inf elsewhere.
_MASKED_FROM = -1e4


class InputReader:
    """Reads the arguments of a model's training forwards.

    Args:
        model: whose forward takes ``attention_mask`` or ``labels``.
        balancer: the handle that is told.
        reads_attention_mask: whether a mask of that name is one of tokens, as in transformers.
    """

    def __init__(
        self, model: nn.Module, balancer: LoadBalancer, *, reads_attention_mask: bool
    ) -> None:
        self._model = weakref.ref(model)
        self._balancer = balancer
        self._signature = inspect.signature(model.forward)
        self._model_name = type(model).__name__
        self._argument = {
            "mask": "attention_mask" if reads_attention_mask else None,
            "labels": "labels",
            "all": None,
        }[balancer.config.valid_tokens]
        self._around: list[Masks] = []
        self._handles: list[Any] = []
        if self._argument is not None:
            self._handles = [
                model.register_forward_pre_hook(self._before, with_kwargs=True),
                model.register_forward_hook(self._after, always_call=True),
            ]

    def __deepcopy__(self, memo: Any) -> "InputReader":
        """The hooks of a copied model stay with the model that they were made for."""
        return self

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not self._model():
            return
        self._around.append(self._balancer.current_masks)
        if self._balancer.micro_step is None:
            return
        bound = self._signature.bind_partial(*args, **kwargs).arguments
        given = bound | bound.get("kwargs", {})
        mask = self._read(given)
        if mask is not None:
            self._balancer.current_masks += ((self._argument or "", mask),)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._model():
            self._balancer.current_masks = self._around.pop()

    def _read(self, given: dict[str, Any]) -> Tensor | None:
        value = given.get(self._argument or "")
        if self._argument == "labels":
            if isinstance(value, Tensor):
                return value != _IGNORED_LABEL
            raise ValueError(
                f"{SECTION}.valid_tokens: got 'labels', but the forward of {self._model_name} was "
                f"called with labels = {type(value).__name__}; pass labels, or use 'mask' with "
                f"engine.load_balancer.token_mask(labels != {_IGNORED_LABEL})"
            )
        if isinstance(value, Tensor):
            num_sequences, length = _shape_of_tokens(given)
            mask = token_mask_of(value, num_sequences=num_sequences)
            if given.get("past_key_values") is not None and length is not None:
                return mask[..., -length:]  # a prefix (peft) has columns in it, and no tokens
            return mask
        if value is None or any(name == "token_mask" for name, _ in self._balancer.current_masks):
            return None
        raise ValueError(
            f"{SECTION}.valid_tokens: got 'mask', but attention_mask is a {type(value).__name__}, "
            f"which does not tell which tokens are padding; wrap the forward in "
            f"engine.load_balancer.token_mask(...), or set valid_tokens to 'all'"
        )


def _shape_of_tokens(given: dict[str, Any]) -> tuple[int | None, int | None]:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(given.get(name), Tensor) and given[name].dim() >= 2:
            return int(given[name].shape[0]), int(given[name].shape[1])
    return None, None


def token_mask_of(attention_mask: Tensor, *, num_sequences: int | None) -> Tensor:
    """Which tokens an attention mask leaves in, ``(B, S)`` bool.

    Args:
        attention_mask: ``(B, S)``, non-zero = a token; or ``(B, Q, K)`` or ``(B, heads, Q, K)``,
            where a token counts if any query attends to its column: bool or integer, True = is
            attended; floating, what is added to the attention scores.
        num_sequences: B, for masks that are the same for all sequences.
    """
    if attention_mask.dim() <= 2:
        return attention_mask != 0
    if attention_mask.is_floating_point():
        attended = attention_mask > _MASKED_FROM
    else:
        attended = attention_mask != 0
    valid_BS = attended.flatten(1, -2).any(dim=1)
    if num_sequences is not None and valid_BS.shape[0] == 1:
        valid_BS = valid_BS.expand(num_sequences, -1)
    return valid_BS


class OwnLossSwitch:
    """Keeps a transformers model from adding its own auxiliary loss in training.

    The model's config, which is saved with its weights, stays as it is. Where the loss was asked
    for, the output has a zero in its place, for scripts that add ``coefficient * aux_loss``. A
    tuple, where one was asked for, has as many entries as the model's own.
    """

    def __init__(self, model: nn.Module, balancer: LoadBalancer) -> None:
        self._model = weakref.ref(model)
        self._balancer = balancer
        self._signature = inspect.signature(model.forward)
        self._asked: list[bool] = []
        self._wants_tuple = False
        # The model inside records the router logits, and the one around it makes a loss of them.
        inside: nn.Module = getattr(model, "base_model", model)
        self._inside = weakref.ref(inside)
        self._handles = [
            inside.register_forward_pre_hook(self._before_inside, with_kwargs=True),
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def __deepcopy__(self, memo: Any) -> "OwnLossSwitch":
        """The hooks of a copied model stay with the model that they were made for."""
        return self

    def remove(self) -> None:
        """Give the model its loss back."""
        for handle in self._handles:
            handle.remove()

    def _is_off(self) -> bool:
        balancer = self._balancer
        if balancer.micro_step is None or not torch.is_grad_enabled():
            return False
        return balancer.policy.coefficients is not None  # None: only measured, by the schedule

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if module is not self._model():
            return None
        self._asked.append(False)
        if not self._is_off():
            return None
        bound = self._signature.bind_partial(*args, **kwargs)
        asked = bound.arguments.get("output_router_logits")
        if asked is None:
            config: Any = module.config
            asked = getattr(config.get_text_config(), "output_router_logits", False)
        self._asked[-1] = bool(asked)
        bound.arguments["output_router_logits"] = False
        # By a config with return_dict false these families fail in transformers itself.
        self._wants_tuple = bool(asked) and kwargs.get("return_dict") is False
        if not self._wants_tuple:
            return bound.args, bound.kwargs
        # A tuple leaves out what is None, so the loss needs its place before it becomes one.
        return bound.args, bound.kwargs | {"return_dict": True}

    def _before_inside(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        is_on = module is self._inside() and bool(self._asked) and self._wants_tuple
        if not is_on or "output_router_logits" not in kwargs:
            return None
        return args, kwargs | {"output_router_logits": True}

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if module is not self._model() or not self._asked.pop() or not isinstance(output, dict):
            return output
        return _with_aux_loss(output, as_tuple=self._wants_tuple)


def _with_aux_loss(output: Any, *, as_tuple: bool) -> Any:
    """A transformers ModelOutput with a zero where its auxiliary loss is None."""
    if getattr(output, "aux_loss", 0) is None:
        device = next((x.device for x in output.values() if isinstance(x, Tensor)), None)
        output["aux_loss"] = torch.zeros((), device=device)
        for field in fields(output):  # the new entry belongs in the middle
            if field.name in output:
                output.move_to_end(field.name)
    return output.to_tuple() if as_tuple else output
