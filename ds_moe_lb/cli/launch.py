"""Starting ranks on this machine from a command, and a Ctrl-C that they get once and clean."""

import os
import signal
import subprocess
import sys

import psutil

from ds_moe_lb.cli import EXIT_INTERRUPTED
from ds_moe_lb.training.free_port import free_port


def launch(arguments: list[str], *, num_ranks: int) -> int:
    """Run `ds-moe-lb ARGUMENTS` on ranks of the deepspeed launcher; on Ctrl-C wait for them.

    The launcher gets a session of its own: it would kill its ranks at the terminal's Ctrl-C, while
    here only the ranks are told, once.

    Returns:
        Their exit status, `EXIT_INTERRUPTED` where they were interrupted.
    """
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "error"]
    command += ["--num_accelerators", str(num_ranks), "--master_port", str(free_port())]
    command += ["--module", "ds_moe_lb", *arguments]
    # Ranks share this machine's cores; torch's deprecations are addressed to DeepSpeed.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning", **os.environ}
    if not _enough_gpus(num_ranks):
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
