"""Run averaging schemes between real processes over gloo, some of which are late.

    python benchmarks/averaging_delays.py             (writes benchmarks/averaging-delays.md, .json)
    python benchmarks/averaging_delays.py --only stall

Part "added" measures how much time the delays of WAGMA's section 5.2 add, in which two random ranks
wait 320 ms before each step.  The figures are seconds per step of the slowest rank, including
``finish()``.  Every scheme runs with and without delays, one after the other, ``--repeats`` times.
Part "stall" measures how long an average takes if the other rank is busy, so that its agent shares
an interpreter with a computation.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist

from sparsync.cli.launch import launch
from sparsync.cli.output import progress
from sparsync.cli.train.command import train
from sparsync.cli.train.settings import TrainSettings
from sparsync.published.wagma import Wagma
from sparsync.transports.driver import run
from sparsync.transports.process_group import connect_group

RANKS = 8
SCHEMES = ("allreduce", "wagma", "local", "dpsgd", "sgp", "eager-solo", "eager-majority", "adpsgd")
DELAY = "random:2:0.32"
TARGET = 0.6  # largest acceptable share of the time that delays add to allreduce
# small, so that steps consist mostly of waiting
MODEL = {
    "workload": "bytes",
    "layers": 1,
    "width": 64,
    "batch_size": 4,
    "context": 32,
}
PERIODS = {"local": {"period": 1}}
STALL_SIZE = 10_000  # elements


def seconds_per_step(scheme: str, delay: str, steps: int, seed: int) -> float:
    """Train on all ranks; return the slowest rank's seconds per step."""
    settings = TrainSettings(
        ranks=RANKS,
        steps=steps,
        seed=seed,
        delay=delay,
        transport="torch",
        **MODEL,
        **PERIODS.get(scheme, {}),
    )
    results = train(settings, [scheme])
    assert results is not None, "start this without a launcher"
    assert results[0].replicas_equal, f"{scheme}: replicas differ after finish()"
    return results[0].seconds_total / steps


# ---- stall -----------------------------------------------------------------------------------------


def sleeping(until: float) -> None:
    """Leave the processor idle."""
    time.sleep(until - time.monotonic())


def python(until: float) -> None:
    """Hold the interpreter's lock, and offer it to other threads only every 5 ms."""
    count = 0
    while time.monotonic() < until:
        count += sum(range(100))


def torch_work(until: float) -> None:
    """Multiply matrices, which releases the lock."""
    matrix = torch.ones(400, 400)
    while time.monotonic() < until:
        matrix = matrix @ matrix / 400.0


KINDS: dict[str, Callable[[float], None]] = {
    "sleeps": sleeping, "runs pure Python": python, "multiplies matrices": torch_work
}  # fmt: skip


def stall(transport: str, kind: str, seconds: float) -> list[float]:
    """Average with a rank that stays busy for ``seconds``; return the seconds of every average."""
    torch.set_num_threads(1)
    comm = connect_group(transport=transport, timeout=60.0)
    averager, vector = Wagma(group_size=2, sync_period=None), torch.zeros(STALL_SIZE)
    run(averager.begin(comm, vector, 0))
    times, until = [], time.monotonic() + seconds
    vector = run(averager.average(comm, vector, 0))
    if comm.rank == 0:
        while time.monotonic() < until - 0.2:  # the other rank is busy throughout
            started = time.perf_counter()
            vector = run(averager.average(comm, vector, len(times) + 1))
            times.append(time.perf_counter() - started)
    else:
        KINDS[kind](until)
    steps = torch.tensor([len(times)])
    dist.broadcast(steps, 0)
    run(averager.conclude(comm, vector, int(steps) + 1))
    comm.close()
    return times


# ---- tables ----------------------------------------------------------------------------------------


