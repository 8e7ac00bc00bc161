"""The JSON section: defaults, strict types, and one clear error for everything that is wrong."""

import pytest

from ds_moe_lb.config import LoadBalancingConfig, parse_config


def parse(section):
    return parse_config({"train_batch_size": 4, "moe_load_balancing": section})


def test_absent_section_keeps_the_plugin_off():
    assert parse_config({"train_batch_size": 4, "zero_optimization": {"stage": 1}}) is None


def test_defaults_are_the_documented_ones():
    assert parse({}).model_dump() == {
        "enabled": True,
        "scope": "global_batch",
        "estimate": "running",
        "sync_group": "data_parallel",
        "valid_tokens": "mask",
        "aux_loss_coeff": None,
        "micro_batch_weight": 0.0,
        "z_loss_coeff": 0.0,
        "bias_update_rate": 0.0,
        "schedule": [],
        "monitor": {"enabled": True, "interval": 1, "detail": "layer", "image_interval": 0},
    }


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"scop": 1}, r"moe_load_balancing.scop: unknown key. Did you mean 'scope'\? Allowed keys"),
        (
            {"scope": "global"},
            r"moe_load_balancing.scope: got 'global', expected one of 'global_batch', "
            r"'micro_batch', 'sequence', 'none' \(nearest: 'global_batch'\)",
        ),
        ({"scope": None}, "moe_load_balancing.scope: got None, expected one of 'global_batch'"),
        ({"enabled": 1}, "moe_load_balancing.enabled: got 1, expected true or false"),
        ({"enabled": "auto"}, "moe_load_balancing.enabled: got 'auto', expected true or false"),
        ({"aux_loss_coeff": True}, "aux_loss_coeff: got True, expected null or a finite number"),
        ({"aux_loss_coeff": "0.1"}, "aux_loss_coeff: got '0.1', expected null or a finite"),
        ({"aux_loss_coeff": -0.1}, "aux_loss_coeff: got -0.1, expected null or a finite number"),
        ({"aux_loss_coeff": float("nan")}, "aux_loss_coeff: got nan, expected null or a finite"),
        ({"aux_loss_coeff": float("inf")}, "aux_loss_coeff: got inf, expected null or a finite"),
        ({"sync_group": "dp"}, "sync_group: got 'dp', expected one of 'data_parallel', 'expert_p"),
        ({"monitor": 3}, "moe_load_balancing.monitor: got 3, expected an object with the keys"),
        ({"monitor": {"interval": 0}}, "monitor.interval: got 0, expected a number >= 1"),
        ({"monitor": {"interval": 1.5}}, "monitor.interval: got 1.5, expected an integer"),
        ({"monitor": {"intervall": 1}}, "monitor.intervall: unknown key. Did you mean 'interval'"),
        ({"monitor": {"detail": "experts"}}, r"monitor.detail: got .* \(nearest: 'expert'\)"),
        ({3: 4}, "got the key 3, expected one of 'enabled', 'scope'"),
        (None, "moe_load_balancing: got None, expected an object"),
        (["scope"], r"moe_load_balancing: got \['scope'\], expected an object"),
    ],
)
def test_wrong_section_says_what_where_and_what_is_allowed(section, message):
    with pytest.raises(ValueError, match=message):
        parse(section)


def test_every_wrong_key_is_named_at_once():
    with pytest.raises(ValueError, match="(?s)scope: got 'x'.*monitor.interval: got -1"):
        parse({"scope": "x", "monitor": {"interval": -1}})


@pytest.mark.parametrize(
    "section",
    [
        {"bias_update_rate": 0.001},
        {"schedule": [{"step": 10, "scope": "global_batch"}]},
    ],
)
def test_what_this_version_does_not_run_is_refused_and_never_ignored(section):
    (key,) = section
    with pytest.raises(ValueError, match=f"moe_load_balancing.{key}: .*this version of ds_moe_lb"):
        parse(section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"scope": "none", "aux_loss_coeff": 0.1}, "scope 'none' only measures"),
        ({"scope": "micro_batch", "estimate": "boundary"}, "estimate: got 'boundary'.*leave it"),
        ({"scope": "sequence", "estimate": "carry"}, "estimate: got 'carry'.*leave it"),
        ({"scope": "micro_batch", "micro_batch_weight": 0.1}, "micro_batch_weight: got 0.1.*leave"),
        ({"z_loss_coeff": 0.1}, r"z_loss_coeff: got 0.1.*aux_loss_coeff \(0 for.*got None\)"),
        (
            {"z_loss_coeff": 0.1, "aux_loss_coeff": 0.0, "scope": "none"},
            r"z_loss_coeff: .*a scope other than 'none' \(got 'none'\)",
        ),
        ({"scope": "none", "sync_group": "expert_parallel"}, "sync_group: got .*leave it out"),
    ],
)
def test_keys_that_contradict_each_other(section, message):
    with pytest.raises(ValueError, match=message):
        parse(section)


@pytest.mark.parametrize("section", [{"scope": "none", "aux_loss_coeff": 0}, {"enabled": False}])
def test_allowed_corner_cases(section):
    assert isinstance(parse(section), LoadBalancingConfig)


@pytest.mark.parametrize(
    "name",
    ["moe_load_balancng", "MoE_Load_Balancing", "moe-load-balancing", "moe_balance", "moe_lb"],
)
def test_misspelt_section_name(name):
    """DeepSpeed accepts an unknown section in silence, and the user trains unbalanced for days."""
    with pytest.raises(ValueError, match=f"section '{name}' is unknown.*'moe_load_balancing'"):
        parse_config({name: {"scope": "global_batch"}})


@pytest.mark.parametrize(
    "name", ["zero_optimization", "moe", "monitor_config", "checkpoint", "my_moe_model", "wandb"]
)
def test_other_sections_are_left_alone(name):
    assert parse_config({name: {}}) is None
