"""Stop processes in the middle of training, and record exit codes, seconds and output on stderr.

``python benchmarks/exits.py --runs 200`` writes ``exits.md``. Finished runs are stored in
``exits.json``, so an interrupted table can be completed later. Two ranks train with AdamW, and both
stop after a step that has begun an exchange, which is still in flight if ``delay=1``. A run fails
if a rank ends with an unexpected code, prints anything besides its own traceback, or takes more
than 5 seconds after its last statement.

Ranks are forked from a process that has imported everything and started no thread.  They end like
any Python process, through the interpreter's own finalisation.  Time for which a process waits for
a processor does not count; only Linux's scheduler reports it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
import sparsync.transports.zmq
from sparsync.updates import OUTER_SETTINGS, OuterStep

HERE = Path(__file__).parent
RESULTS = HERE / "exits.json"
RANKS = 2
ALLOWED = 5.0  # seconds from the last statement to the end of the process
HANGS = 40.0  # seconds after which a rank counts as hanging, and is killed
SAID = "sparsync: exchanges updates"  # a line that attach prints
CODES = {"end": 0, "exit": 3, "raise": 1}
KINDS = list(itertools.product(("zmq", "torch"), (0, 1), (False, True), CODES))


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", type=int, default=20, help="of each kind, of two exits; earlier ones included"
    )
    parser.add_argument("--kinds", default="", help="part of the names of the kinds to run")
    parser.add_argument("--words", action="store_true", help="show what ranks of wrong runs said")
    options = parser.parse_args()
    done: dict[str, list[Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    command, pipes = [sys.executable, __file__, "--serve"], {"stdin": PIPE, "stdout": PIPE}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as server:
        # kinds alternate, so an interrupted table has equal numbers of each
        for number, kind in itertools.product(range(options.runs), KINDS):
            name = name_of(*kind)
            if options.kinds not in name or number < len(done.setdefault(name, [])):
                continue
            server.stdin.write(json.dumps([number, *kind]) + "\n")
            server.stdin.flush()
            ranks = json.loads(server.stdout.readline())
            wrong, seconds = judge(kind[-1], ranks)
            done[name].append([wrong, seconds])
            if wrong and options.words:
                sys.stderr.write(f"{name}: {wrong}\n{ranks}\n")
            RESULTS.write_text(json.dumps(done))
            (HERE / "exits.md").write_text(table(done))
    sys.stdout.write(table(done))


def name_of(transport: str, delay: int, destroys: bool, end: str) -> str:
    """Return the name of a kind of exit."""
    after = ", destroy_process_group" if destroys else ""
    return f"{'gloo' if transport == 'torch' else transport}, delay={delay}{after}, {end}"


def judge(end: str, ranks: list[Any]) -> tuple[str, float]:
    """Return a run's defects, and the seconds that its ranks took to end."""
    for code, seconds, words in ranks:
        lines = [line.partition("]: ")[2] or line for line in words.strip().splitlines()]
        lines = [line for line in lines if not line.startswith(SAID)]
        own = end == "raise" and len(lines) > 1 and lines[0].startswith("Traceback")
        if seconds is None:
            return f"did not get to its end: code {code}", 0.0
        if seconds > HANGS - 1:
            return "hangs", seconds
        if code != CODES[end]:
            return f"code {code}", seconds
        if lines and not (own and lines[-1] == "RuntimeError: the end"):
            return "noise", seconds
        if seconds > ALLOWED:
            return "late", seconds
    return "", max(seconds for _, seconds, _ in ranks)


