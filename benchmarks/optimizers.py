"""The one line with every optimizer, with unlike data and sizes, and in fine-tuning, on virtual ranks.

    python benchmarks/optimizers.py --studies optimizers --seeds 1,2,3
    python benchmarks/optimizers.py --report    (only writes what is there)

Every finished run is a line of ``optimizers/results.jsonl`` and is not made again; ``optimizers.md``
reads nothing else.  Optimizers that PyTorch does not have come from ``pytorch-optimizer``; without it
their rows are left out.  What comes out is the same on every machine with the same packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from schedules import TorchTask, rate_at
from virtual_updates import DEFAULT, train_dense, train_updates

OUT = Path(__file__).parent / "optimizers.md"
SHAPE = 32, 32, 1  # of the GPT: context, width, layers; 22 thousand parameters
STEPS, RANKS, SCHEDULE = 300, 4, "cosine-0"
FACTOR = 2.0  # between the rates that are tried for dense
MOST = 8  # rates on either side of the first

Made = torch.optim.Optimizer | list[torch.optim.Optimizer]


# ---- every optimizer ------------------------------------------------------------------------------


def of_torch(name: str, **options: Any) -> Callable[[nn.Module], Made]:
    """Return what makes one of PyTorch's."""
    return lambda model: getattr(torch.optim, name)(model.parameters(), **options)


def of_package(name: str, **options: Any) -> Callable[[nn.Module], Made]:
    """Return what makes one of ``pytorch-optimizer``'s."""

    def made(model: nn.Module) -> Made:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(model.parameters(), **options)

    return made


def muon(model: nn.Module) -> Made:
    """Return Muon of the hidden matrices, scaled to AdamW's steps, and AdamW of the rest."""
    hidden = [p for name, p in model.named_parameters() if "layers" in name and p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not one for one in hidden)]
    return [
        torch.optim.Muon(hidden, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, weight_decay=0.1),
    ]


# name -> what makes it, and the first rate that is tried for dense
OPTIMIZERS: Mapping[str, tuple[Callable[[nn.Module], Made], float]] = MappingProxyType(
    {
        "AdamW": (of_torch("AdamW", weight_decay=0.1), 1.6e-2),
        "AdamW, amsgrad": (of_torch("AdamW", weight_decay=0.1, amsgrad=True), 1.6e-2),
        "NAdam": (of_torch("NAdam"), 8e-3),
        "RAdam": (of_torch("RAdam"), 8e-3),
        "Adamax": (of_torch("Adamax"), 1.6e-2),
        "RMSprop": (of_torch("RMSprop"), 4e-3),
        "Adagrad": (of_torch("Adagrad"), 3.2e-2),
        "Adadelta": (of_torch("Adadelta"), 4.0),
        "Adafactor": (of_torch("Adafactor"), 1.6e-2),
        "Muon and AdamW": (muon, 1.6e-2),
        "Lion": (of_package("Lion", weight_decay=0.1), 1e-3),
        "SOAP": (of_package("SOAP"), 8e-3),
        "AdEMAMix": (of_package("AdEMAMix", weight_decay=0.1, weight_decouple=True), 4e-3),
        "ADOPT": (of_package("ADOPT", weight_decay=0.1, weight_decouple=True), 8e-3),
        "LAMB": (of_package("Lamb"), 1.6e-2),
        "AdaBelief": (of_package("AdaBelief"), 8e-3),
        "Prodigy": (of_package("Prodigy"), 1.0),
    }
)


class Study:
    """One kind of question: its runs, and what the report says about them.

    A run is a dictionary that tells it apart: ``study``, ``case``, ``lr``, ``seed``, ``method``.
    """

    methods: tuple[str, ...] = ("dense", "updates")

    def cases(self) -> list[str]:
        """Return the names of the rows."""
        raise NotImplementedError

    def first_rate(self, case: str) -> float:
        """Return the rate that is tried first for dense."""
        raise NotImplementedError

    def train(self, run: Mapping[str, Any]) -> float:
        """Return the held-out loss of a run."""
        raise NotImplementedError


def trained(
    run: Mapping[str, Any],
    task: Any,
    make_optimizer: Callable[[nn.Module], Made],
    make_model: Callable[[], nn.Module],
    *,
    schedule: str = SCHEDULE,
    ranks: int = RANKS,
    **more: Any,
) -> nn.Module:
    """Train a run's model, dense or not."""
    arguments: tuple[Any, ...] = (
        make_model,
        make_optimizer,
        lambda model, step, rank: task.loss_of(model, run["seed"], step, rank),
        lambda step: run["lr"] * rate_at(schedule, step, STEPS),
        STEPS,
    )
    if run["method"] == "dense":
        return train_dense(*arguments, ranks=ranks, clip=task.clip)
    return train_updates(*arguments, ranks=ranks, clip=task.clip, settings=DEFAULT, **more)[0]


