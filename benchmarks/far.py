"""Exchanges over far links: in round trips, back to back and after a pause.

    python benchmarks/far.py        (about 12 minutes; Linux, root; writes benchmarks/far.md)

4 ranks exchange 1 % of 14.7 M elements over links of 100 Mbit/s and several round-trip times.  Ranks
begin together; an exchange is over when the last one has its total.  Its floor: the bytes of the rank
that sends or receives most, at the links' rate, and two round trips.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import sparsync
from sparsync.cli.lab import Lab, ensure_privileges, local_address, local_traffic
from sparsync.cli.launch import gather, launch
from sparsync.feedback.reducer import Reducer
from sparsync.presets import resolve
from sparsync.transports.driver import run
from sparsync.units import plan_units

HERE = Path(__file__).parent
SIZE, DENSITY, RANKS = 14_728_266, 0.01, 4
RATE = 100_000_000
RTTS = (0, 20, 80)  # milliseconds
ROWS = (("budgeted", "zmq"), ("budgeted", "torch"), ("halving", "zmq"), ("allgather", "zmq"))
PAUSE = 1.5  # seconds of computation: longer than a retransmission timeout
STEPS = 7  # measured, after two that open the windows
IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")


def measure(preset: str, transport: str, pause: float, keep: bool) -> tuple[float, float]:
    """Return the median seconds of an exchange, and its bytes on the busiest link, in and out."""
    torch.set_num_threads(1)
    if keep:
        IDLE.write_text("0")  # of this rank's namespace alone
    settings: dict[str, Any] = {"interface": local_address()} if transport == "zmq" else {}
    comm = sparsync.connect(300.0, transport=transport, **settings)
    algorithm = run(resolve(preset).on(comm))
    reducer = Reducer(comm, plan_units([("w", torch.empty(SIZE))]), algorithm, DENSITY)
    draw, seconds, nbytes = torch.Generator().manual_seed(dist.get_rank()), [], []
    for step in range(STEPS + 2):
        reducer.accumulate(0, 0, torch.randn(SIZE, generator=draw))
        time.sleep(pause if step else 0.0)
        dist.barrier()
        before, started = local_traffic(), time.perf_counter()
        assert before is not None
        run(reducer.exchange(0))
        seconds.append(time.perf_counter() - started)
        run(reducer.share())
        reducer.commit()
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
        "| exchange | transport | RTT, ms | MB | floor, ms | back to back, ms | over the floor | "
        f"after {PAUSE:g} s, ms | the same, windows kept, ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for preset, transport in ROWS:
        for rtt in RTTS:
            link = f"{RATE // 10**6}mbit" + (f",{rtt}ms" if rtt else "")
            found = []
            for pause, keep in ((0.0, False), (PAUSE, False), (PAUSE, True)):
                with Lab(RANKS, link) as lab:
                    call = measure, RANKS, preset, transport, pause, keep
                    found.append(launch(*call, lab=lab, timeout=300.0))
            (quick, nbytes), (idle, _), (kept, _) = found
            floor = 8 * nbytes / RATE + 2 * rtt / 1000
            lines.append(
                f"| {preset} | {transport} | {rtt} | {nbytes / 1e6:.2f} | {1000 * floor:.0f} | "
                f"{1000 * quick:.0f} | {quick / floor:.2f} | {1000 * idle:.0f} | {1000 * kept:.0f} |"
            )
            Console(stderr=True).print(lines[-1], markup=False)
    about = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    text = (__doc__ or "").split("\n\n")
    head = f"# Exchanges over far links\n\n`python benchmarks/far.py` on 2 cores, {about}.\n\n"
    notes = (
        "\n\nBack to back: exchanges follow each other by some 0.1 s. After a pause TCP begins with its "
        "first window again, and needs a round trip for each doubling; windows kept: with "
        "`sysctl -w net.ipv4.tcp_slow_start_after_idle=0` on all ranks.\n"
    )
    out.write_text(head + text[-1].strip() + "\n\n" + "\n".join(lines) + notes, encoding="utf-8")
    Console().print(f"wrote {out}")


if __name__ == "__main__":
    main()
