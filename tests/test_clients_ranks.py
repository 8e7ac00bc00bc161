"""What scripts do with a transformers model round its training, and what it must not change."""

import copy
import inspect
import logging
from dataclasses import replace
from typing import Any

import deepspeed
import deepspeed.comm as dist
import pytest
import torch

import ds_moe_lb
from families import make_model
from hf_runs import (
    COEFF,
    LEARNING_RATE,
    Run,
    Watch,
    check,
    find_routers,
    forward,
    launcher_environment,
    make_inputs,
    start_engine,
)
from models import MODEL_DIM, TinyMoE
from ranks import run_ranks

pytestmark = pytest.mark.ranks

BASE = Run("qwen3_moe", padding="right", num_windows=2)
AUTOEP = replace(BASE, autoep_size=2)


def check_on_ranks(worker: Any, run: Run, *, world_size: int = 2) -> None:
    check(run, run_ranks(worker, world_size, run, timeout_s=120.0))


# loops


def _accelerate_loop(run: Run) -> list[dict[str, Any]]:
    launcher_environment()
    from accelerate import Accelerator, DeepSpeedPlugin

    import ds_moe_lb.auto  # noqa: F401

    accelerator = Accelerator(
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=run.config()),
    )
    torch.manual_seed(7)
    model = make_model(run.family)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config.pop("optimizer")
    model, optimizer = accelerator.prepare(model, optimizer)
    watch = Watch(model, run)
    for window in range(run.num_windows):
        for micro_step in range(run.gradient_accumulation_steps):
            inputs = make_inputs(run, window=window, micro_step=micro_step)
            with accelerator.accumulate(model):
                accelerator.backward(0.0 * forward(run, model, inputs).loss)
                optimizer.step()
                optimizer.zero_grad()
    return watch.recorder.windows


def test_an_accelerate_loop_gives_the_references_gradient() -> None:
    check_on_ranks(_accelerate_loop, BASE)


def _plain_loop(run: Run) -> list[dict[str, Any]]:
    engine = start_engine(run)
    watch = Watch(engine, run)
    for window in range(run.num_windows):
        for micro_step in range(run.gradient_accumulation_steps):
            inputs = make_inputs(run, window=window, micro_step=micro_step)
            (0.0 * forward(run, engine, inputs).loss).backward()
            engine.step()
    return watch.recorder.windows


@pytest.mark.parametrize("run", [BASE, AUTOEP], ids=["replicated", "autoep"])
def test_a_loop_with_loss_backward_gives_the_references_gradient(run: Run) -> None:
    check_on_ranks(_plain_loop, run)


def _lora_loop(run: Run) -> list[dict[str, Any]]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    model = get_peft_model(
        make_model(run.family),
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["gate"]),
    )
    engine = ds_moe_lb.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )[0]
    assert len(engine.load_balancer.layout.layers) == 2  # and not the copies that peft put aside
    watch = Watch(engine, run)
    for window in range(run.num_windows):
        for micro_step in range(run.gradient_accumulation_steps):
            inputs = make_inputs(run, window=window, micro_step=micro_step)
            engine.backward(0.0 * forward(run, engine, inputs).loss)
            engine.step()
    return watch.recorder.windows


def test_lora_with_trained_routers_gives_the_references_gradient() -> None:
    pytest.importorskip("peft")
    check_on_ranks(_lora_loop, BASE)


def _lora_with_frozen_routers(run: Run) -> tuple[list[str], dict[str, float]]:
    from peft import LoraConfig, get_peft_model

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("DeepSpeed").addHandler(handler)
    torch.manual_seed(7)
    model = get_peft_model(make_model(run.family), LoraConfig(r=2, target_modules=["q_proj"]))
    engine = ds_moe_lb.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )[0]
    for micro_step in range(run.gradient_accumulation_steps):
        inputs = make_inputs(run, window=0, micro_step=micro_step)
        engine.backward(forward(run, engine, inputs).loss)
        engine.step()
    return warnings, engine.load_balancer.metrics()


def test_frozen_routers_are_measured_and_named_in_one_warning() -> None:
    pytest.importorskip("peft")
    (warnings, metrics), _ = run_ranks(_lora_with_frozen_routers, 2, BASE)
    frozen = [text for text in warnings if "are frozen" in text]
    assert len(frozen) == 1 and "layers.0" in frozen[0] and "layers.1" in frozen[0]
    assert metrics["lbl_global_batch"] > 0.0


