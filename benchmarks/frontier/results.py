"""Store finished runs, so that none is repeated, and tune methods."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from frontier.methods import METHODS
from frontier.training import Run
from sparsync.cli.launch import RankError
from sparsync.cli.output import to_json

Row = dict[str, Any]


class Results:
    """The file of finished runs.

    Args:
        path: the file; each line is a run in JSON, the fields of ``Run`` and then the measurements.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def rows(self) -> list[Row]:
        """All finished runs, read on each access because several commands may write to the file."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text("utf-8").splitlines()]

    def get(self, run: Run) -> Row:
        """Return the row of a run; make the run if it is missing.

        A run whose ranks stopped because of NaN or Inf has no loss.
        """
        asked = json.loads(json.dumps(asdict(run)))
        for row in self.rows:
            if asked.items() <= row.items():
                return row
        try:
            measured = run.make(name_of(run))
        except RankError as error:
            if "NonFinite" not in str(error):
                raise
            measured = {"loss": None, "diverged": str(error).splitlines()[0]}
        row = asked | json.loads(to_json(measured))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def tune(self, run: Run, rates: Sequence[float], seeds: Sequence[int], *, knobs: bool) -> None:
        """Find the best rate, then the best knobs, with the first seed; then run the other seeds.

        All methods try equally many rates, and equally many values of their two knobs.
        """
        best = replace(run, seed=seeds[0], knobs=METHODS[run.method].untuned)
        best = self._best(replace(best, lr=rate) for rate in rates)
        for knob, values in METHODS[run.method].knobs.items() if knobs else ():
            best = self._best(replace(best, knobs={**best.knobs, knob: value}) for value in values)
        for seed in seeds[1:]:
            self.get(replace(best, seed=seed))

    def _best(self, runs: Iterable[Run]) -> Run:
        return min(runs, key=lambda run: loss_of(self.get(run)))

    def time(self, run: Run, lab: str, steps: int) -> None:
        """Measure a method's seconds and bytes in the lab, with its best settings.

        These runs are short: they consist of complete periods and a dense phase of 2 steps, from
        which the report extrapolates.
        """
        method, same = METHODS[run.method], comparable(self.rows, run)
        won = chosen(same)[0] if same else {"lr": run.lr, "knobs": method.untuned}
        knobs = {**won["knobs"]}
        period = {**method.settings, **knobs}.get("period", 1)
        steps = -(-steps // period) * period
        knobs |= {
            name: value for name, value in (("start", 2), ("warmup", 2 / steps)) if knobs.get(name)
        }
        self.get(replace(run, lr=won["lr"], knobs=knobs, lab=lab, steps=steps))


def name_of(run: Run) -> str:
    """Return a run's name for the progress display."""
    knobs = "".join(f" {knob}={value}" for knob, value in run.knobs.items())
    lab = f" at {run.lab}" if run.lab else ""
    return f"{run.task} {run.method} {run.optimizer} lr={run.lr:g}{knobs} seed={run.seed}{lab}"


def loss_of(row: Row) -> float:
    """Return the held-out loss, which is infinite if training diverged."""
    return math.inf if row["loss"] is None else float(row["loss"])


def comparable(rows: Iterable[Row], run: Run) -> list[Row]:
    """Return the rows outside the lab that differ from ``run`` only in tuned settings or the seed."""
    tuned = {"lr", "knobs", "seed"}
    asked = {name: value for name, value in asdict(run).items() if name not in tuned}
    return [row for row in rows if asked.items() <= row.items()]


def settings_of(row: Row) -> str:
    """Return the tuned settings as a string for comparison."""
    return json.dumps([row["lr"], row["knobs"]], sort_keys=True)


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the settings with the smallest loss for the first seed, in order of seeds."""
    first = min(row["seed"] for row in rows)
    best = min((row for row in rows if row["seed"] == first), key=loss_of)
    same = [row for row in rows if settings_of(row) == settings_of(best)]
    return sorted(same, key=lambda row: row["seed"])
