"""Many trainings, one after the other, kept in a file: a table that was cut short goes on later."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from sparsync.cli.train.command import train
from sparsync.cli.train.settings import TrainSettings

__all__ = ["Runs", "spread"]

Spec = Mapping[str, Any]


class Runs:
    """Finished trainings: what was asked for, and what it gave.

    Args:
        path: the file (JSON), read now and written after every run.
        ranks: of every training.
        wanted: a part of the name of the runs to make, which is all values of the specification.
        after: called when a run has been made.
    """

    def __init__(
        self, path: Path, ranks: int, wanted: str = "", after: Callable[[], None] = lambda: None
    ) -> None:
        self.path, self.ranks, self.wanted, self.after = path, ranks, wanted, after
        self.done: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def find(self, spec: Spec) -> dict[str, Any] | None:
        """Return the run of a specification, or None."""
        return next((run for run in self.done if run["settings"] == spec), None)

    def make(self, spec: Spec, **options: Any) -> None:
        """Train, unless that is done or not wanted.

        Args:
            spec: "algorithm", names of your own that begin with "part", and fields of
                ``TrainSettings``.
            options: more fields, which do not tell runs apart.
        """
        name = " ".join(f"{value}" for value in spec.values())
        if self.wanted not in name or self.find(spec):
            return
        started = time.perf_counter()
        fields = {k: v for k, v in spec.items() if k != "algorithm" and not k.startswith("part")}
        settings = TrainSettings(ranks=self.ranks, **fields, **options)
        results = train(settings, [spec["algorithm"]])
        assert results is not None, "start this without a launcher"
        (result,) = results
        run = {
            "settings": dict(spec),
            "eval_loss": result.eval_loss if math.isfinite(result.eval_loss) else None,
            "accuracy": result.accuracy,
            "parameters": result.parameters,
            "bytes_sent_per_step_mean": fmean(result.bytes_sent),
            "replicas_equal": result.replicas_equal,
            "seconds": time.perf_counter() - started,
        }
        self.done.append(run)
        partial = self.path.with_suffix(".partial")  # who is cut short here loses one run only
        partial.write_text(json.dumps(self.done, indent=1) + "\n")
        partial.replace(self.path)
        Console().print(f"{name}: eval loss {run['eval_loss']}, {run['seconds']:.0f} s")
        self.after()


def spread(values: list[float]) -> str:
    """Write mean and standard deviation.

    Example:
        >>> spread([1.0, 3.0]), spread([2.0])
        ('2.0000 ± 1.4142', '2.0000')
    """
    return f"{fmean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")