def _counts_behind_a_prefix(run: Run) -> tuple[list[int], int]:
    from peft import PrefixTuningConfig, get_peft_model

    prefix = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = get_peft_model(make_model(run.family), prefix)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = ds_moe_lb.initialize(model=model, model_parameters=trained, config=run.config())[0]
    inputs = make_inputs(run, window=0, micro_step=0)
    forward(run, engine, inputs)
    counts = engine.load_balancer.counts().values()
    return [int(n.sum()) for n in counts], int(inputs["valid"].sum())


def test_the_columns_of_a_learned_prefix_are_no_tokens() -> None:
    pytest.importorskip("peft")
    for counted, num_valid in run_ranks(_counts_behind_a_prefix, 2, BASE):
        assert counted == [2 * num_valid] * 2  # k = 2, two layers


def _router_gradients(run: Run, lora: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of the first window at what peft trains of the routers, and the first factors."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    model = make_model(run.family)
    torch.manual_seed(8)
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], **lora))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    config = run.config()
    engine = ds_moe_lb.initialize(
        model=model, model_parameters=list(trained.values()), config=config
    )[0]
    for micro_step in range(run.gradient_accumulation_steps):
        inputs = make_inputs(run, window=0, micro_step=micro_step)
        engine.backward(0.0 * forward(run, engine, inputs).loss)
        if micro_step == run.gradient_accumulation_steps - 1:
            found = {
                name: deepspeed.utils.safe_get_full_grad(p)
                for name, p in trained.items()
                if ".gate." in name
            }
            found |= {name + "=": p.detach().clone() for name, p in trained.items()}
        engine.step()
    return {name: tensor.double() for name, tensor in found.items()}


def _lora_on_routers(run: Run) -> list[tuple[list[Any], list[Any]]]:
    """For each layer, the gradient of LoRA's second factor: as it is, and by the chain rule."""
    full = _router_gradients(run, {"modules_to_save": ["gate"]})
    lora = _router_gradients(run, {"target_parameters": ["gate.weight"]})
    pairs = []
    for layer in range(2):
        gate = f"base_model.model.model.layers.{layer}.mlp.gate"
        weight_grad = full[f"{gate}.modules_to_save.default.weight"]
        first = lora[f"{gate}.lora_A.default.weight="]
        # W + (alpha / r) B A with B = 0
        by_hand = 6 / 2 * weight_grad @ first.T
        pairs.append((lora[f"{gate}.lora_B.default.weight"].tolist(), by_hand.tolist()))
    return pairs


@pytest.mark.parametrize("scope", ["global_batch", "sequence"])
def test_lora_on_the_routers_own_weight_gets_its_part_of_the_gradient(scope: str) -> None:
    pytest.importorskip("peft")
    run = replace(BASE, section={"aux_loss_coeff": COEFF, "scope": scope})
    for pairs in run_ranks(_lora_on_routers, 2, run):
        for got, by_hand in pairs:
            assert torch.tensor(by_hand).abs().max() > 1e-2
            torch.testing.assert_close(
                torch.tensor(got), torch.tensor(by_hand), rtol=1e-5, atol=1e-7
            )


# what must not change


def _with_evaluation_inside_the_window(run: Run) -> list[dict[str, Any]]:
    engine = start_engine(run)
    watch = Watch(engine, run)
    for window in range(run.num_windows):
        for micro_step in range(run.gradient_accumulation_steps):
            inputs = make_inputs(run, window=window, micro_step=micro_step)
            watch.recorder.is_paused = True
            with torch.no_grad():
                forward(run, engine, inputs)  # in training mode
                engine.eval()
                forward(run, engine, inputs)
                ids, mask = inputs["input_ids"], inputs["attention_mask"]
                # With a cache a router gets one token for each sequence, the mask covers all.
                engine.module.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
                engine.train()
            watch.recorder.is_paused = False
            engine.backward(0.0 * forward(run, engine, inputs).loss)
            engine.step()
    return watch.recorder.windows


@pytest.mark.parametrize("run", [BASE, AUTOEP], ids=["replicated", "autoep"])
def test_evaluation_and_generation_inside_a_window_change_nothing(run: Run) -> None:
    check_on_ranks(_with_evaluation_inside_the_window, run)


