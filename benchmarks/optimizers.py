"""Try ``attach`` with all optimizers, unequal data per rank, and fine-tuning, on virtual ranks.

    python benchmarks/optimizers.py --studies optimizers --seeds 1,2,3 --search
    python benchmarks/optimizers.py --report    (only writes the tables)

Every finished run is a line of ``optimizers/results.jsonl`` and is not repeated; ``optimizers.md`` is
made from these lines alone.  Optimizers that PyTorch lacks come from ``pytorch-optimizer``; without
this package, they are skipped. Results are the same on every machine with the same packages.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from schedules import TorchTask, rate_at
from virtual_updates import ONE_BIT, train_dense, train_updates

from sparsync.presets import resolve

OUT = Path(__file__).parent / "optimizers.md"
SHAPE = 32, 32, 1  # the GPT's context, width and layers, with 22 thousand parameters
STEPS, RANKS, SCHEDULE = 300, 4, "cosine-0"
FACTOR = 2.0  # ratio of two adjacent rates that are tried for dense

Made = torch.optim.Optimizer | list[torch.optim.Optimizer]


# ---- every optimizer ------------------------------------------------------------------------------


def of_torch(name: str, **options: Any) -> Callable[[nn.Module], Made]:
    """Return a factory for one of PyTorch's optimizers."""
    return lambda model: getattr(torch.optim, name)(model.parameters(), **options)


def of_package(name: str, **options: Any) -> Callable[[nn.Module], Made]:
    """Return a factory for one of ``pytorch-optimizer``'s optimizers."""

    def made(model: nn.Module) -> Made:
        import pytorch_optimizer  # type: ignore[import-not-found, unused-ignore]

        return getattr(pytorch_optimizer, name)(model.parameters(), **options)

    return made


def muon(model: nn.Module) -> Made:
    """Return Muon for the hidden matrices, scaled to AdamW's steps, and AdamW for the rest."""
    hidden = [p for name, p in model.named_parameters() if "layers" in name and p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not one for one in hidden)]
    return [
        torch.optim.Muon(hidden, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, weight_decay=0.1),
    ]


