"""Latency of small messages: ZeroMQ against gloo, among local processes.

    python benchmarks/transports.py        (about 1 minute; writes benchmarks/transports.md)

All transports take turns in the same processes, several times over, because timings of a busy machine
drift: the ratios of one run are what counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from sparsync.cli.launch import launch
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.process_group import TorchCommunicator
from sparsync.transports.zmq import ZmqCommunicator

RANKS = (2, 4, 8)
TURNS = 5  # of each transport, interleaved
ROUNDS = 100  # per turn
WARM_UP = 10  # untimed rounds per turn
NBYTES = 16
LARGE = 65_536  # bytes: what a rank sends to another at 1 % of 14.7 M, packed, P = 8


def all_to_all(comm: Communicator, nbytes: int) -> Callable[[], None]:
    """Return one exchange of ``nbytes`` between every two ranks, checked."""
    payload = torch.full((nbytes,), comm.rank, dtype=torch.uint8)
    payloads, sizes = [payload] * comm.world_size, [nbytes] * comm.world_size

    def once() -> None:
        received = run(comm.alltoallv(payloads, sizes, "bench", Raw("value")))
        assert all(int(block[-1]) == rank for rank, block in enumerate(received))

    return once


def native_all_to_all(nbytes: int) -> Callable[[], None]:
    """Return gloo's own collective: equal splits, one call."""
    outgoing = torch.zeros(nbytes * dist.get_world_size(), dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)
    return lambda: dist.all_to_all_single(incoming, outgoing)


def small_allreduce(comm: Communicator) -> Callable[[], None]:
    """Return an allreduce of two numbers, as the collectives use for counts."""
    value = torch.tensor([1.0, 2.0])
    return lambda: (run(comm.allreduce(value, "bench")), None)[1]


def measure() -> dict[str, dict[str, float]]:
    """Return the median milliseconds of every exchange and transport on this rank."""
    gloo = TorchCommunicator(timeout=60)
    with ZmqCommunicator(gloo.rank, gloo.world_size, store=gloo, timeout=60) as zmq:
        exchanges = {
            f"all-to-all, {NBYTES} bytes": {
                "zmq": all_to_all(zmq, NBYTES),
                "gloo": all_to_all(gloo, NBYTES),
                "gloo native": native_all_to_all(NBYTES),
            },
            f"all-to-all, {LARGE} bytes": {
                "zmq": all_to_all(zmq, LARGE),
                "gloo": all_to_all(gloo, LARGE),
                "gloo native": native_all_to_all(LARGE),
            },
            "allreduce of two numbers": {
                "zmq": small_allreduce(zmq),
                "gloo native": small_allreduce(gloo),
            },
        }
        return {name: _timed(candidates) for name, candidates in exchanges.items()}


def _timed(candidates: dict[str, Callable[[], None]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(TURNS):
        for name, once in candidates.items():
            dist.barrier()
            for _ in range(WARM_UP):
                once()
            for _ in range(ROUNDS):
                started = time.perf_counter()
                once()
                seconds[name].append(time.perf_counter() - started)
    return {name: 1000 * statistics.median(times) for name, times in seconds.items()}


def report(results: dict[int, dict[str, dict[str, float]]]) -> str:
    """Write the tables, ratios first."""
    lines = [
        "# Small messages: ZeroMQ against gloo",
        "",
        f"Median of {TURNS * ROUNDS} rounds, the transports taking turns in the same processes on one "
        f"machine ({os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}).",
        '"gloo" is the same point-to-point algorithm over gloo, "gloo native" its own collective.',
        "The native ones need equal lengths that all ranks know; a sparse collective's lengths differ,",
        "so over gloo it takes the point-to-point calls, or a round more for the lengths.",
        "Made by `python benchmarks/transports.py`; the machine had other work too, so read ratios.",
    ]
    for exchange in next(iter(results.values())):
        names = list(next(iter(results.values()))[exchange])
        head = ["P", *(f"{n} / zmq" for n in names[1:]), *(f"{n}, ms" for n in names)]
        lines += ["", f"## {exchange}", "", *_table(head, exchange, names, results)]
    return "\n".join(lines) + "\n"


def _table(
    head: list[str],
    exchange: str,
    names: list[str],
    results: dict[int, dict[str, dict[str, float]]],
) -> list[str]:
    rows = [head, ["---:"] * len(head)]
    for ranks, exchanges in results.items():
        times = exchanges[exchange]
        ratios = [f"{times[name] / times['zmq']:.1f}" for name in names[1:]]
        rows.append([str(ranks), *ratios, *(f"{times[name]:.3f}" for name in names)])
    return ["| " + " | ".join(row) + " |" for row in rows]


def main() -> None:
    """Measure every number of ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    results = {}
    for ranks in RANKS:
        results[ranks] = launch(measure, ranks, timeout=60.0)
        print(ranks, results[ranks])
    arguments.output.write_text(report(results))


if __name__ == "__main__":
    main()
