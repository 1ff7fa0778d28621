"""Measure the processor time of one exchange by the defaults of SGD and AdamW, relative to ``add_``.

    python benchmarks/processor_time.py            (2 minutes; writes benchmarks/processor_time.md)
    python benchmarks/processor_time.py --growth   (40 minutes, 10 GB; appends how cost grows, with
                                                    benchmarks/processor_time.png)

Every rank is a process with one thread of torch, connected over ZeroMQ on this machine.  Processor
time is summed over all threads of a rank, including ZeroMQ's. It is relative to the processor time
of ``a.add_(b)`` on all ranks at once, which alternates with the exchanges in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.cli.launch import launch, on_one_thread
from sparsync.collectives import Budgeted, Quantised
from sparsync.collectives.collective import Collective
from sparsync.feedback.residual import Residual
from sparsync.kernels import top
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.process_group import TorchCommunicator
from sparsync.transports.sim import simulate
from sparsync.transports.zmq import ZmqCommunicator

HERE = Path(__file__).parent
RANKS = (2, 4, 8)
SIZE = 14_728_266  # VGG-16 on CIFAR-10
TURNS = 9  # repetitions of each exchange and of add_, interleaved; the fastest counts
DENSITY = 0.01
BLOCK = 512  # elements per scale in the default of AdamW
SIZES = (1_000_000, SIZE, 100_000_000, 500_000_000)  # for the growth with n, at P = 2
GROWTH_TURNS = 3
VIRTUAL_RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
VIRTUAL_SIZE = 1 << 18  # elements per virtual rank: 1,024 of them fit 4 GB
PHASES = ("pack", "unpack", "communicate")  # "communicate" is the rest of an exchange
PARTS = ("exchange", "residual", "average")

Seconds = dict[str, float]


class _OnProcessorTime(ZmqCommunicator):  # makes stages record processor time; final only for users
    @property
    def now(self) -> float:
        """The processor time of all threads."""
        return time.process_time()


class Exchange:
    """One kind of exchange, with its residual and a gradient to exchange."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.k = name, max(round(DENSITY * size), 1)
        self.collective: Collective = (
            Budgeted() if name == "budgeted" else Quantised(bits=2, block=BLOCK)
        )
        self.residual = Residual(size, torch.float32, torch.device("cpu"))

    def select(self, gradient: Tensor) -> Vector:
        """Return the entries or values to exchange; for ``budgeted``, the selection is not timed."""
        if self.name == "budgeted":
            self.residual.accumulate(0, gradient)
            whole = self.residual.accumulated
            indices = top(whole, self.k)
            return SparseVector(indices, whole[indices], whole.numel())
        return self.residual.accumulate_later(lambda start, stop, _: gradient[start:stop].clone())


async def once(comm: Communicator, exchange: Exchange, gradient: Tensor) -> Seconds:
    """Exchange a gradient, replacing it by the average; return the processor seconds of each part."""
    selected, before = exchange.select(gradient), dict(comm.ledger.stages)
    times = [time.process_time()]
    with comm.stage("communicate"):
        reduced = await exchange.collective.reduce(comm, selected, exchange.k, 0)
    times.append(time.process_time())
    after = dict(comm.ledger.stages)
    exchange.residual.retain(reduced.delivered)
    times.append(time.process_time())
    reduced.total.divide_(comm.world_size)
    reduced.total.write_to_(gradient)
    times.append(time.process_time())
    spent = {part: end - start for part, start, end in zip(PARTS, times, times[1:], strict=False)}
    return spent | {phase: after.get(phase, 0.0) - before.get(phase, 0.0) for phase in PHASES}