class Optimizers(Study):
    """Every optimizer, over dense of its own kind at the same rate."""

    def cases(self) -> list[str]:
        """Return those that can be had."""
        there = importlib.util.find_spec("pytorch_optimizer") is not None
        own = [*OPTIMIZERS][:10]
        return [*OPTIMIZERS] if there else own

    def first_rate(self, case: str) -> float:
        """Return a usual one."""
        return OPTIMIZERS[case][1]

    def train(self, run: Mapping[str, Any]) -> float:
        """Train the GPT of torch's layers from its beginning."""
        task = TorchTask(*SHAPE)
        model = trained(run, task, OPTIMIZERS[run["case"]][0], lambda: task.make_model(run["seed"]))
        return held_out(task, model)


@torch.no_grad()
def held_out(task: Any, model: nn.Module) -> float:
    """Return a model's loss on text that is not trained on."""
    return task.held_out_loss(model.eval())


# ---- what is run ----------------------------------------------------------------------------------


STUDIES: Mapping[str, Study] = MappingProxyType({"optimizers": Optimizers()})


class Results:
    """The finished runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.parent.mkdir(exist_ok=True)
        text = path.read_text() if path.exists() else ""
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def loss(self, run: dict[str, Any]) -> float | None:
        """Return the loss of a run that is finished; Inf where it has diverged."""
        found = (row for row in self.rows if run.items() <= row.items())
        row = next(found, None)
        return None if row is None else math.inf if row["loss"] is None else row["loss"]

    def make(self, run: dict[str, Any]) -> float:
        """Return the loss of a run, which is made unless it is there."""
        if (known := self.loss(run)) is not None:
            return known
        began = time.perf_counter()
        loss = STUDIES[run["study"]].train(run)
        row = {**run, "loss": loss if math.isfinite(loss) else None}
        row["seconds"] = round(time.perf_counter() - began, 1)
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(*run.values(), f"loss {loss:.4g}, {row['seconds']} s", flush=True)
        return self.loss(run) or 0.0


def best_rate(study: str, case: str, loss_at: Callable[[dict[str, Any]], float | None]) -> float:
    """Return the rate at which dense is best, of powers of ``FACTOR`` times the first; NaN: unknown.

    Climbs from the first: to either side while the loss falls.
    """
    first = STUDIES[study].first_rate(case)

    def loss(lr: float) -> float:
        run = {"study": study, "case": case, "lr": lr, "seed": 1, "method": "dense"}
        known = loss_at(run)
        return math.nan if known is None else known

    best, lowest = first, loss(first)
    for factor in (1 / FACTOR, FACTOR):
        at = first
        for _ in range(MOST):
            at *= factor
            if math.isnan(here := loss(at)):
                return math.nan
            if here >= lowest:
                break
            best, lowest = at, here
    return best if lowest < math.inf else math.nan


def report(results: Results) -> str:
    """Return the page."""
    lines = ["# The one line with every optimizer", ""]
    for name, study in STUDIES.items():
        lines += [
            "| optimizer | dense's best rate | seeds | dense | over dense | at half the rate |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for case in study.cases():
            best = best_rate(name, case, results.loss)
            if not math.isnan(best):
                lines.append(
                    f"| {case} | {best:g} | " + " | ".join(cells(results, name, case, best))
                )
    return "\n".join([*lines, ""])


def gaps(results: Results, study: str, case: str, lr: float) -> Iterator[tuple[float, float]]:
    """Yield dense's loss and the one line's, for every seed of which there are both."""
    for seed in range(1, 10):
        run = {"study": study, "case": case, "lr": lr, "seed": seed}
        dense, other = (results.loss({**run, "method": its}) for its in ("dense", "updates"))
        if dense is not None and other is not None:
            yield dense, other


def spread(values: list[float]) -> str:
    """Write percentages: mean and deviation."""
    text = f"{fmean(values):+.1f}" if values else "-"
    return text + (f" ± {stdev(values):.1f}" if len(values) > 1 else "") + (" %" if values else "")


def cells(results: Results, study: str, case: str, best: float) -> list[str]:
    """Return the cells of a row."""
    found = list(gaps(results, study, case, best))
    half = [100 * (other / dense - 1) for dense, other in gaps(results, study, case, best / FACTOR)]
    over = [100 * (other / dense - 1) for dense, other in found]
    mean = f"{fmean(dense for dense, _ in found):.3f}" if found else "-"
    return [str(len(found)), mean, spread(over), spread(half) + " |"]


def main() -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--studies", type=words, default=list(STUDIES))
    parser.add_argument("--cases", type=words, help="only these rows")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[1])
    parser.add_argument(
        "--rates", type=int, default=2, help="1: dense's best one; 2: half of it, too"
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(OUT.with_suffix("") / "results.jsonl")
    for seed in [] if given.report else given.seeds:
        for name in given.studies:
            study = STUDIES[name]
            for case in given.cases or study.cases():
                best = best_rate(name, case, results.make)
                for lr in [best, best / FACTOR][: given.rates]:
                    for method in study.methods:
                        results.make(
                            {"study": name, "case": case, "lr": lr, "seed": seed, "method": method}
                        )
    OUT.write_text(report(results))


if __name__ == "__main__":
    main()
