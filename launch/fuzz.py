"""Random input for everything that takes any: the JSON section, the pure functions, a live gate.

    python launch/fuzz.py                     2,100 inputs with a new seed, which is printed
    python launch/fuzz.py --inputs 50000 --seed 7

Whatever comes in, the answer is the right value or a ValueError that says what is wrong, one line
for each problem; finite input never gives NaN. A failure is shrunk to its smallest input and ends
the script with exit code 1. The tests run fewer of the same (tests/test_fuzz.py).
"""

import argparse
import json
import math
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import reference  # noqa: E402
from ds_moe_lb import loss, metrics  # noqa: E402
from ds_moe_lb.config import SECTION, LoadBalancingConfig, MonitorConfig, parse_config  # noqa: E402
from ranks import run_ranks  # noqa: E402

# ------------------------------------------------------------------------------------------------
# The JSON section

_texts = st.text(st.characters(exclude_categories=()), max_size=12)  # lone surrogates are JSON too
_words = st.sampled_from(
    "global_batch micro_batch sequence none running carry boundary exact data_parallel "
    "expert_parallel expert_data_parallel mask labels all model layer expert auto true 1".split()
)
_numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, 1, -1, 0.0, 0.01, 1.0, 10**400, -(10**400)])
)
_values = st.recursive(
    st.one_of(st.none(), st.booleans(), _numbers, _words, _texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(_texts, inner, max_size=4)
    ),
    max_leaves=8,
)


def _sections(keys: list[str], special: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    """Objects with mostly known keys, whose values are right, nearly right or anything."""
    any_key = st.one_of(st.sampled_from(keys), st.sampled_from(keys).map(lambda k: k + "s"), _texts)
    known = {key: special.get(key, _values) for key in keys}
    return st.one_of(
        st.fixed_dictionaries({}, optional=known),
        st.dictionaries(any_key, _values, max_size=4),
        st.tuples(
            st.fixed_dictionaries({}, optional=known), st.dictionaries(any_key, _values, max_size=2)
        ).map(lambda two: two[0] | two[1]),
    )


_right: dict[str, st.SearchStrategy] = {
    "enabled": st.booleans(),
    "scope": _words,
    "estimate": _words,
    "sync_group": _words,
    "valid_tokens": _words,
    "detail": _words,
    "aux_loss_coeff": _numbers,
}
_monitors = _sections(list(MonitorConfig.model_fields), _right)
sections = st.one_of(
    _sections(list(LoadBalancingConfig.model_fields), {**_right, "monitor": _monitors}), _values
)


@given(section=sections, name=st.one_of(st.just(SECTION), st.just("moe_load_balancng"), _texts))
def check_section(section: Any, name: str) -> None:
    """A valid config, or one clean ValueError."""
    try:
        config = parse_config({"train_batch_size": 4, name: section})
    except ValueError as error:
        lines = str(error).splitlines()
        assert type(error) is ValueError, f"{type(error).__name__}: {error}"
        assert lines and all(SECTION in line for line in lines), lines
        return
    assert config is None if name != SECTION else isinstance(config, LoadBalancingConfig)
    if config is not None:  # what was accepted is what was written
        written = json.loads(json.dumps(config.model_dump()))
        assert parse_config({SECTION: written}) == config


# ------------------------------------------------------------------------------------------------
# Pure functions against the reference's loops


@st.composite
def routings(draw: Any) -> dict[str, Any]:
    """Logits, selections and a mask of one micro-batch; T may be 0 and the mask all False."""
    num_experts = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, min(4, num_experts)))
    num_tokens = draw(st.one_of(st.just(0), st.integers(1, 9)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]))
    logits_TE = scale * torch.randn(num_tokens, num_experts, generator=generator)
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    rows = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)
    mask = draw(st.one_of(st.none(), rows, st.just([False] * num_tokens)))
    return {
        "top_k": top_k,
        "logits_TE": logits_TE.to(dtype),
        "mask": mask,
        "not_finite": draw(st.sampled_from([None, math.nan, math.inf, -math.inf])),
        "where": draw(st.integers(0, max(num_tokens - 1, 0))),
    }


