"""Windows of tiny transformers models on a live engine, and their comparison with the reference.

The balancing gradient is isolated: every router reads a detached copy of its input, so that its
gradient holds the balancing of its own layer only, and the language-model loss is multiplied by 0.

Runs on ranks return plain data; the reference is made in the calling process.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch

import families
import reference
from families import FAMILIES, make_model

COEFF = 0.5
LEARNING_RATE = 0.5
SEQUENCES, LENGTH = 2, 6
TOLERANCE, FLOOR = 1e-5, 1e-2  # |g - ref| <= TOLERANCE * max(|ref|, FLOOR)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        family: key of ``FAMILIES``.
        autoep_size: expert-parallel size under AutoEP; None = no AutoEP.
        padding: "none", "right" or "left": of one sequence on each rank.
        pass_mask: how the mask goes in: "keyword", "positional", "4d_bool" or "4d_additive".
        valid_tokens: of the section.
        section: further keys of the section.
        model: further keys of the model's config.
        extra: further keys of the DeepSpeed JSON.
    """

    family: str
    zero_stage: int = 1
    gradient_accumulation_steps: int = 2
    checkpointing: str = "off"
    autoep_size: int | None = None
    padding: str = "none"
    pass_mask: str = "keyword"
    valid_tokens: str = "mask"
    num_windows: int = 1
    freeze_embeddings: bool = False
    section: dict[str, Any] = field(default_factory=lambda: {"aux_loss_coeff": COEFF})
    model: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """The DeepSpeed JSON."""
        zero: dict[str, Any] = {"stage": self.zero_stage}
        if self.zero_stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SEQUENCES,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_clipping": 0,  # the default is 1.0 and hides scale bugs
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
            "steps_per_print": 1_000_000,
            "moe_load_balancing": {"valid_tokens": self.valid_tokens, **self.section},
        }
        if self.autoep_size is not None:
            config["expert_parallel"] = {
                "enabled": True,
                "autoep_size": self.autoep_size,
                "preset_model": self.family,
            }
        for key, value in self.extra.items():
            both = isinstance(value, dict) and isinstance(config.get(key), dict)
            config[key] = config[key] | value if both else value
        return config


class Recorder:
    """Detaches the routers' inputs and records what they saw and chose in first passes."""

    def __init__(self, routers: dict[str, torch.nn.Module], top_k: int) -> None:
        self.windows: list[dict[str, Any]] = []
        self.valid: list[list[bool]] = []
        self.inputs: dict[str, list[Any]] = {name: [] for name in routers}
        self.selections: dict[str, list[Any]] = {name: [] for name in routers}
        self._top_k = top_k
        self.is_paused = False
        for name, router in routers.items():
            router.register_forward_pre_hook(self._detach)
            router.register_forward_hook(lambda m, a, out, name=name: self._record(name, a, out))

    def _detach(self, module: torch.nn.Module, args: Any) -> Any:
        x = args[0].detach().requires_grad_(torch.is_grad_enabled())
        return (x, *args[1:])

    def _record(self, name: str, args: Any, outputs: Any) -> None:
        if self.is_paused or torch._C._current_graph_task_id() != -1:
            return
        integers = [
            x for x in outputs if isinstance(x, torch.Tensor) and not x.dtype.is_floating_point
        ]
        if integers:
            chosen = next(x for x in integers if x.dim() == 2)
        else:  # Llama 4: the k largest logits
            chosen = outputs[1].topk(self._top_k, dim=1)[1]
        self.inputs[name].append(args[0].detach().flatten(0, -2).double().tolist())
        self.selections[name].append(chosen.tolist())

    def close_window(self, weights: dict[str, Any], grads: dict[str, Any]) -> None:
        """Put the window's records away."""
        self.windows.append(
            {
                "weights": weights,
                "grads": grads,
                "inputs": self.inputs,
                "selections": self.selections,
                "valid": self.valid,
            }
        )
        self.inputs = {name: [] for name in self.inputs}
        self.selections = {name: [] for name in self.selections}
        self.valid = []


def make_inputs(
    run: Run, *, window: int, micro_step: int, rank: int | None = None
) -> dict[str, torch.Tensor]:
    """A rank's micro-batch (this one's): other tokens for every rank, window and micro-step."""
    rank = dist.get_rank() if rank is None else rank
    seed = 1000 * window + 100 * micro_step + rank
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, families.VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    valid = torch.ones_like(ids, dtype=torch.bool)
    if run.padding != "none":
        cut = 1 + (rank + micro_step) % 3  # different numbers of tokens everywhere
        valid[1, LENGTH - cut :] = False
        if run.padding == "left":
            valid = valid.flip(1)
        ids = torch.where(valid, ids, 0)
    labels = torch.where(valid, ids, -100)
    if run.valid_tokens == "labels":  # completion-only: the prompt carries no labels
        labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": valid.long(), "labels": labels, "valid": valid}


