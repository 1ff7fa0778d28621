"""Measure the longest exchange while strangers attack a rank's port.

    python benchmarks/strangers.py     (a minute; writes benchmarks/strangers.md)

Two ranks repeatedly exchange 64 KiB over ZeroMQ, without keys. Meanwhile, a third process does one
of three things: it sends millions of empty parts in one message, it sends 60,000 messages of another
job, or it holds 132 connections open.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import zmq
from torch.distributed import TCPStore

from sparsync.transports.ledger import Raw
from sparsync.transports.zmq import ZmqCommunicator
from sparsync.transports.zmq.mailbox import Header
from sparsync.transports.zmq.peers import host_and_port

HERE = Path(__file__).parent
SECONDS = 8.0  # duration of the exchanges in a case; the stranger begins after two seconds
RAW = Raw("value")


def empty_parts(address: str, until: float) -> None:
    """Send one message of 8 million empty parts, 16 MB in all."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.linger, stranger.sndhwm = 0, 0
        stranger.connect(address)
        for more in [zmq.SNDMORE] * 8_000_000 + [0]:
            if time.monotonic() > until:
                return
            with suppress(zmq.Again):
                stranger.send(b"", more | zmq.NOBLOCK)


def foreign_headers(address: str, until: float) -> None:
    """Send 60,000 messages of unknown jobs."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.linger, stranger.sndhwm = 0, 0
        stranger.connect(address)
        for job in range(1, 60_001):
            if time.monotonic() > until:
                return
            with suppress(zmq.Again):
                stranger.send(Header(0, 1, job, 0, 0, 0, -1, 0, 0).pack(), zmq.NOBLOCK)


def held_connections(address: str, until: float) -> None:
    """Hold 132 silent connections open."""
    with ExitStack() as stack:
        for _ in range(132):
            with suppress(OSError):
                stack.enter_context(socket.create_connection(host_and_port(address), timeout=5))
        time.sleep(max(until - time.monotonic(), 0))


CASES: dict[str, Callable[[str, float], None] | None] = {
    "nobody": None,
    "16 MB of empty parts": empty_parts,
    "60,000 messages of another job": foreign_headers,
    "132 held connections": held_connections,
}


def rank_of(number: int, port: int, tell: Any) -> None:
    """Exchange with the other rank; send rank 0's address first, and the longest exchange at the end."""
    store = TCPStore("127.0.0.1", port, 2, number == 0)
    with ZmqCommunicator(number, 2, store=store, timeout=60.0) as comm:
        if number == 0:
            tell.put(comm.mesh.address)
        longest, count, until = 0.0, 0, time.monotonic() + SECONDS
        mine = torch.zeros(1 << 16, dtype=torch.uint8)
        going = True
        while going:
            began = time.monotonic()
            receiving = comm.irecv(1 - number, len(mine), "exchange", RAW)
            # rank 0 decides when both ranks end
            mine[0] = int(began < until)
            comm.isend(mine, 1 - number, "exchange", RAW).wait()
            receiving.wait()
            going = bool(mine[0] if number == 0 else receiving.result[0])
            longest, count = max(longest, time.monotonic() - began), count + 1
        if number == 0:
            tell.put((longest, count))


def measure(case: str) -> tuple[float, int]:
    """Return the seconds of the longest exchange, and the number of exchanges."""
    context = multiprocessing.get_context("spawn")
    tell = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [context.Process(target=rank_of, args=(n, port, tell)) for n in range(2)]
    for rank in ranks:
        rank.start()
    address, attack = tell.get(timeout=60), CASES[case]
    time.sleep(2)
    stranger = None
    if attack is not None:
        until = time.monotonic() + SECONDS - 3
        stranger = context.Process(target=attack, args=(address, until))
        stranger.start()
    found = tell.get(timeout=120)
    for process in [*ranks, *([stranger] if stranger else [])]:
        process.join(30)
        assert not process.is_alive(), "it hangs"
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return found


def main() -> None:
    """Measure and write the table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    lines = [
        "# Strangers at a rank's port",
        "",
        f"`python benchmarks/strangers.py`: two ranks exchange 64 KiB for {SECONDS:g} s; no keys.",
        "",
        "| a stranger sends | longest exchange, ms | exchanges |",
        "|---|---:|---:|",
    ]

    for case in CASES:
        longest, count = measure(case)
        lines.append(f"| {case} | {1e3 * longest:.0f} | {count:,} |")
        print(lines[-1], flush=True)
    (HERE / "strangers.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