def measure(names: tuple[str, ...], size: int, turns: int) -> dict[str, Seconds]:
    """Return the processor seconds of every exchange and of ``add_``, averaged over ranks."""
    torch.set_num_threads(1)
    gloo = TorchCommunicator(timeout=600)
    rank, ranks = gloo.rank, gloo.world_size
    generator = torch.Generator().manual_seed(rank)
    gradient = torch.empty(size)
    found: dict[str, Seconds] = {}
    with _OnProcessorTime(rank, ranks, store=gloo, timeout=600) as comm:
        for name in names:
            exchange, best = Exchange(name, size), dict[str, Seconds]()
            for _ in range(turns):
                gradient.normal_(generator=generator)
                dist.barrier()
                _keep_fastest(best, "exchange", run(once(comm, exchange, gradient)))
                dist.barrier()
                before = time.process_time()
                exchange.residual.accumulated.add_(gradient)
                _keep_fastest(best, "add_", {"add_": time.process_time() - before})
            found[name] = best["exchange"] | best["add_"]
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, found)
    return {
        name: {part: statistics.mean(one[name][part] for one in everybody) for part in found[name]}
        for name in names
    }


def _keep_fastest(best: dict[str, Seconds], kind: str, new: Seconds) -> None:
    """Keep the fastest turn of each part, because other work on the machine only adds time."""
    old = best.get(kind, new)
    best[kind] = {part: min(old[part], seconds) for part, seconds in new.items()}


def virtual(name: str, ranks: int) -> Seconds:
    """Return processor seconds per rank, virtual seconds and bytes of one exchange in the simulator."""
    exchanges = [Exchange(name, VIRTUAL_SIZE) for _ in range(ranks)]
    gradients = torch.randn(ranks, VIRTUAL_SIZE)

    async def program(comm: Communicator) -> None:
        await once(comm, exchanges[comm.rank], gradients[comm.rank])

    before = time.process_time()
    result = simulate(program, ranks)
    spent = (time.process_time() - before) / ranks
    sent = max(ledger.total().sent for ledger in result.ledgers)
    return {"processor": spent, "virtual": result.seconds, "bytes": float(sent)}


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def ratios(name: str, ranks: int, times: Seconds) -> list[str]:
    """Return a row with parts and phases relative to ``add_``."""
    add = times["add_"]
    whole = sum(times[part] for part in PARTS)
    cells = [f"{times[part] / add:.2f}" for part in PARTS]
    phases = [f"{times[phase] / add:.2f}" for phase in PHASES]
    ms = [f"{1e3 * times['exchange']:.1f}", f"{1e3 * whole:.1f}", f"{1e3 * add:.1f}"]
    return [name, str(ranks), f"{whole / add:.2f}", *cells, *phases, *ms]


def report(results: dict[int, dict[str, Seconds]]) -> list[str]:
    """Return the first section."""
    head = ["exchange", "P", "whole / add_", "exchange / add_", "residual / add_"]
    head += ["average / add_", "pack", "unpack", "rest", "exchange, ms", "whole, ms", "add_, ms"]
    rows = [ratios(name, p, results[p][name]) for name in results[RANKS[0]] for p in RANKS]
    return [
        "# Processor time of one exchange",
        "",
        f"n = {SIZE:,}; {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, one "
        "thread of torch per rank.",
        "The fastest of "
        f"{TURNS} turns on each rank, mean over ranks; made by `python benchmarks/processor_time.py`.",
        "",
        f"`quantised` has two bits per element in blocks of {BLOCK}, as the default of AdamW;",
        f"`budgeted` has a density of {DENSITY:.0%}. *Exchange* is from the accumulated vector or from",
        "selected entries to the sum (`quantised` adds the residual to the gradient on the way),",
        "*residual* what is kept, *average* the written result; *whole* is their sum. Pack, unpack and",
        "rest are the phases of *exchange*, also over `add_`; rest is what carries messages.",
        "",
        *table(head, rows),
    ]


