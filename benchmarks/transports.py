"""Compare small messages between local processes over ZeroMQ, gloo, bare pyzmq and bare sockets.

    python benchmarks/transports.py        (about 2 minutes; writes benchmarks/transports.md)

All transports take turns in the same processes, several times, because timings on a busy machine
drift. Compare only ratios within one run.  Processor time is summed over all threads of a rank.
"""

from __future__ import annotations

import argparse
import os
import platform
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq

from sparsync.cli.launch import launch
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.process_group import TorchCommunicator
from sparsync.transports.zmq import ZmqCommunicator

RANKS = (2, 4, 8)
TURNS = 5  # turns of each transport, interleaved
ROUNDS = 100  # exchanges per turn
WARM_UP = 10  # untimed rounds per turn
NBYTES = 16
LARGE = 65_536  # bytes of a packed message between two ranks with 1 % of 14.7 M elements and P = 8


def all_to_all(comm: Communicator, nbytes: int) -> Callable[[], None]:
    """Return an exchange of ``nbytes`` between all pairs of ranks, which checks its result."""
    payload = torch.full((nbytes,), comm.rank, dtype=torch.uint8)
    payloads, sizes = [payload] * comm.world_size, [nbytes] * comm.world_size

    def once() -> None:
        received = run(comm.alltoallv(payloads, sizes, "bench", Raw("value")))
        assert all(int(block[-1]) == rank for rank, block in enumerate(received))

    return once


def native_all_to_all(nbytes: int) -> Callable[[], None]:
    """Return the same exchange, made by one call of gloo's native all-to-all with equal splits."""
    outgoing = torch.zeros(nbytes * dist.get_world_size(), dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)
    return lambda: dist.all_to_all_single(incoming, outgoing)


@contextmanager
def pyzmq_all_to_all(rank: int, ranks: int, nbytes: int) -> Iterator[Callable[[], None]]:
    """Yield a minimal exchange over ZeroMQ: one frame to and from every other rank."""
    context: zmq.Context[Any] = zmq.Context()
    incoming = context.socket(zmq.PULL)
    port = incoming.bind_to_random_port("tcp://127.0.0.1")
    links = []
    for peer, other in enumerate(everybodys(port)):
        if peer != rank:
            links.append(context.socket(zmq.PUSH))
            links[-1].connect(f"tcp://127.0.0.1:{other}")
    payload = bytes(nbytes)

    def once() -> None:
        for link in links:
            link.send(payload)
        for _ in links:
            incoming.recv(copy=False)

    yield once
    dist.barrier()
    context.destroy(linger=0)


@contextmanager
def socket_all_to_all(rank: int, ranks: int, nbytes: int) -> Iterator[Callable[[], None]]:
    """Yield an exchange over TCP connections between all pairs of ranks, with non-blocking calls."""
    with socket.create_server(("127.0.0.1", 0), backlog=ranks) as server:
        ports = everybodys(server.getsockname()[1])
        links = [socket.create_connection(("127.0.0.1", port)) for port in ports[:rank]]
        links += [server.accept()[0] for _ in ports[rank + 1 :]]
    for link in links:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setblocking(False)
    payload, incoming = bytes(nbytes), [memoryview(bytearray(nbytes)) for _ in links]

    def once() -> None:
        unsent, missing = [memoryview(payload)] * len(links), list(incoming)
        with selectors.DefaultSelector() as ready:
            for number, link in enumerate(links):
                unsent[number] = unsent[number][sent(link, unsent[number]) :]
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent[number] else 0)
                ready.register(link, wanted, number)
            while ready.get_map():
                for key, _ in ready.select():
                    number, link = key.data, links[key.data]
                    if unsent[number]:
                        unsent[number] = unsent[number][sent(link, unsent[number]) :]
                        if not unsent[number] and missing[number]:
                            ready.modify(link, selectors.EVENT_READ, number)
                    if missing[number]:
                        missing[number] = missing[number][received(link, missing[number]) :]
                    if not (unsent[number] or missing[number]):
                        ready.unregister(link)

    yield once
    dist.barrier()
    for link in links:
        link.close()


def everybodys(port: int) -> list[int]:
    """Return the port of every rank."""
    ports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ports, port)
    return ports


