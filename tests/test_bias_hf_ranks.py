"""Auxiliary-loss-free balancing of transformers routers through the model's own correction bias.

With and without AutoEP, on two ranks and two micro-steps; the biases are summed up by hand from the
selections that the routers were seen to make.
"""

import tempfile
from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import torch

import hf_runs
import reference
from families import FAMILIES
from hf_runs import COEFF, Run
from ranks import run_ranks

pytestmark = pytest.mark.ranks

RATE = 0.0625
NUM_WINDOWS, FIRST_WITH_RATE, SKIPPED, RESUMED = 4, 1, 2, 3
SECTION = {
    "aux_loss_coeff": COEFF,
    "bias_update_rate": 0.0,
    "schedule": [{"step": FIRST_WITH_RATE, "bias_update_rate": RATE}],
}
BASE = Run("deepseek_v3", padding="right", section=SECTION, num_windows=NUM_WINDOWS)


def own_biases(module: torch.nn.Module) -> list[torch.Tensor]:
    """The models' own biases, in the order of their layers."""
    names = ("e_score_correction_bias", "expert_bias")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [tensor for name, tensor in tensors.items() if name.rpartition(".")[2] in names]


def values(module: torch.nn.Module) -> list[list[float]]:
    return [hf_runs.full(bias).flatten().tolist() for bias in own_biases(module)]


