"""Measure rate, RTT, loss and asymmetry of the lab's far links, and the processor time they cost.

    python benchmarks/lab.py        (about 6 minutes; Linux, root; writes benchmarks/lab.md)

The ranks are separate processes that use plain sockets. In the last table, every rank sends either
to the next rank or to all others at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import socket
import statistics
import threading
import time
from pathlib import Path

import torch.distributed as dist

from sparsync.cli.lab import Lab, ensure_privileges
from sparsync.cli.launch import gather, launch

PORT = 5000
PINGS = 50
DATAGRAMS = 20_000
AT_ONCE, PAUSE = 20, 0.005  # datagrams, then seconds of pause: at most 4,000 datagrams per second
ON_WIRE = 1514 / 1448  # bytes of an Ethernet frame / bytes of its payload
PAIRS = (  # links of two ranks, and the seconds that a stream runs before it is measured
    ("100mbit,20ms", 2),
    ("100mbit,80ms", 5),
    ("10mbit,80ms", 5),
    ("110mbit:500mbit,20ms", 2),
    ("500mbit,10ms;1=20mbit:50mbit,30ms", 2),
    ("100mbit,20ms,1%", 2),
    ("100mbit,80ms,0.1%", 5),
    ("100mbit,20ms,0%,2ms", 2),
)
LOADS = ("100mbit,20ms", "100mbit,80ms", "100mbit,20ms,0.01%")  # of four ranks


def address(rank: int) -> tuple[str, int]:
    """Return the address at which a rank listens."""
    return f"10.77.0.{rank + 1}", PORT


def listen(kind: int) -> socket.socket:
    """Return a listening socket, once all ranks are listening."""
    server = socket.socket(socket.AF_INET, kind)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(address(dist.get_rank()))
    if kind == socket.SOCK_STREAM:
        server.listen(64)
    else:  # SO_RCVBUFFORCE, so that no datagram is lost if this rank reads late
        server.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)
    dist.barrier()
    return server


def ping() -> float:
    """Return, on rank 0, the median round trip of a byte over TCP to rank 1; on other ranks, 0."""
    with listen(socket.SOCK_STREAM) as server:
        seconds = [0.0]
        if dist.get_rank() == 0:
            with socket.create_connection(address(1)) as link:
                for _ in range(PINGS):
                    started = time.perf_counter()
                    link.sendall(b"x")
                    link.recv(1)
                    seconds.append(time.perf_counter() - started)
        elif dist.get_rank() == 1:
            with server.accept()[0] as link:
                for _ in range(PINGS):
                    link.sendall(link.recv(1))
        dist.barrier()
    return statistics.median(seconds)


def lost(source: int) -> float:
    """Return the share of datagrams that did not reach this rank, or 0 on their sender."""
    with listen(socket.SOCK_DGRAM) as server:
        arrived = 0
        if dist.get_rank() == source:
            for number in range(DATAGRAMS):
                server.sendto(bytes(100), address(1 - source))
                if number % AT_ONCE == AT_ONCE - 1:
                    time.sleep(PAUSE)
            arrived = DATAGRAMS
        else:
            server.settimeout(2.0)
            with contextlib.suppress(TimeoutError):
                while arrived < DATAGRAMS:
                    arrived += len(server.recv(200)) // 100
        dist.barrier()
    return 1 - arrived / DATAGRAMS


def receive(streams: list[tuple[int, int]], warm_up: float, seconds: float) -> float:
    """Send between ranks; return the bits per second that this rank receives."""
    rank = dist.get_rank()
    received, links = [0], []
    with listen(socket.SOCK_STREAM) as server:

        def take(link: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while nbytes := len(link.recv(1 << 18)):
                    received[0] += nbytes

        def send(link: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while True:
                    link.sendall(bytes(1 << 18))

        for source, dest in streams:
            if source == rank:
                links.append(socket.create_connection(address(dest)))
                threading.Thread(target=send, args=(links[-1],), daemon=True).start()
        for _, dest in streams:
            if dest == rank:
                links.append(server.accept()[0])
                threading.Thread(target=take, args=(links[-1],), daemon=True).start()
        time.sleep(warm_up)
        before, started = received[0], time.perf_counter()
        time.sleep(seconds)
        rate = 8 * (received[0] - before) * ON_WIRE / (time.perf_counter() - started)
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        time.sleep(1.0)  # until messages in flight have arrived
        dist.barrier()
    return rate


def pair(warm_up: float, seconds: float) -> tuple[float, ...]:
    """Return the round-trip time, and the rates and losses of 0 -> 1 and of 1 -> 0."""
    rates = [receive([ends], warm_up, seconds) for ends in ((0, 1), (1, 0))]
    mine = ping(), *rates, lost(0), lost(1)
    return tuple(map(max, zip(*gather(list(mine)), strict=True)))


def load(pattern: str, warm_up: float, seconds: float) -> list[float]:
    """Return each rank's receiving rate while all ranks send to the next rank, or to all others."""
    ranks = dist.get_world_size()
    steps = (1,) if pattern == "to the next" else range(1, ranks)
    streams = [(rank, (rank + step) % ranks) for step in steps for rank in range(ranks)]
    return gather(receive(streams, warm_up, seconds))


