"""`ds-moe-lb plan`: layers found in configs, batch sizes, traffic, times, memory, text.

First what needs no device; then, marked `ranks`, the numbers of a live engine.
"""

import json
import math

import pytest
import torch

import ds_moe_lb
from ds_moe_lb import counts, router, sync
from ds_moe_lb import monitor as monitor_module
from ds_moe_lb.cli import main
from ds_moe_lb.config import parse_config
from ds_moe_lb.counts import CountLayout, RouterLayer
from ds_moe_lb.plan import advice, arithmetic, cost, model_facts
from ds_moe_lb.plan.known_models import KNOWN_MODELS
from ds_moe_lb.plan.run_plan import Plan
from models import MODEL_DIM, TinyMoE, moe_param_groups
from ranks import run_ranks

# ------------------------------------------------------------------------------------------------
# The model


def _facts(**config):
    return model_facts.facts_of(config, name="m")


_BASE = {"num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 5]}, [1, 2, 3, 4]),
        ({"first_k_dense_replace": 3}, [3, 4, 5]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4]),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, [1, 2, 4, 5]),
        ({"num_dense_layers": 2}, [2, 3, 4, 5]),
        ({"interleave_moe_layer_step": 3}, [2, 5]),
        ({"interleave_moe_layer_step": 3, "moe_layers": [1, 4]}, [1, 4]),
        ({"moe_layers_enum": "2,3"}, [2, 3]),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, [1, 3, 5]),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2}, [1, 3]),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, [1, 2, 3, 4, 5]),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 5}, [1, 2, 3, 4, 5]),
        ({"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4}, [2, 3, 4, 5]),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe", "mlp", "moe"]}, [1, 3, 5]),
        ({"hybrid_override_pattern": "MEM*E-"}, [1, 4]),
    ],
)
def test_layers_follow_the_keys_of_the_config(keys, layers):
    assert list(_facts(**_BASE, **keys).moe_layers) == layers


def test_numbers_are_found_under_each_familys_names():
    inner = {"n_layers": 4, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}}
    facts = _facts(text_config=inner, vision_config={"num_hidden_layers": 99})
    assert (facts.num_layers, facts.num_experts, facts.top_k) == (4, 16, 4)
    assert facts.coefficient is None and facts.has_own_term is None
    facts = _facts(**_BASE, router_aux_loss_coef=0.001, output_router_logits=True)
    assert (facts.coefficient, facts.has_own_term) == (0.001, True)
    facts = _facts(**_BASE, aux_loss_alpha=0.002)  # of a model's own code
    assert (facts.coefficient_key, facts.has_own_term) == ("aux_loss_alpha", False)


# Layers, MoE layers, experts, k as the models' papers and cards state them.
PUBLISHED = {
    "Qwen/Qwen3-30B-A3B": (48, 48, 128, 8),
    "qwen3-235b-a22b": (94, 94, 128, 8),
    "Qwen1.5-MoE-A2.7B": (24, 24, 60, 4),
    "mixtral-8x7B": (32, 32, 8, 2),
    "Mixtral-8x22B": (56, 56, 8, 2),
    "DeepSeek-V2-Lite": (27, 26, 64, 6),
    "DeepSeek-V2": (60, 59, 160, 6),
    "DeepSeek-V3": (61, 58, 256, 8),
    "OLMoE-1B-7B": (16, 16, 64, 8),
    "gpt-oss-20b": (24, 24, 32, 4),
    "gpt-oss-120b": (36, 36, 128, 4),
    "Phi-3.5-MoE": (32, 32, 16, 2),
    "MiniMax-M2": (62, 62, 256, 8),
    "GLM-4.5": (92, 89, 160, 8),
    "GLM-4.5-Air": (46, 45, 128, 8),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_well_known_models(name):
    facts = model_facts.read_model(name)
    found = (facts.num_layers, facts.num_moe_layers, facts.num_experts, facts.top_k)
    assert found == PUBLISHED[name]


def test_every_known_model_is_in_the_list_above():
    assert {name.rsplit("/", 1)[-1].lower() for name in PUBLISHED} == set(KNOWN_MODELS)


# (model_type, what makes some layers dense)
FAMILIES = [
    ("qwen2_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0, 3]}),
    ("qwen3_next", {"decoder_sparse_step": 3}),
    ("mixtral", {}),
    ("olmoe", {}),
    ("gpt_oss", {}),
    ("phimoe", {}),
    ("minimax_m2", {}),
    ("deepseek_v2", {"first_k_dense_replace": 2, "num_experts_per_tok": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 3}),
    ("glm4_moe", {"first_k_dense_replace": 1}),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}),
    ("afmoe", {"num_dense_layers": 2}),
    ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_interval": 2}),
    ("jamba", {"expert_layer_period": 2, "expert_layer_offset": 1}),
    ("llama4_text", {"interleave_moe_layer_step": 2}),
]


