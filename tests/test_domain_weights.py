"""How often domains are sampled: fixed and dynamic weights, and the batches drawn by them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_moe_lb.cli import EXIT_USAGE, main
from ds_moe_lb.data.batches import BatchPlan, training_micro_batches
from ds_moe_lb.data.corpus import Corpus, Document, build_corpus, build_domain
from ds_moe_lb.data.domain_weights import DomainWeights
from ds_moe_lb.training.options import TrainOptions

NAMES = ["a", "b", "c"]


def _dynamic(**weights: float) -> DomainWeights:
    references = {"a": 1.0, "b": 2.0, "c": 3.0}
    return DomainWeights(NAMES, weights=weights or None, reference_losses=references)


def test_fixed_weights_are_normalised_and_stay() -> None:
    fixed = DomainWeights(NAMES, weights={"c": 1, "a": 6, "b": 3}, reference_losses=None)
    assert fixed.weights_D.tolist() == pytest.approx([0.6, 0.3, 0.1], abs=1e-15)
    fixed.update([9.0, 1.0, 1.0], step=5)
    assert fixed.weights_D.tolist() == pytest.approx([0.6, 0.3, 0.1], abs=1e-15)
    assert not fixed.is_dynamic and fixed.updated_at == -1


def test_dynamic_weights_follow_the_excess_loss() -> None:
    """By hand: (1/2, 1/4, 1/4) times exp(0, ln 2, ln 4) is (1/2, 1/2, 1), or (1/4, 1/4, 1/2)."""
    dynamic = _dynamic(a=2, b=1, c=1)
    dynamic.update([1.0, 2.0 + math.log(2), 3.0 + math.log(4)], step=7)
    uniform_part = 1e-4 / 3
    expected = [0.9999 * share + uniform_part for share in (0.25, 0.25, 0.5)]
    assert dynamic.weights_D.tolist() == pytest.approx(expected, abs=1e-15)
    assert dynamic.updated_at == 7


def test_a_huge_excess_neither_overflows_nor_kills_the_others() -> None:
    dynamic = _dynamic()
    for step in range(3):
        dynamic.update([2000.0, 2.0, 3.0], step=step)
    assert dynamic.weights_D.tolist() == pytest.approx(
        [0.9999 + 1e-4 / 3, 1e-4 / 3, 1e-4 / 3], abs=1e-12
    )


def test_state_goes_through_json_and_continues_bit_for_bit() -> None:
    losses = [[1.3, 2.0, 2.9], [1.2, 2.2, 2.8], [1.1, 2.1, 3.1]]
    whole, first = _dynamic(), _dynamic()
    for step, values in enumerate(losses):
        whole.update(values, step=step)
    first.update(losses[0], step=0)
    resumed = _dynamic()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in (1, 2):
        resumed.update(losses[step], step=step)
    assert resumed.weights_D.tolist() == whole.weights_D.tolist()
    other = DomainWeights(["a", "b", "d"], weights=None, reference_losses=None)
    with pytest.raises(ValueError, match="got the domains a, b, c, expected exactly a, b, d"):
        other.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("weights", "references", "message"),
    [
        (
            {"a": 1, "b": 1},
            None,
            "--domain-weights: got the domains a, b, expected exactly a, b, c",
        ),
        ({"a": 1, "b": -1, "c": 1}, None, "expected numbers >= 0 and one > 0"),
        ({"a": 0, "b": 0, "c": 0}, None, "expected numbers >= 0 and one > 0"),
        ({"a": 1, "b": "x", "c": 1}, None, "got 'x' for 'b', expected a finite number"),
        ({"a": 1, "b": True, "c": 1}, None, "got True for 'b', expected a finite number"),
        (None, {"a": 1}, "--reference-losses: got the domains a, expected exactly a, b, c"),
        (None, {"a": 1, "b": math.nan, "c": 1}, "got nan for 'b'"),
        ({"a": 1, "b": 0, "c": 1}, {"a": 1, "b": 1, "c": 1}, "never sampled has no place"),
    ],
)
def test_wrong_weights_say_what_is_expected(
    weights: dict[str, float] | None, references: dict[str, float] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DomainWeights(NAMES, weights=weights, reference_losses=references)


def _corpus() -> Corpus:
    """Domains whose bytes say which one they are."""
    return build_corpus(
        [
            build_domain(name, [Document(name=str(i), text=name.encode() * 200) for i in range(4)])
            for name in NAMES
        ]
    )


def _sampled(weights: list[float] | None, *, steps: int, ranks: int = 1) -> list[int]:
    """Sequences per domain."""
    plan = BatchPlan(
        sequence_length=8,
        micro_batch_size=8 // ranks,
        gradient_accumulation_steps=4,
        dp_world_size=ranks,
        seed=3,
    )
    counts = torch.zeros(3, dtype=torch.int64)
    for step in range(steps):
        for rank in range(ranks):
            for batch in training_micro_batches(
                _corpus(),
                plan,
                step=step,
                dp_rank=rank,
                weights_D=None if weights is None else np.array(weights),
            ):
                text = batch.max(dim=1).values  # a newline joins documents
                counts += torch.bincount(text - ord("a"), minlength=3)
    return counts.tolist()


def test_sequences_are_drawn_by_weight_for_every_cut() -> None:
    """3,200 draws: five standard deviations are 139 around 1,920 and 85 around 320."""
    counts = _sampled([0.6, 0.3, 0.1], steps=100)
    assert sum(counts) == 3200
    for count, share in zip(counts, (0.6, 0.3, 0.1), strict=True):
        assert abs(count - 3200 * share) < 5 * math.sqrt(3200 * share * (1 - share))
    assert _sampled([0.6, 0.3, 0.1], steps=100, ranks=2) == counts
    assert _sampled([0.5, 0.0, 0.5], steps=20)[1] == 0


def test_options_and_files_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--eval-interval: got 0, expected a number >= 1 with"):
        TrainOptions(eval_interval=0, reference_losses={"a": 1.0})
    file = tmp_path / "weights.json"
    for content, message in (
        (None, "expected a JSON file, but"),
        ("[", "expected a JSON file, but"),
        ("[1]", 'expected an object, {"domain": number, ...}'),
    ):
        if content is not None:
            file.write_text(content)
        command = ["train", "--config", "zero1_ep2_global_batch", "--output", str(tmp_path / "run")]
        assert main([*command, "--domain-weights", str(file)]) == EXIT_USAGE
        assert message in capsys.readouterr().err
