"""Times the plugin's count all-reduces on CPU ranks and compares them with the model of `plan`.

    python launch/measure_collectives.py                2 and 4 ranks of this machine, gloo
    python launch/measure_collectives.py --ranks 2 --repeats 500

Latency and bandwidth are fitted at the smallest and the largest message, for each number of ranks;
the other sizes are predictions. The last column predicts with the fit of the fewest ranks instead.
gloo's all-reduce is a ring, and so is the model here. More ranks than cores wait for each other's
turn on a core, which no network model knows of.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402

from ds_moe_lb.plan.cost import HEADER, Network  # noqa: E402

# (layers, experts): one layer and a whole model at the gate and at the end of the forward; the last
# one is there to show the bandwidth.
SHAPES = ((1, 64), (1, 128), (16, 64), (48, 128), (58, 256), (480, 1024))


def message_numbers(layers: int, experts: int) -> int:
    """int64 numbers of one message."""
    return layers * (experts + HEADER)


def _measure(rank: int, world_size: int, store: str, repeats: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    messages = [torch.ones(message_numbers(*shape), dtype=torch.int64) for shape in SHAPES]
    seconds: list[list[float]] = [[] for _ in SHAPES]
    num_warm_ups = repeats // 5  # the first ones make connections
    for repeat in range(num_warm_ups + repeats):
        # By turns, so that whatever else the machine does falls on all sizes alike.
        for message, times in zip(messages, seconds, strict=True):
            message.fill_(1)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(message, async_op=True).wait()
            if repeat >= num_warm_ups:
                times.append(time.perf_counter() - start)
    medians = [statistics.median(times) for times in seconds]
    mine = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)  # a collective takes as long as on its slowest rank
    if rank == 0:
        torch.save(mine, out)
    dist.barrier()
    dist.destroy_process_group()


def measure(world_size: int, repeats: int) -> list[float]:
    """Median seconds of each shape's all-reduce."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/medians"
        torch.multiprocessing.spawn(
            _measure, (world_size, f"{folder}/store", repeats, out), nprocs=world_size
        )
        return [float(x) for x in torch.load(out)]


def fit(seconds: list[float], *, num_ranks: int) -> Network:
    """Latency and bandwidth of a ring that takes these times for the first and the last shape."""
    small, large = (message_numbers(*SHAPES[at]) * 8 for at in (0, -1))
    steps = 2 * (num_ranks - 1)
    s_per_byte = (seconds[-1] - seconds[0]) / (large - small) * num_ranks / steps
    latency_s = seconds[0] / steps - small / num_ranks * s_per_byte
    return Network(latency_s=latency_s, bytes_per_s=1 / s_per_byte)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    if min(options.ranks) < 2 or options.repeats < 5:
        parser.error("--ranks needs numbers >= 2, --repeats >= 5")
    measured = {ranks: measure(ranks, options.repeats) for ranks in options.ranks}
    networks = {ranks: fit(seconds, num_ranks=ranks) for ranks, seconds in measured.items()}
    fewest = networks[min(networks)]
    print(
        f"torch {torch.__version__}, gloo, Python {platform.python_version()}, "
        f"{len(os.sched_getaffinity(0))} CPU cores, median of {options.repeats}"
    )
    for ranks, network in networks.items():
        print(
            f"{ranks} ranks: latency {network.latency_s * 1e6:.0f} us, bandwidth "
            f"{network.bytes_per_s * 8 / 1e9:.1f} Gbit/s"
        )
    print(
        "\n| ranks | layers x experts | bytes | measured us | modelled us | measured / modelled "
        f"| by the fit at {min(networks)} ranks us |\n|---|---|---|---|---|---|---|"
    )
    for ranks, seconds in measured.items():
        for at, ((layers, experts), second) in enumerate(zip(SHAPES, seconds, strict=True)):
            num_bytes = message_numbers(layers, experts) * 8
            model = networks[ranks].ring_s(num_bytes, ranks)
            ratio = "fitted" if at in (0, len(SHAPES) - 1) else f"{second / model:.2f}"
            print(
                f"| {ranks} | {layers} x {experts} | {num_bytes:,} | {second * 1e6:.0f} "
                f"| {model * 1e6:.0f} | {ratio} | {fewest.ring_s(num_bytes, ranks) * 1e6:.0f} |"
            )


if __name__ == "__main__":
    main()