@pytest.mark.parametrize(("model_type", "keys"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_layers_are_those_that_transformers_builds(model_type, keys, tmp_path):
    """Routers are counted in a model without memory, built from the saved config."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, num_hidden_layers=4, **keys)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    recorders = {}
    for module in model.modules():
        recorders |= getattr(module, "_can_record_outputs", None) or {}
    recorded = recorders["router_logits"]
    kind = getattr(recorded, "target_class", recorded)
    routers = {name for name, module in model.named_modules() if isinstance(module, kind)}
    indices = sorted({int(name.split("layers.")[1].split(".")[0]) for name in routers})
    config.save_pretrained(tmp_path)
    facts = model_facts.read_model(str(tmp_path))
    assert list(facts.moe_layers) == indices
    assert facts.num_layers == 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 4}, "the number of experts is missing: none of num_local_experts"),
        ({"num_experts": 8, "num_hidden_layers": 4}, "the experts per token is missing"),
        ({"num_experts": 8, "num_experts_per_tok": 2}, "the number of layers is missing"),
        ({**_BASE, "num_experts": [8, 8]}, r"num_experts is \[8, 8\]; plan needs one integer"),
        ({**_BASE, "mlp_only_layers": 3}, "mlp_only_layers is 3; plan needs a list of layer"),
        ({**_BASE, "moe_layers_enum": "1,x"}, "moe_layers_enum is '1,x'; plan needs a list"),
        ({**_BASE, "num_experts": 1}, "1 experts, 2 per token: nothing to balance"),
        ({**_BASE, "enable_moe_block": False}, "none of its 6 layers has experts"),
        ({**_BASE, "is_encoder_decoder": True}, "an encoder-decoder model"),
    ],
)
def test_a_config_that_cannot_be_planned_for_says_why(config, message):
    with pytest.raises(ValueError, match=message):
        _facts(**config)


# ------------------------------------------------------------------------------------------------
# Batch sizes


def _world(ds_config=None, **sizes):
    sizes = {"world_size": 16, **sizes}
    return arithmetic.make_world(
        ds_config or {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
        **sizes,
    )


def test_balance_batch_sizes_of_every_group():
    # 16 ranks, 2 of them per sequence and 2 per token: 4 x 2 with data of their own, so D = 4
    world = _world(ep_size=4, tensor_parallel_size=2, sequence_parallel_size=2)
    assert (world.num_data_ranks, world.dp_size) == (8, 4)
    assert world.balance_batch(None, micro_steps=1) == 1.0  # half of 2 sequences
    assert world.balance_batch("data_parallel", micro_steps=4) == 4 * 2 * 4
    assert world.balance_batch("expert_parallel", micro_steps=4) == 4 * 2 * 4 / 2
    assert world.balance_batch("expert_data_parallel", micro_steps=4) == 2 * 2 * 4 / 2


@pytest.mark.parametrize(
    ("ds_config", "flags", "expected"),
    [
        ({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, {}, (2, 8)),
        ({"train_batch_size": 256, "gradient_accumulation_steps": 4}, {}, (4, 4)),
        ({"train_batch_size": 64}, {}, (4, 1)),
        ({"train_micro_batch_size_per_gpu": 3}, {}, (3, 1)),
        (
            {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
            {"micro_batch": 2, "gas": 8},
            (2, 8),
        ),
    ],
)
def test_batch_sizes_are_completed_as_deepspeed_does(ds_config, flags, expected):
    world = _world(ds_config, **flags)
    assert (world.micro_batch, world.gas) == expected


def test_the_expert_parallel_size_of_autoep_is_the_default():
    ds_config = {"train_batch_size": 16, "expert_parallel": {"enabled": True, "autoep_size": 4}}
    assert _world(ds_config).ep_size == 4
    assert _world(ds_config, ep_size=2).ep_size == 2


@pytest.mark.parametrize(
    ("ds_config", "flags", "message"),
    [
        ({}, {}, "neither train_batch_size nor train_micro_batch_size_per_gpu is a number"),
        ({"train_batch_size": 100}, {}, r"is 100, but .* = 6 x 1 x 16 = 96; DeepSpeed refuses"),
        ({"train_batch_size": 8}, {}, r"is 8, but .* = 1 x 1 x 16 = 16; DeepSpeed"),
        ({"train_batch_size": "many"}, {}, "train_batch_size: got 'many', expected an integer"),
        (None, {"world_size": 0}, "--world-size: got 0, expected an integer >= 1"),
        (None, {"ep_size": -1}, "--ep-size: got -1"),
        (None, {"tensor_parallel_size": 3}, "--world-size: got 16, expected a multiple of"),
        (None, {"micro_batch": 4}, "--micro-batch-size: got 4, but train_micro_batch_size_per_gpu"),
        (None, {"gas": 2}, "--gradient-accumulation-steps: got 2, but"),
    ],
)
def test_a_wrong_size_is_one_error(ds_config, flags, message):
    with pytest.raises(ValueError, match=message):
        arithmetic.make_world(
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
            if ds_config is None
            else ds_config,
            **{"world_size": 16, **flags},
        )


@pytest.mark.parametrize(  # the expected maximum of E standard normals, from published tables
    ("num_experts", "maximum"), [(2, 0.56419), (3, 0.84628), (10, 1.53875), (100, 2.50759)]
)
def test_max_violation_by_chance_follows_the_expected_maximum_of_normals(num_experts, maximum):
    tokens = 10_000
    expected = maximum * math.sqrt(num_experts / tokens)  # k = 1: p = 1/E
    got = arithmetic.chance_max_violation(tokens, num_experts=num_experts, top_k=1)
    assert got == pytest.approx(expected, rel=5e-3)


def test_max_violation_by_chance_is_that_of_tokens_that_choose_at_random():
    tokens, num_experts, top_k = 4096, 64, 8
    generator = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(40):
        chosen = torch.rand(tokens, num_experts, generator=generator).topk(top_k, dim=1)[1]
        counts = torch.bincount(chosen.flatten(), minlength=num_experts)
        seen.append(float(counts.max()) / (tokens * top_k / num_experts) - 1)
    expected = arithmetic.chance_max_violation(tokens, num_experts=num_experts, top_k=top_k)
    assert sum(seen) / len(seen) == pytest.approx(expected, rel=0.05)
    assert arithmetic.chance_max_violation(tokens, num_experts=8, top_k=8) == 0.0


def test_coefficients_keep_their_strength():
    # 48 layers, top 8, 64 ranks: transformers pools layers and does not divide by k
    factors = [row.factor for row in arithmetic.conversions(num_layers=48, top_k=8, dp_size=64)]
    assert factors == [1.0, 1.0, 1 / 64, 8 / 48]


# ------------------------------------------------------------------------------------------------
# Collectives, bytes, memory, time


@pytest.mark.parametrize(
    ("estimate", "mechanism", "collectives", "message_bytes"),
    [
        # 48 layers x (128 counts + 3) x 8 bytes = 50,304; one layer 1,048; 8 micro-steps
        ("running", "l_aux", 384, 1_048),
        ("running", "injected", 8, 50_304),
        ("carry", "l_aux", 384, 1_048),
        ("carry", "injected", 8, 50_304),
        ("boundary", "l_aux", 1, 50_304),
        ("boundary", "injected", 1, 50_304),
        ("exact", "l_aux", 1, 50_304),
        ("exact", "injected", 1, 50_304),
    ],
)
def test_traffic_of_48_layers_with_128_experts(estimate, mechanism, collectives, message_bytes):
    arguments = {"estimate": estimate, "mechanism": mechanism, "num_layers": 48}
    arguments |= {"num_experts": 128, "gas": 8}
    traffic = cost.count_traffic(**arguments, group_size=64)
    assert (traffic.collectives, traffic.message_bytes) == (collectives, message_bytes)
    assert traffic.total_bytes == collectives * message_bytes
    assert cost.count_traffic(**arguments, group_size=1).total_bytes == 0


def test_constants_are_those_of_the_plugin():
    assert cost.HEADER == counts.HEADER
    assert cost.MAX_RECORDS == router._MAX_RECORDS
    assert advice.MAX_EXPERT_KEYS == monitor_module.MAX_EXPERT_KEYS
    layers = [RouterLayer(index, str(index), 128, 8) for index in range(48)]
    layout = CountLayout(layers, torch.device("cpu"))
    assert layout.pack(layout.zeros(), range(48), rank=0).nbytes == 50_304


def test_memory_grows_with_the_calls_that_are_remembered():
    arguments = {"num_layers": 2, "num_experts": 100, "estimate": "running"}  # F = 200

    def held(**more):
        return cost.memory_bytes(**{**arguments, "mechanism": "l_aux", "reports": False, **more})

    # 40 F + 80 L for the window; 24 F, slopes 4 F and the message 8 (F + 3 L) for each micro-step
    assert held(gas=4) == 8_000 + 160 + 4 * (4_800 + 800 + 1_648)
    assert held(gas=1_000) == 8_000 + 160 + 256 * (4_800 + 800 + 1_648)
    # reports: 16 F + 32 L, and 4 F + 8 L for each micro-step
    assert held(gas=4, reports=True) - held(gas=4) == 3_200 + 64 + 4 * (800 + 16)
    # where the plugin adds the loss one micro-step is remembered, without messages
    assert held(gas=4, mechanism="injected") == 8_000 + 160 + 4_800 + 800
    # the last window instead of slopes and messages of this one
    assert held(gas=4, estimate="boundary") == 8_000 + 160 + 2_400 + 4 * 4_800


def test_times_of_all_reduces():
    network = cost.Network(latency_s=10e-6, bytes_per_s=1e9)
    # 2 x 7 steps of 10 us and 1,000 bytes; 2 x 3 of 10 us, and twice 8,000 bytes
    assert network.ring_s(8_000, 8) == pytest.approx(14 * (10e-6 + 1e-6), rel=1e-12)
    assert network.tree_s(8_000, 8) == pytest.approx(6 * 10e-6 + 16e-6, rel=1e-12)
    assert network.tree_s(8_000, 9) == pytest.approx(8 * 10e-6 + 16e-6, rel=1e-12)
    assert network.all_reduce_s(8_000, 8) == network.tree_s(8_000, 8)
    assert network.all_reduce_s(8e6, 2) == network.ring_s(8e6, 2)  # 8.02 against 16.02 ms
    assert network.all_reduce_s(8_000, 1) == 0.0


@pytest.mark.parametrize(
    ("estimate", "mechanism", "latency_us", "exposed_us", "overlapped_us"),
    [
        # 2 layers, 4 micro-steps, 2 ranks; a step of 2,400 us has forwards of 200 us, layers of
        # 100 us; a ring of 2 ranks is two steps. Bandwidth plays no part.
        ("running", "l_aux", 20, 8 * 40, 0),
        ("running", "l_aux", 70, 8 * 140, 8 * 40),
        ("running", "injected", 20, 4 * 40, 4 * 40),
        ("boundary", "l_aux", 70, 140, 40),
        ("boundary", "injected", 70, 140, 0),
        ("boundary", "injected", 120, 240, 40),
        ("exact", "l_aux", 20, 40, 40),
    ],
)
def test_computation_hides_what_runs_beside_it(
    estimate, mechanism, latency_us, exposed_us, overlapped_us
):
    traffic = cost.count_traffic(
        estimate=estimate, mechanism=mechanism, num_layers=2, num_experts=8, gas=4, group_size=2
    )
    time = cost.step_time(
        traffic,
        network=cost.Network(latency_s=latency_us * 1e-6, bytes_per_s=math.inf),
        group_size=2,
        estimate=estimate,
        mechanism=mechanism,
        num_layers=2,
        gas=4,
        step_s=2_400e-6,
    )
    assert time.exposed_s == pytest.approx(exposed_us * 1e-6, rel=1e-9)
    assert time.overlapped_s == pytest.approx(overlapped_us * 1e-6, rel=1e-9, abs=1e-12)


# ------------------------------------------------------------------------------------------------
# Warnings


def _warnings(section=None, *, world=None, ds_config=None, **facts):
    facts = {"num_moe": 48, "num_experts": 128, **facts}
    model = model_facts.MoeFacts(
        name="m",
        num_layers=facts["num_moe"],
        moe_layers=tuple(range(facts["num_moe"])),
        num_experts=facts["num_experts"],
        top_k=8,
        coefficient=facts.get("coefficient"),
        coefficient_key=facts.get("key"),
        has_own_term=facts.get("has_own_term"),
    )
    config = parse_config({"moe_load_balancing": section or {"aux_loss_coeff": 0.01}})
    world = world or _world(world_size=64)
    return advice.warnings(model, world, config, has_section=True)


def test_nothing_is_warned_of_where_all_is_well():
    assert _warnings() == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"section": {"aux_loss_coeff": 0.01, "enabled": False}}, "the plugin stays off"),
        ({"section": {"scope": "none"}}, "scope none only measures"),
        ({"section": {"aux_loss_coeff": 0}}, "adds nothing"),
        ({"section": {"estimate": "running"}}, "only if the script adds coefficient * l_aux"),
        (
            {"section": {"estimate": "running"}, "coefficient": 0.006, "key": "aux_loss_alpha"},
            "aux_loss_alpha 0.006 of the model would be ignored: transformers does not use that "
            "key; for its strength set aux_loss_coeff to 0.001 (c k / L)",
        ),
        (
            {
                "section": {"estimate": "running"},
                "coefficient": 0.006,
                "key": "router_aux_loss_coef",
                "has_own_term": False,
            },
            "transformers adds its term only with output_router_logits true",
        ),
        ({"world": _world(world_size=1, ds_config={"train_batch_size": 2})}, "nothing changes"),
        ({"world": _world(world_size=2)}, "balance batch size 16 sequences is small"),
        ({"world": _world(world_size=8)}, "balance batch size 64 sequences leaves a little"),
        (
            {"world": _world(world_size=64, ep_size=48)},
            "size 48 does not divide the data-parallel ranks (64), which DeepSpeed needs; the next "
            "smaller that does is 32",
        ),
        ({"num_experts": 60, "world": _world(world_size=64, ep_size=8)}, "a layer (60)"),
        (
            {"section": {"aux_loss_coeff": 0.01, "monitor": {"detail": "expert"}}},
            "only the loads of the first 1024 experts are written, of 6,144",
        ),
    ],
)
def test_each_warning(arguments, text):
    found = _warnings(**arguments)
    assert len([line for line in found if text in line]) == 1, found


@pytest.mark.parametrize("term", [{"z_loss_coeff": 0.1}, {"bias_update_rate": 0.001}])
def test_other_terms_without_the_loss_are_not_said_to_do_nothing(term):
    assert not any("adds nothing" in line for line in _warnings({"aux_loss_coeff": 0} | term))


def test_a_model_that_has_its_own_term_on_is_not_said_to_ignore_it():
    found = _warnings(
        section={"estimate": "running"},
        coefficient=0.001,
        key="router_aux_loss_coef",
        has_own_term=True,
    )
    assert not any("would be ignored" in line for line in found)


# ------------------------------------------------------------------------------------------------
# The command

_COMMAND = ["plan", "--config", "zero1_ep2_injected", "--model", "Qwen3-30B-A3B"]
_TIMES = ["--latency-us", "20", "--bandwidth-gbps", "100", "--step-time-ms", "2000"]


def test_the_command_prints_the_plan_within_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["--world-size", "64", "--ep-size", "8", "--sequence-length", "4096", *_TIMES]
    assert main([*_COMMAND, *arguments]) == 0
    said = capsys.readouterr().out
    assert "48 MoE layers of 48 (0 dense; MoE: 0-47), E=128 k=8" in said
    assert "8 count collectives of 49.12 KiB per optimizer step, 393 KiB in all" in said
    # 64 ranks x 2 sequences x 8 micro-steps x 4,096 tokens, x 8 / 128
    cells = [line.split("│") for line in said.splitlines() if "│data_parallel " in line]
    assert [cell.strip() for cell in cells[0][2:6]] == ["64", "1,024", "4,194,304", "262,144"]
    # 4,096 ranks: 24 latencies of 20 us and twice 1,048 bytes at 12.5 GB/s, 384 times = 184.4 ms
    (row,) = [line for line in said.splitlines() if line.startswith("│4,096 ")]
    assert row.split("│")[2].strip() == "184 9.22%"
    assert "aux_loss_coeff 0.01 weighs it 0.01, 60 times as much" in said  # 0.01 / (.001 * 8 / 48)
    tables = [line for line in said.splitlines() if line.startswith(("│", "┃"))]
    assert tables and all(len(line) <= 80 and "…" not in line for line in tables)


def test_the_command_reads_local_configs(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**_BASE, "decoder_sparse_step": 2}))
    ds_config = tmp_path / "ds.json"
    ds_config.write_text(json.dumps({"train_batch_size": 64}))
    arguments = ["plan", "--config", str(ds_config), "--model", str(tmp_path), "--world-size", "4"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "3 MoE layers of 6 (3 dense; MoE: 1, 3, 5), E=8 k=2" in said
    assert "moe_load_balancing is absent from the config" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "0"], "--world-size: got 0, expected an integer >= 1"),
        (["--world-size", "8", "--model", "Qwen3-30B"], "Did you mean 'qwen3-30b-a3b'?"),
        (["--world-size", "8", "--config", "nothing"], "no ready config is named 'nothing'"),
        (["--world-size", "8", "--latency-us", "5"], "missing: --bandwidth-gbps, --step-time-ms"),
        (
            ["--world-size", "8", *_TIMES, "--latency-us", "-1"],
            "--latency-us: got -1, expected a finite number > 0",
        ),
    ],
)
def test_a_bad_argument_is_one_clear_line(arguments, message, capsys):
    assert main([*_COMMAND, *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_section_is_validated_as_the_plugin_does(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"moe_load_balancing": {"estimat": "running"}}))
    assert main([*_COMMAND, "--world-size", "8", "--config", str(path)]) == 2
    assert "moe_load_balancing.estimat: unknown key. Did you mean" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# The numbers of a live engine

_EXPERTS, _GAS = 64, 4
SECTIONS = [
    {},
    {"aux_loss_coeff": 0.1},
    {"estimate": "boundary"},
    {"estimate": "boundary", "aux_loss_coeff": 0.1},
    {"estimate": "carry"},
    {"estimate": "carry", "aux_loss_coeff": 0.1},
    {"estimate": "exact"},
    {"estimate": "exact", "aux_loss_coeff": 0.1},
    {"aux_loss_coeff": 0.0},
    {"aux_loss_coeff": 0.0, "z_loss_coeff": 0.1},
    {"aux_loss_coeff": 0.0, "bias_update_rate": 0.01},
    {"scope": "micro_batch"},
    {"scope": "none"},
    {"sync_group": "expert_parallel"},
    {"sync_group": "expert_data_parallel", "aux_loss_coeff": 0.1},
    {"monitor": {"enabled": False}},
]


def _ds_config(section):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": _GAS,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "moe_load_balancing": section,
    }


def _check_live(sections):
    """Sizes of the plugin's all-reduces in the second window, and bytes it then holds."""
    sizes, seen = [], []
    for section in sections:
        torch.manual_seed(7)
        model = TinyMoE(k=2, ep_size=2, num_experts=(_EXPERTS, _EXPERTS))
        engine = ds_moe_lb.initialize(
            model=model, model_parameters=moe_param_groups(model), config=_ds_config(section)
        )[0]
        original = sync.dist
        try:
            for window in range(2):
                if window:
                    sync.dist = _Recorder(original, seen)
                inputs = [torch.randn(2, 4, MODEL_DIM) for _ in range(_GAS)]
                for x in engine.load_balancer.window(inputs, engine):
                    prediction, losses = engine(x)
                    coefficient = 0.0 if section.get("aux_loss_coeff") is not None else 0.1
                    engine.backward(prediction.square().mean() + coefficient * sum(losses))
                    held = _tensor_bytes(engine.load_balancer)
                    engine.step()
        finally:
            sync.dist = original
        sizes.append((sorted(seen), held))
        seen.clear()
        engine.load_balancer.uninstall()
        engine.destroy()
    return sizes


class _Recorder:
    """deepspeed.comm, noting dtype and bytes of each all-reduce."""

    def __init__(self, original, seen):
        self._original, self._seen = original, seen

    def __getattr__(self, name):
        return getattr(self._original, name)

    def all_reduce(self, tensor, *args, **kwargs):
        self._seen.append((str(tensor.dtype), tensor.nbytes))
        return self._original.all_reduce(tensor, *args, **kwargs)


def _tensor_bytes(balancer):
    """Storage of all tensors that the plugin's own objects refer to."""
    storages, done, todo = {}, set(), [balancer]
    while todo:
        thing = todo.pop()
        if id(thing) in done:
            continue
        done.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, list | tuple | set) or type(thing).__name__ == "deque":
            todo += thing
        elif type(thing).__module__.startswith("ds_moe_lb"):
            todo += vars(thing).values()
    return sum(storages.values())


@pytest.mark.ranks
def test_planned_numbers_are_those_of_a_live_engine():
    results = run_ranks(_check_live, 2, SECTIONS, timeout_s=120.0)
    facts = _facts(num_hidden_layers=2, num_experts=_EXPERTS, num_experts_per_tok=2)
    for per_rank in results:
        for section, (seen, held) in zip(SECTIONS, per_rank, strict=True):
            ds_config = _ds_config(section)
            config = parse_config(ds_config)
            world = arithmetic.make_world(ds_config, world_size=2, ep_size=2)
            plan = Plan(
                facts=facts, world=world, config=config, has_section=True, network=None, step_s=0.0
            )
            traffic = plan.own_traffic()
            expected = [("torch.int64", traffic.message_bytes)] * traffic.collectives
            if config.monitor.enabled:
                report = cost.report_traffic(num_layers=2, num_experts=_EXPERTS, group_size=2)
                expected += [("torch.float64", report.message_bytes)] * report.collectives
            assert seen == sorted(expected), section
            planned = plan.memory_bytes()
            assert 0.9 * planned <= held <= 1.1 * planned, (section, held, planned)
