"""`ds-moe-lb compare`: two runs that differ only in moe_load_balancing.scope, and the outcome."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from ds_moe_lb.cli import arguments
from ds_moe_lb.cli.arguments import UsageError, usage_errors
from ds_moe_lb.cli.launch import launch
from ds_moe_lb.cli.report import require_report_packages, write_report
from ds_moe_lb.cli.train import load_ds_config

SCOPES = ("micro_batch", "global_batch")
_SECTION = "moe_load_balancing"
_GLOBAL_ONLY = ("estimate", "sync_group", "micro_batch_weight")  # refused in any other scope


def run(options: argparse.Namespace) -> int:
    """Train both, show the tables, write figures and page; 130 when interrupted."""
    require_report_packages()
    with usage_errors():
        configs = scope_configs(load_ds_config(options.config))
        given = arguments.given_model(options)
        if "model" in given:
            arguments.refuse_sizes_of_folder_model(given | arguments.given_options(options))
            if not Path(given["model"], "config.json").is_file():  # before ranks say it each
                raise UsageError(
                    f"--model {given['model']}: expected the folder of a transformers model, but "
                    f"it has no config.json"
                )
    output: Path = options.output
    if any((output / scope).exists() for scope in SCOPES):
        raise UsageError(f"{output} holds a comparison already: remove it or give another --output")
    arguments.make_output_folder(output)
    started = time.perf_counter()
    for number, (scope, config) in enumerate(configs.items(), start=1):
        print(f"[{number}/{len(configs)}] training with scope {scope!r}", flush=True)
        config_file = output / f"{scope}.json"
        config_file.write_text(json.dumps(config, indent=2) + "\n")
        words = _arguments(options, config_file, run_folder=output / scope, label=scope)
        status = launch(words, num_ranks=options.num_ranks)
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


def _arguments(
    options: argparse.Namespace, config: Path, *, run_folder: Path, label: str
) -> list[str]:
    train = ["train", "--config", str(config), "--output", str(run_folder), "--label", label]
    if options.data is not None:
        train += ["--data", str(options.data)]
    given = arguments.given_options(options) | arguments.given_model(options)
    return [*train, *arguments.as_flags(given)]
