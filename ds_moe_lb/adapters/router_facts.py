"""What a transformers router returns and how it scores, found out on a small copy of it.

The families agree on a form, ``(logits (T, E), weights (T, K), indices (T, K))``, and not on the
score function. A fresh instance with random weights is asked on the CPU, so that neither the
engine's parameters (which ZeRO-3 may have sharded) nor any random state is touched. The odd ones
stand in a table.

Shape legend: T tokens, E experts, K choices per token, M features.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_moe_lb.adapters.correction_bias import prefer_first_expert
from ds_moe_lb.config import SECTION

_NUM_TOKENS = 64
# log(w0 / w1) of the first two choices equals f(l0) - f(l1) for the right log-score f, whatever is
# normalised, scaled or limited to groups; in fp32 to about 1e-7, and other functions are off by
# 4e-2 or more.
_TOLERANCE = 1e-3
_LOG_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits,
    "sigmoid": nn.functional.logsigmoid,
    "sqrt_softplus": lambda logits: nn.functional.softplus(logits).log() / 2,
}


@dataclass(frozen=True)
class RouterFacts:
    """How to read a router's output.

    Attributes:
        num_experts: E.
        top_k: k.
        score_function: see :func:`ds_moe_lb.loss.router_probs`.
        logits_at: index of the logits in the output.
        scores_at: index of what routing goes on with, which carries the gradient.
        selected_at: index of the chosen experts; None = the k largest logits, chosen later.
        takes_bias: a correction bias of its own moves what it chooses, and nothing else.
    """

    num_experts: int
    top_k: int
    score_function: str
    logits_at: int = 0
    scores_at: int = 1
    selected_at: int | None = 2
    takes_bias: bool = False


@dataclass(frozen=True)
class _Odd:
    """A router that the probe cannot read: what it is, or why it cannot be balanced."""

    score_function: str = ""
    logits_at: int = 0
    scores_at: int = 1
    selected_at: int | None = 2
    refusal: str = ""


_ODD = {
    # returns its logits only; the block around it takes their softmax and the k largest
    "DbrxRouter": _Odd("softmax", scores_at=0, selected_at=None),
    # (scores (T, E), logits): sigmoid of the k largest logits, the others at minus infinity
    "Llama4Router": _Odd("sigmoid", logits_at=1, scores_at=0, selected_at=None),
    # index 0 has probabilities, and the weights a learned scale of each expert
    "Gemma4TextRouter": _Odd("probabilities"),
    "DiffusionGemmaTextRouter": _Odd("probabilities"),
    # the weights are its sparse mixer's; it samples in training, the indices are what it took
    "PhimoeTopKRouter": _Odd("softmax"),
    "JetMoeTopKGating": _Odd(refusal="it returns sorted slots and not the experts of each token"),
    "SwitchTransformersTop1Router": _Odd(
        refusal="it returns its choices after capacity has dropped some"
    ),
    "NllbMoeTop2Router": _Odd(refusal="it returns its choices after capacity has dropped some"),
    "Ernie4_5_VLMoeMoeBlock": _Odd(refusal="its text and its vision experts see other tokens each"),
    "ZayaRouter": _Odd(refusal="its choices include skipping the experts"),
    "LongcatFlashTopkRouter": _Odd(refusal="its choices include experts that do nothing"),
}


def read_router(module: nn.Module, config: Any, *, name: str) -> RouterFacts:
    """Find out how a router of a live model is to be read.

    Args:
        module: the router.
        config: that of the transformers model around it.
        name: of the router in the model, for messages.

    Raises:
        ValueError: it cannot be read; says why.
    """
    cls = type(module)
    odd = _ODD.get(cls.__name__, _Odd())
    if odd.refusal:
        raise _unreadable(name, cls, odd.refusal)
    text_config = config.get_text_config()
    try:
        outputs, biased, top_k = _try_out(module, text_config)
        logits_TE = outputs[odd.logits_at]
        num_experts = logits_TE.shape[-1]
        if top_k is None and odd.selected_at is not None:
            top_k = outputs[odd.selected_at].shape[-1]
        if odd.score_function:
            score_function = odd.score_function
        else:
            score_function = _recognise(logits_TE, outputs[1], outputs[2])
    except _UnreadableError as error:
        raise _unreadable(name, cls, str(error)) from None
    except (TypeError, AttributeError, IndexError, RuntimeError, ValueError) as error:
        key = _missing_choices(text_config)
        if key is not None:
            raise ValueError(
                f"{SECTION}: the router {name!r} ({cls.__qualname__}) cannot be balanced: {key} of "
                f"the model's config is None; set it to the number of experts that each token "
                f"chooses, for instance 2"
            ) from error
        reason = f"trying a copy of it gave {type(error).__name__}: {error}"
        raise _unreadable(name, cls, reason) from error
    if top_k is None:
        raise _unreadable(name, cls, "nothing tells how many experts it chooses")
    return RouterFacts(
        num_experts,
        top_k,
        score_function,
        odd.logits_at,
        odd.scores_at,
        odd.selected_at,
        takes_bias=biased is not None and _only_chose_first(outputs, biased),
    )


class _UnreadableError(Exception):
    """Why a router cannot be read."""


def _unreadable(name: str, cls: type, reason: str) -> ValueError:
    return ValueError(
        f"{SECTION}: the router {name!r} ({cls.__qualname__}) cannot be balanced: {reason}. Remove "
        f"the section, or use a family whose routers return (logits, weights, indices)"
    )


def _try_out(
    module: nn.Module, config: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None, int | None]:
    """A fresh instance on random tokens.

    Returns:
        Its outputs; those with a bias towards expert 0, if it has a correction bias; and the live
        router's k if it tells.
    """
    top_k = _number_of_choices(module, config)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        probe = type(module)(_own_config(module, config)).float().eval()
        for tensor in (*probe.parameters(), *probe.buffers()):
            if tensor.is_floating_point():
                tensor.zero_()
        for parameter in probe.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif "scale" in _name_of(probe, parameter):
                parameter.fill_(1.0)
        if getattr(probe, "top_k", None) == 1:
            probe.__dict__["top_k"] = 2  # one choice alone does not show the score function
        hidden_size = getattr(config, "hidden_size", None) or config.d_model
        tokens = torch.randn(1, _NUM_TOKENS, hidden_size)
        further = _further_arguments(probe)
        outputs = _call(probe, tokens, further)
        biased = None
        if prefer_first_expert(probe, further):
            biased = _call(probe, tokens, further)
    return outputs, biased, top_k


def _call(probe: nn.Module, tokens: Tensor, further: dict[str, Tensor]) -> tuple[Tensor, ...]:
    try:
        outputs = probe(tokens[0], **further)
    except ValueError:  # some take (B, S, M) apart themselves
        outputs = probe(tokens, **further)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(x.flatten(0, -2) if isinstance(x, Tensor) else x for x in outputs)


def _only_chose_first(plain: tuple[Tensor, ...], biased: tuple[Tensor, ...]) -> bool:
    """Whether a bias towards expert 0 had it chosen and left its weights those of the scores."""
    logits_TE, weights_TK, selected_TK = biased[:3]
    if not torch.equal(plain[0], logits_TE) or not (selected_TK == 0).any(dim=1).all():
        return False
    try:
        return _recognise(logits_TE, weights_TK, selected_TK) == _recognise(*plain[:3])
    except _UnreadableError:
        return False


def _further_arguments(probe: nn.Module) -> dict[str, Tensor]:
    """Zeros for a selection bias that the block around the router hands over at each call."""
    parameters = list(inspect.signature(probe.forward).parameters.values())[1:]
    required = [x.name for x in parameters if x.default is x.empty and "bias" not in x.name]
    required = [name for name in required if name not in ("args", "kwargs")]
    if required:
        raise _UnreadableError(f"its forward also wants {', '.join(required)}")
    num_experts = next(p.shape[0] for p in probe.parameters() if p.dim() == 2)
    return {x.name: torch.zeros(num_experts) for x in parameters if "bias" in x.name}


def _own_config(module: nn.Module, config: Any) -> Any:
    return config.ffn_config if type(module).__name__ == "DbrxRouter" else config


def _name_of(module: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, p in module.named_parameters() if p is parameter)


def _number_of_choices(module: nn.Module, config: Any) -> int | None:
    for owner in (module, config, getattr(config, "ffn_config", None)):
        for key in ("top_k", "num_experts_per_tok", "moe_top_k", "top_k_experts"):
            value = getattr(owner, key, None)
            if isinstance(value, int):
                return value
    return None


def _missing_choices(config: Any) -> str | None:
    """The key of the config that should tell k and is None; DeepSeek-V2's is by default."""
    keys = ("num_experts_per_tok", "moe_top_k", "top_k_experts")
    found = {key: getattr(config, key) for key in keys if hasattr(config, key)}
    return None if any(found.values()) else next(iter(found), None)


def _recognise(logits_TE: Tensor, weights_TK: Any, selected_TK: Any) -> str:
    """The score function, from the weights of the first two choices."""
    is_form = (
        isinstance(weights_TK, Tensor)
        and isinstance(selected_TK, Tensor)
        and weights_TK.shape == selected_TK.shape
        and len(logits_TE) == len(selected_TK)
        and not selected_TK.is_floating_point()
    )
    if not is_form:
        raise _UnreadableError("it does not return (logits, weights, indices)")
    if selected_TK.shape[1] < 2:
        raise _UnreadableError("with one choice its score function cannot be told")
    chosen_T2 = selected_TK[:, :2].long()
    ratio_T = (weights_TK[:, 0] / weights_TK[:, 1]).double().log()
    for name, log_score in _LOG_SCORES.items():
        scores_T2 = log_score(logits_TE.double()).gather(1, chosen_T2)
        if (scores_T2[:, 0] - scores_T2[:, 1] - ratio_T).abs().max() < _TOLERANCE:
            return name
    raise _UnreadableError("its score function is none of " + ", ".join(_LOG_SCORES))
