"""Find out why ``attach`` with AdamW lags behind dense, with exact exchanges and exact noise levels.

    python benchmarks/exact_shares.py --seeds 1,2,3 --steps 1000

Four ranks average their updates in 32 bits after every step. For each parameter, or each group of
its rows, they know exactly by which factor (the *share*) averaging shrinks the squares of their
gradients. The remaining gap is therefore not due to rounding, measurement or the period. The
variants remove further causes: clipping by each rank's own norm, and each rank's own second
moments.

Every finished run is a line of ``exact_shares/results.jsonl`` and is not repeated;
``exact_shares.md`` is made from these lines alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from schedules import TASKS, rate_at

OUT = Path(__file__).parent / "exact_shares.md"
RANKS = 4


class Method(NamedTuple):
    """The differences between a run and the default of ``attach``.

    Attributes:
        dense: average gradients before the optimizer, as DDP does.
        groups: number of shares per matrix, each for equally many contiguous rows; 0 means one share
            per row.
        common_clip: clip by the norm of the average, as DDP does, instead of by each rank's own norm.
        second: the second moments by which steps are divided: the rank's "own", their "mean" over
            ranks, or, as in DDP, "dense" ones from averaged gradients.
    """

    dense: bool = False
    groups: int = 1
    common_clip: bool = False
    second: str = "own"


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "dense": Method(dense=True),
        "a share per parameter": Method(),
        "4 per matrix": Method(groups=4),
        "16 per matrix": Method(groups=16),
        "one per row": Method(groups=0),
        "per parameter, clipped as DDP": Method(common_clip=True),
        "dense's second moments": Method(second="dense"),
        "the mean's second moments": Method(second="mean"),
    }
)


class State:
    """The moments of all ranks for one parameter, and sums of squares per group of its rows."""

    def __init__(self, parameter: Tensor, group: Mapping[str, Any], method: Method) -> None:
        rows = parameter.shape[0] if parameter.dim() else 1
        wanted = method.groups or rows
        size = -(-rows // min(wanted, rows)) if parameter.dim() > 1 else rows
        self.group_of_row = torch.arange(rows) // size
        self.first = torch.zeros(RANKS, *parameter.shape)
        self.second = torch.zeros(RANKS, *parameter.shape)
        self.of_dense = torch.zeros_like(parameter)
        self.squares = torch.zeros(2, -(-rows // size))  # of the average, and of single ranks
        self.group, self.method = group, method

    def direction(self, gradients: Tensor, step: int) -> Tensor:
        """Return the average of all ranks' steps at a rate of 1; ``gradients`` are `[ranks, ...]`."""
        method, (beta1, beta2) = self.method, self.group["betas"]
        self.first.lerp_(gradients, 1 - beta1)
        self.second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        mean = gradients.mean(0)
        self.of_dense.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
        rows = gradients.reshape(RANKS, len(self.group_of_row), -1)
        self.squares.mul_(beta2)
        for sums, its in zip(
            self.squares, (rows.mean(0).square().sum(1), rows.square().sum(2).mean(0)), strict=True
        ):
            sums.index_add_(0, self.group_of_row, its)
        shares = (self.squares[0] / self.squares[1].clamp(min=1e-30)).clamp(1 / RANKS, 1)
        share = (
            shares[self.group_of_row].view(-1, *[1] * (mean.dim() - 1)) if mean.dim() else shares
        )
        second = self.second * share
        if method.dense or method.second == "dense":
            second = self.of_dense[None]
        elif method.second == "mean":
            second = second.mean(0, keepdim=True)
        root = (second / (1 - beta2 ** (step + 1))).sqrt_().add_(self.group["eps"])
        return (self.first / (1 - beta1 ** (step + 1)) / root).mean(0)


def factor(gradients: list[Tensor], clip: float) -> float:
    """Return the factor that limits the gradients' 2-norm to ``clip``."""
    norm = torch.stack([one.norm() for one in gradients]).norm()
    return min(1.0, clip / (float(norm) + 1e-6))


