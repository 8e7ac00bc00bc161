"""`ds-moe-lb train`: one run, on any launcher's ranks or alone; Ctrl-C leaves a checkpoint."""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ds_moe_lb._configs import config_path
from ds_moe_lb.cli import EXIT_INTERRUPTED, arguments
from ds_moe_lb.cli.arguments import UsageError, usage_errors


def run(options: argparse.Namespace) -> int:
    """Train; returns 0 when finished, 130 when interrupted."""
    from ds_moe_lb.training import process_group
    from ds_moe_lb.training.progress import make_progress
    from ds_moe_lb.training.run_folder import RunFolder
    from ds_moe_lb.training.stop_request import StopRequest
    from ds_moe_lb.training.trainer import Trainer

    process_group.join()
    rank, world_size = process_group.rank_and_world_size()
    if rank != 0:
        sys.stdout = open(os.devnull, "w")  # DeepSpeed prints on every rank
    with usage_errors():
        info = _resumed_info(options, world_size) if options.resume else _new_info(options)
        path = Path(info["output"])
        task = _task(info, world_size=world_size)
        if options.resume is None:
            _refuse_used_folder(path)
            if rank == 0:
                arguments.make_output_folder(path)
        folder = RunFolder(path, writes=rank == 0)
        trainer = Trainer(task, folder)  # collective, so every rank has looked before rank 0 writes
        folder.write_info({**info, **_facts(task, world_size)})
        if options.resume:
            trainer.resume()
    progress = make_progress(
        label=info["label"], first_step=trainer.step, steps=task.options.steps, shown=rank == 0
    )
    try:
        with StopRequest() as stop:
            finished = trainer.run(progress, stop)
            folder.set_status("finished" if finished else "interrupted")
    finally:
        progress.close()
    if rank == 0:
        print(
            _closing_words(path, step=trainer.step, finished=finished, world_size=world_size),
            flush=True,
        )
    process_group.leave()
    return 0 if finished else EXIT_INTERRUPTED


def load_ds_config(name: str) -> dict[str, Any]:
    """A DeepSpeed JSON by path, or a ready one by name.

    Raises:
        ValueError: no such file or recipe, or not a JSON object.
    """
    path = Path(name) if Path(name).is_file() else config_path(Path(name).name)
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--config {path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"--config {path}: expected a JSON object, got {type(config).__name__}")
    return config


def _new_info(options: argparse.Namespace) -> dict[str, Any]:
    if options.config is None:
        raise UsageError("--config is needed: a DeepSpeed JSON or the name of a ready config")
    label = options.label or Path(options.config).stem
    model = arguments.given_model(options)
    if "model" in model:
        arguments.refuse_sizes_of_folder_model(model | arguments.given_options(options))
        model["model"] = str(Path(model["model"]).resolve())
    return {
        "label": label,
        "output": str((options.output or Path("runs") / label).resolve()),
        "data": str(options.data.resolve()) if options.data else None,
        "options": _with_domain_files(arguments.given_options(options)),
        "model": model,
        "ds_config": load_ds_config(options.config),
        "resumed_at": [],
    }


def _with_domain_files(given: dict[str, Any]) -> dict[str, Any]:
    """Options with the content of the JSON files, so that a resumed run does not need them."""
    read = {}
    for name in arguments.DOMAIN_FILES:
        if name in given:
            flag, file = "--" + name.replace("_", "-"), Path(given[name])
            try:
                read[name] = json.loads(file.read_text())
            except (OSError, json.JSONDecodeError) as error:
                raise ValueError(f"{flag} {file}: expected a JSON file, but {error}") from None
            if not isinstance(read[name], dict):
                raise ValueError(f'{flag} {file}: expected an object, {{"domain": number, ...}}')
    return given | read


