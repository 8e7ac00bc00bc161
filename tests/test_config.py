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
        ({"scope": "none", "bias_update_rate": 0.1}, "so bias_update_rate must be 0, got 0.1"),
        (
            {"bias_update_rate": 0.1, "sync_group": "expert_parallel"},
            "bias_update_rate: got 0.1 with sync_group 'expert_parallel'.*use sync_group",
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


def test_a_schedule_builds_on_what_was_before():
    config = parse(
        {
            "aux_loss_coeff": 0.1,
            "schedule": [
                {"step": 10, "scope": "micro_batch"},
                {"step": 20, "aux_loss_coeff": 0.2, "bias_update_rate": 0.001},
                {"step": 30, "scope": "global_batch", "estimate": "boundary"},
            ],
        }
    )
    keys = ("scope", "estimate", "aux_loss_coeff", "bias_update_rate")
    assert [(step, *(getattr(state, key) for key in keys)) for step, state in config.states()] == [
        (0, "global_batch", "running", 0.1, 0.0),
        (10, "micro_batch", "running", 0.1, 0.0),
        (20, "micro_batch", "running", 0.2, 0.001),
        (30, "global_batch", "boundary", 0.2, 0.001),
    ]


def test_what_one_state_of_a_schedule_ignores_may_serve_another():
    section = {"scope": "micro_batch", "estimate": "boundary", "sync_group": "expert_parallel"}
    parse(section | {"schedule": [{"step": 1, "scope": "global_batch"}]})


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"step": 1}, "schedule: got .*expected a list of objects such as"),
        ([3], r"schedule.0: got 3, expected an object with the keys 'step', 'scope'"),
        ([{"scope": "none"}], "schedule.0.step: .*expected the key 'step', an integer"),
        ([{"step": 1.5, "scope": "none"}], "schedule.0.step: got 1.5, expected an integer"),
        ([{"step": -1, "scope": "none"}], "schedule.0.step: got -1, expected a number >= 0"),
        ([{"step": 1}], r"schedule\[0\]: changes nothing, expected one or more of 'scope'"),
        (
            [{"step": 1, "scope": "micro"}],
            r"schedule.0.scope: got 'micro', expected one of .*nearest: 'micro_batch'",
        ),
        ([{"step": 1, "scop": "none"}], "schedule.0.scop: unknown key. Did you mean 'scope'"),
        ([{"step": 1, "monitor": {}}], "schedule.0.monitor: unknown key. Allowed keys: 'step'"),
        ([{"step": 1, "aux_loss_coeff": None}], "aux_loss_coeff: got None, expected"),
        (
            [{"step": 5, "scope": "micro_batch"}, {"step": 5, "scope": "sequence"}],
            r"schedule\[1\].step: got 5 after 5, expected steps that increase",
        ),
        (
            [{"step": 5, "micro_batch_weight": 0.1}, {"step": 9, "scope": "micro_batch"}],
            r"schedule\[1\] \(from step 9 on\): .*micro_batch_weight: got 0.1",
        ),
        ([{"step": 5, "scope": "none"}], r"schedule\[0\] \(from step 5 on\): .*only measures"),
    ],
)
def test_wrong_schedules(schedule, message):
    with pytest.raises(ValueError, match=message):
        parse({"aux_loss_coeff": 0.1, "schedule": schedule})


def test_a_schedule_goes_from_number_to_number():
    with pytest.raises(ValueError, match="begins with null, where the script adds the loss"):
        parse({"schedule": [{"step": 1, "aux_loss_coeff": 0.1}]})