def growth_report(by_size: dict[int, dict[str, Seconds]], by_ranks: dict[str, Any]) -> list[str]:
    """Return the section on the growth of the cost."""
    lines = ["", "## How cost grows", "", "### With n, two real ranks", ""]
    head = ["exchange", "n", "whole / add_", "ns per element", "per element, over n = 14.7 M"]
    rows = []
    for name in next(iter(by_size.values())):
        for size, results in by_size.items():
            each, base = per_element(results[name], size), per_element(by_size[SIZE][name], SIZE)
            over = each * results[name]["add_"] / size
            rows.append(
                [name, f"{size:,}", f"{each:.2f}", f"{1e9 * over:.2f}", f"{each / base:.2f}"]
            )
    lines += table(head, rows)
    lines += [
        "",
        "The last column compares ratios to `add_`, so the machine's other work cancels.",
        "",
        f"### With P, virtual ranks of {VIRTUAL_SIZE:,} elements",
        "",
    ]
    head = ["exchange", "P", "bytes sent per element", "virtual ms", "processor ns per element"]
    rows = []
    for name, found in by_ranks.items():
        for ranks, one in found.items():
            figures = one["bytes"] / VIRTUAL_SIZE, 1e3 * one["virtual"]
            processor = 1e9 * one["processor"] / VIRTUAL_SIZE
            rows.append(
                [name, str(ranks), f"{figures[0]:.3f}", f"{figures[1]:.2f}", f"{processor:.1f}"]
            )
    return lines + table(head, rows) + ["", "![How cost grows](processor_time.png)"]


def per_element(times: Seconds, size: int) -> float:
    """Return the processor time per element of a whole exchange, relative to ``add_``."""
    return sum(times[part] for part in PARTS) / times["add_"]


def draw(by_size: dict[int, dict[str, Seconds]], by_ranks: dict[str, Any], path: Path) -> None:
    """Plot the growth with n and with P."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    colours = {"quantised": "#1b6ca8", "budgeted": "#d95f02"}
    for name, colour in colours.items():
        style = {"color": colour, "marker": "o", "markersize": 4, "label": name}
        sizes = list(by_size)
        left.semilogx(sizes, [per_element(by_size[n][name], n) for n in sizes], **style)
        found = by_ranks[name]
        ranks = [int(p) for p in found]
        sent = [found[p]["bytes"] / VIRTUAL_SIZE for p in found]
        spent = [1e9 * found[p]["processor"] / VIRTUAL_SIZE for p in found]
        middle.semilogx(ranks, sent, base=2, **style)
        right.semilogx(ranks, spent, base=2, **style)
    left.set(title="time over add_, P = 2", xlabel="elements n", ylim=(0, None))
    middle.set(title="bytes sent per element", xlabel="virtual ranks P", ylim=(0, None))
    right.set(title="processor ns per element", xlabel="virtual ranks P", yscale="log")
    left.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "processor_time.md")
    parser.add_argument("--growth", action="store_true", help="append how cost grows")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    names = ("quantised", "budgeted")
    if not arguments.growth:
        results = {}
        for ranks in arguments.ranks:
            results[ranks] = launch(measure, ranks, names, SIZE, TURNS, timeout=600.0)
            for name in names:
                print(*ratios(name, ranks, results[ranks][name]))
        if tuple(arguments.ranks) == RANKS:
            arguments.output.write_text("\n".join(report(results)) + "\n", "utf-8")
        return
    by_size = {}
    for size in SIZES:
        by_size[size] = launch(measure, 2, names, size, GROWTH_TURNS, timeout=600.0)
        print(size, json.dumps(by_size[size]))
    by_ranks: dict[str, Any] = {name: {} for name in names}
    with on_one_thread():
        for ranks in VIRTUAL_RANKS:
            for name in names:
                by_ranks[name][ranks] = virtual(name, ranks)
                print(name, ranks, by_ranks[name][ranks])
    text = arguments.output.read_text("utf-8").split("\n## How cost grows")[0].rstrip()
    lines = [text, *growth_report(by_size, by_ranks)]
    arguments.output.write_text("\n".join(lines) + "\n", "utf-8")
    draw(by_size, by_ranks, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