def sent(link: socket.socket, payload: memoryview) -> int:
    """Send as much as the system accepts now; return the number of bytes."""
    try:
        return link.send(payload)
    except BlockingIOError:
        return 0


def received(link: socket.socket, room: memoryview) -> int:
    """Receive the bytes that have arrived; return their number."""
    try:
        return link.recv_into(room)
    except BlockingIOError:
        return 0


def small_allreduce(comm: Communicator) -> Callable[[], None]:
    """Return an allreduce of two numbers, which collectives need to agree on counts."""
    value = torch.tensor([1.0, 2.0])
    return lambda: (run(comm.allreduce(value, "bench")), None)[1]


# medians per round on one rank: seconds, and processor seconds
Times = dict[str, tuple[float, float]]


def measure() -> dict[str, Times]:
    """Return the times of every exchange and transport on this rank, in ms."""
    gloo = TorchCommunicator(timeout=60)
    rank, ranks = gloo.rank, gloo.world_size
    results = {}
    with ZmqCommunicator(rank, ranks, store=gloo, timeout=60) as zmq:
        for nbytes in (NBYTES, LARGE):
            with (
                pyzmq_all_to_all(rank, ranks, nbytes) as pyzmq,
                socket_all_to_all(rank, ranks, nbytes) as sockets,
            ):
                results[f"all-to-all, {nbytes} bytes"] = _timed(
                    {
                        "zmq": all_to_all(zmq, nbytes),
                        "pyzmq alone": pyzmq,
                        "sockets": sockets,
                        "gloo": all_to_all(gloo, nbytes),
                        "gloo native": native_all_to_all(nbytes),
                    }
                )
        results["allreduce of two numbers"] = _timed(
            {"zmq": small_allreduce(zmq), "gloo native": small_allreduce(gloo)}
        )
    return results


def _timed(candidates: dict[str, Callable[[], None]]) -> Times:
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    busy: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(TURNS):
        for name, once in candidates.items():
            dist.barrier()
            for _ in range(WARM_UP):
                once()
            before = time.process_time()
            for _ in range(ROUNDS):
                started = time.perf_counter()
                once()
                seconds[name].append(time.perf_counter() - started)
            busy[name].append((time.process_time() - before) / ROUNDS)
    median = statistics.median
    return {n: (1000 * median(seconds[n]), 1000 * median(busy[n])) for n in candidates}


def report(results: dict[int, dict[str, Times]]) -> str:
    """Format the tables, ratios first."""
    lines = [
        "# Small messages: ZeroMQ, gloo, and bare sockets",
        "",
        f"Median of {TURNS * ROUNDS} rounds; the transports take turns in the same processes on one "
        f"machine ({os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}).",
        '"gloo" is the same point-to-point algorithm over gloo, "gloo native" is gloo\'s own collective.',
        "The native collectives need equal lengths that all ranks know. A sparse collective's lengths",
        "differ, so over gloo it needs point-to-point calls, or one more round for the lengths.",
        '"pyzmq alone" only sends and receives the same frames; "sockets" is TCP with non-blocking calls',
        "from Python and known lengths. Processor: time of all threads of a rank. Made by `python",
        "benchmarks/transports.py`; the machine was also doing other work, so compare ratios.",
    ]
    for exchange in next(iter(results.values())):
        names = list(next(iter(results.values()))[exchange])
        head = ["P", *(f"{n} / zmq" for n in names[1:])]
        head += [f"{n}, ms" for n in names] + [f"{n}, processor ms" for n in names]
        lines += ["", f"## {exchange}", "", *_table(head, exchange, names, results)]
    return "\n".join(lines) + "\n"


def _table(
    head: list[str], exchange: str, names: list[str], results: dict[int, dict[str, Times]]
) -> list[str]:
    rows = [head, ["---:"] * len(head)]
    for ranks, exchanges in results.items():
        times = exchanges[exchange]
        ratios = [f"{times[name][0] / times['zmq'][0]:.1f}" for name in names[1:]]
        figures = [f"{times[name][kind]:.3f}" for kind in (0, 1) for name in names]
        rows.append([str(ranks), *ratios, *figures])
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