def added_table(rows: dict[str, dict[str, list[float]]], steps: int) -> list[str]:
    """Return the table of the time that delays add; ratios are medians over repeats."""
    lines = [
        "## What delays add",
        "",
        f"`sparsync train --ranks {RANKS} --transport torch --workload bytes --layers 1 --width 64 "
        f"--batch-size 4 --context 32 --steps {steps}`, with and without `--delay {DELAY}`. Times are "
        "the slowest rank's seconds per step, including `finish()`; medians over repeats. *Over "
        "allreduce*: added seconds relative to allreduce's in the same repeat. A scheme without any "
        f"waiting would add the mean delay, {0.32 * 2 / RANKS:.2f} s.",
        "",
        "| scheme | without | with delays | added | over allreduce | repeats |",
        "|---|---|---|---|---|---|",
    ]
    base = added(rows["allreduce"]) if "allreduce" in rows else []
    for scheme, times in rows.items():
        mine = added(times)
        over = median(a / b for a, b in zip(mine, base, strict=False)) if mine and base else None
        mark = "**" if over is not None and over <= TARGET else ""
        lines.append(
            f"| {scheme} | {median(times['none']):.3f} | {median(times[DELAY]):.3f} | "
            f"{median(mine):.3f} | {'' if over is None else f'{mark}{over:.2f}{mark}'} | {len(mine)} |"
        )
    return lines


def added(times: dict[str, list[float]]) -> list[float]:
    """Return the seconds per step that delays add, by repeat."""
    return [late - plain for plain, late in zip(times["none"], times[DELAY], strict=True)]


def stall_table(rows: dict[str, list[float]]) -> list[str]:
    """Return the table of the durations of averages."""
    lines = [
        "",
        "## An average whose other member is busy",
        "",
        f"Two ranks, {STALL_SIZE:,} elements. Rank 1 is busy and participates passively; times are "
        "milliseconds of rank 0's averages. While pure Python runs, a message waits for the "
        "interpreter's lock, 5 ms at a time.",
        "",
        "| transport | rank 1 | averages | median | mean | longest |",
        "|---|---|---|---|---|---|",
    ]
    for name, times in rows.items():
        ms = [1e3 * seconds for seconds in times]
        numbers = f"{len(ms)} | {median(ms):.1f} | {mean(ms):.1f} | {max(ms):.1f}"
        lines.append(f"| {name.replace(', ', ' | ')} | {numbers} |")
    return lines


def report(measured: dict, steps: int) -> str:
    """Return the tables."""
    lines = [
        "# Averaging with delays, in real processes",
        "",
        f"`python benchmarks/averaging_delays.py` on torch {torch.__version__}, {platform.machine()}, "
        "gloo (and ZeroMQ for the stall).",
        "",
    ]
    rows = {
        k: v for k, v in measured["added"].items() if v["none"] and len(v[DELAY]) == len(v["none"])
    }
    lines += added_table(rows, steps) if rows else []
    lines += stall_table(measured["stall"]) if measured["stall"] else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--only", choices=["added", "stall"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "averaging-delays.md")
    args = parser.parse_args()
    stored = args.out.with_suffix(".json")
    measured = json.loads(stored.read_text()) if stored.exists() else {"added": {}, "stall": {}}

    def write() -> None:
        stored.write_text(json.dumps(measured, indent=1) + "\n")
        args.out.write_text(report(measured, args.steps))

    if args.only != "stall":
        measured["added"] = {s: {"none": [], DELAY: []} for s in args.schemes.split(",")}
        for repeat in range(args.repeats):
            for scheme, times in measured["added"].items():
                for delay in ("none", DELAY):
                    times[delay].append(seconds_per_step(scheme, delay, args.steps, seed=repeat))
                write()
    if args.only != "added":
        with progress(shown=True) as rows, rows("stall") as bar:
            cases = [(t, kind) for t in ("torch", "zmq") for kind in KINDS]
            for transport, kind in cases:
                measured["stall"][f"{transport}, {kind}"] = launch(stall, 2, transport, kind, 5.0)
                bar(len(cases))
                write()
    write()


if __name__ == "__main__":
    main()
