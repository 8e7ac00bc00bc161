"""`ds-moe-lb run SCRIPT ARGS...`: a training script as it is, with the plugin on its engines."""

import argparse
import importlib.util
import os
import runpy
import sys
from pathlib import Path

from ds_moe_lb.cli.arguments import UsageError


def run(options: argparse.Namespace) -> int:
    """Run the script as `python SCRIPT ARGS...` would; its exit status is that of the process.

    Raises:
        UsageError: there is no such file.
    """
    import ds_moe_lb.auto  # noqa: F401

    given = options.script_and_arguments
    script, *arguments = given[1:] if given[0] == "--" else given
    if options.local_rank is not None:
        # The deepspeed launcher means this for the script, which it takes `ds_moe_lb` for.
        arguments.insert(0, f"--local_rank={options.local_rank}")
    sys.argv = [script, *arguments]
    if options.is_module:
        sys.path[0] = os.getcwd()
        if _is_missing(script):
            raise UsageError(f"{script}: no such module; run --module takes its name")
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return 0
    if not Path(script).is_file():
        raise UsageError(f"{script}: no such file; run takes a Python script")
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    return 0


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError as error:  # of a package around it, or of something that one imports
        return error.name is not None and f"{module}.".startswith(f"{error.name}.")
