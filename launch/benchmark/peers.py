"""What others charge for the same thing, where they are installed: transformers and megatron-core.

Every peer is measured against itself without balancing, because its gate is another gate.

Shape legend: T tokens, M width, E experts.
"""

import gc
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from launch.benchmark.ranks import any_rank, say
from launch.benchmark.shape import COEFFICIENT, SEQUENCES, Shape

_VOCABULARY = 256


def package_version(name: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# transformers: a whole step with the model's own router loss against the plugin's


def measure_transformers(shape: Shape, blocks: int, seconds: float, seed: int) -> dict[str, Any]:
    """A small Mixtral: its own router loss (plain) against ours. Collective; data for JSON."""
    if package_version("transformers") is None:
        return {"not_run": "transformers is not installed"}
    import deepspeed

    import ds_moe_lb

    model = _mixtral(shape)
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": shape.gas,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 20_000_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = (SEQUENCES, shape.tokens // SEQUENCES)
    tokens_BS = torch.randint(_VOCABULARY, size, generator=generator).to(engine.device)

    def window() -> None:
        for _ in range(shape.gas):
            output = engine(input_ids=tokens_BS, labels=tokens_BS)
            engine.backward(output.loss)
            engine.step()

    def timed(section: dict[str, Any] | None) -> float:
        balancer = None if section is None else ds_moe_lb.install(engine, section)
        window()
        gc.collect()
        dist.barrier()
        started = time.perf_counter()
        window()
        dist.barrier()
        took = time.perf_counter() - started
        if balancer is not None:
            balancer.uninstall()
        return took

    quiet = {"monitor": {"enabled": False}, "aux_loss_coeff": COEFFICIENT}
    sections = {
        "the model's own loss": None,
        "running, aux_loss_coeff": {**quiet, "estimate": "running"},
        "boundary, aux_loss_coeff": {**quiet, "estimate": "boundary"},
    }
    try:
        for section in sections.values():
            timed(section)
    except ValueError as error:
        return {"not_run": str(error)}
    return {
        "version": package_version("transformers"),
        "shape": asdict(shape),
        "baseline": "the model's own loss",
        "wall_s": _in_blocks(
            {name: lambda s=section: timed(s) for name, section in sections.items()},
            blocks=blocks,
            seconds=seconds,
            seed=seed,
        ),
    }


def _mixtral(shape: Shape) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(42)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=_VOCABULARY,
            hidden_size=shape.model_dim,
            intermediate_size=shape.expert_dim,
            num_hidden_layers=shape.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            num_local_experts=shape.num_experts,
            num_experts_per_tok=shape.top_k,
            max_position_embeddings=max(shape.tokens, 16),
            output_router_logits=True,
            router_aux_loss_coef=COEFFICIENT,
        )
    )


# megatron-core: its router alone, with the global loss against none


def measure_megatron(shape: Shape, blocks: int, seconds: float, seed: int) -> dict[str, Any]:
    """Forward and backward of its routers over the same ranks. Collective; data for JSON."""
    found = package_version("megatron-core")
    if found is None:
        return {"not_run": "megatron-core is not installed"}
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not torch.cuda.is_available():  # it asks for CUDA by name, and for TransformerEngine
        torch.cuda.current_device = lambda: torch.device("cpu")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    parallel_state.initialize_model_parallel()
    groups = moe_utils.get_default_pg_collection()

    def routers(kind: str) -> list[Any]:
        torch.manual_seed(42)
        config = TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.model_dim,
            num_attention_heads=8,
            num_moe_experts=shape.num_experts,
            moe_router_topk=shape.top_k,
            moe_router_load_balancing_type=kind,
            moe_aux_loss_coeff=COEFFICIENT,
            moe_router_dtype="fp32",
            moe_router_pre_softmax=True,
            use_cpu_initialization=True,
            add_bias_linear=False,
        )
        made = [TopKRouter(config, pg_collection=groups) for _ in range(shape.layers)]
        for number, router in enumerate(made, start=1):
            router.set_layer_number(number)
            router.train()
        return made

    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TM = torch.randn(shape.tokens // SEQUENCES, SEQUENCES, shape.model_dim, generator=generator)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))

    def timed(layers: list[Any]) -> float:
        dist.barrier()
        times = []
        for _ in range(shape.gas):
            leaf_TM = x_TM.detach().requires_grad_()
            started = time.perf_counter()
            scores: list[Tensor] = [router(leaf_TM)[0].sum() for router in layers]
            torch.stack(scores).sum().backward()
            times.append(time.perf_counter() - started)
        for router in layers:
            if getattr(router, "global_tokens_per_expert", None) is not None:
                router.reset_global_aux_loss_tracker()
        return median(times)

    kinds = {kind: routers(kind) for kind in ("none", "aux_loss", "global_aux_loss")}
    for layers in kinds.values():
        timed(layers)
    return {
        "version": found,
        "shape": asdict(shape),
        "baseline": "none",
        "gate_wall_s": _in_blocks(
            {kind: lambda r=layers: timed(r) for kind, layers in kinds.items()},
            blocks=blocks,
            seconds=seconds,
            seed=seed,
        ),
    }


def _in_blocks(
    timers: dict[str, Callable[[], float]], *, blocks: int, seconds: float, seed: int
) -> dict[str, list[float]]:
    """Each timer once in each block, in random order, the same on all ranks."""
    order = random.Random(seed)
    taken: dict[str, list[float]] = {name: [] for name in timers}
    begun = time.monotonic()
    for block in range(blocks):
        if block and any_rank(time.monotonic() - begun > seconds):
            break
        for name in order.sample(sorted(timers), len(timers)):
            taken[name].append(timers[name]())
    say(f"  {len(next(iter(taken.values())))} blocks in {time.monotonic() - begun:.0f} s")
    return taken
