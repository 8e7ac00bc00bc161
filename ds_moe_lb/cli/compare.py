"""`ds-moe-lb compare`: two runs that differ only in moe_load_balancing.scope, and the outcome."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from ds_moe_lb.cli import EXIT_INTERRUPTED, arguments
from ds_moe_lb.cli.arguments import UsageError, usage_errors
from ds_moe_lb.cli.report import require_report_packages, write_report
from ds_moe_lb.cli.train import load_ds_config
from ds_moe_lb.training.free_port import free_port

SCOPES = ("micro_batch", "global_batch")
_SECTION = "moe_load_balancing"
_GLOBAL_ONLY = ("estimate", "sync_group", "micro_batch_weight")  # refused in any other scope


def run(options: argparse.Namespace) -> int:
    """Train both, show the tables, write figures and page; 130 when interrupted."""
    require_report_packages()
    with usage_errors():
        configs = scope_configs(load_ds_config(options.config))
    output: Path = options.output
    if any((output / scope).exists() for scope in SCOPES):
        raise UsageError(f"{output} holds a comparison already: remove it or give another --output")
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    for number, (scope, config) in enumerate(configs.items(), start=1):
        print(f"[{number}/{len(configs)}] training with scope {scope!r}", flush=True)
        config_file = output / f"{scope}.json"
        config_file.write_text(json.dumps(config, indent=2) + "\n")
        status = _launch(_command(options, config_file, run_folder=output / scope, label=scope))
        if status != 0:
            print(f"the run with scope {scope!r} ended with exit status {status}", file=sys.stderr)
            return status
    with usage_errors():
        page = write_report([output / scope for scope in SCOPES], output=output / "report.html")
    minutes = (time.perf_counter() - started) / 60
    print(f"done in {minutes:.1f} minutes")
    print(f"page         {page}\nfigures      {page.parent / 'figures'}")
    print(f"tensorboard  tensorboard --logdir {output}")
    return 0


def scope_configs(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The given config once per scope, with nothing else changed.

    Keys that only the global batch has are left out of the other one.
    """
    section = config.get(_SECTION, {})
    per_scope: dict[str, dict[str, Any]] = {}
    for scope in SCOPES:
        kept = {
            k: v for k, v in section.items() if scope == "global_batch" or k not in _GLOBAL_ONLY
        }
        per_scope[scope] = {**config, _SECTION: {**kept, "enabled": True, "scope": scope}}
    return per_scope


def _command(
    options: argparse.Namespace, config: Path, *, run_folder: Path, label: str
) -> list[str]:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "error"]
    launcher += ["--num_accelerators", str(options.num_ranks), "--master_port", str(free_port())]
    train = ["train", "--config", str(config), "--output", str(run_folder), "--label", label]
    if options.data is not None:
        train += ["--data", str(options.data)]
    given = arguments.given_options(options) | arguments.given_model(options)
    return [*launcher, "--module", "ds_moe_lb", *train, *arguments.as_flags(given)]


def _launch(command: list[str]) -> int:
    """Run the launcher; on Ctrl-C let the ranks save and wait for them.

    The launcher gets a session of its own: it would kill its ranks at the terminal's Ctrl-C, while
    here only the ranks are told, once.
    """
    # Ranks share this machine's cores; torch's deprecations are addressed to DeepSpeed.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning", **os.environ}
    if not _enough_gpus(int(command[command.index("--num_accelerators") + 1])):
        environment.setdefault("DS_ACCELERATOR", "cpu")
    launcher = subprocess.Popen(command, env=environment, start_new_session=True)

    def forward(number: int, frame: object) -> None:
        for process in psutil.Process(launcher.pid).children(recursive=True):
            if "deepspeed.launcher" not in " ".join(process.cmdline()):
                process.send_signal(signal.SIGINT)

    previous = {
        number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        status = launcher.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return EXIT_INTERRUPTED if status < 0 else status


def _enough_gpus(wanted: int) -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() >= wanted
