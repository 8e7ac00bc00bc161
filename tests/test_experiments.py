"""Experiments without ranks: catalogue, keys, records, analysis by hand, tables and figures."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_moe_lb.cli import EXIT_USAGE, main
from ds_moe_lb.config import parse_config
from ds_moe_lb.experiments.analysis import (
    Frontier,
    Interval,
    at_equal_violation,
    best,
    common_violations,
    interval,
    paired_difference,
)
from ds_moe_lb.experiments.catalogue import EXPERIMENTS, runs_of
from ds_moe_lb.experiments.figures import save_figures
from ds_moe_lb.experiments.records import RECORDS_FILE, Records, corpus_hashes
from ds_moe_lb.experiments.results import INFORMATION, LOSS, Results, collect
from ds_moe_lb.experiments.setting import NUM_RANKS, RunSpec, Setting
from ds_moe_lb.experiments.shuffle import draw_counts
from ds_moe_lb.experiments.tables import page, show
from ds_moe_lb.training.options import script_aux_loss_coeff

SHIPPED = Path(__file__).parent.parent / "launch/experiments/results"
SETTING = Setting(steps=8)
CORPUS = "c" * 64
DOMAINS = ("english", "python", "tables")


# what is run


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_has_a_valid_config_and_the_same_global_batch(name: str) -> None:
    runs = runs_of(EXPERIMENTS[name], SETTING, num_seeds=2)
    names = [variant.name for variant, _ in runs]
    assert len(set(names)) * 2 == len(names)
    for variant, spec in runs:
        config = spec.ds_config
        assert parse_config(config) is not None
        sequences = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
        assert sequences * NUM_RANKS == SETTING.global_batch_size
        assert variant.baseline == "" or variant.baseline in names
        assert spec.steps == 8 and spec.seed in (1, 2)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_only_deepspeeds_own_loss_is_added_by_the_script(name: str) -> None:
    """`none` once had it too: the section said nothing of a coefficient."""
    for variant, spec in runs_of(EXPERIMENTS[name], SETTING, num_seeds=1):
        added = script_aux_loss_coeff(spec.options(), spec.ds_config)
        assert added == (SETTING.aux_loss_coeff if variant.name == "deepspeed" else 0.0)


def test_experiments_share_the_runs_that_are_the_same() -> None:
    def keys(name: str, variants: set[str]) -> set[str]:
        runs = runs_of(EXPERIMENTS[name], SETTING, num_seeds=1)
        return {spec.key(CORPUS) for variant, spec in runs if variant.name in variants}

    two = keys("methods", {"micro", "exact"})
    assert len(two) == 2
    assert two == keys("routing", {"micro", "global"}) == keys("switch", {"micro", "global"})
    two = keys("balance-batch", {"2", "32"})
    assert len(two) == 2
    assert two == keys("weights", {"micro 0.1", "global 0.1"})
    assert two == keys("routers", {"linear, micro", "linear, global"})
    assert keys("balance-batch", {"2"}) == keys("methods", {"micro"})


def test_a_key_follows_config_seed_and_text_and_nothing_else() -> None:
    spec = SETTING.run(seed=1, section={"scope": "none"})
    key = spec.key(CORPUS)
    again = RunSpec(**json.loads(json.dumps(spec.__dict__)))
    assert again.key(CORPUS) == key
    others = [
        spec.key("d" * 64),
        replace(spec, seed=2).key(CORPUS),
        replace(spec, shuffled=True).key(CORPUS),
        replace(spec, steps=9).key(CORPUS),
        SETTING.run(seed=1, section={"scope": "none"}, micro_batch_size=4).key(CORPUS),
        SETTING.run(seed=1, section={"scope": "none"}, router={"type": "hyper"}).key(CORPUS),
    ]
    assert len({key, *others}) == 1 + len(others)


def test_routers_are_drawn_by_the_seed_of_the_run() -> None:
    specs = runs_of(EXPERIMENTS["routers"], SETTING, num_seeds=2)
    sections = [s.ds_config.get("moe_router") for v, s in specs if v.name == "hyper, global"]
    assert sections == [{"type": "hyper", "seed": 1}, {"type": "hyper", "seed": 2}]
    assert all("moe_router" not in s.ds_config for v, s in specs if v.name == "linear, micro")


def test_a_micro_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="micro_batch_size: got 3, expected a divisor of 16"):
        SETTING.run(seed=1, section={"scope": "none"}, micro_batch_size=3)


# records


def test_records_come_back_by_key_and_a_torn_line_is_overwritten(tmp_path: Path) -> None:
    records = Records(tmp_path / "new")
    assert records.read() == {}
    records.append({"key": "a", "seed": 1})
    with records.path.open("a") as file:
        file.write('{"key": "b", "se')  # the machine lost power here
    assert list(records.read()) == ["a"]
    records.append({"key": "c", "seed": 2})
    records.append({"key": "a", "seed": 3})
    assert records.read() == {"a": {"key": "a", "seed": 3}, "c": {"key": "c", "seed": 2}}
    assert len(records.path.read_text().splitlines()) == 3


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / RECORDS_FILE).write_text('{"key": "a"}\nhello\n')
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 2: expected the record of a run"):
        Records(tmp_path).read()


def test_a_folder_is_of_one_command_at_a_time(tmp_path: Path) -> None:
    with Records(tmp_path).reserved():
        with pytest.raises(ValueError, match="another experiment is being run there"):
            with Records(tmp_path).reserved():
                pass
    with Records(tmp_path).reserved():
        pass


# the control


def test_drawn_counts_are_of_as_many_tokens_as_a_micro_batch() -> None:
    """Two of six tokens; layer 0 sends token t to experts t and t + 1, layer 1 all to 0 and 1."""
    tokens = torch.arange(6)
    selected = torch.stack(
        [torch.stack([tokens, (tokens + 1) % 6], dim=1), torch.tensor([[0, 1]]).expand(6, 2)]
    )
    draws = draw_counts(selected, num_experts=6, num_tokens=2, num_draws=300, seed=3)
    assert draws.shape == (300, 2, 6)
    assert (draws.sum(dim=2) == 4).all()  # k x tokens
    assert (draws[:, 1] == torch.tensor([2, 2, 0, 0, 0, 0])).all()
    assert draws[:, 0].max() == 2  # without replacement: no token, and so no pair, twice
    # Each expert is one of the pairs of two of six tokens: 2 x 2 / 6 on average; the standard error
    # of the mean of 300 draws is below 0.6 / sqrt(300) = 0.035.
    assert draws[:, 0].double().mean(dim=0).tolist() == pytest.approx([2 / 3] * 6, abs=0.14)
    again = draw_counts(selected, num_experts=6, num_tokens=2, num_draws=300, seed=3)
    assert torch.equal(draws, again)
    assert not torch.equal(
        draws, draw_counts(selected, num_experts=6, num_tokens=2, num_draws=300, seed=4)
    )


def test_all_tokens_drawn_are_the_global_batch() -> None:
    selected = torch.randint(5, (1, 12, 1))
    draws = draw_counts(selected, num_experts=5, num_tokens=12, num_draws=1, seed=0)
    assert torch.equal(draws[0, 0], selected.flatten().bincount(minlength=5))


# analysis


def test_interval_of_three_numbers_by_hand() -> None:
    # mean 2, standard deviation 1, t(2) = 4.3027: 4.3027 / sqrt(3) = 2.4842
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.number == 3
    assert found.half_width == pytest.approx(2.4842, abs=1e-4)
    assert found.sign == 0 and interval([2.0, 2.1, 2.2]).sign == 1
    assert interval([-2.0, -2.1, -2.2]).sign == -1
    assert interval([5.0]).half_width == math.inf and interval([5.0]).sign == 0
    with pytest.raises(ValueError, match="got 0 values, expected 1 to 31"):
        interval([])


def test_pairing_takes_away_what_a_seed_does_to_both() -> None:
    baseline = {1: 10.0, 2: 20.0, 3: 30.0}
    found = paired_difference({1: 10.5, 2: 20.5, 4: 0.0}, baseline)
    assert found == Interval(mean=0.5, half_width=0.0, number=2)
    assert paired_difference({4: 1.0}, baseline) is None


def _frontier(violations: list[float], losses: list[float]) -> Frontier:
    weights = [0.01, 0.1, 1.0][: len(violations)]
    return Frontier(weights=weights, violations=violations, losses=losses, information=losses)


def test_frontier_is_read_between_the_weights() -> None:
    frontier = _frontier([2.0, 1.0, 0.5], [10.0, 20.0, 40.0])
    # Half-way from 2 to 1 in MaxVio is half-way in log weight: loss 15; 3/4 on the next: 35.
    assert frontier.at_violation(1.5, frontier.losses) == pytest.approx(15.0)
    assert frontier.at_violation(0.625, frontier.losses) == pytest.approx(35.0)
    with pytest.raises(ValueError, match=r"MaxVio 3: expected a number between 0\.5 and 2"):
        frontier.at_violation(3.0, frontier.losses)


def test_a_frontier_with_noise_is_made_monotone() -> None:
    # 1.0 and 1.2 stand in the wrong order: both become 1.1, and MaxVio 1.55 is half-way to them.
    frontier = _frontier([2.0, 1.0, 1.2], [10.0, 20.0, 40.0])
    assert frontier.at_violation(1.55, frontier.losses) == pytest.approx(15.0)


def test_methods_are_compared_at_a_violation_that_both_reach() -> None:
    micro = {seed: _frontier([2.0, 1.0, 0.5], [10.0 + seed] * 3) for seed in (1, 2)}
    over_global = {seed: _frontier([4.0, 1.5, 1.0], [9.0 + seed] * 3) for seed in (1, 2)}
    common = common_violations([*micro.values(), *over_global.values()], number=3)
    assert common == pytest.approx([1.0, math.sqrt(2.0), 2.0])
    for violation in common:
        found = at_equal_violation(over_global, micro, violation, "losses")
        assert found == Interval(mean=-1.0, half_width=0.0, number=2)
    apart = _frontier([8.0, 7.0, 6.0], [0.0] * 3)
    assert common_violations([micro[1], apart], number=3) == []


def test_best_weight_is_by_the_mean_over_seeds_that_all_have() -> None:
    losses = {"small": {1: 2.0, 2: 2.0}, "large": {1: 1.0, 2: 2.5, 3: 9.0}}
    assert best(losses) == "large"


# pages from records


def _record(spec: RunSpec, *, loss: float, violation: float, specialised: bool) -> dict[str, Any]:
    even, own = [2, 2, 2, 2], [[8, 0, 0, 0], [0, 8, 0, 0], [0, 0, 4, 4]]
    counts_DE = own if specialised else [even] * 3
    return {
        "key": spec.key(CORPUS),
        "seed": spec.seed,
        "corpus": CORPUS,
        "config": spec.config,
        "label": "made up",
        "validation_loss": loss,
        "loss_per_domain": dict.fromkeys(DOMAINS, loss),
        "mutual_information_L": [1.0 if specialised else 0.0] * 2,
        "validation_max_violation": violation,
        "max_violation_global_batch": violation,
        "tokens_per_expert_LDE": [counts_DE] * 2,
        "top_k_score_LD": [[0.5, 0.25, 0.125]] * 2,
        "curve": {},
        "seconds": 30.0,
        "versions": {"torch": "1.2.3"},
        "machine": {"cores": 2, "processor": "abacus"},
        "finished": "2026-01-02 03:04:05",
    }


def _made_up(name: str, *, num_seeds: int = 3) -> Results:
    """Losses: seed + 1 for the micro-batch, a tenth less for anything else; half the weight."""
    recorded = {}
    for variant, spec in runs_of(EXPERIMENTS[name], SETTING, num_seeds=num_seeds):
        is_global = "global_batch" in json.dumps(spec.ds_config)
        weight = variant.section.get("aux_loss_coeff", 0.0)
        record = _record(
            spec,
            loss=spec.seed + (0.9 if is_global else 1.0) + weight / 2,
            violation=1.0 / (0.1 + weight) + 0.1 * is_global,
            specialised=is_global,
        )
        recorded[record["key"]] = record
    results = collect(
        EXPERIMENTS[name], SETTING, recorded, corpus_sha256=CORPUS, num_seeds=num_seeds
    )
    assert results is not None
    return results


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_page_that_says_how_it_was_made(name: str) -> None:
    text = page(_made_up(name))
    assert EXPERIMENTS[name].question in text
    command = f"ds-moe-lb experiment {name} --seeds 3 --steps 8"
    assert f"`{command}` (2026-01-02 to 2026-01-02)" in text
    for fact in ("cccccccccccc", "torch 1.2.3", "2 cores (abacus)", "minutes in all"):
        assert fact in text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_figures(name: str, tmp_path: Path) -> None:
    paths = save_figures(_made_up(name), tmp_path)
    assert paths and all(path.stat().st_size > 10_000 for path in paths)
    one_seed = save_figures(_made_up(name, num_seeds=1), tmp_path / "one")
    assert [path.name for path in one_seed] == [path.name for path in paths]


def test_differences_in_a_page_are_those_of_the_records() -> None:
    results = _made_up("methods")
    assert results.mean("micro", LOSS).mean == pytest.approx(3.05)
    difference = results.difference("carry", LOSS, baseline="micro")
    assert difference is not None and difference.mean == pytest.approx(-0.1)
    assert results.difference("micro", INFORMATION, baseline="micro") is None
    row = next(line for line in page(results).splitlines() if line.startswith("| exact"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:5] == ["exact", "2.9500", "1.000", "5.10", "micro"]
    assert cells[5:] == [
        "**-0.1000 [-0.1000, -0.1000]**",
        "**+1.000 [+1.000, +1.000]**",
        "**+0.10 [+0.10, +0.10]**",
        "lower, as here",
        "3",
    ]
    rows = [line for line in page(results).splitlines() if line.startswith("| shuffle")]
    # In the first table against micro, from which nothing tells it apart here; then against exact.
    assert "| +0.0000 [+0.0000, +0.0000] |" in rows[0] and "lower; open here" in rows[0]
    assert "| **+0.1000 [+0.1000, +0.1000]** |" in rows[1]


def test_a_loss_that_goes_the_other_way_than_the_papers_is_said_plainly() -> None:
    results = _made_up("balance-batch")
    records = {
        seed: {**record, LOSS: record[LOSS] + 1.0} for seed, record in results.records["8"].items()
    }
    worse = replace(results, records={**results.records, "8": records})
    row = next(line for line in page(worse).splitlines() if line.startswith("| 8 |"))
    assert "lower, **not here**" in row


def test_weights_are_compared_at_their_best_and_at_equal_balance() -> None:
    text = page(_made_up("weights"))
    assert (
        "At each one's best weight (micro 0.003 (MaxVio 9.71), global 0.003 (MaxVio 9.81)) the "
        "global batch minus the micro-batch is **-0.1000 [-0.1000, -0.1000]**." in text
    )
    # MaxVio 2.6 is the global batch at weight 0.3: loss 0.9 + 0.15. The micro-batch has 5 at 0.1,
    # 2.5 at 0.3, so it is 96% of the way there: 1 + 0.05 + 0.96 x 0.1.
    rows = [line for line in text.splitlines() if line.startswith("| 2.60 |")]
    assert len(rows) == 1 and "| **-0.0960 [-0.0960, -0.0960]** |" in rows[0]


def test_a_page_of_some_of_the_runs_says_how_many() -> None:
    results = _made_up("methods")
    partly = replace(results, records={**results.records, "bias": {2: results.records["bias"][2]}})
    row = next(line for line in page(partly).splitlines() if line.startswith("| bias"))
    assert row.endswith("| 1 |") and "(1 seed)" in row


def test_an_interval_is_shown_with_its_sign() -> None:
    assert show(Interval(mean=0.5, half_width=0.1, number=5), digits=1) == "**+0.5 [+0.4, +0.6]**"
    assert show(Interval(mean=0.5, half_width=1.0, number=5), digits=1) == "+0.5 [-0.5, +1.5]"


def test_the_search_shows_a_candidate_once_all_its_runs_are_there() -> None:
    path = Path(__file__).resolve().parent.parent / "launch" / "experiments" / "search.py"
    module_spec = importlib.util.spec_from_file_location("search", path)
    assert module_spec is not None and module_spec.loader is not None
    search: Any = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(search)
    keys = [
        spec.key(CORPUS)
        for setting in search.CANDIDATES.values()
        for spec in search.runs(setting).values()
    ]
    assert len(set(keys)) == 4 * len(search.CANDIDATES)  # no candidate is another one's double
    recorded = {}
    for (method, seed), spec in search.runs(search.CHOSEN).items():
        assert search.row("chosen", search.CHOSEN, recorded, CORPUS) is None
        loss = 3.0 + seed - (0.1 * seed if method == "global" else 0.0)
        record = _record(spec, loss=loss, violation=0.5 * seed, specialised=method == "global")
        recorded[record["key"]] = record
    assert search.row("chosen", search.CHOSEN, recorded, CORPUS) == [
        *("chosen", "30", "-0.1000, -0.2000"),
        *("0.000, 0.000", "1.000, 1.000", "0.50, 1.00", "0.50, 1.00"),
    ]


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["--output", str(tmp_path)]
    assert main(["experiment", "methods", "--seeds", "0", *output]) == EXIT_USAGE
    assert capsys.readouterr().err.endswith("--seeds: got 0, expected a number >= 1\n")
    assert main(["experiment", "methods", "--draw", *output]) == EXIT_USAGE
    assert "no run is recorded there; train first, without --draw" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["experiment", "method", *output])
    assert "invalid choice: 'method'" in capsys.readouterr().err


# what is shipped


@pytest.mark.parametrize("name", [path.stem for path in sorted(SHIPPED.glob("*.md"))])
def test_shipped_pages_are_made_of_the_shipped_runs(name: str) -> None:
    """With the settings of today: who changes them has to run the experiments anew."""
    recorded = Records(SHIPPED).read()
    (corpus,) = corpus_hashes(recorded.values())
    results = collect(EXPERIMENTS[name], Setting(), recorded, corpus_sha256=corpus, num_seeds=5)
    assert results is not None
    assert all(len(by_seed) == 5 for by_seed in results.records.values())
    assert list(results.records) == [v.name for v in EXPERIMENTS[name].variants(Setting())]
    assert page(results) == (SHIPPED / f"{name}.md").read_text()
