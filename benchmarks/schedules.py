"""Compare ``attach`` with dense AdamW at the same rate, under nine schedules, on virtual ranks.

    python benchmarks/schedules.py --tasks torch-100k,bytes-100k --schedules cosine-0,linear-0 --seeds 1,2
    python benchmarks/schedules.py --methods uncorrected,two-bits    (other candidates for the default)
    python benchmarks/schedules.py --report    (only writes the report)

Every finished run is a line of ``schedules/results.jsonl`` and is not repeated; ``schedules.md`` is made
from these lines alone.  Results are the same on every machine with the same torch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from frontier.tasks import BETAS, GptWorkload, grouped
from small_networks import ResNet, VisionTransformer, held_out_digits
from virtual_updates import DEFAULT, ONE_BIT, TWO_BITS, train_dense, train_updates

from sparsync.cli.workloads.digits import DigitsWorkload, SmallVgg
from sparsync.cli.workloads.stdlib_text import LstmWorkload
from sparsync.cli.workloads.workload import Draw
from sparsync.presets import resolve

HERE = Path(__file__).parent
OUT = HERE / "schedules.md"
WARMUP = 20  # warm-up steps of every schedule except OneCycle


def cosine(part: float) -> float:
    """Return half a cosine wave, which falls from 1 to 0 as ``part`` goes from 0 to 1."""
    return (1 + math.cos(math.pi * part)) / 2


SCHEDULES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "constant": lambda at: 1.0,
        "cosine-0": cosine,
        "cosine-10": lambda at: 0.1 + 0.9 * cosine(at),
        "linear-0": lambda at: 1 - at,
        "wsd": lambda at: min(1.0, 5 * (1 - at)),
        "restarts": lambda at: cosine(3 * at % 1),
        "drop-10": lambda at: 1.0 if at < 0.6 else 0.1,
        "drop-100": lambda at: 1.0 if at < 0.6 else 0.01,
        "onecycle": lambda at: (
            0.04 + 0.96 * (1 - cosine(at / 0.3)) if at < 0.3 else cosine((at - 0.3) / 0.7)
        ),
    }
)


def rate_at(schedule: str, step: int, steps: int) -> float:
    """Return the learning rate as a fraction of the largest.

    Example:
        >>> [round(rate_at("linear-0", step, 40), 3) for step in (0, 19, 20, 39)]
        [0.05, 0.525, 0.5, 0.025]
    """
    rising = 1.0 if schedule == "onecycle" else min(1.0, (step + 1) / WARMUP)
    return rising * SCHEDULES[schedule](step / steps)


class TorchGpt(nn.Module):
    """A GPT made of torch's own layers, with biases, GELU and an untied head."""

    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        hidden = torch.triu(torch.full((context, context), -math.inf), 1)
        self.register_buffer("mask", hidden, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, positions, 128]`."""
        return self.head(
            self.body(self.tokens(tokens) + self.places, mask=self.mask, is_causal=True)
        )


class TorchTask:
    """A task that trains ``TorchGpt`` on the sources of some Python packages, and clips at 1.0."""

    clip, batch = 1.0, 8

    def __init__(
        self,
        context: int,
        width: int,
        layers: int,
        packages: tuple[str, ...] = ("email", "json", "http"),
    ) -> None:
        self.shape = context, width, layers
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [p for name in packages for p in sorted((library / name).glob("*.py"))]
        text = torch.tensor(list(b"".join(p.read_bytes() for p in files))).clamp(max=127)
        self.text, self.held_out = text.split(
            [9 * len(text) // 10, len(text) - 9 * len(text) // 10]
        )

    def make_model(self, seed: int) -> nn.Module:
        """Return the model that a seed begins with."""
        torch.manual_seed(seed)
        return TorchGpt(*self.shape)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW, with one decay for everything."""
        return torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.1)

    def _loss(self, model: nn.Module, text: Tensor, draw: torch.Generator) -> Tensor:
        first = torch.randint(len(text) - self.shape[0] - 1, (self.batch,), generator=draw)
        rows = torch.stack([text[at : at + self.shape[0] + 1] for at in first.tolist()])
        return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def loss_of(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        """Return the loss on the batch of a step and rank."""
        draw = torch.Generator().manual_seed(1_000_000 * seed + 1_000 * step + rank)
        return self._loss(model, self.text, draw)

    def held_out_loss(self, model: nn.Module) -> float:
        """Return the loss on 40 held-out batches of text."""
        draw = torch.Generator().manual_seed(0)
        return fmean(self._loss(model, self.held_out, draw).item() for _ in range(40))


class WorkloadTask:
    """A task that trains a model of ``frontier.py`` (a GPT without biases, or an LSTM); clips at 1.0."""

    clip = 1.0

    def __init__(self, workload: Any) -> None:
        self.workload = workload

    def make_model(self, seed: int) -> nn.Module:
        """Return the model that a seed begins with."""
        return self.workload.make_model(seed)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW, with decay for matrices only."""
        return torch.optim.AdamW(grouped(dict(model.named_parameters())), betas=BETAS)

    def loss_of(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        """Return the loss on the batch of a step and rank."""
        inputs, targets = self.workload.batch(Draw(seed, step, rank, 4, 8))
        return self.workload.loss(model(inputs), targets)

    def held_out_loss(self, model: nn.Module) -> float:
        """Return the loss on a quarter of the held-out files."""
        return self.workload.evaluate(model, rank=0, world_size=4).loss


class DigitsTask:
    """A task that trains a network on scikit-learn's images of digits, shifted by up to a pixel."""

    clip = math.inf

    def __init__(self, network: Callable[[], nn.Module]) -> None:
        self.network, self.workload = network, DigitsWorkload()

    def make_model(self, seed: int) -> nn.Module:
        """Return the model that a seed begins with."""
        torch.manual_seed(seed)
        return self.network()

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW, with one decay for everything."""
        return torch.optim.AdamW(model.parameters(), weight_decay=0.1)

    def loss_of(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        """Return the loss on the batch of a step and rank."""
        images, digits = self.workload.batch(Draw(seed, step, rank, 4, 32))
        return nn.functional.cross_entropy(model(images), digits)

    def held_out_loss(self, model: nn.Module) -> float:
        """Return the loss on the held-out images, with all shifts."""
        images, digits = held_out_digits()
        return nn.functional.cross_entropy(model(images), digits).item()


class RegressionTask:
    """A task in which a linear layer learns to copy ten inputs, as in ``docs/quick-start.md``."""

    clip = math.inf

    def make_model(self, seed: int) -> nn.Module:
        """Return the model that a seed begins with."""
        torch.manual_seed(seed)
        return nn.Linear(1_000, 10)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW with its default settings."""
        return torch.optim.AdamW(model.parameters())

    def loss_of(self, model: nn.Module, seed: int, step: int, rank: int, count: int = 32) -> Tensor:
        """Return the loss on the batch of a step and rank."""
        draw = torch.Generator().manual_seed(1_000_000 * seed + 1_000 * step + rank)
        inputs = torch.randn(count, 1_000, generator=draw)
        return nn.functional.mse_loss(model(inputs), inputs[:, :10])

    def held_out_loss(self, model: nn.Module) -> float:
        """Return the loss on 4,096 other inputs."""
        return self.loss_of(model, 0, 0, 999, 4096).item()


TASKS: Mapping[str, tuple[Callable[[], Any], tuple[float, ...]]] = MappingProxyType(
    {
        # rates: dense AdamW's best, half of it, and a quarter of it
        "torch-100k": (lambda: TorchTask(32, 64, 2), (1.6e-2, 8e-3, 4e-3)),
        "bytes-100k": (
            lambda: WorkloadTask(GptWorkload(context=128, width=64, layers=2)),
            (4e-3, 2e-3, 1e-3),
        ),
        "torch-1m": (lambda: TorchTask(64, 160, 3), (4e-3, 2e-3, 1e-3)),
        "gpt-1m": (lambda: WorkloadTask(GptWorkload()), (2e-3, 1e-3, 5e-4)),
        "lstm": (lambda: WorkloadTask(LstmWorkload()), (6e-3, 3e-3, 1.5e-3)),
        "resnet": (lambda: DigitsTask(ResNet), (4e-3, 2e-3, 1e-3)),
        "vit": (lambda: DigitsTask(VisionTransformer), (4e-3, 2e-3, 1e-3)),
        "vgg": (lambda: DigitsTask(lambda: SmallVgg(seed=torch.initial_seed())), (4e-3, 2e-3)),
        "regression": (RegressionTask, (3e-3,)),
    }
)

METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "updates": DEFAULT,
        # the default for larger models
        "two-bits": TWO_BITS,
        "two-bits-clip": TWO_BITS,  # see clip_of
        "one-bit": ONE_BIT,
        "four-bits": {**ONE_BIT, "algorithm": resolve("quantised", bits=4, block=512)},
        "two-bits-every": {**TWO_BITS, "period": 1},
        # fewer exchanges: a half and three quarters of the bytes
        "two-bits-4": {**TWO_BITS, "period": 4},
        "three-bits-4": {
            **TWO_BITS,
            "algorithm": resolve("quantised", bits=3, block=512),
            "period": 4,
        },
        "every-step": {**ONE_BIT, "period": 1},
        "lossless": {**ONE_BIT, "algorithm": "dense"},
        "lossless-every": {**ONE_BIT, "algorithm": "dense", "period": 1},
        "uncorrected": {**ONE_BIT, "noise_correction": False},
        "every-uncorrected": {**ONE_BIT, "period": 1, "noise_correction": False},
        "lossless-uncorrected": {**ONE_BIT, "algorithm": "dense", "noise_correction": False},
        "no-warmup": {**ONE_BIT, "warmup_steps": 0},
    }
)


def clip_of(method: str, clip: float, ranks: int) -> float:
    """Return the largest norm of a rank's gradient.

    With "two-bits-clip", it is sqrt(P) times dense's limit, because a rank's gradient is up to sqrt(P)
    times as long as the average of P gradients.
    """
    return clip * ranks**0.5 if method == "two-bits-clip" else clip


def largest_ratio(optimizer: torch.optim.Optimizer) -> float:
    """Return the largest abs(m) / sqrt(v) of any element."""
    found = [0.0]
    for state in optimizer.state.values():
        root = state["exp_avg_sq"].sqrt()
        here = (state["exp_avg"].abs() / root)[root > 0]
        found.append(here.max().item() if here.numel() else 0.0)
    return max(found)


def make(run: dict[str, Any]) -> dict[str, Any]:
    """Train once."""
    task, began, ratio = TASKS[run["task"]][0](), time.perf_counter(), [0.0]

    def after_step(_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if len(ratio) % 40 == 0:
            ratio.append(largest_ratio(optimizer))
        else:
            ratio.append(ratio[-1])

    arguments: tuple[Any, ...] = (
        lambda: task.make_model(run["seed"]),
        task.make_optimizer,
        lambda model, step, rank: task.loss_of(model, run["seed"], step, rank),
        lambda step: run["lr"] * rate_at(run["schedule"], step, run["steps"]),
        run["steps"],
    )
    clip = clip_of(run["method"], task.clip, run["ranks"])
    more = {"ranks": run["ranks"], "clip": clip}
    if run["method"] == "dense":
        model, sent = train_dense(*arguments, **more), None
    else:
        more |= {"settings": METHODS[run["method"]], "after_step": after_step}
        model, told = train_updates(*arguments, **more)
        size = sum(p.numel() for p in model.parameters())
        sent = told["sent"] / size / run["steps"]
    with torch.no_grad():
        loss = task.held_out_loss(model.eval())
    seconds = round(time.perf_counter() - began, 1)
    return {**run, "loss": loss, "ratio": max(ratio), "bytes": sent, "seconds": seconds}


def report(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    keys = ("task", "steps", "ranks", "lr", "schedule", "seed")
    dense = {tuple(r[k] for k in keys): r for r in rows if r["method"] == "dense"}
    lines = [
        "# The one line under every schedule: AdamW",
        "",
        "Held-out loss relative to dense AdamW's at the same rate and schedule; mean and deviation "
        "over seeds. Made by `benchmarks/schedules.py`, on virtual ranks. The first rate of a task is "
        'the best of several for dense AdamW with cosine decay to a tenth. "updates" is the default, '
        '"two-bits" that of models from a million parameters: two bits on every second step. The other '
        "rows of exchanged updates have one bit on every second step, but for what their names say. "
        'All but "updates", "two-bits" and "two-bits-clip" were measured when a matrix had one share '
        'of noise for all of its rows, "..., whole" with otherwise the same settings as the first two. '
        '"..., at once" was measured when each local step was lengthened at once, and not before the '
        "exchange. "
        '"two-bits-clip" clips a rank\'s gradient to the root of P times the norm of dense training.',
        "",
        "| task | steps | ranks | rate | schedule | method | seeds | dense | over dense "
        "| abs(m) / sqrt(v) | bytes per parameter and step |",
        "|---|---:|---:|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    together: dict[tuple[Any, ...], list[float]] = {}
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["method"] != "dense" and tuple(row[k] for k in keys) in dense:
            cells.setdefault((*(row[k] for k in keys[:-1]), row["method"]), []).append(row)
    for cell, found in sorted(cells.items(), key=lambda item: str(item[0])):
        others = [dense[(*cell[:-1], row["seed"])]["loss"] for row in found]
        gaps = [100 * (row["loss"] / o - 1) for row, o in zip(found, others, strict=True)]
        spread = f" ± {stdev(gaps):.1f}" if len(gaps) > 1 else ""
        task, steps, ranks, lr, schedule, method = cell
        together.setdefault((task, steps, method), []).extend(gaps)
        lines.append(
            f"| {task} | {steps} | {ranks} | {lr:g} | {schedule} | {method} | {len(found)} "
            f"| {fmean(others):.4g} | {fmean(gaps):+.1f}{spread} % "
            f"| {max(row['ratio'] for row in found):.2f} | {fmean(row['bytes'] for row in found):.3f} |"
        )
    lines += [
        "",
        "All rates, schedules and seeds of a task together: mean and standard error, and the worst run. "
        "Where single runs differ by 20 %, as those of the ResNet, only these means decide.",
        "",
        "| task | steps | method | runs | over dense | worst |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for (task, steps, method), gaps in sorted(together.items()):
        error = f" ± {stdev(gaps) / math.sqrt(len(gaps)):.1f}" if len(gaps) > 1 else ""
        lines.append(
            f"| {task} | {steps} | {method} | {len(gaps)} | {fmean(gaps):+.1f}{error} % "
            f"| {max(gaps):+.1f} % |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Make the missing runs, then write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--tasks", type=words, default=["torch-100k", "bytes-100k", "regression"])
    parser.add_argument("--schedules", type=words, default=list(SCHEDULES))
    parser.add_argument(
        "--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[1, 2, 3]
    )
    parser.add_argument(
        "--rates", type=int, default=3, help="how many of the task's, the best first"
    )
    parser.add_argument("--methods", type=words, default=["updates"], help=", ".join(METHODS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = OUT.with_suffix("") / "results.jsonl"
    path.parent.mkdir(exist_ok=True)
    for seed in [] if given.report else given.seeds:
        for schedule in given.schedules:
            for task in given.tasks:
                for lr in TASKS[task][1][: given.rates]:
                    for method in ("dense", *given.methods):
                        run = {"task": task, "steps": given.steps, "ranks": given.ranks, "lr": lr}
                        run |= {"schedule": schedule, "seed": seed, "method": method}
                        lines = path.read_text().splitlines() if path.exists() else []
                        if any(run.items() <= json.loads(line).items() for line in lines):
                            continue
                        row = make(run)
                        with path.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                        print(
                            *run.values(), f"loss {row['loss']:.4g}, {row['seconds']} s", flush=True
                        )
    if path.exists():
        OUT.write_text(report([json.loads(line) for line in path.read_text().splitlines()]))


if __name__ == "__main__":
    main()