def _bits(run: Run, *, section: dict[str, Any] | None, uninstall: bool = False) -> list[Any]:
    """Losses and final router weights of two windows of ordinary training."""
    config = run.config()
    if section is None:
        del config["moe_load_balancing"]
    else:
        config["moe_load_balancing"] = section
    torch.manual_seed(7)
    model = make_model(run.family, **run.model)
    engine = ds_moe_lb.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    if uninstall:
        engine.load_balancer.uninstall()
    losses = []
    for window in range(run.num_windows):
        for micro_step in range(run.gradient_accumulation_steps):
            output = forward(run, engine, make_inputs(run, window=window, micro_step=micro_step))
            losses.append(output.loss.item())
            engine.backward(output.loss)
            engine.step()
    keys = sorted(engine.module.state_dict())
    weights = [router.state_dict() for router in find_routers(engine.module).values()]
    return [losses, [{k: v.tolist() for k, v in w.items()} for w in weights], keys]


def _all_bits(run: Run, keeps_own_loss: bool) -> list[list[Any]]:
    measured = {"scope": "none"} if keeps_own_loss else {"aux_loss_coeff": 0}
    return [
        _bits(run, section=None),
        _bits(run, section={"enabled": False}),
        _bits(run, section={"scope": "none"}),
        _bits(run, section=measured),
        _bits(run, section={"aux_loss_coeff": COEFF}, uninstall=True),
        _bits(run, section={"aux_loss_coeff": COEFF}),
    ]


@pytest.mark.parametrize(
    ("run", "keeps_own_loss"),
    [
        (replace(BASE, model={"output_router_logits": True, "router_aux_loss_coef": 0.1}), True),
        (BASE, False),
        (replace(AUTOEP, family="deepseek_v3"), False),
    ],
    ids=["own loss", "replicated", "autoep"],
)
def test_training_is_bit_identical_where_nothing_is_balanced(
    run: Run, keeps_own_loss: bool
) -> None:
    for plain, *others, balanced in run_ranks(_all_bits, 2, run, keeps_own_loss, timeout_s=120.0):
        for other in others:
            assert other == plain
        assert balanced[1] != plain[1]
        assert balanced[2] == plain[2]  # the same keys in a checkpoint


def _losses(run: Run) -> list[list[Any]]:
    """Loss and auxiliary loss in training, and in evaluation, with the model's own loss replaced,
    and of plain DeepSpeed with it off and on."""
    own = {"output_router_logits": True, "router_aux_loss_coef": 100.0}
    seen = []
    for section, model_keys in (({}, own), (None, {}), (None, own)):
        config = run.config() | {"moe_load_balancing": section}
        if section is None:
            del config["moe_load_balancing"]
        torch.manual_seed(7)
        model = make_model(run.family, **model_keys)
        engine = ds_moe_lb.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
        inputs = make_inputs(run, window=0, micro_step=0)
        trained = forward(run, engine, inputs)
        asked = engine(inputs["input_ids"], labels=inputs["labels"], output_router_logits=True)
        engine.eval()
        with torch.no_grad():
            evaluated = forward(run, engine, inputs)
        seen.append([trained.loss.item(), trained.aux_loss, asked.aux_loss, evaluated.loss.item()])
        assert model.config.output_router_logits == ("output_router_logits" in model_keys)
    return [[value if value is None else float(value) for value in row] for row in seen]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "minimax_m2"])
def test_the_models_own_loss_is_added_in_evaluation_only(family: str) -> None:
    for ours, off, on in run_ranks(_losses, 2, replace(BASE, family=family)):
        # Also where the script asks for router logits, and may add coefficient * aux_loss itself.
        assert ours[:3] == [off[0], 0.0, 0.0]
        assert ours[3] == on[3] > off[3] + 1.0
        assert on[0] > off[0] + 1.0 and on[2] is not None


def _tuples(runs: list[Run]) -> list[tuple[list[str], list[str], float]]:
    return [_tuple_of(run) for run in runs]


def _tuple_of(run: Run) -> tuple[list[str], list[str], float]:
    """Types and shapes of a training forward's tuple, with the plugin and without; our aux_loss."""
    shapes: list[list[str]] = []
    for uninstalls in (False, True):
        engine = start_engine(run)
        if uninstalls:
            engine.load_balancer.uninstall()
        inputs = make_inputs(run, window=0, micro_step=0)
        given = {"labels": inputs["labels"], "output_router_logits": True, "return_dict": False}
        output = engine(inputs["input_ids"], use_cache=False, **given)
        assert isinstance(output, tuple)
        shapes.append([_shape(entry) for entry in output])
        if not uninstalls:
            aux_loss = float(output[1])
            engine.backward(output[0])
            engine.load_balancer.uninstall()
        engine.destroy()
    return (*shapes, aux_loss)


