"""Masks, coefficients and router facts of the adapters, by hand and without ranks."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from ds_moe_lb import _compat
from ds_moe_lb.adapters.model_inputs import token_mask_of
from ds_moe_lb.adapters.router_facts import read_router
from ds_moe_lb.adapters.transformers import find_own_loss, find_transformers_sites
from ds_moe_lb.coefficients import layer_coefficients
from ds_moe_lb.config import parse_section
from ds_moe_lb.loss import router_probs
from families import FAMILIES, PRESETS, make_model, routers

LOWEST = torch.finfo(torch.float32).min


def test_two_dimensional_masks_are_taken_as_they_are() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 2, 1]])
    assert token_mask_of(mask, num_sequences=2).tolist() == [
        [True, True, False],
        [False, True, True],
    ]


@pytest.mark.parametrize("kind", ["bool", "integer", "additive", "minus infinity"])
def test_four_dimensional_masks_count_a_token_whose_column_is_attended(kind: str) -> None:
    # Causal, 3 tokens, the first is padding: nobody attends to column 0.
    attended = torch.tensor([[[[0, 0, 0], [0, 1, 0], [0, 1, 1]]]], dtype=torch.bool)
    mask = {
        "bool": attended,
        "integer": attended.long(),
        "additive": torch.where(attended, 0.0, LOWEST),
        "minus infinity": torch.where(attended, 0.0, float("-inf")),
    }[kind]
    assert token_mask_of(mask, num_sequences=1).tolist() == [[False, True, True]]


def test_packed_rows_count_in_full() -> None:
    # Two documents of two tokens in one row: each token attends within its own document.
    block = torch.ones(2, 2, dtype=torch.bool).tril()
    attended = torch.block_diag(block, block).bool()[None, None]
    assert token_mask_of(attended, num_sequences=1).tolist() == [[True] * 4]


def test_a_mask_for_all_sequences_is_repeated() -> None:
    attended = torch.tensor([[[[True, False], [True, False]]]])
    assert token_mask_of(attended, num_sequences=3).tolist() == [[True, False]] * 3


def test_probabilities_of_other_scores_are_normalised_over_all_experts() -> None:
    # sigmoid(0) = 1/2, sigmoid(log 3) = 3/4: shares 2/5 and 3/5.
    logits = torch.tensor([[1.0, 3.0]]).log()
    assert router_probs(logits, score_function="sigmoid").tolist() == [pytest.approx([0.4, 0.6])]
    # softplus(log(e^1 - 1)) = 1 and softplus(log(e^4 - 1)) = 4: roots 1 and 2.
    logits = torch.tensor([[1.0, 4.0]]).expm1().log()
    assert router_probs(logits, score_function="sqrt_softplus").tolist() == [
        pytest.approx([1 / 3, 2 / 3])
    ]
    given = torch.tensor([[0.2, 0.8]])
    assert router_probs(given, score_function="probabilities").tolist() == [
        pytest.approx([0.2, 0.8])
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_score_function_of_every_family_is_found(family: str) -> None:
    before = torch.get_rng_state()
    model = make_model(family)
    torch.set_rng_state(before)
    sites = find_transformers_sites(list(model.named_modules()))
    assert torch.equal(torch.get_rng_state(), before)  # trying out leaves no trace
    assert [site.name for site in sites] == list(routers(model))
    for name, router in routers(model).items():
        config = next(m.config for m in model.modules() if hasattr(m, "config"))
        facts = read_router(router, config, name=name)
        assert facts.score_function == FAMILIES[family].score_function
        assert facts.num_experts == 8


class _UnknownRouter(torch.nn.Module):
    def __init__(self, config: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x @ self.weight.T
        weights, chosen = logits.square().topk(2, dim=1)  # nobody scores like this
        return logits, weights, chosen


def test_a_router_that_cannot_be_read_is_named_with_the_reason() -> None:
    model = make_model("qwen3_moe")
    with pytest.raises(ValueError, match=r"router 'x.gate' \(_UnknownRouter\).*score function"):
        read_router(_UnknownRouter(None), model.config, name="x.gate")


def test_a_family_that_cannot_be_balanced_is_named_with_the_reason() -> None:
    config = transformers.Ernie4_5_VLMoeConfig()
    config.text_config.num_hidden_layers = config.vision_config.depth = 2
    with torch.device("meta"):
        model = transformers.Ernie4_5_VLMoeForConditionalGeneration(config)
    with pytest.raises(ValueError, match=r"Ernie4_5_VLMoeMoeBlock\) cannot be balanced: its text"):
        find_transformers_sites(list(model.named_modules()))


def _own(model: torch.nn.Module, **section: object) -> list[float] | None:
    sites = find_transformers_sites(list(model.named_modules()))
    return layer_coefficients(parse_section(section), sites, find_own_loss(model))


def test_the_models_own_coefficient_becomes_k_over_layers_of_it_in_each_layer() -> None:
    on = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    # pooled and k when balanced: 0.02 x k = 2 over L = 2 layers
    assert _own(make_model("qwen3_moe", **on)) == pytest.approx([0.02, 0.02])
    deeper = make_model("qwen3_moe", num_hidden_layers=4, **on)
    assert _own(deeper) == pytest.approx([0.01] * 4)
    assert _own(deeper, aux_loss_coeff=0.5) == [0.5] * 4
    assert _own(deeper, scope="none") is None


def test_the_own_coefficients_of_several_models_are_not_taken_over() -> None:
    on = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    both = torch.nn.ModuleList([make_model("qwen3_moe", **on), make_model("mixtral", **on)])
    with pytest.raises(ValueError, match=r"got None.*\(Qwen3MoeForCausalLM, MixtralForCausalLM\)"):
        _own(both)
    assert _own(both, aux_loss_coeff=0.5) == [0.5] * 4


@pytest.mark.parametrize(
    ("family", "model", "why"),
    [
        ("qwen3_moe", {}, "only with output_router_logits true"),
        ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.0}, "above 0"),
        ("deepseek_v3", {}, "has no auxiliary loss of its own"),
    ],
)
def test_no_coefficient_where_nobody_applies_a_loss_is_refused(
    family: str, model: dict, why: str
) -> None:
    with pytest.raises(ValueError, match=rf"aux_loss_coeff: got None.*{why}"):
        _own(make_model(family, **model))


def test_a_config_that_does_not_say_how_many_experts_a_token_chooses_is_named() -> None:
    """DeepSeek-V2's config has None by default, which was a TypeError of torch.topk."""
    model = make_model("deepseek_v2", num_experts_per_tok=None)
    named = (
        r"'model\.layers\.0\.mlp\.gate' \(DeepseekV2\w+\) cannot be balanced: num_experts_per_tok"
    )
    with pytest.raises(ValueError, match=named):
        find_transformers_sites(list(model.named_modules()))


