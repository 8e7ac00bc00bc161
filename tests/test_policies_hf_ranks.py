"""The balancing policies on routers of transformers models and of AutoEP."""

from dataclasses import replace

import deepspeed.comm as dist
import pytest
import torch

import hf_runs
from hf_runs import COEFF, Run
from ranks import run_ranks
from test_transformers_ranks import of_runs

pytestmark = pytest.mark.ranks

SECTIONS = [
    {"estimate": "carry", "micro_batch_weight": 0.3},
    {"z_loss_coeff": 0.2},
    {"scope": "sequence", "z_loss_coeff": 0.2},
]


def _runs(run: Run) -> list[Run]:
    sections = [{"aux_loss_coeff": COEFF, **section} for section in SECTIONS]
    return [replace(run, section=section, num_windows=2) for section in sections]


def test_policies_of_softmax_and_sigmoid_routers_equal_the_reference() -> None:
    runs = _runs(Run("qwen3_moe", padding="right", checkpointing="reentrant"))
    runs += _runs(Run("deepseek_v3", padding="left", zero_stage=3))[1:]
    of_runs(runs)


def test_policies_under_autoep_equal_the_reference() -> None:
    runs = _runs(Run("mixtral", padding="right", autoep_size=2, zero_stage=3))
    runs += _runs(Run("deepseek_v3", padding="left", autoep_size=2))[2:]
    of_runs(runs)


def _check_autoep_bias(family: str) -> list[bool]:
    """One window with a bias; whether it followed the counts, and what it then selects."""
    run = Run(family, autoep_size=2, section={"aux_loss_coeff": 0.0, "bias_update_rate": 0.05})
    engine = hf_runs.start_engine(run)
    routers = hf_runs.find_routers(engine.module)
    for micro_step in range(run.gradient_accumulation_steps):
        inputs = hf_runs.make_inputs(run, window=0, micro_step=micro_step)
        engine.backward(hf_runs.forward(run, engine, inputs).loss)
        counts = engine.load_balancer.counts()
        engine.step()
    seen = []
    for name, router in routers.items():
        (total_E,) = [n for key, n in counts.items() if key.startswith(name)]
        dist.all_reduce(total_E)
        expected_E = 0.05 * torch.sign(total_E.sum() - len(total_E) * total_E)
        seen.append(torch.allclose(router.lb_bias, expected_E) and bool(expected_E.any()))
        router.eval()
        with torch.no_grad():
            x_TM = torch.randn(30, router.gate.weight.shape[1])
            router.lb_bias.copy_(torch.linspace(0.9, -0.9, len(total_E)))
            weights_TK, chosen_TK, _ = router(x_TM)
            router.lb_bias.zero_()
            plain_TK = router(x_TM)[1]
            scores_TE = router.gate(x_TM).softmax(dim=1)
        expected_TK = (scores_TE + torch.linspace(0.9, -0.9, len(total_E))).topk(router.top_k)[1]
        seen.append(chosen_TK.sort()[0].equal(expected_TK.sort()[0]))
        seen.append(not chosen_TK.sort()[0].equal(plain_TK.sort()[0]))
        taken_TK = scores_TE.gather(1, chosen_TK)
        ratio_T1 = weights_TK / taken_TK  # of unbiased scores, normalised or not
        seen.append(torch.allclose(ratio_T1, ratio_T1[:, :1].expand_as(ratio_T1), rtol=1e-4))
    engine.load_balancer.uninstall()
    seen.append(not any(hasattr(router, "lb_bias") for router in routers.values()))
    return seen


def test_the_bias_of_an_autoep_router() -> None:
    for seen in run_ranks(_check_autoep_bias, 2, "mixtral", timeout_s=90):
        assert all(seen), seen