def _shape(entry: Any) -> str:
    return f"{tuple(entry.shape)}" if hasattr(entry, "shape") else str([_shape(x) for x in entry])


def test_a_tuple_has_the_entries_that_the_model_itself_gives_it() -> None:
    """The place of the loss was missing, so that every later entry was taken for another."""
    runs = [replace(BASE, family=family) for family in ("qwen3_moe", "mixtral", "minimax_m2")]
    for ours, models_own, aux_loss in run_ranks(_tuples, 1, runs)[0]:
        assert len(ours) == 4 and ours == models_own
        assert aux_loss == 0.0


def _copies_and_signatures(run: Run) -> dict[str, Any]:
    engine = start_engine(run)
    inputs = make_inputs(run, window=0, micro_step=0)
    engine.backward(forward(run, engine, inputs).loss)
    before = [n.tolist() for n in engine.load_balancer.counts().values()]
    twin = copy.deepcopy(engine.module)
    forward(run, twin, inputs).loss.backward()
    after = [n.tolist() for n in engine.load_balancer.counts().values()]
    of_engine = inspect.signature(type(engine).save_checkpoint).parameters
    of_ours = inspect.signature(engine.save_checkpoint).parameters
    return {
        "before": before,
        "after": after,
        "missing": sorted(set(of_engine) - set(of_ours)),
    }


def test_a_deep_copy_of_the_model_is_not_balanced_and_methods_keep_their_signature() -> None:
    for seen in run_ranks(_copies_and_signatures, 2, BASE):
        assert seen["after"] == seen["before"]
        # Trainer saves no frozen weights of peft models if it sees `exclude_frozen_parameters`.
        assert seen["missing"] == ["self"]