def forward(run: Run, model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """Call the model as a script would."""
    given = {name: value for name, value in inputs.items() if name != "valid"}
    mask = given.pop("attention_mask")
    if run.pass_mask == "positional":
        return model(given.pop("input_ids"), mask, **given)
    if run.pass_mask.startswith("4d"):
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        attended = causal & inputs["valid"][:, None, None, :]
        mask = attended
        if run.pass_mask == "4d_additive":
            mask = torch.zeros(attended.shape).masked_fill(
                ~attended, torch.finfo(torch.float32).min
            )
    return model(attention_mask=mask, **given)


def find_routers(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The live routers by the name of their block, with or without AutoEP."""
    found = families.routers(module)
    autoep = {name: m for name, m in module.named_modules() if type(m).__name__ == "AutoEPMoELayer"}
    if autoep:
        return {name: layer.router for name, layer in autoep.items()}
    return {
        name.rsplit(".", 1)[0]: router
        for name, router in found.items()
        if not name.endswith("original_module")  # put aside by peft
    }


def own_parameters(router: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Weight and bias of a router's linear map."""
    linear = getattr(router, "gate", router)
    return {
        name: parameter
        for name, parameter in linear.named_parameters(recurse=False)
        if name in ("weight", "bias")
    }


def start_engine(
    run: Run, *, prepare: Callable[[torch.nn.Module], Any] = lambda model: None
) -> Any:
    """Model and engine of a run, with the plugin; `prepare` gets the model before the engine."""
    import ds_moe_lb

    torch.manual_seed(7)  # the same weights on every rank
    model = make_model(run.family, **run.model)
    if run.checkpointing != "off":
        model.gradient_checkpointing_enable({"use_reentrant": run.checkpointing == "reentrant"})
        if run.checkpointing == "reentrant":
            model.enable_input_require_grads()
    if run.freeze_embeddings:
        model.get_input_embeddings().requires_grad_(False)
    prepare(model)
    return ds_moe_lb.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )[0]


def train_on_rank(runs: list[Run]) -> list[list[dict[str, Any]]]:
    """Train each run on this rank; its windows' records."""
    return [_train(run) for run in runs]


def _train(run: Run) -> list[dict[str, Any]]:
    engine = start_engine(run)
    records = train_windows(run, engine, range(run.num_windows))
    engine.load_balancer.uninstall()
    engine.destroy()
    return records


def train_windows(
    run: Run,
    engine: Any,
    windows: Iterable[int],
    *,
    before_step: Callable[[int, int], None] = lambda window, micro_step: None,
) -> list[dict[str, Any]]:
    """Train these windows of the run on an engine that is fresh or resumed; their records.

    Args:
        before_step: called with window and micro-step before `engine.step`.
    """
    routers = find_routers(engine.module)
    recorder = Recorder(routers, next(iter(engine.load_balancer.layout.layers)).top_k)
    for window in windows:
        weights = {
            name: {
                key: full(parameter).double().tolist()
                for key, parameter in own_parameters(router).items()
            }
            for name, router in routers.items()
        }
        for micro_step in range(run.gradient_accumulation_steps):
            inputs = make_inputs(run, window=window, micro_step=micro_step)
            is_valid = inputs["labels"] != -100 if run.valid_tokens == "labels" else inputs["valid"]
            if run.valid_tokens == "all":
                is_valid = torch.ones_like(inputs["valid"])
            recorder.valid.append(is_valid.flatten().tolist())
            engine.backward(0.0 * forward(run, engine, inputs).loss)
            if micro_step == run.gradient_accumulation_steps - 1:
                grads = {
                    name: {
                        key: deepspeed.utils.safe_get_full_grad(parameter).double().tolist()
                        for key, parameter in own_parameters(router).items()
                    }
                    for name, router in routers.items()
                }
                counts = {name: n.tolist() for name, n in engine.load_balancer.counts().items()}
                recorder.close_window(weights, grads)
                recorder.windows[-1]["counts"] = counts
            before_step(window, micro_step)
            engine.step()
    return recorder.windows


def full(parameter: torch.Tensor) -> torch.Tensor:
    """All of it in fp32, also under ZeRO-3."""
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().float().clone()


def launcher_environment() -> None:
    """What a launcher sets, which accelerate reads."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(dist.get_rank())
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    # Asked for, and not used: the process group is there.
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "1"
    from accelerate import PartialState

    PartialState(cpu=True, backend="gloo")


class Watch:
    """Records an engine's windows from outside: what the routers saw, and the gradients."""

    def __init__(self, engine: Any, run: Run) -> None:
        self.routers = find_routers(engine.module)
        self.recorder = Recorder(self.routers, engine.load_balancer.layout.layers[0].top_k)
        self._run, self._engine = run, engine
        self._weights = self._now()
        step = engine.step

        def step_and_record(*args: Any, **kwargs: Any) -> Any:
            if not engine.is_gradient_accumulation_boundary():
                return step(*args, **kwargs)
            grads = {
                name: {
                    key: deepspeed.utils.safe_get_full_grad(p).double().tolist()
                    for key, p in own_parameters(router).items()
                }
                for name, router in self.routers.items()
            }
            num_steps = len(next(iter(self.recorder.inputs.values())))
            counts = {name: n.tolist() for name, n in engine.load_balancer.counts().items()}
            window = len(self.recorder.windows)
            for micro_step in range(num_steps):
                valid = make_inputs(run, window=window, micro_step=micro_step)["valid"]
                self.recorder.valid.append(valid.flatten().tolist())
            self.recorder.close_window(self._weights, grads)
            self.recorder.windows[-1]["counts"] = counts
            returned = step(*args, **kwargs)
            self._weights = self._now()
            return returned

        engine.step = step_and_record

    def _now(self) -> dict[str, Any]:
        weights = {}
        for name, router in self.routers.items():
            parameters = own_parameters(router)
            with deepspeed.zero.GatheredParameters(list(parameters.values())):
                weights[name] = {k: p.detach().double().tolist() for k, p in parameters.items()}
        return weights


def deviations(
    run: Run, by_rank: list[list[dict[str, Any]]], *, groups: list[list[int]] | None = None
) -> dict[str, float]:
    """Largest ``|g - ref| / max(|ref|, FLOOR)`` over all windows, by router parameter.

    Also checks that the plugin counted what the reference counts, exactly.
    """
    worst: dict[str, float] = {}
    previous: dict[str, reference.Window] = {}
    for w in range(run.num_windows):
        windows = [rank_windows[w] for rank_windows in by_rank]
        for name, parameters in windows[0]["weights"].items():
            steps = range(run.gradient_accumulation_steps)
            selections = [[r["selections"][name][m] for r in windows] for m in steps]
            window = reference.Window(
                parameters["weight"],
                [[r["inputs"][name][m] for r in windows] for m in steps],
                selections,
                [[r["valid"][m] for r in windows] for m in steps],
                top_k=len(selections[0][0][0]),
                bias=parameters.get("bias"),
                score_function=FAMILIES[run.family].score_function,
            )
            expected = reference.balance(
                window,
                previous=previous.get(name),
                groups=groups,
                coeff=coefficient(run, window.top_k, len(windows[0]["weights"])),
                **terms(run.section),
            )
            previous[name] = window
            for rank, record in enumerate(windows):
                counted = next(c for key, c in record["counts"].items() if key.startswith(name))
                in_all = reference.add(*[expected.counts[m][rank] for m in steps])
                assert counted == in_all, f"{run}: rank {rank}, layer {name}: {counted} != {in_all}"
                for key, grad in record["grads"][name].items():
                    right = expected.weight_grad if key == "weight" else expected.bias_grad
                    got, ref = torch.tensor(grad), torch.tensor(right, dtype=torch.float64)
                    scale = ref.abs().clamp(min=FLOOR)
                    deviation = float(((got - ref).abs() / scale).max())
                    where = f"window {w} {name}.{key}"
                    worst[where] = max(worst.get(where, 0.0), deviation)
                    assert float(ref.abs().max()) > 1e-3, f"{where}: nothing to compare"
    return worst


def terms(section: dict[str, Any]) -> dict[str, Any]:
    """The reference's arguments for the terms of a section."""
    scope = section.get("scope", "global_batch")
    return {
        "estimate": section.get("estimate", "running") if scope == "global_batch" else scope,
        "micro_batch_weight": section.get("micro_batch_weight", 0.0),
        "z_coeff": section.get("z_loss_coeff", 0.0),
        "num_sequences": SEQUENCES,
    }


def coefficient(run: Run, top_k: int, num_layers: int) -> float:
    """What a layer's loss has to weigh: the section's number, or the model's own converted."""
    if run.section.get("aux_loss_coeff") is not None:
        return run.section["aux_loss_coeff"]
    return run.model["router_aux_loss_coef"] * top_k / num_layers


def check(
    run: Run, by_rank: list[list[dict[str, Any]]], *, groups: list[list[int]] | None = None
) -> None:
    """Assert that a run's gradients are those of the reference; groups share counts."""
    worst = deviations(run, by_rank, groups=groups)
    at = max(worst, key=lambda where: worst[where])
    assert worst[at] <= TOLERANCE, f"{run}: {at} deviates by {worst[at]:.2e}"


def vary(run: Run, **levels: list[Any]) -> list[Run]:
    """The run with one thing changed at a time."""
    return [replace(run, **{key: value}) for key, values in levels.items() for value in values]