def train(run: Mapping[str, Any]) -> float:
    """Train; return the held-out loss."""
    task, method, seed = TASKS[run["task"]][0](), METHODS[run["method"]], run["seed"]
    model = task.make_model(seed)
    # perturb the weights by rounding errors alone: the effect shows how exact a single run's loss is
    if run["moved"]:
        draw = torch.Generator().manual_seed(run["moved"])
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=draw), alpha=1e-6)
    groups = task.make_optimizer(model).param_groups
    states = {p: State(p, group, method) for group in groups for p in group["params"]}
    for step in range(run["steps"]):
        rate = run["lr"] * rate_at(run["schedule"], step, run["steps"])
        ranks = [
            list(torch.autograd.grad(task.loss_of(model, seed, step, rank), list(states)))
            for rank in range(RANKS)
        ]
        if method.dense or method.common_clip:
            mean = [sum(several) / RANKS for several in zip(*ranks, strict=True)]
            factors = [factor(mean, task.clip)] * RANKS
        else:
            factors = [factor(one, task.clip) for one in ranks]
        with torch.no_grad():
            for at, (parameter, state) in enumerate(states.items()):
                scaled = [one[at] * by for one, by in zip(ranks, factors, strict=True)]
                stacked = torch.stack(scaled)
                if method.dense:
                    stacked = stacked.mean(0).expand_as(stacked)
                direction = state.direction(stacked, step)
                parameter.mul_(1 - rate * state.group["weight_decay"])
                parameter.sub_(direction, alpha=rate)
    with torch.no_grad():
        return task.held_out_loss(model.eval())


def report(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    lines = [
        "# The remaining gap to dense AdamW without rounding",
        "",
        f"Held-out loss relative to dense AdamW's, {RANKS} virtual ranks that average updates in 32 "
        "bits after every step and know the noise of their gradients exactly; mean, deviation and each "
        "seed. Made "
        'by `benchmarks/exact_shares.py`. "moved": the same, begun 1e-6 beside, which shows how much '
        "a single run tells.",
        "",
        "| task | steps | rate | schedule | method | moved | seeds | over dense, % | |",
        "|---|---:|---:|---|---|---:|---:|---:|---|",
    ]
    keys = ("task", "steps", "lr", "schedule")
    dense = {
        (*(r[k] for k in keys), r["seed"]): r["loss"]
        for r in rows
        if r["method"] == "dense" and not r["moved"]
    }
    cells: dict[tuple[Any, ...], list[float]] = {}
    for row in sorted(rows, key=lambda r: r["seed"]):
        at = tuple(row[k] for k in keys)
        if (*at, row["seed"]) in dense and (row["method"] != "dense" or row["moved"]):
            gap = 100 * (row["loss"] / dense[(*at, row["seed"])] - 1)
            cells.setdefault((*at, row["method"], row["moved"]), []).append(gap)
    for cell, gaps in cells.items():
        *at, method, moved = cell
        spread = f" ± {stdev(gaps):.1f}" if len(gaps) > 1 else ""
        each = ", ".join(f"{gap:+.1f}" for gap in gaps)
        words = " | ".join([*(f"{one:g}" if isinstance(one, float) else str(one) for one in at)])
        lines.append(
            f"| {words} | {method} | {moved or ''} | {len(gaps)} | {fmean(gaps):+.1f}{spread} | {each} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Make the missing runs, then write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--tasks", type=words, default=["torch-100k"])
    parser.add_argument("--schedule", default="cosine-0")
    parser.add_argument("--rate", type=int, default=1, help="which of the task's, from 0, the best")
    parser.add_argument("--methods", type=lambda t: t.split(";"), default=list(METHODS))
    parser.add_argument("--seeds", type=lambda t: [int(s) for s in t.split(",")], default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--moved", type=int, default=0, help="seed of what is added at the start")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = OUT.with_suffix("") / "results.jsonl"
    path.parent.mkdir(exist_ok=True)
    runs = [
        {"task": task, "lr": TASKS[task][1][given.rate], "steps": given.steps}
        | {"schedule": given.schedule, "seed": seed, "method": method, "moved": given.moved}
        for seed in given.seeds
        for task in given.tasks
        for method in given.methods
    ]
    for run in [] if given.report else runs:
        lines = path.read_text().splitlines() if path.exists() else []
        if any(run.items() <= json.loads(line).items() for line in lines):
            continue
        began = time.perf_counter()
        row = {**run, "loss": train(run), "seconds": round(time.perf_counter() - began, 1)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(*run.values(), f"loss {row['loss']:.4g}, {row['seconds']} s", flush=True)
    if path.exists():
        OUT.write_text(report([json.loads(line) for line in path.read_text().splitlines()]))


if __name__ == "__main__":
    main()
