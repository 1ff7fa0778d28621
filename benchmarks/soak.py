"""Train for hours with delays, overflows, restarts and killed ranks; check for losses and leaks.

    python benchmarks/soak.py                  (Linux; 2 hours; writes benchmarks/soak.md, .json, .png)
    python benchmarks/soak.py --minutes 5

The job has several lives, i.e. runs of fresh processes.  In each life, all ranks train a small model
under DDP over ZeroMQ.  Ranks are late at random, and gradients overflow at random. From time to
time, all ranks close their handles, wrap the model again and load the checkpoint, in the same
processes.  Every other life ends with a killed rank, which the others must report in time.  The next
life loads the last checkpoint with a different number of ranks.

The job repeatedly checks that

- the law of conservation holds: everything accumulated is in the total or in a residual,
- replicas are equal,
- a refused step leaves residuals unchanged,
- a restart restores the state,
- memory, threads and open files do not grow.

The .json is written after every life; a later call continues from it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from soak_report import draw, report
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.checkpoint.files import read_file, states_in, whole_checkpoints
from sparsync.cli.launch import RankError, launch

ALGORITHMS = ("budgeted", "oktopk", "halving")  # lives alternate; each algorithm has checkpoints
RANKS = (4, 3, 2)  # numbers of ranks between which an algorithm's lives alternate
LIVES = 8  # number of lives in a soak of 40 minutes or more; a shorter soak has 4
WIDTH = 512  # 0.8 M parameters
DENSITY = 0.01
TIMEOUT = 20.0  # seconds that a rank waits for another
LATE = 0.05  # share of steps at which a rank is late
LATENESS = 0.1  # mean seconds by which it is late
OVERFLOWS = 0.02  # share of steps at which a gradient overflows
CHECKED = 10  # steps between checks of the law
RESTART = 100  # steps between restarts inside a life
SAMPLE = 2.0  # seconds between measurements of memory
PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


class Trainee:
    """A rank's model, optimizer and handle, which a restart rebuilds."""

    def __init__(self, algorithm: str, folder: Path) -> None:
        self.algorithm, self.folder = algorithm, folder
        self.counts: Counter[str] = Counter()
        self.worst = 0.0  # largest violation of the law, relative to its bound
        self.begin()

    def begin(self) -> None:
        """Wrap the model again, with different buckets, and load the last checkpoint if there is one."""
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH // 2)
        )
        bucket = random.Random(self.counts["restarts"]).choice([0.5, 1.0, 25.0])
        self.ddp = DistributedDataParallel(self.net, bucket_cap_mb=bucket)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=0.9)
        self.sync = sparsync.attach(
            self.ddp,
            algorithm=self.algorithm,
            density=DENSITY,
            transport=sparsync.Transport("zmq", timeout=TIMEOUT),
            monitoring=sparsync.Monitoring(
                nonfinite="skip",
                sentinel=sparsync.Sentinel(period=50, policy="raise", optimizer=self.optimizer),
            ),
        )
        if whole_checkpoints(self.folder):
            sparsync.load(self.sync, self.folder, model=self.net, optimizer=self.optimizer)
        self.step = int(self.sync.stats()["exchanges"])

    def restart(self) -> None:
        """Save, close, and start again; the state must be the same, bit for bit."""
        self.save()
        before, weights = self.residual(), self.weights()
        self.sync.close()
        del self.ddp, self.sync, self.optimizer
        self.counts["restarts"] += 1
        self.begin()
        assert torch.equal(before, self.residual()), "a restart changed a residual"
        assert torch.equal(weights, self.weights()), "a restart changed a weight"

    def save(self) -> None:
        """Write a checkpoint."""
        sparsync.save(self.sync, self.folder, model=self.net, optimizer=self.optimizer)

    def weights(self) -> Tensor:
        """Return all weights, flat."""
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])

    def residual(self) -> Tensor:
        """Return this rank's residual as a flat tensor, in the order of the parameters."""
        kept = self.sync.state_dict()["content"]["reducer"]["residual"]
        zeros = {n: torch.zeros(p.numel()) for n, p in self.net.named_parameters()}
        return torch.cat([kept.get(name, zeros[name]) for name in zeros])

    def moved(self, saved: Sequence[Mapping[str, Tensor]]) -> float:
        """Return how far the sum of residuals is from the saved sum, relative to the rounding error."""
        if not saved:
            return 0.0
        names = [name for name, _ in self.net.named_parameters()]
        was = torch.stack([torch.cat([one[name] for name in names]).double() for one in saved])
        now = self.residual().double()
        dist.all_reduce(now)
        bound = (len(saved) + 2) * 2.0**-24 * was.abs().sum(0) + 2.0**-126
        return float(((now - was.sum(0)).abs() / bound).max())

    def train(self, *, watched: bool = True) -> None:
        """Run one step, in which the rank may be late, or a gradient overflow, or the law be checked."""
        rank, step = dist.get_rank(), self.step
        common, own = random.Random(f"step {step}"), random.Random(f"{step} of {rank}")
        if own.random() < LATE:
            time.sleep(own.expovariate(1 / LATENESS))
        overflows = common.random() < OVERFLOWS
        unlucky, checked = common.randrange(dist.get_world_size()), step % CHECKED == 0 and watched
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
        y = x[:, : WIDTH // 2].sin()
        if overflows and rank == unlucky:
            x[0, 0] = torch.inf
        before = self.residual() if overflows or checked else None
        skipped = self.sync.stats()["refused_exchanges"]
        self.optimizer.zero_grad()
        (self.ddp(x) - y).pow(2).mean().backward()
        if overflows:
            assert self.sync.stats()["refused_exchanges"] == skipped + 1, (
                "an overflow was not refused"
            )
            assert before is not None and torch.equal(before, self.residual())
            self.counts["overflows refused"] += 1
        elif before is not None:
            self.check(x, y, before)
        self.optimizer.step()
        self.step += 1
        self.counts["steps"] += 1

    def check(self, x: Tensor, y: Tensor, before: Tensor) -> None:
        """Check ``sum(residual + gradient) == P average + sum(residual)``, within its rounding."""
        world_size, parameters = dist.get_world_size(), list(self.net.parameters())
        own = torch.autograd.grad((self.net(x) - y).pow(2).mean(), parameters)
        accumulated = (before + torch.cat([g.flatten() for g in own])).double()
        sums = torch.stack([accumulated, self.residual().double(), accumulated.abs()])
        dist.all_reduce(sums)
        average = torch.cat([p.grad.flatten() for p in parameters]).double()
        # the law's bound plus one rounding, because the average was divided by P
        bound = (world_size + 3) * 2.0**-24 * sums[2] + 2.0**-126
        off = (sums[0] - world_size * average - sums[1]).abs() / bound
        self.worst = max(self.worst, float(off.max()))
        assert self.worst <= 1, f"step {self.step}: the law is off by {self.worst} of its rounding"
        digest = self.weights().view(torch.int32).long().sum()
        everyone = [torch.empty_like(digest) for _ in range(world_size)]
        dist.all_gather(everyone, digest)
        assert len({int(d) for d in everyone}) == 1, "replicas differ"
        self.counts["checks"] += 1


def sample() -> list[float]:
    """Return this process's memory in MiB, its threads and its open files.

    Python first collects garbage (DDP's models are in reference cycles), and the C library returns
    free memory to the system, so all remaining memory is in use.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / MIB
    files = len(list(Path("/proc/self/fd").iterdir()))
    return [resident, threading.active_count(), files]


def saved_residuals(folder: Path) -> list[Mapping[str, Tensor]]:
    """Return the residuals of all ranks in the last checkpoint."""
    whole = whole_checkpoints(folder)
    files = states_in(whole[max(whole)]).values() if whole else []
    return [read_file(path)["content"]["reducer"]["residual"] for path in files]


def live(algorithm: str, folder: str, seconds: float, dies: bool) -> None:
    """Train for this many seconds and record observations; if one rank ``dies``, kill it at the end."""
    torch.set_num_threads(1)
    waiting = saved_residuals(Path(folder))
    rank, trainee = dist.get_rank(), Trainee(algorithm, Path(folder))
    started = time.monotonic()
    diary = Path(folder) / f"diary-{rank}.json"
    samples: list[list[float]] = []
    moved = trainee.moved(waiting)
    while True:
        age = time.monotonic() - started
        over = torch.tensor([float(age > seconds)])
        if trainee.step % CHECKED == 1:
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            if bool(over):
                break
        if not samples or age - samples[-1][0] > SAMPLE:
            samples.append([age, *sample()])
        trainee.train()
        if trainee.step % RESTART == 0:
            trainee.restart()
    trainee.save()
    said = {"samples": samples, "worst": trainee.worst, "counts": trainee.counts}
    diary.write_text(json.dumps({**said, "residual moved by": moved}))
    dist.barrier()
    if dies and rank == trainee.step % dist.get_world_size():
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while dies:
        trainee.train(watched=False)  # the checks use a separate group and raise other errors
    trainee.sync.close()


# ---- the parent -----------------------------------------------------------------------------------


def one_life(number: int, seconds: float, folder: Path) -> dict:
    """Start the ranks of one life; return their records."""
    algorithm = ALGORITHMS[number % len(ALGORITHMS)]
    ranks, dies = RANKS[number // len(ALGORITHMS) % len(RANKS)], number % 2 == 1
    home = folder / algorithm
    home.mkdir(parents=True, exist_ok=True)
    for diary in home.glob("diary-*"):
        diary.unlink()
    died = ""
    try:
        launch(live, ranks, algorithm, str(home), seconds, dies, timeout=60.0)
    except RankError as error:
        died = str(error)
    diaries = [home / f"diary-{rank}.json" for rank in range(ranks)]
    if not all(diary.exists() for diary in diaries):
        raise SystemExit(f"life {number} ended before its time:\n{died}")
    found = [json.loads(diary.read_text()) for diary in diaries]
    lines = died.splitlines()
    named = [
        re.match(r"rank \d+: (Peer|Deadline)Error: .*step \d+.*phase '", line) for line in lines
    ]
    return {
        "algorithm": algorithm,
        "ranks": ranks,
        "died": dies,
        "error": died,
        "survivors named it": not dies or sum(map(bool, named)) == ranks - 1,
        "unexpected": "" if dies == ("exit code -9" in died) else died or "nobody died",
        "residual moved by": max(one["residual moved by"] for one in found),
        "counts": found[0]["counts"],
        "worst": max(one["worst"] for one in found),
        "samples": [one["samples"] for one in found],
        "parent": sample(),
    }


def main() -> None:
    """Run the lives that the .json does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(""))
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "sparsync-soak"
    )
    args = parser.parse_args()
    output = {kind: args.output.with_suffix(f".{kind}") for kind in ("json", "md", "png")}
    lives = LIVES if args.minutes >= 40 else 4
    seconds = 60 * args.minutes / lives
    record: dict = {"minutes": args.minutes, "seconds": seconds, "lives": []}
    if output["json"].exists():
        found = json.loads(output["json"].read_text())
        if found["minutes"] == args.minutes and len(found["lives"]) < lives:
            record = found
    folder = args.folder / f"{args.minutes:g}"
    if not record["lives"] and folder.exists():
        shutil.rmtree(folder)
    for number in range(len(record["lives"]), lives):
        record["lives"].append(one_life(number, seconds, folder))
        output["json"].write_text(json.dumps(record) + "\n")
        report(record, output["md"])
        draw(record, output["png"])
        print(f"life {number}: {record['lives'][-1]['counts']}")


if __name__ == "__main__":
    main()