class _TwoModels(torch.nn.Module):
    def __init__(self, run: Run, **own: Any) -> None:
        super().__init__()
        self.first = make_model("qwen3_moe", **own)
        self.second = make_model("mixtral", **own)
        self.run = run

    def forward(self, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [forward(self.run, model, inputs).loss for model in (self.first, self.second)]


def _losses_of_two_models(run: Run) -> list[list[float]]:
    seen = []
    for own in ({"output_router_logits": True, "router_aux_loss_coef": 100.0}, {}):
        torch.manual_seed(7)
        model = _TwoModels(run, **own)
        engine = ds_moe_lb.initialize(
            model=model, model_parameters=model.parameters(), config=run.config()
        )[0]
        losses = engine(make_inputs(run, window=0, micro_step=0))
        seen.append([loss.item() for loss in losses])
    return seen


def test_every_model_inside_the_engines_has_its_own_loss_off() -> None:
    for on, off in run_ranks(_losses_of_two_models, 2, BASE):
        assert on == off


def _engines_without_an_optimizer(run: Run) -> list[Any]:
    seen: list[Any] = []
    for stage in (0, 3):
        config = replace(run, zero_stage=stage).config()
        del config["optimizer"]
        for model in (make_model(run.family), torch.nn.Linear(4, 4)):
            engine = ds_moe_lb.initialize(model=model, config=config)[0]
            seen.append(engine.load_balancer is not None)
    try:
        model = torch.nn.Linear(4, 4)
        ds_moe_lb.initialize(model=model, model_parameters=model.parameters(), config=run.config())
    except ValueError as error:
        seen.append(str(error))
    return seen


def test_a_dense_model_that_is_not_trained_is_left_alone() -> None:
    """Preference trainers build engines of reward models from the JSON of the policy."""
    for *seen, message in run_ranks(_engines_without_an_optimizer, 2, BASE):
        assert seen == [True, False, True, False]
        assert "the model (Linear) has no deepspeed.moe.layer.MoE layers" in message


# messages


def _messages(run: Run) -> dict[str, str]:
    cases: dict[str, Any] = {
        "own loss off": {},
        "no expert groups": {"aux_loss_coeff": 1.0, "sync_group": "expert_parallel"},
        "labels missing": {"aux_loss_coeff": 1.0, "valid_tokens": "labels"},
        "mask of another kind": {"aux_loss_coeff": 1.0},
        "routers replaced": {"aux_loss_coeff": 1.0},
        "top_k changed": {"aux_loss_coeff": 1.0},
    }
    said = {}
    for name, section in cases.items():
        torch.manual_seed(7)
        model = make_model(run.family)
        inputs = make_inputs(run, window=0, micro_step=0)
        config = run.config() | {"moe_load_balancing": section}
        try:
            engine = ds_moe_lb.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )[0]
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            if name == "routers replaced":
                for layer in model.model.layers:
                    layer.mlp.forward = lambda x: x
            if name == "top_k changed":
                for router in find_routers(model).values():
                    router.top_k = 3
            if name == "mask of another kind":
                engine(input_ids=ids, attention_mask={"full_attention": None})
            else:
                engine(input_ids=ids, attention_mask=mask)
            said[name] = "nothing"
        except (ValueError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_what_cannot_work_is_one_clear_message() -> None:
    expected = {
        "own loss off": r"ValueError: .*aux_loss_coeff: got None.*output_router_logits",
        "no expert groups": r"ValueError: .*sync_group: got 'expert_parallel'.*'data_parallel'",
        "labels missing": r"ValueError: .*valid_tokens: got 'labels'.*pass labels",
        "mask of another kind": r"ValueError: .*attention_mask is a dict.*token_mask",
        "routers replaced": r"RuntimeError: .*called none of its 2 routers.*use_kernels=False",
        "top_k changed": r"RuntimeError: .*chooses 3, but had E=8 k=2",
    }
    for said in run_ranks(_messages, 2, BASE):
        for name, pattern in expected.items():
            assert __import__("re").search(pattern, said[name]), (name, said[name])


def _announcement(run: Run) -> str:
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        start_engine(run)
    return said.getvalue()


def test_both_weights_are_said_once() -> None:
    own = {"output_router_logits": True, "router_aux_loss_coef": 0.02, "num_hidden_layers": 4}
    said, other = run_ranks(_announcement, 2, replace(BASE, section={}, model=own))
    line = next(line for line in said.splitlines() if "moe_load_balancing" in line)
    assert "4 MoE layers (E=8 k=2)" in line
    # 0.02 x k = 2 / L = 4
    assert "0.01 (router_aux_loss_coef 0.02 x k / L) on each layer's loss" in line
    assert "D x G = 2 x 2" in line
    assert "moe_load_balancing" not in other


def _counts_in_groups(run: Run) -> list[dict[str, Any]]:
    engine = start_engine(run)
    watch = Watch(engine, run)
    for micro_step in range(run.gradient_accumulation_steps):
        inputs = make_inputs(run, window=0, micro_step=micro_step)
        engine.backward(0.0 * forward(run, engine, inputs).loss)
        engine.step()
    assert dist.get_world_size() == 4
    return watch.recorder.windows


@pytest.mark.parametrize(
    ("sync_group", "groups"),
    [("expert_parallel", [[0, 1], [2, 3]]), ("expert_data_parallel", [[0, 2], [1, 3]])],
)
def test_autoep_counts_within_smaller_groups(sync_group: str, groups: list[list[int]]) -> None:
    section = {"aux_loss_coeff": COEFF, "sync_group": sync_group}
    run = replace(AUTOEP, section=section, num_windows=1)
    check(run, run_ranks(_counts_in_groups, 4, run), groups=groups)


class _Labelled(TinyMoE):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(x)


def _count_labelled_tokens() -> tuple[list[int], str]:
    model = _Labelled(k=2)
    config = Run("").config() | {"moe_load_balancing": {"valid_tokens": "labels"}}
    config["zero_optimization"] = {"stage": 0}
    engine = ds_moe_lb.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    labels = torch.tensor([[5, -100, 7], [-100, -100, 1]])
    engine(torch.randn(2, 3, MODEL_DIM), labels=labels)
    counted = [int(n.sum()) for n in engine.load_balancer.counts().values()]
    try:
        engine(torch.randn(2, 3, MODEL_DIM))
    except ValueError as error:
        return counted, str(error)
    return counted, ""


def test_labels_tell_which_tokens_of_native_layers_count() -> None:
    for counted, message in run_ranks(_count_labelled_tokens, 2):
        assert counted == [6, 6]  # two layers, three tokens with a label, k = 2
        assert "the forward of _Labelled was called with labels = NoneType" in message
