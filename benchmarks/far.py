"""Measure exchanges over far links in round trips, back to back and after a pause.

    python benchmarks/far.py        (about 20 minutes; Linux, root; writes benchmarks/far.md)

4 ranks exchange 1 % of 14.7 M elements, or all of 8.4 M elements in one bit (`updates`), over links
with several rates and round-trip times.  Ranks start at the same time, and an exchange ends when
the last rank has its total.  The floor (lower bound) is two round trips, plus the time that the
busiest rank's link needs for its bytes.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import sparsync
from sparsync.cli.lab import Lab, ensure_privileges, local_address, local_traffic
from sparsync.cli.launch import gather, launch
from sparsync.collectives.quantised import Quantised
from sparsync.feedback.reducer import Reducer
from sparsync.presets import resolve
from sparsync.sparse import DenseVector
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.units import plan_units

HERE = Path(__file__).parent
DENSITY, RANKS = 0.01, 4
SIZE, UPDATES = 14_728_266, 8_443_552  # number of gradient elements, and of update elements
FAST, SLOW = (100, (0, 20, 80)), (10, (20, 80))  # (Mbit/s, round-trip times in milliseconds)
ROWS = (
    ("budgeted", "zmq", *FAST),
    ("budgeted", "torch", *FAST),
    ("halving", "zmq", *FAST),
    ("allgather", "zmq", *FAST),
    ("updates", "zmq", *FAST),
    ("budgeted", "zmq", *SLOW),
    ("updates", "zmq", *SLOW),
)
PAUSE = 1.5  # seconds of computation: longer than a retransmission timeout
STEPS = 7  # measured steps, after two that open TCP's windows
KEPT, BBR = {"tcp_slow_start_after_idle": "0"}, {"tcp_congestion_control": "bbr"}


def gradients(preset: str, comm: Communicator) -> Iterator[None]:
    """Exchange gradients repeatedly; yield before and after each exchange, and at the end of a step."""
    reducer = Reducer(
        comm, plan_units([("w", torch.empty(SIZE))]), run(resolve(preset).on(comm)), DENSITY
    )
    draw = torch.Generator().manual_seed(comm.rank)
    while True:
        reducer.accumulate(0, 0, torch.randn(SIZE, generator=draw))
        yield
        run(reducer.exchange(0))
        yield
        run(reducer.share())
        reducer.commit()
        yield


def updates(_: str, comm: Communicator) -> Iterator[None]:
    """Exchange weight changes in one bit each; yield at the same points as ``gradients``."""
    whole, draw = Quantised(bits=1, block=512), torch.Generator().manual_seed(comm.rank)
    for step in count():
        change = DenseVector(torch.randn(UPDATES, generator=draw))
        yield
        run(whole.reduce(comm, change, UPDATES, step))
        yield
        yield


def measure(preset: str, transport: str, pause: float, tcp: dict[str, str]) -> tuple[float, float]:
    """Return an exchange's median seconds, and its bytes on the busiest link in both directions."""
    torch.set_num_threads(1)
    for name, value in tcp.items():  # set only in this rank's namespace
        (Path("/proc/sys/net/ipv4") / name).write_text(value)
    settings: dict[str, Any] = {"interface": local_address()} if transport == "zmq" else {}
    comm = sparsync.connect(300.0, transport=transport, **settings)
    phases, seconds, nbytes = (updates if preset == "updates" else gradients)(preset, comm), [], []
    for step in range(STEPS + 2):
        next(phases)
        time.sleep(pause if step else 0.0)
        dist.barrier()
        before, started = local_traffic(), time.perf_counter()
        assert before is not None
        next(phases)
        seconds.append(time.perf_counter() - started)
        next(phases)
        dist.barrier()
        after = local_traffic()
        assert after is not None
        nbytes.append(max(after.sent - before.sent, after.received - before.received))
    comm.close()
    everyone = gather((seconds[2:], nbytes[2:]))
    walls = [max(theirs) for theirs in zip(*(one[0] for one in everyone), strict=True)]
    most = max(median(one[1]) for one in everyone)
    return median(walls), float(most)


def main() -> None:
    """Measure every row, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "far.md")
    out = parser.parse_args().out
    ensure_privileges()
    lines = [
        "| exchange | transport | Mbit/s | RTT, ms | MB | floor, ms | back to back, ms | over it | "
        f"after {PAUSE:g} s, ms | the same, windows kept, ms | after {PAUSE:g} s with BBR, ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    modes = (0.0, {}), (PAUSE, {}), (PAUSE, KEPT), (PAUSE, BBR)
    for preset, transport, rate, rtts in ROWS:
        for rtt in rtts:
            link = f"{rate}mbit" + (f",{rtt}ms" if rtt else "")
            found = []
            for pause, tcp in modes:
                with Lab(RANKS, link) as lab:
                    call = measure, RANKS, preset, transport, pause, tcp
                    found.append(launch(*call, lab=lab, timeout=300.0))
            (quick, nbytes), *paused = found
            floor = 8 * nbytes / rate / 1e6 + 2 * rtt / 1000
            lines.append(
                f"| {preset} | {transport} | {rate} | {rtt} | {nbytes / 1e6:.2f} | {1000 * floor:.0f} | "
                f"{1000 * quick:.0f} | {quick / floor:.2f} | "
                + " | ".join(f"{1000 * seconds:.0f}" for seconds, _ in paused)
                + " |"
            )
            Console(stderr=True).print(lines[-1], markup=False)
    about = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    text = (__doc__ or "").split("\n\n")
    head = f"# Exchanges over far links\n\n`python benchmarks/far.py` on 2 cores, {about}.\n\n"
    notes = (
        "\n\n*Back to back*: exchanges follow each other after some 0.1 s. After a pause, TCP starts "
        "again from its initial window, and needs one round trip for each doubling. *Windows kept*: with "
        "`sysctl -w net.ipv4.tcp_slow_start_after_idle=0` on all ranks. Congestion control is Reno, "
        "except in the last column, where it is BBR "
        "(`sysctl -w net.ipv4.tcp_congestion_control=bbr`).\n"
    )
    out.write_text(head + text[-1].strip() + "\n\n" + "\n".join(lines) + notes, encoding="utf-8")
    Console().print(f"wrote {out}")


if __name__ == "__main__":
    main()