class Outputs:
    """What the routers return in first passes, by window: logits, weights and indices."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.by_layer: list[list[tuple[torch.Tensor, ...]]] = []
        for router in hf_runs.find_routers(module).values():
            self.by_layer.append([])
            router.register_forward_hook(self._note(self.by_layer[-1]))

    @staticmethod
    def _note(seen: list[tuple[torch.Tensor, ...]]) -> Any:
        return lambda module, args, outputs: seen.append(tuple(x.detach() for x in outputs))

    def take(self) -> list[list[list[Any]]]:
        taken = [[[x.tolist() for x in call] for call in layer] for layer in self.by_layer]
        for layer in self.by_layer:
            layer.clear()
        return taken


def _check_bias(runs: list[Run], folder: str) -> list[dict[str, Any]]:
    return [_train_bias(run, f"{folder}/{index}") for index, run in enumerate(runs)]


def _train_bias(run: Run, folder: str) -> dict[str, Any]:
    """Four windows: u from the second on, the third is skipped, the last on a resumed engine."""
    engine = hf_runs.start_engine(run)
    outputs = Outputs(engine.module)
    biases, records, seen = [values(engine.module)], [], []

    def skip(window: int, micro_step: int) -> None:
        if (window, micro_step) == (SKIPPED, 1):
            engine.skipped_steps += 1  # as an optimizer does whose gradients overflow

    for window in range(run.num_windows):
        if window == RESUMED:
            engine.save_checkpoint(folder)
            keys = [key for key in engine.module.state_dict() if "lb_" in key]
            engine.load_balancer.uninstall()
            assert values(engine.module) == biases[-1]  # what was trained stays
            engine.destroy()
            engine = hf_runs.start_engine(run)
            outputs = Outputs(engine.module)
            assert engine.load_checkpoint(folder)[0] is not None
            loaded = values(engine.module)
        records += hf_runs.train_windows(run, engine, [window], before_step=skip)
        seen.append(outputs.take())
        biases.append(values(engine.module))
    engine.load_balancer.uninstall()
    engine.destroy()
    return {"biases": biases, "loaded": loaded, "records": records, "outputs": seen, "keys": keys}


def expected_biases(run: Run, ran: list[dict[str, Any]]) -> list[list[list[float]]]:
    """By window and layer, from the recorded selections of all ranks: int64, then fp32."""
    now = [torch.tensor(bias_E) for bias_E in ran[0]["biases"][0]]
    expected = [[bias_E.tolist() for bias_E in now]]
    for window in range(run.num_windows):
        for layer, name in enumerate(ran[0]["records"][window]["selections"]):
            total = [0] * len(now[layer])
            for of_rank in ran:
                record = of_rank["records"][window]
                steps = zip(record["selections"][name], record["valid"], strict=True)
                for selected_TK, valid_T in steps:
                    for chosen, counts in zip(selected_TK, valid_T, strict=True):
                        for expert in chosen if counts else ():
                            total[expert] += 1
            if window >= FIRST_WITH_RATE and window != SKIPPED:
                over = [sum(total) - len(total) * n for n in total]
                signs = torch.tensor([(x > 0) - (x < 0) for x in over], dtype=torch.float32)
                now[layer] = now[layer] + torch.tensor(RATE) * signs
        expected.append([bias_E.tolist() for bias_E in now])
    return expected


def best(run: Run, scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """The experts of the largest score + bias, within the best groups where there are groups."""
    biased_TE = scores_TE + bias_E
    config = FAMILIES[run.family].config
    num_groups = config.get("n_group", 1)
    if num_groups > 1:
        groups_TGE = biased_TE.unflatten(1, (num_groups, -1))
        best_TG = groups_TGE.topk(2)[0].sum(dim=2).topk(config["topk_group"])[1]
        is_best_TG = torch.zeros(groups_TGE.shape[:2], dtype=torch.bool).scatter(1, best_TG, True)
        biased_TE = groups_TGE.masked_fill(~is_best_TG.unsqueeze(2), -1e9).flatten(1)
    return biased_TE.topk(top_k)[1].sort(dim=1)[0]


def check_selection(run: Run, ran: list[dict[str, Any]]) -> None:
    """The bias decides what is chosen, and the weights are those of the scores without it."""
    is_softmax = FAMILIES[run.family].score_function == "softmax"
    num_moved = 0
    for of_rank in ran:
        for window, of_layers in enumerate(of_rank["outputs"]):
            for layer, calls in enumerate(of_layers):
                bias_E = torch.tensor(of_rank["biases"][window][layer])
                for logits, weights, selected in calls:
                    logits_TE = torch.tensor(logits)
                    scores_TE = logits_TE.softmax(dim=1) if is_softmax else logits_TE.sigmoid()
                    weights_TK, selected_TK = torch.tensor(weights), torch.tensor(selected)
                    top_k = selected_TK.shape[1]
                    chosen_TK = selected_TK.sort(dim=1)[0]
                    where = f"{run.family} window {window} layer {layer}"
                    assert chosen_TK.equal(best(run, scores_TE, bias_E, top_k)), where
                    num_moved += int((chosen_TK != best(run, scores_TE, 0 * bias_E, top_k)).sum())
                    ratio_TK = weights_TK / scores_TE.gather(1, selected_TK)
                    same_TK = ratio_TK[:, :1].expand_as(ratio_TK)
                    torch.testing.assert_close(ratio_TK, same_TK, rtol=1e-4, atol=0.0, msg=where)
    assert num_moved > 10, f"{run.family}: the bias changed no selection"


@pytest.mark.parametrize(
    "runs",
    [
        # a buffer of the router, with groups; one of the block around it
        [BASE, replace(BASE, family="minimax_m2", zero_stage=3, checkpointing="reentrant")],
        # a frozen parameter, which ZeRO-3 partitions, and keeps whole by default where it is small
        [
            replace(BASE, family="ernie4_5_moe", zero_stage=3),
            replace(
                BASE,
                family="ernie4_5_moe",
                zero_stage=3,
                extra={"zero_optimization": {"stage3_param_persistence_threshold": 1e5}},
            ),
        ],
    ],
    ids=["buffer", "parameter"],
)
def test_the_models_own_bias_follows_the_counts_and_steers_the_selection_alone(
    runs: list[Run],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(_check_bias, 2, runs, folder, timeout_s=150)
    for index, run in enumerate(runs):
        ran = [of_rank[index] for of_rank in results]
        expected = expected_biases(run, ran)
        assert expected[-1] != expected[RESUMED] != expected[FIRST_WITH_RATE] == expected[0]
        for of_rank in ran:
            assert of_rank["biases"] == expected, str(run)
            assert of_rank["loaded"] == expected[RESUMED]
            assert of_rank["keys"] == []
        check_selection(run, ran)
        # P does not see the bias: the reference's gradient has none.
        hf_runs.check(run, [of_rank["records"] for of_rank in ran])


# ------------------------------------------------------------------------------------------------
# half precision

SMALL_RATE, NUM_SMALL, RESUMED_SMALL = 0.0006, 4, 2
HALF = replace(
    BASE,
    family="minimax_m2",
    section={"aux_loss_coeff": 0.0, "bias_update_rate": SMALL_RATE},
    extra={
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    },
)


def _check_half(runs: list[Run], folder: str) -> list[dict[str, Any]]:
    return [_train_half(run, f"{folder}/{index}") for index, run in enumerate(runs)]


def _train_half(run: Run, folder: str) -> dict[str, Any]:
    """The same window four times, biases starting at 1; the second half on a resumed engine."""
    engine = hf_runs.start_engine(run, prepare=torch.nn.Module.bfloat16)
    for bias in own_biases(engine.module):
        with deepspeed.zero.GatheredParameters([bias], modifier_rank=0):
            bias.detach().fill_(1.0)
    dtypes = {str(bias.dtype) for bias in own_biases(engine.module)}
    biases, counts = [values(engine.module)], []
    for window in range(NUM_SMALL):
        if window == RESUMED_SMALL:
            engine.save_checkpoint(folder)
            engine.load_balancer.uninstall()
            engine.destroy()
            engine = hf_runs.start_engine(run, prepare=torch.nn.Module.bfloat16)
            assert engine.load_checkpoint(folder)[0] is not None
            assert values(engine.module) == biases[-1]
        for micro_step in range(2):
            inputs = hf_runs.make_inputs(run, window=0, micro_step=micro_step)
            engine.backward(hf_runs.forward(run, engine, inputs).loss)
            if micro_step == 1:
                counts.append([n.tolist() for n in engine.load_balancer.counts().values()])
            engine.step()
        biases.append(values(engine.module))
    engine.load_balancer.uninstall()
    engine.destroy()
    return {"biases": biases, "counts": counts, "dtypes": dtypes}


def test_small_steps_are_summed_up_in_fp32_where_the_models_bias_is_in_half_precision() -> None:
    """Below 1 the steps of bf16 are 2^-8: the fourth step of 0.0006 is the first to be seen."""
    runs = [HALF, replace(HALF, family="ernie4_5_moe", zero_stage=3)]
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(_check_half, 2, runs, folder, timeout_s=120)
    for index, run in enumerate(runs):
        ran = [of_rank[index] for of_rank in results]
        assert ran[0]["dtypes"] == {"torch.bfloat16"}, str(run)
        sums = [torch.tensor(bias_E) for bias_E in ran[0]["biases"][0]]
        for window in range(NUM_SMALL):
            for layer, sum_E in enumerate(sums):
                total = reference.add(*[of_rank["counts"][window][layer] for of_rank in ran])
                over = [sum(total) - len(total) * n for n in total]
                signs = torch.tensor([(x > 0) - (x < 0) for x in over], dtype=torch.float32)
                sums[layer] = sum_E + torch.tensor(SMALL_RATE) * signs
            rounded = [sum_E.bfloat16().tolist() for sum_E in sums]
            assert [of_rank["biases"][window + 1] for of_rank in ran] == [rounded] * 2, str(run)
        assert ran[0]["biases"][-2] == ran[0]["biases"][0]
        assert ran[0]["biases"][-1] != ran[0]["biases"][0]


# ------------------------------------------------------------------------------------------------
# AutoEP


def _check_autoep(runs: list[Run]) -> list[dict[str, Any]]:
    return [_train_autoep(run) for run in runs]


def _train_autoep(run: Run) -> dict[str, Any]:
    """Two windows; then a checkpoint of the router with a bias of ours beside its own."""
    engine = hf_runs.start_engine(run)
    keys = [key for key in engine.module.state_dict() if key.endswith("_bias")]
    records = hf_runs.train_windows(run, engine, range(2))
    biases = values(engine.module)
    router = next(iter(hf_runs.find_routers(engine.module).values()))
    own = torch.linspace(0.5, -0.5, router.num_experts)
    with deepspeed.zero.GatheredParameters(list(router.parameters()), modifier_rank=0):
        older = {"e_score_correction_bias": own, "lb_bias": 7.0 + own}
        router.load_state_dict(router.state_dict() | older)
    loaded = router.e_score_correction_bias.tolist() == own.tolist()
    engine.load_balancer.uninstall()
    engine.destroy()
    return {"biases": biases, "records": records, "keys": keys, "loaded": loaded}


def test_autoep_moves_the_models_own_bias_where_there_is_one() -> None:
    section = {"aux_loss_coeff": COEFF, "bias_update_rate": RATE}
    runs = [
        replace(BASE, section=section, num_windows=2, autoep_size=2),
        replace(
            BASE, family="minimax_m3", section=section, num_windows=2, autoep_size=2, zero_stage=3
        ),
    ]
    results = run_ranks(_check_autoep, 2, runs, timeout_s=120)
    for index, run in enumerate(runs):
        ran = [of_rank[index] for of_rank in results]
        for layer, name in enumerate(ran[0]["records"][0]["selections"]):
            expected_E = torch.zeros(8)
            for window in range(2):
                counts = [
                    next(
                        n for key, n in of_rank["records"][window]["counts"].items() if name in key
                    )
                    for of_rank in ran
                ]
                total = reference.add(*counts)
                over = [sum(total) - len(total) * n for n in total]
                signs = torch.tensor([(x > 0) - (x < 0) for x in over], dtype=torch.float32)
                expected_E = expected_E + RATE * signs
            assert expected_E.any()
            for of_rank in ran:
                assert of_rank["biases"][layer] == expected_E.tolist(), str(run)
                assert of_rank["loaded"]
                ends = {key.rpartition(".")[2] for key in of_rank["keys"]}
                assert ends == {"e_score_correction_bias"}
        # Counts and gradient are the reference's: neither P nor the loss sees the bias.
        hf_runs.check(run, [of_rank["records"] for of_rank in ran])


# ------------------------------------------------------------------------------------------------
# refused


def _check_refusals() -> list[str]:
    section = {"aux_loss_coeff": 0.0, "schedule": [{"step": 9, "bias_update_rate": RATE}]}
    said = []
    for family, trains_bias in (("qwen3_moe", False), ("ernie4_5_moe", True)):
        run = Run(family, section=section)
        with pytest.raises(ValueError) as caught:
            hf_runs.start_engine(run, prepare=lambda m, on=trains_bias: _train_all(m, on))
        said.append(str(caught.value))
    return said


def _train_all(model: torch.nn.Module, on: bool) -> None:
    if on:
        model.requires_grad_(True)


def test_routers_without_a_bias_and_with_one_that_the_optimizer_owns_are_refused() -> None:
    without, trained = run_ranks(_check_refusals, 1, timeout_s=60)[0]
    assert "bias_update_rate: got 0.0625, but the selection of layer 'model.layers.0." in without
    assert "(Qwen3MoeTopKRouter) cannot be biased: it has no correction bias of its own" in without
    assert "train the model with AutoEP" in without
    assert "(Ernie4_5_MoeTopKRouter) cannot be biased: its e_score_correction_bias" in trained
    assert "is a trainable parameter, which the optimizer would write over" in trained
    assert "requires_grad_(False)" in trained
