"""A few hundred random inputs of launch/fuzz.py, always the same ones."""

import pytest

from ds_moe_lb.config import parse_config
from launch.fuzz import check_pure_functions, check_section, fuzz_gate, run
from ranks import run_ranks


def test_any_json_is_a_config_or_a_clean_error():
    run(check_section, 300, None)


def test_pure_functions_agree_with_the_reference_on_any_input():
    run(check_pure_functions, 150, None)


@pytest.mark.ranks
def test_an_installed_gate_agrees_with_the_reference_on_any_input():
    run_ranks(fuzz_gate, 1, 100, None, timeout_s=120.0)


def _nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "section",
    [
        {"a\nb": 1},
        {"monitor": {"\r": 1}},
        {"\ud800": 1},
        {"scope": "\ud800"},
        {"monitor": {3: 4}},
        {"scope": _nested(900)},
        {"schedule": _nested(900)},
        {"aux_loss_coeff": 10**400},
        {"scope": "x" * 10**6},
    ],
    ids=lambda section: ascii(section)[:20],
)
def test_an_error_is_one_short_line_however_odd_the_input(section):
    """A key with a line break cut its own message in two; a long value was printed whole."""
    with pytest.raises(ValueError) as error:
        parse_config({"moe_load_balancing": section})
    (line,) = str(error.value).splitlines()
    assert line.startswith("moe_load_balancing") and len(line) < 400
