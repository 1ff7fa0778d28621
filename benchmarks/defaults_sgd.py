"""Compare SGD's default with dense SGD at its best rate, with and without momentum, on virtual ranks.

    python benchmarks/defaults_sgd.py                       (missing runs, then the table)
    python benchmarks/defaults_sgd.py --tasks mlp,resnet --methods "default,1 %" --seeds 1,2,3
    python benchmarks/defaults_sgd.py --report              (only writes the table)

Every finished run is a line of ``defaults_sgd/results.jsonl`` and is not repeated; ``defaults_sgd.md`` is
made from these lines alone.  Dense SGD first runs at every rate of a network, with every seed.  All other
methods use the rate with the best mean, because a single seed cannot separate rates.  Results are the
same on every machine with the same torch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from small_networks import ResNet, VisionTransformer, held_out_digits

from sparsync.cli.output import progress
from sparsync.cli.workloads import make_workload
from sparsync.cli.workloads.digits import DigitsWorkload
from sparsync.cli.workloads.workload import Draw
from sparsync.feedback.correction import Correction
from sparsync.feedback.reducer import Reducer
from sparsync.options import Compression, Monitoring, Options, Transport
from sparsync.presets import resolve
from sparsync.transports.sim import SimCommunicator, simulate
from sparsync_papers.models.images import vgg16_cifar10
from sparsync_papers.models.text import LstmLanguageModel

OUT = Path(__file__).with_suffix(".md")
RANKS = 4
LAST = 5  # a run's loss is the mean of this many evaluations, five steps apart; one is too noisy


# ---- networks -------------------------------------------------------------------------------------


class Regression:
    """A task that learns a random network of the same shape from its outputs for random inputs."""

    batch, clip = 32, math.inf

    def __init__(self, student: Callable[[], nn.Module], teacher: Callable[[], nn.Module]) -> None:
        self.student, self.teacher = student, teacher

    def make_model(self, seed: int) -> nn.Module:
        """Return the model that a seed begins with."""
        torch.manual_seed(seed)
        self.taught = self.teacher()
        return self.student()

    def loss_of(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        """Return the loss on the batch of a step and rank."""
        return self._loss(model, 1_000_000 * seed + 1_000 * step + rank, self.batch)

    def held_out_loss(self, model: nn.Module) -> float:
        """Return the loss on 2,048 other inputs."""
        return self._loss(model, 999, 2048).item()

    def _loss(self, model: nn.Module, seed: int, count: int) -> Tensor:
        inputs = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            targets = self.taught(inputs)
        return F.mse_loss(model(inputs), targets)


class Digits:
    """A task that learns scikit-learn's handwritten digits, shifted by up to a pixel."""

    clip = math.inf

    def __init__(self, network: Callable[[], nn.Module], batch: int = 16, every: int = 1) -> None:
        self.network, self.batch, self.every, self.workload = (
            network,
            batch,
            every,
            DigitsWorkload(),
        )

    def make_model(self, seed: int) -> nn.Module:
        """Return the model that a seed begins with."""
        torch.manual_seed(seed)
        return self.network()

    def loss_of(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        """Return the loss on the batch of a step and rank."""
        images, digits = self.workload.batch(Draw(seed, step, rank, RANKS, self.batch))
        return F.cross_entropy(model(images), digits)

    def held_out_loss(self, model: nn.Module) -> float:
        """Return the loss on all held-out images or on every n-th one, with all shifts."""
        images, digits = held_out_digits()
        return F.cross_entropy(model(images[:: self.every]), digits[:: self.every]).item()


class Text:
    """A task that predicts bytes of Python's standard library, by default with ``make demo``'s model."""

    def __init__(
        self,
        batch: int,
        network: Callable[[], nn.Module] | None = None,
        *,
        clip: float = math.inf,
        **settings: Any,
    ) -> None:
        self.batch, self.network, self.clip = batch, network, clip
        self.workload = make_workload("bytes", **settings)

    def make_model(self, seed: int) -> nn.Module:
        """Return the model that a seed begins with."""
        if self.network is None:
            return self.workload.make_model(seed)
        torch.manual_seed(seed)
        return self.network()

    def loss_of(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        """Return the loss on the batch of a step and rank."""
        inputs, targets = self.workload.batch(Draw(seed, step, rank, RANKS, self.batch))
        return self.workload.loss(model(inputs), targets)

    def held_out_loss(self, model: nn.Module) -> float:
        """Return the loss on a quarter of the held-out files."""
        return self.workload.evaluate(model, rank=0, world_size=4).loss


class Vgg(nn.Module):
    """The VGG-16 of ``papers/`` with a width of 18, for digits enlarged by 4 in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = vgg16_cifar10(width=18)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[batch, 10]`."""
        return self.network(F.interpolate(images, scale_factor=4).expand(-1, 3, -1, -1))


def lstm() -> nn.Module:
    """Return the LSTM of ``papers/`` for bytes, with a width of 256 and without dropout."""
    return LstmLanguageModel(vocabulary=256, width=256, dropout=0.0)


def wide() -> nn.Module:
    """Return a network of 1,126,410 parameters, which exchanges 1 % of them."""
    layers = nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def small() -> nn.Module:
    """Return a network of 4,680 parameters."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


# task -> its steps, and dense SGD's rates without momentum and with a momentum of 0.9
TASKS: Mapping[str, tuple[Callable[[], Any], int, Mapping[float, tuple[float, ...]]]] = (
    MappingProxyType(
        {
            "linear": (
                lambda: Regression(lambda: nn.Linear(64, 8), lambda: nn.Linear(64, 8)),
                300,
                {0.0: (0.5, 1.5, 3.0), 0.9: (0.05, 0.15, 0.5)},
            ),
            "mlp": (
                lambda: Regression(small, small),
                300,
                {0.0: (0.3, 1.0, 3.0), 0.9: (0.03, 0.1, 0.3)},
            ),
            "wide": (lambda: Digits(wide), 200, {0.0: (0.1, 0.3), 0.9: (0.01, 0.03, 0.1)}),
            "resnet": (lambda: Digits(ResNet), 200, {0.0: (0.1, 0.3, 0.6), 0.9: (0.03, 0.1)}),
            "vit": (
                lambda: Digits(lambda: VisionTransformer(64, 2)),
                500,
                {0.0: (0.05, 0.1), 0.9: (0.005, 0.01)},
            ),
            "bytes-280k": (
                lambda: Text(8, context=64, layers=2, width=96),
                200,
                {0.0: (0.5, 1.0), 0.9: (0.1, 0.3)},
            ),
            "demo": (
                lambda: Text(4, context=None, layers=None, width=None),
                80,
                {0.0: (0.5, 1.0), 0.9: (0.1, 0.2)},
            ),
            "vgg16": (lambda: Digits(Vgg, 8, 8), 100, {0.0: (0.1, 0.3), 0.9: (0.01, 0.03)}),
            "lstm": (
                lambda: Text(5, lstm, clip=0.25, context=35, layers=None, width=None),
                150,
                {0.0: (10.0, 20.0), 0.9: (1.0, 2.0)},
            ),
        }
    )
)

METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dense": {"algorithm": "dense"},
        "default": {},
        "1 %": {"density": 0.01},
        "10 %": {"density": 0.1},
        "1 % corrected": {"density": 0.01, "corrects": True},
        "1 % after 30 dense steps": {"density": 0.01, "warmup_steps": 30},
    }
)


# ---- runs -----------------------------------------------------------------------------------------


def make(run: Mapping[str, Any], bar: Callable[[int], None]) -> dict[str, Any]:
    """Train once; call ``bar`` with the number of steps after every step."""
    task, method = TASKS[run["task"]][0](), METHODS[run["method"]]
    steps, seed, momentum, began = run["steps"], run["seed"], run["momentum"], time.perf_counter()
    correction = Correction(momentum=momentum) if method.get("corrects") and momentum else None
    given = Options(
        resolve(method.get("algorithm", "budgeted")),
        method.get("density"),
        correction,
        Compression(warmup_steps=method.get("warmup_steps", 0)),
        Transport(),
        Monitoring(),
    )

    async def program(comm: SimCommunicator) -> dict[str, Any]:
        model, losses = task.make_model(seed), []
        after = 0.0 if correction else momentum
        optimizer = torch.optim.SGD(model.parameters(), run["lr"], momentum=after)
        options = given.for_size(sum(p.numel() for p in model.parameters()), lambda _said: None)
        units = options.units(model.named_parameters(), model)
        warmup = options.compression.warmup()
        reducer = Reducer(comm, units, options.algorithm, options.density, warmup, correction)
        (unit,) = units
        for step in range(steps):
            optimizer.zero_grad()
            task.loss_of(model, seed, step, comm.rank).backward()
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
            await reducer.reduce([flat])
            for slot, parameter in zip(unit.slots, model.parameters(), strict=True):
                average = flat[slot.start : slot.start + slot.size]
                parameter.grad.copy_(average.view_as(parameter))
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            if comm.rank == 0:
                bar(steps)
                if steps - step <= 5 * LAST and (steps - step) % 5 == 1:
                    with torch.no_grad():
                        losses.append(task.held_out_loss(model.eval()))
                    model.train()
        return {
            "loss": fmean(losses) if losses else None,
            "bytes": comm.ledger.total().sent / unit.size / steps,
            "density": options.density,
            "parameters": unit.size,
            "noticed": bool(reducer.notice),
        }

    try:
        told = simulate(program, RANKS).results[0]
    except Exception as error:  # NaN on some rank
        if "NaN or Inf" not in str(error):
            raise
        told = {
            "loss": math.inf,
            "bytes": None,
            "density": None,
            "parameters": None,
            "noticed": True,
        }
    return {**run, **told, "seconds": round(time.perf_counter() - began, 1)}


class Runs:
    """Finished runs, one per line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.done: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def get(self, run: Mapping[str, Any], *, makes: bool = True) -> dict[str, Any] | None:
        """Return the result of a run; make the run if it is missing."""
        found = next((row for row in self.done if run.items() <= row.items()), None)
        if found is not None or not makes:
            return found
        name = " ".join(map(str, run.values()))
        with progress(shown=True) as rows, rows(name) as bar:
            row = make(run, bar)
        self.done.append(row)
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}: loss {row['loss']:.4g}, {row['seconds']} s", flush=True)
        return row

    def best_rate(
        self, task: str, momentum: float, seeds: Sequence[int], *, makes: bool
    ) -> float | None:
        """Return dense SGD's best rate, by the mean over seeds, or None if all rates diverged."""
        _, steps, rates = TASKS[task]
        base = {"task": task, "steps": steps, "momentum": momentum, "method": "dense"}
        losses: dict[float, list[float]] = {lr: [] for lr in rates[momentum]}
        for seed in seeds:
            found = [self.get({**base, "lr": lr, "seed": seed}, makes=makes) for lr in losses]
            if all(found):  # the report may be written before all seeds are done
                for row in found:
                    losses[row["lr"]].append(row["loss"])
        means = {lr: fmean(its) for lr, its in losses.items() if its and math.isfinite(sum(its))}
        return min(means, key=lambda lr: means[lr]) if means else None


def report(runs: Runs, seeds: Sequence[int]) -> str:
    """Return the page."""
    others = [m for m in METHODS if m != "dense" and any(r["method"] == m for r in runs.done)]
    lines = [
        "# SGD's default over dense SGD",
        "",
        f"Held-out loss relative to dense SGD's at its best constant rate, {RANKS} ranks; mean and "
        "deviation over seeds. Made by `benchmarks/defaults_sgd.py`, on virtual ranks. A run's loss is "
        f"the mean of its last {LAST} evaluations, five steps apart. *Default*: `density` as chosen by "
        "`attach`. *Corrected*: momentum is applied before the exchange. A value of 1 means equal to "
        "dense.",
        "",
        "| network | parameters | steps | momentum | rate, of tried | seeds | dense | "
        f"{' | '.join(others)} "
        "| density by default | bytes per parameter and step |",
        f"|---|{'---:|' * (len(others) + 8)}",
    ]
    for task, (_, steps, rates) in TASKS.items():
        for momentum in rates:
            lr = runs.best_rate(task, momentum, seeds, makes=False)
            cell = {"task": task, "steps": steps, "momentum": momentum, "lr": lr}
            rows = [row for row in runs.done if cell.items() <= row.items()]
            dense = {row["seed"]: row["loss"] for row in rows if row["method"] == "dense"}
            shown = [row for row in rows if row["method"] == "default" and row["seed"] in dense]
            if lr is None or not shown:
                continue
            cells, first = [], shown[0]
            for method in others:
                its = [row for row in rows if row["method"] == method and row["seed"] in dense]
                cells.append(_over([row["loss"] / dense[row["seed"]] for row in its]))
            lines.append(
                f"| {task} | {first['parameters']:,} | {steps} | {momentum:g} "
                f"| {lr:g} of {len(rates[momentum])} | {len(shown)} | "
                f"{fmean(dense[row['seed']] for row in shown):.3g} | {' | '.join(cells)} | "
                f"{first['density']:.2g} | {fmean(row['bytes'] for row in shown):.3g} |"
            )
    return "\n".join([*lines, ""])


def _over(ratios: list[float]) -> str:
    if not ratios:
        return ""
    spread = f" ± {stdev(ratios):.2g}" if len(ratios) > 1 and math.isfinite(sum(ratios)) else ""
    mean = fmean(ratios)
    return (f"{mean:.2f}" if mean < 100 else f"{mean:.0e}") + spread


def main() -> None:
    """Make the missing runs, then write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--tasks", type=words, default=list(TASKS))
    parser.add_argument("--methods", type=words, default=["default"])
    parser.add_argument("--seeds", type=words, default=["1", "2", "3"])
    parser.add_argument("--momenta", type=words, default=["0", "0.9"])
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs, seeds = Runs(OUT.with_suffix("") / "results.jsonl"), [int(seed) for seed in given.seeds]
    for task in [] if given.report else given.tasks:
        for momentum in map(float, given.momenta):
            lr = runs.best_rate(task, momentum, seeds, makes=True)
            cell = {"task": task, "steps": TASKS[task][1], "momentum": momentum, "lr": lr}
            for seed in seeds:
                for method in ["dense", *given.methods]:
                    runs.get({**cell, "method": method, "seed": seed})
            OUT.write_text(report(runs, seeds))
    OUT.write_text(report(runs, seeds))


if __name__ == "__main__":
    main()