def pair_row(text: str, warm_up: float, seconds: float) -> str:
    """Measure two ranks; return the row."""
    with Lab(2, text) as lab:
        one, other = lab.links
        rtt, forth, back, *losses = launch(pair, 2, warm_up, seconds, lab=lab)
        carrier = lab.carrier
    asked = (one.rtt + other.rtt) / 2
    loss = 1 - ((1 - one.loss) * (1 - other.loss)) ** 0.5
    deviation = (loss * (1 - loss) / DATAGRAMS) ** 0.5
    cells = [
        f"`{text}`",
        carrier,
        f"{asked * 1e3:g}",
        f"{rtt * 1e3:.2f}",
        f"{min(one.up, other.down) / 1e6:g} / {min(other.up, one.down) / 1e6:g}",
        f"{forth / 1e6:.1f} / {back / 1e6:.1f}",
        f"{loss:.2%} ± {2 * deviation:.2%}" if loss else "0",
        " / ".join(f"{each:.2%}" for each in losses),
    ]
    return f"| {' | '.join(cells)} |"


def load_row(text: str, pattern: str, ranks: int, warm_up: float, seconds: float) -> str:
    """Measure the processor time of the forwarder while all ranks send; return the row."""
    shares: list[float] = []
    ended = threading.Event()

    def watch(lab: Lab) -> None:
        while lab.forwarder is not None and not ended.is_set():
            before, started = lab.forwarder.processor_seconds(), time.perf_counter()
            if ended.wait(1.0):
                return
            used = lab.forwarder.processor_seconds() - before
            shares.append(used / (time.perf_counter() - started))

    with Lab(ranks, text, "forwarder") as lab:
        thread = threading.Thread(target=watch, args=(lab,))
        thread.start()
        rates = launch(load, ranks, pattern, warm_up, seconds, lab=lab)
        ended.set()
        thread.join()
    busiest = sorted(shares)[-round(seconds) :]  # only the seconds under load, not the start
    each = ", ".join(f"{rate / 1e6:.0f}" for rate in rates)
    median = statistics.median(busiest)
    return f"| `{text}` | {pattern} | {each} | {median:.2f} | {max(busiest):.2f} |"


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description="Far links, as asked and as measured.")
    parser.add_argument("--seconds", type=float, default=4.0, help="of every stream")
    seconds = parser.parse_args().seconds
    ensure_privileges()
    pairs = [pair_row(text, warm_up, seconds) for text, warm_up in PAIRS]
    patterns = ("to the next", "to all")
    loads = [load_row(text, each, 4, 5.0, 2 * seconds) for text in LOADS for each in patterns]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
    lines = [
        "# Far links: requested properties, and those measured with plain sockets",
        "",
        f"Made by `python benchmarks/lab.py` on one machine ({machine}), which was also doing other "
        "work.",
        f"RTT: median of {PINGS} round trips of a byte over TCP. Rates: one stream of {seconds:g} s",
        "(Reno), including headers, rank 0 to 1 / rank 1 to 0.",
        f"Losses: of {DATAGRAMS:,} datagrams each way, ± twice the binomial deviation.",
        "",
        "| links of two ranks | carrier | RTT asked, ms | measured | Mbit/s asked | measured "
        "| loss asked | measured |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *pairs,
        "",
        "Where packets are lost, Reno determines the rate, not the link.",
        "",
        "## Processor time of the forwarder",
        "",
        "Four ranks, each sending to the next one or to all others at once, by as many streams. Cores:",
        "processor time of the forwarder's thread per second, in which the receiving ranks' kernels",
        "handle TCP, too.",
        "",
        "| links of four ranks | each sends | received by each rank, Mbit/s | cores, median "
        "| cores, busiest second |",
        "|---|---|---|---:|---:|",
        *loads,
    ]
    text = "\n".join(lines) + "\n"
    Path(__file__).with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
