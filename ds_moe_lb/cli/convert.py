"""`ds-moe-lb convert`: a dense transformers checkpoint becomes an MoE checkpoint."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_moe_lb.cli.arguments import UsageError, make_output_folder, usage_errors
from ds_moe_lb.training.progress import make_progress

if TYPE_CHECKING:
    from torch import Tensor

    from ds_moe_lb.convert.conversion import Conversion
    from ds_moe_lb.data.corpus import Corpus


def run(options: argparse.Namespace) -> int:
    """Convert; returns 0."""
    _require_hf()
    from ds_moe_lb.convert.conversion import Conversion
    from ds_moe_lb.convert.plan import ConversionOptions

    names = [field.name for field in dataclasses.fields(ConversionOptions)]
    with usage_errors():
        plan = ConversionOptions(
            **{name: getattr(options, name) for name in names if name in options}
        )
        corpus = _corpus(options, plan.num_experts) if plan.split == "importance" else None
        if corpus is None and options.data is not None:
            raise UsageError(f"--data is used by --split importance only, got {plan.split!r}")
        conversion = Conversion(options.source, options.output, plan)
        make_output_folder(options.output.parent)
        scores = _scores(conversion, corpus, options) if corpus is not None else None
        _convert(conversion, scores, label=options.source.name)
    _describe(conversion, options.output, corpus)
    return 0


def _convert(conversion: "Conversion", scores: "Tensor | None", *, label: str) -> None:
    progress = make_progress(
        label=f"converting {label}", first_step=0, steps=conversion.num_steps, describe=_what
    )
    try:
        conversion.run(
            scores_ELH=scores,
            on_progress=lambda done, what: progress.update(done, {"what": what}),
        )
    finally:
        progress.close()


def _scores(conversion: "Conversion", corpus: "Corpus", options: argparse.Namespace) -> "Tensor":
    """Importance of each neuron to each domain: ``(E, L, H)`` fp64. Loads the whole model."""
    import torch
    from transformers import AutoModelForCausalLM

    from ds_moe_lb.convert.domain_text import domain_batches, text_tokenizer
    from ds_moe_lb.convert.importance import domain_importance

    path = conversion.checkpoint.path
    tokenize, bytes_per_token = text_tokenizer(
        path, vocab_size=conversion.checkpoint.config.vocab_size
    )
    model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    progress = make_progress(
        label="importance", first_step=0, steps=len(corpus.domains), describe=_what
    )
    try:
        scores = []
        for number, domain in enumerate(corpus.domains, start=1):
            batches = domain_batches(
                domain,
                tokenize,
                bytes_per_token=bytes_per_token,
                num_sequences=options.domain_sequences,
                sequence_length=options.sequence_length,
            )
            scores.append(domain_importance(model, batches))
            progress.update(number, {"what": domain.name})
    finally:
        progress.close()
    return torch.stack(scores)


def _corpus(options: argparse.Namespace, num_experts: int) -> "Corpus":
    from ds_moe_lb.data.folder import folder_corpus

    if options.data is None:
        raise UsageError("--split importance needs --data: a folder with one domain per expert")
    for name in ("domain_sequences", "sequence_length"):
        if getattr(options, name) < 1 + (name == "sequence_length"):
            raise UsageError(f"--{name.replace('_', '-')}: got {getattr(options, name)}")
    corpus = folder_corpus(options.data)
    if len(corpus.domains) != num_experts:
        raise UsageError(
            f"--data {options.data}: got {len(corpus.domains)} domains "
            f"({', '.join(corpus.domain_names)}), expected {num_experts}, one per expert "
            f"(--num-experts)"
        )
    return corpus


def _describe(conversion: "Conversion", output: Path, corpus: "Corpus | None") -> None:
    plan = conversion.options
    print(
        f"wrote {output}: {conversion.target.architecture}, {plan.num_experts} experts of "
        f"{conversion.expert_size} neurons, {plan.top_k} per token, routed output x "
        f"{plan.routed_factor:g} ({plan.scale})"
    )
    if corpus is not None:
        print(f"experts in the order of the domains: {', '.join(corpus.domain_names)}")
    if plan.top_k == 1:
        print(
            "with --top-k 1 the weight of the selected expert is always 1, so the language-model "
            "loss sends the router no gradient",
            file=sys.stderr,
        )


def _what(record: Mapping[str, Any]) -> str:
    return str(record["what"])


def _require_hf() -> None:
    try:
        import safetensors  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is missing: pip install 'ds_moe_lb[hf]'") from None