def table(done: dict[str, list[Any]]) -> str:
    """Return the table as Markdown."""
    lines = [
        "# Exits in the middle of training",
        "",
        "Two ranks reach the end of the script, call `sys.exit(3)` or raise right after a step that has",
        "begun an exchange (with `delay=1`, it is still in flight), with and without a preceding",
        "`destroy_process_group()`. A run is wrong if an exit code is not 0, 3 or 1, if anything but",
        "the exception's traceback is on stderr, if it takes more than 5 s, or if it hangs. Seconds are",
        "counted from the last statement to the end of the process, without time in which other",
        "processes had the processor. Made by `python benchmarks/exits.py`.",
        "",
        "| kind | exits | wrong runs | how | longest, s |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for name, runs in done.items():
        how = Counter(wrong for wrong, _ in runs if wrong)
        said = ", ".join(f"{count} {wrong}" for wrong, count in how.items())
        longest = max((seconds for _, seconds in runs), default=0.0)
        if runs:
            lines.append(
                f"| {name} | {RANKS * len(runs)} | {sum(how.values())} | {said} | {longest:.1f} |"
            )
    return "\n".join([*lines, ""])


def serve() -> tuple[int, list[Any], str] | None:
    """Fork two ranks for each input line; return only in a rank: its number, kind of exit and file."""
    warm = torch.nn.Linear(1, 1)
    warm.weight.grad = torch.ones(1, 1)
    torch.optim.AdamW(warm.parameters()).step()  # imports torch's compiler before any fork
    for line in sys.stdin:
        job, folder = json.loads(line), Path(tempfile.mkdtemp())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        pids, ended = dict[int, int](), dict[int, tuple[int, float]]()
        at = [folder / f"{rank}.at" for rank in range(RANKS)]  # for the time of the last statement
        for rank in range(RANKS):
            if (pid := os.fork()) == 0:
                words = os.open(folder / f"{rank}.err", os.O_CREAT | os.O_WRONLY)
                os.dup2(words, 1)
                os.dup2(words, 2)
                return rank, job, str(at[rank])
            pids[pid] = rank
        until = time.monotonic() + 3 * HANGS
        while len(ended) < RANKS:
            over = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if over is not None:
                when = ran_until(over.si_pid)
                status = os.waitpid(over.si_pid, 0)[1]
                ended[pids[over.si_pid]] = os.waitstatus_to_exitcode(status), when
                continue
            if all(file.exists() for file in at):
                until = min(until, time.monotonic() + HANGS)
            if time.monotonic() > until:
                for one in pids:
                    if pids[one] not in ended:
                        os.kill(one, signal.SIGKILL)
            time.sleep(0.005)
        ranks = []
        for rank, (code, when) in sorted(ended.items()):
            seconds = when - float(at[rank].read_text()) if at[rank].exists() else None
            ranks.append([code, seconds, (folder / f"{rank}.err").read_text()[-2000:]])
        shutil.rmtree(folder)
        sys.stdout.write(json.dumps(ranks) + "\n")
        sys.stdout.flush()
    return None


def ran_until(pid: int | str) -> float:
    """Return the clock's time minus the time that a process has waited for a processor, in seconds."""
    waited = Path(f"/proc/{pid}/schedstat").read_text().split()[1]
    return time.monotonic() - int(waited) / 1e9


def train(rank: int, number: int, transport: str, delay: int) -> Any:
    """Take the steps of a rank; an exchange begins after the last one."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = OUTER_SETTINGS["updates"] | {"delay": delay, "warmup_steps": 0}
    sync = sparsync.attach(
        model, optimizer, OuterStep(**settings), transport=sparsync.Transport(transport, timeout=60)
    )
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 256)).pow(2).mean().backward()
        optimizer.step()
    # from no pause to about the duration of an exchange, so that exits meet all of its stages
    time.sleep(random.Random(number * RANKS + rank).choice((0.0, 0.0, 0.001, 0.004, 0.016)))
    return sync


if __name__ == "__main__":
    if "--serve" not in sys.argv:
        main()
    elif (given := serve()) is not None:
        # at the top level, so that only the interpreter's finalisation follows
        mine, (run, carrier, late, destroys, end), file = given
        handle = train(mine, run, carrier, late)
        if destroys:
            dist.destroy_process_group()
        Path(file).write_text(str(ran_until("self")))
        if end == "exit":
            sys.exit(3)
        if end == "raise":
            raise RuntimeError("the end")