OWN_BIASES = {
    "deepseek_v3": "gate.e_score_correction_bias",
    "glm4_moe": "gate.e_score_correction_bias",
    "dots1": "gate.e_score_correction_bias",
    "minimax_m3": "gate.e_score_correction_bias",
    "minimax_m2": "e_score_correction_bias",
    "ernie4_5_moe": "gate.moe_statics.e_score_correction_bias",
    "lfm2_moe": "expert_bias",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_correction_bias_of_a_family_is_found_where_it_has_one(family: str) -> None:
    model = make_model(family)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for site in find_transformers_sites(list(model.named_modules())):
        if family not in OWN_BIASES:
            assert site.bias is None
        else:
            block = site.name.rpartition(".")[0]
            assert site.bias.tensor is tensors[f"{block}.{OWN_BIASES[family]}"]


def test_a_bias_that_a_family_does_not_use_is_none() -> None:
    sites = find_transformers_sites(
        list(make_model("lfm2_moe", use_expert_bias=False).named_modules())
    )
    assert [site.bias for site in sites] == [None, None]


def test_a_transformers_that_autoep_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"expert_parallel": {"enabled": True}}
    _compat.refuse_broken_autoep(config)  # 5.22
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.23.1")
    with pytest.raises(ValueError, match=r"does not work with transformers 5\.23\.1.*<5\.23"):
        _compat.refuse_broken_autoep(config)
    _compat.refuse_broken_autoep({"expert_parallel": {"enabled": False}})


def test_the_readme_names_the_families_that_are_run() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    row = next(line for line in readme.splitlines() if "the model's own routers" in line)
    named = re.findall(r"\b[a-z]+\w*\d*\b", row.split("|")[2])
    assert set(named) - {"softmax", "sigmoid"} == set(FAMILIES)
    row = next(line for line in readme.splitlines() if line.startswith("| AutoEP"))
    named = re.findall(r"\b[a-z]+\w*\d+\w*\b|mixtral", row.split("|")[2])
    assert set(named) == set(PRESETS)


def test_the_readmes_import_of_the_callback_works() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    imports = re.findall(r"`(from ds_moe_lb\.adapters\.trainer import (\w+))`", readme)
    assert len(imports) == 1
    names: dict[str, object] = {}
    exec(imports[0][0], names)
    assert f"callbacks=[{imports[0][1]}()]" in readme and imports[0][1] in names
