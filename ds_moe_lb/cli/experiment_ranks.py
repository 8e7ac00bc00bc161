"""The ranks of `ds-moe-lb experiment`: started by it, not by hand."""

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from ds_moe_lb.cli import EXIT_INTERRUPTED
from ds_moe_lb.cli.arguments import UsageError
from ds_moe_lb.cli.experiment import read_corpus


def run(options: argparse.Namespace) -> int:
    """Do the runs of the file; returns 0 when all are done, 130 when interrupted."""
    from deepspeed.utils import logger

    from ds_moe_lb.experiments.records import Records
    from ds_moe_lb.experiments.worker import PendingRun, run_all
    from ds_moe_lb.training import process_group

    content = json.loads(options.pending.read_text())
    logger.setLevel(logging.ERROR)  # dozens of engines, each with a page of settings
    process_group.join()
    rank, _ = process_group.rank_and_world_size()
    # DeepSpeed and the plugin print for every engine; what is left is how far the runs are.
    out, sys.stdout = sys.stdout, open(os.devnull, "w")
    corpus = read_corpus(Path(content["data"]) if content["data"] else None)
    if corpus.sha256 != content["corpus"]:
        raise UsageError(
            f"the text has changed since the command was started (corpus hash "
            f"{content['corpus'][:12]} then, {corpus.sha256[:12]} now); start it again"
        )
    runs = [PendingRun.from_json(item) for item in content["runs"]]
    finished = run_all(runs, corpus, Records(Path(content["records"])), rank=rank, out=out)
    process_group.leave()
    return 0 if finished else EXIT_INTERRUPTED