# name -> factory, and the first rate to try with dense
OPTIMIZERS: Mapping[str, tuple[Callable[[nn.Module], Made], float]] = MappingProxyType(
    {
        "AdamW": (of_torch("AdamW", weight_decay=0.1), 1.6e-2),
        "AdamW, amsgrad": (of_torch("AdamW", weight_decay=0.1, amsgrad=True), 1.6e-2),
        "NAdam": (of_torch("NAdam"), 8e-3),
        "RAdam": (of_torch("RAdam"), 6.4e-2),
        "Adamax": (of_torch("Adamax"), 1.6e-2),
        "RMSprop": (of_torch("RMSprop"), 4e-3),
        "Adagrad": (of_torch("Adagrad"), 3.2e-2),
        "Adadelta": (of_torch("Adadelta"), 4.0),
        "Adafactor": (of_torch("Adafactor"), 0.128),
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


# ---- how it is trained ----------------------------------------------------------------------------


def adamw(model: nn.Module) -> Made:
    """Return AdamW over the trained parameters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.1)


# method -> differences from ``attach``'s default
SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "32 bits": {"algorithm": "dense"},
        "2 bits": {"algorithm": resolve("quantised", bits=2, block=256)},
        "period 1": {"period": 1},
        "not corrected": {"noise_correction": False},
    }
)


def trained(
    run: Mapping[str, Any],
    task: Any,
    make_optimizer: Callable[[nn.Module], Made],
    make_model: Callable[[], nn.Module],
    *,
    ranks: int = RANKS,
    schedule: str = SCHEDULE,
    seen: Callable[[int, int], float] | None = None,
) -> float:
    """Train a run's model, dense or not; return its held-out loss."""
    arguments: tuple[Any, ...] = (
        make_model,
        make_optimizer,
        lambda model, step, rank: task.loss_of(model, run["seed"], step, rank),
        lambda step: run["lr"] * rate_at(schedule, step, STEPS),
        STEPS,
    )
    if run["method"] == "dense":
        model = train_dense(*arguments, ranks=ranks, clip=task.clip)
    else:
        settings = {**ONE_BIT, **SETTINGS.get(run["method"], {})}
        model, _ = train_updates(
            *arguments, ranks=ranks, clip=task.clip, settings=settings, seen=seen
        )
    with torch.no_grad():
        return task.held_out_loss(model.eval())


def train_optimizer(run: Mapping[str, Any]) -> float:
    """Train the GPT of torch's layers from scratch."""
    task = TorchTask(*SHAPE)
    return trained(run, task, OPTIMIZERS[run["case"]][0], lambda: task.make_model(run["seed"]))


# ---- unequal numbers ------------------------------------------------------------------------------


class Unequal(TorchTask):
    """A task in which ranks have unequal numbers of windows per step; dense averages over all."""

    def __init__(self, rows: Sequence[int], *, joined: bool) -> None:
        super().__init__(*SHAPE)
        self.rows, self.joined = rows, joined

    def loss_of(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        """Return a rank's mean loss; if ranks are joined, its part of the overall mean."""
        self.batch = self.rows[rank]
        loss = super().loss_of(model, seed, step, rank)
        return loss * (self.rows[rank] * len(self.rows) / sum(self.rows) if self.joined else 1)

    def held_out_loss(self, model: nn.Module) -> float:
        """Return the loss on batches of the usual size."""
        self.batch = 8
        return super().held_out_loss(model)


ROWS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"1 : 9": (2, 18), "1 : 99": (1, 99), "1 : 1 : 1 : 9": (2, 2, 2, 18)}
)


def train_unequal(run: Mapping[str, Any]) -> float:
    """Train ranks with unequal amounts of data; "dense" is one process with all data."""
    rows = ROWS[run["case"]]
    task = Unequal(rows, joined=run["method"] == "dense")

    def seen(_step: int, rank: int) -> float:
        return rows[rank] * SHAPE[0]

    make, counts = (lambda: task.make_model(run["seed"])), run["method"] == "contribute"
    return trained(run, task, adamw, make, ranks=len(rows), seen=seen if counts else None)


# ---- unlike data ----------------------------------------------------------------------------------


class Apart(TorchTask):
    """A task in which every rank has its own part of the text; some batches are from the whole text."""

    def __init__(self, common: float) -> None:
        super().__init__(*SHAPE, packages=("email", "pydoc_data", "json", "http"))
        self.common = common

    def loss_of(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        """Return the loss on a batch from the whole text, or from this rank's part."""
        draw = torch.Generator().manual_seed(1_000_000 * seed + 1_000 * step + rank)
        own = self.text.chunk(RANKS)[rank]
        anywhere = torch.rand((), generator=draw).item() < self.common
        return self._loss(model, self.text if anywhere else own, draw)


class Classes:
    """A small network on digits; each rank has its own classes, or all ranks have all classes."""

    clip = math.inf

    def __init__(self, *, apart: bool) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        images = torch.tensor(data.data, dtype=torch.float32) / 16
        labels = torch.tensor(data.target)
        held = torch.arange(len(labels)) % 5 == 0
        self.held_out, left = (images[held], labels[held]), (images[~held], labels[~held])
        owner = left[1] % RANKS if apart else torch.arange(len(left[1])) % RANKS
        self.own = [(left[0][owner == r], left[1][owner == r]) for r in range(RANKS)]

    def make_model(self, seed: int) -> nn.Module:
        """Return a seed's initial network."""
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def loss_of(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        """Return the loss on 16 of this rank's digits."""
        draw = torch.Generator().manual_seed(1_000_000 * seed + 1_000 * step + rank)
        images, labels = self.own[rank]
        at = torch.randint(len(labels), (16,), generator=draw)
        return nn.functional.cross_entropy(model(images[at]), labels[at])

    def held_out_loss(self, model: nn.Module) -> float:
        """Return the loss on held-out digits."""
        images, labels = self.held_out
        return nn.functional.cross_entropy(model(images), labels).item()


APART: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "text, alike": lambda: Apart(1.0),
        "text, half of each rank's from a part of its own": lambda: Apart(0.5),
        "text, each rank has a part of its own": lambda: Apart(0.0),
        "digits, alike": lambda: Classes(apart=False),
        "digits, each rank has two or three classes": lambda: Classes(apart=True),
    }
)


def train_apart(run: Mapping[str, Any]) -> float:
    """Train ranks whose data differ."""
    task = APART[run["case"]]()
    return trained(run, task, adamw, lambda: task.make_model(run["seed"]))


# ---- fine-tuning ----------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen linear layer plus the product of two narrow layers (LoRA, matrix rank 4)."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 4, bias=False)
        self.up = nn.Linear(4, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    @property
    def weight(self) -> Tensor:
        """The combined weight: without gradients, torch's encoder layers use only this attribute."""
        return self.frozen.weight + self.up.weight @ self.down.weight

    @property
    def bias(self) -> Tensor:
        """See ``weight``."""
        return self.frozen.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        return self.frozen(x) + self.up(self.down(x))


@cache
def pretrained(seed: int) -> nn.Module:
    """Return the GPT, pretrained dense on Python's sources."""
    task = TorchTask(*SHAPE)
    return train_dense(
        lambda: task.make_model(seed),
        adamw,
        lambda model, step, rank: task.loss_of(model, seed, step, rank),
        lambda step: 1.6e-2 * rate_at(SCHEDULE, step, STEPS),
        STEPS,
        ranks=RANKS,
        clip=task.clip,
    )


def tuned(case: str, seed: int) -> nn.Module:
    """Return the model from which fine-tuning starts."""
    model = copy.deepcopy(pretrained(seed))
    if case == "LoRA":
        model.requires_grad_(False)
        torch.manual_seed(seed)
        for layer in model.body.layers:
            layer.linear1, layer.linear2 = LowRank(layer.linear1), LowRank(layer.linear2)
        model.head = LowRank(model.head)
    return model


def fine_tune(run: Mapping[str, Any]) -> float:
    """Fine-tune on the text of Python's manual; "before" is the initial loss."""
    task, case = TorchTask(*SHAPE, packages=("pydoc_data",)), run["case"].split(",")[0]
    if run["method"] == "before":
        model = tuned(case, run["seed"]).eval()
        with torch.no_grad():
            return task.held_out_loss(model)
    return trained(run, task, adamw, lambda: tuned(case, run["seed"]), schedule="linear-0")


# ---- what is run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """One question, with its rows, their training, and the text of the report.

    A run is identified by a dictionary with ``study``, ``case``, ``lr``, ``seed`` and ``method``.

    Attributes:
        title: the table's title.
        cases: name of a row -> dense's rates, beginning with the usual rate.
        train: function that returns a run's held-out loss.
        methods: the methods compared; the first is "dense".
        improvement: whether the table shows shares of dense's improvement over "before".
    """

    title: str
    cases: Mapping[str, tuple[float, ...]]
    train: Callable[[Mapping[str, Any]], float]
    methods: tuple[str, ...] = ("dense", "updates")
    improvement: bool = False


def grid(first: float) -> tuple[float, ...]:
    """Return rates around ``first``."""
    return tuple(first * FACTOR**power for power in sorted(range(-4, 5), key=abs))


def is_there(study: str, case: str) -> bool:
    """Return whether an optimizer can run here; the report shows finished runs in any case."""
    own = study != "optimizers" or case in [*OPTIMIZERS][:10]
    return own or importlib.util.find_spec("pytorch_optimizer") is not None


STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        "optimizers": Study(
            "Every optimizer",
            {name: grid(at) for name, (_, at) in OPTIMIZERS.items()},
            train_optimizer,
            ("dense", "updates", "not corrected"),
        ),
        "unequal": Study(
            "Ranks with unequal amounts of data",
            dict.fromkeys(ROWS, grid(1.6e-2)),
            train_unequal,
            ("dense", "contribute", "updates"),
        ),
        "apart": Study("Ranks whose data differ", dict.fromkeys(APART, grid(8e-3)), train_apart),
        "tuning": Study(
            "Fine-tuning",
            {
                "all weights, rate 1e-3": (1e-3,),
                "all weights, rate 1e-4": (1e-4,),
                "LoRA, rate 1e-2": (1e-2,),
                "LoRA, rate 1e-3": (1e-3,),
            },
            fine_tune,
            ("dense", "updates", *SETTINGS),
            improvement=True,
        ),
    }
)


class Results:
    """The finished runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.parent.mkdir(exist_ok=True)
        text = path.read_text() if path.exists() else ""
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def loss(self, run: dict[str, Any]) -> float | None:
        """Return the loss of a finished run, or Inf if it diverged."""
        row = next((row for row in self.rows if run.items() <= row.items()), None)
        return None if row is None else math.inf if row["loss"] is None else row["loss"]

    def make(self, run: dict[str, Any]) -> float:
        """Return the loss of a run; make the run if it is missing."""
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
        return loss if math.isfinite(loss) else math.inf


def best_rate(results: Results, name: str, case: str, *, search: bool = False) -> float:
    """Return the best of the rates tried with dense, or the usual rate if there are none.

    A search starts at the usual rate and continues in either direction while the loss falls.
    """
    tried: dict[float, float] = {}
    for rate in STUDIES[name].cases[case]:
        run = {"study": name, "case": case, "lr": rate, "seed": 1, "method": "dense"}
        beside = [tried[near] for near in (rate / FACTOR, rate * FACTOR) if near in tried]
        climbs = not tried or min(beside, default=math.inf) == min(tried.values())
        loss = results.make(run) if search and climbs else results.loss(run)
        if loss is not None:
            tried[rate] = loss
    return min(tried, key=tried.__getitem__, default=STUDIES[name].cases[case][0])


def spread(values: Sequence[float], digits: int = 1, sign: str = "+") -> str:
    """Format mean and standard deviation."""
    text = f"{fmean(values):{sign}.{digits}f}"
    return text + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def row_of(results: Results, name: str, case: str) -> str:
    """Return a row of a table, or an empty string if there is nothing to compare."""
    study, lr = STUDIES[name], best_rate(results, name, case)
    found: dict[str, dict[int, float]] = {}
    for method in ("before", *study.methods):
        run = {"study": name, "case": case, "lr": lr, "method": method}
        losses = {seed: results.loss({**run, "seed": seed}) for seed in range(1, 10)}
        found[method] = {seed: loss for seed, loss in losses.items() if loss is not None}
    dense, before, cells = found["dense"], found["before"], []
    for method in study.methods[1:]:
        its = {seed: loss for seed, loss in found[method].items() if seed in dense}
        if study.improvement:
            shares = [100 * (before[s] - loss) / (before[s] - dense[s]) for s, loss in its.items()]
            cells.append(f"{spread(shares, sign='')} %" if its else "-")
        else:
            over = [100 * (loss / dense[s] - 1) for s, loss in its.items()]
            cells.append(f"{spread(over)} %" if its else "-")
    if all(cell == "-" for cell in cells):
        return ""
    mean = spread([*dense.values()], 3, "")
    return f"| {case} | {lr:g} | {len(dense)} | {mean} | {' | '.join(cells)} |"


def report(results: Results) -> str:
    """Return the page."""
    lines = [
        "# The one line with other optimizers and data",
        "",
        f"Made by `benchmarks/optimizers.py`: {STEPS} steps, {RANKS} virtual ranks unless a row states "
        "otherwise, a GPT of torch's layers with 22 thousand parameters (digits: a network of two "
        "layers), updates in one bit on every second step (half the bits of the default from a million "
        "parameters), and a rate that falls to 0. Rates are the best dense rates among those tried with "
        "the first seed. Columns show held-out loss relative to dense at the same rate, mean and "
        "deviation over seeds; for fine-tuning, they show the share of dense's improvement.",
    ]
    for name, study in STUDIES.items():
        if rows := [row for case in study.cases if (row := row_of(results, name, case))]:
            columns = ("", "rate", "seeds", *study.methods)
            lines += ["", f"## {study.title}", "", f"| {' | '.join(columns)} |"]
            lines += ["|---" + "|---:" * (len(columns) - 1) + "|", *rows]
    return "\n".join([*lines, ""])


def main() -> None:
    """Make the missing runs, then write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--studies", type=words, default=list(STUDIES))
    parser.add_argument("--cases", type=lambda text: text.split("|"), help="only these rows")
    parser.add_argument("--methods", type=words, help="only these besides dense")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[1])
    parser.add_argument("--search", action="store_true", help="find dense's best rates first")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(OUT.with_suffix("") / "results.jsonl")
    for seed in [] if given.report else given.seeds:
        for name in given.studies:
            study = STUDIES[name]
            for case in given.cases or study.cases:
                if not is_there(name, case):
                    print(f"{case}: needs the package pytorch-optimizer, so it is not run")
                    continue
                lr = best_rate(results, name, case, search=given.search)
                wanted = given.methods or study.methods[1:]
                for method in [*(["before"] if study.improvement else []), "dense", *wanted]:
                    run = {"study": name, "case": case, "lr": lr, "seed": seed, "method": method}
                    results.make(run)
    OUT.write_text(report(results))


if __name__ == "__main__":
    main()