@given(routings())
def check_pure_functions(drawn: dict[str, Any]) -> None:
    """Values, gradients and zeros of loss.py and metrics.py."""
    logits_TE, top_k, mask = drawn["logits_TE"], drawn["top_k"], drawn["mask"]
    num_tokens, num_experts = logits_TE.shape
    valid = [True] * num_tokens if mask is None else mask
    valid_mask_T = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    masked_rows = [t for t in range(num_tokens) if not valid[t]]
    if drawn["not_finite"] is not None and drawn["where"] in masked_rows:
        logits_TE = logits_TE.clone()  # a row that does not count may hold anything
        logits_TE[drawn["where"]] = drawn["not_finite"]
    dtype = torch.promote_types(logits_TE.dtype, torch.float32)
    probs_TE = logits_TE.to(dtype).softmax(dim=1).requires_grad_()
    selections = logits_TE.topk(top_k, dim=1).indices.tolist()
    counts = reference.count(selections, valid, num_experts)
    counts_E = torch.tensor(counts)
    fraction = reference.fraction(counts)
    rows = [
        row for row, counts_at_all in zip(probs_TE.tolist(), valid, strict=True) if counts_at_all
    ]
    mean = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)] or [
        0.0
    ] * num_experts

    near = {"rtol": 1e-5, "atol": 1e-6}
    f_E = loss.expert_fraction(counts_E)
    p_E = loss.mean_prob(probs_TE, valid_mask_T=valid_mask_T)
    torch.testing.assert_close(f_E.tolist(), fraction, **near)
    torch.testing.assert_close(p_E.tolist(), mean, **near)
    expected = num_experts * math.fsum(f * p for f, p in zip(fraction, mean, strict=True))
    value = loss.load_balancing_loss(expert_fraction_E=f_E, mean_prob_E=p_E)
    torch.testing.assert_close(value.item(), expected, **near)
    assert value.isfinite() and value.requires_grad

    slope_E = loss.local_slope(counts_E, top_k=top_k)
    sum_E = loss.prob_sum(probs_TE, valid_mask_T=valid_mask_T)
    term = torch.dot(slope_E.to(sum_E.dtype), sum_E)
    torch.testing.assert_close(term.item(), expected, **near)  # N counts / k = valid tokens
    term.backward()
    assert probs_TE.grad.isfinite().all()
    assert not probs_TE.grad[masked_rows].any()

    z = loss.router_z_loss(logits_TE, valid_mask_T=valid_mask_T)
    squares = [
        float(logits_TE[t].double().logsumexp(dim=0)) ** 2 for t in range(num_tokens) if valid[t]
    ]
    expected_z = math.fsum(squares) / max(len(squares), 1)
    torch.testing.assert_close(float(z), expected_z, rtol=1e-4, atol=1e-6)

    mean_load = sum(counts) / num_experts
    violation = max(counts) / mean_load - 1 if mean_load else 0.0
    torch.testing.assert_close(float(metrics.max_violation(counts_E)), violation, **near)
    assert int(metrics.dead_experts(counts_E)) == (counts.count(0) if any(counts) else 0)
    assert 0.0 <= float(metrics.load_entropy(counts_E)) <= 1.0 + 1e-12


# ------------------------------------------------------------------------------------------------
# A gate that is installed on an engine of one rank


@st.composite
def micro_batches(draw: Any) -> dict[str, Any]:
    """Input of a live gate with k experts per token; see :func:`routings`."""
    num_tokens = draw(st.one_of(st.just(0), st.just(1), st.integers(1, 9)))
    rows = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)
    return {
        "top_k": draw(st.sampled_from([1, 2, 4])),
        "injects": draw(st.booleans()),
        "num_tokens": num_tokens,
        "seed": draw(st.integers(0, 2**32)),
        "scale": draw(st.sampled_from([0.1, 1.0, 2.0])),
        "mask": draw(st.one_of(st.none(), rows, st.just([False] * num_tokens))),
        "mask_length": draw(st.sampled_from([0, 0, 0, -1, 2])),
        "mask_by": draw(st.sampled_from(["used_token", "token_mask"])),
        "not_finite": draw(st.sampled_from([None, None, math.nan, math.inf])),
        "where": draw(st.integers(0, max(num_tokens - 1, 0))),
    }


def fuzz_gate(num_inputs: int, seed_of_run: int | None) -> None:
    """Run in a rank of its own: the engines of all kinds are made once."""
    from fuzz_gate import LiveGates

    gates = LiveGates()
    run(given(micro_batches())(gates.check), num_inputs, seed_of_run)


# ------------------------------------------------------------------------------------------------


def run(check: Callable[..., None], num_inputs: int, seed_of_run: int | None) -> None:
    """Run one check; without a seed always on the same inputs."""
    profile = settings(
        max_examples=num_inputs,
        deadline=None,
        derandomize=seed_of_run is None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    check = profile(check)
    (check if seed_of_run is None else seed(seed_of_run)(check))()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=2100, help="over all three kinds")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args(argv)
    share = math.ceil(options.inputs / 3)
    print(f"seed {options.seed}, {share} inputs of each kind", flush=True)
    run(check_section, share, options.seed)
    print("JSON section: ok", flush=True)
    run(check_pure_functions, share, options.seed)
    print("pure functions: ok", flush=True)
    run_ranks(fuzz_gate, 1, share, options.seed, timeout_s=120.0 + share / 10)
    print("installed gate: ok", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