def _resumed_info(options: argparse.Namespace, world_size: int) -> dict[str, Any]:
    from ds_moe_lb.training.run_folder import read_info

    given = arguments.given_options(options) | arguments.given_model(options)
    given |= {name: getattr(options, name) for name in ("config", "data", "output", "label")}
    refused = [
        name
        for name, value in given.items()
        if value is not None and name not in arguments.RESUMABLE
    ]
    if refused:
        raise UsageError(
            f"--resume takes {arguments.flag_list(refused)} from the run; only "
            f"{arguments.flag_list(arguments.RESUMABLE)} may be given again"
        )
    info = read_info(options.resume)
    if info["world_size"] != world_size:
        raise UsageError(
            f"--resume {options.resume}: the run had {info['world_size']} rank(s), this one has "
            f"{world_size}; start as many"
        )
    changed = {name: value for name, value in given.items() if value is not None}
    info["options"] = {**info["options"], **changed}
    info["output"] = str(options.resume.resolve())
    info["resumed_at"] = [*info["resumed_at"], time.strftime("%Y-%m-%d %H:%M:%S")]
    return info


def _task(info: dict[str, Any], *, world_size: int) -> Any:
    from ds_moe_lb.data.builtin import builtin_corpus
    from ds_moe_lb.data.folder import folder_corpus
    from ds_moe_lb.training.options import TrainOptions
    from ds_moe_lb.training.run_folder import TENSORBOARD_FOLDER
    from ds_moe_lb.training.trainer import Task, prepare_ds_config

    options = TrainOptions(**info["options"])
    corpus = folder_corpus(Path(info["data"])) if info["data"] else builtin_corpus()
    recorded = info.get("corpus", {}).get("sha256", corpus.sha256)
    if recorded != corpus.sha256:
        raise UsageError(
            f"--resume: the text has changed since the run was started (corpus hash "
            f"{recorded[:12]} then, {corpus.sha256[:12]} now), so it cannot be continued"
        )
    return Task(
        options=options,
        model=_model_kind(info["model"], ep_size=options.ep_size),
        ds_config=prepare_ds_config(info["ds_config"], Path(info["output"]) / TENSORBOARD_FOLDER),
        corpus=corpus,
    )


def _model_kind(sizes: dict[str, Any], *, ep_size: int) -> Any:
    """What run.json calls "model", as the trainer takes it."""
    from ds_moe_lb.training import process_group
    from ds_moe_lb.training.model import ModelConfig

    if "model" in sizes:
        try:
            from transformers.utils.logging import disable_progress_bar

            from ds_moe_lb.training.transformers_model import TransformersModel
        except ModuleNotFoundError as error:
            raise UsageError(f"{error.name} is missing: pip install 'ds_moe_lb[hf]'") from None
        disable_progress_bar()  # one of every rank for the weights would break that of the run
        names = {field.name for field in dataclasses.fields(TransformersModel)}
        return TransformersModel(**{name: sizes[name] for name in names & set(sizes)})
    model = ModelConfig(**{**sizes, "ep_size": 1})
    ep_size = process_group.expert_parallel_size(ep_size, num_experts=model.num_experts)
    return dataclasses.replace(model, ep_size=ep_size)


def _facts(task: Any, world_size: int) -> dict[str, Any]:
    """What run.json holds besides what was asked."""
    from ds_moe_lb.training.run_folder import versions

    domains = [
        {
            "name": domain.name,
            "train_bytes": len(domain.train),
            "validation_bytes": len(domain.validation),
            "documents": list(domain.num_documents),
        }
        for domain in task.corpus.domains
    ]
    return {
        "options": dataclasses.asdict(task.options),
        "model": task.model.describe(),
        "world_size": world_size,
        "corpus": {"sha256": task.corpus.sha256, "domains": domains},
        "versions": versions(),
        "status": "running",
    }


def _refuse_used_folder(path: Path) -> None:
    from ds_moe_lb.training.run_folder import RUN_FILE

    if (path / RUN_FILE).exists():
        raise UsageError(
            f"{path} holds a run already: go on with it by --resume, remove it, or give another "
            f"--output"
        )


def _closing_words(path: Path, *, step: int, finished: bool, world_size: int) -> str:
    if finished:
        return f"finished at step {step}: {path}"
    command = "ds-moe-lb"
    if world_size > 1:
        command = f"deepspeed --num_accelerators {world_size} --module ds_moe_lb"
    return f"stopped after step {step} with a checkpoint; go on: {command} train --resume {path}"
