"""Dynamic domain weights of a run that is stopped at the very step after which they change."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds_moe_lb.data.corpus import Document, build_corpus, build_domain
from ranks import run_ranks

STEPS, INTERVAL = 4, 2


def _check_weights_and_losses(folder: str, section: dict[str, Any]) -> dict[str, Any]:
    """By run: the weights at its end and the losses of all steps."""
    from ds_moe_lb.training.model import ModelConfig
    from ds_moe_lb.training.options import TrainOptions
    from ds_moe_lb.training.progress import Silent
    from ds_moe_lb.training.run_folder import RunFolder
    from ds_moe_lb.training.trainer import Task, Trainer

    domains = [
        build_domain(name, [Document(name=str(i), text=name.encode() * 90) for i in range(3)])
        for name in ("abcd", "z")
    ]
    task = Task(
        options=TrainOptions(
            steps=STEPS,
            eval_interval=INTERVAL,
            eval_batches=1,
            eval_batch_size=2,
            reference_losses={"abcd": 4.0, "z": 5.0},
        ),
        model=ModelConfig(
            num_layers=1,
            model_dim=16,
            num_heads=2,
            expert_dim=16,
            num_experts=4,
            top_k=2,
            sequence_length=16,
            ep_size=1,
        ),
        ds_config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_print": 1_000_000,
            "moe_load_balancing": {"scope": "global_batch"},
            **section,
        },
        corpus=build_corpus(domains),
    )

    def run(name: str, *, stop_at: int | None = None, resume: bool = False) -> Trainer:
        trainer = Trainer(task, RunFolder(Path(folder) / name, writes=True))
        if resume:
            trainer.resume()
        else:
            trainer.folder.write_info({})

        class Stop:
            @property
            def received(self) -> bool:
                return trainer.step == stop_at

        assert trainer.run(Silent(), Stop()) == (stop_at is None)  # type: ignore[arg-type]
        return trainer

    whole = run("whole")
    assert run("stopped", stop_at=INTERVAL).step == INTERVAL
    resumed = run("stopped", resume=True)
    seen = {}
    for name, trainer in (("whole", whole), ("stopped", resumed)):
        lines = (Path(folder) / name / "history.jsonl").read_text().splitlines()
        weights = trainer._domain_weights
        assert weights is not None
        seen[name] = (weights.by_name, [json.loads(line)["lm_loss"] for line in lines])
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize("section", [{}, {"moe_router": {"type": "hyper"}}], ids=["", "hyper"])
def test_a_stop_between_step_and_validation_loses_no_update(
    section: dict[str, Any], tmp_path: Path
) -> None:
    (seen,) = run_ranks(_check_weights_and_losses, 1, str(tmp_path), section)
    assert len(seen["whole"][1]) == STEPS
    assert seen["stopped"] == seen["whole"]
    assert seen["whole"][0]["abcd"] != 0.5
