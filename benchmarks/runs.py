"""Training runs, stored in a file one by one so that an interrupted table can be continued."""

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
    """Finished training runs, with their settings and results.

    Args:
        path: the JSON file; read on construction, and written after every run.
        ranks: the number of ranks in every run.
        wanted: substring of the names of the runs to make; a name contains all values of the
            specification.
        after: called after every run.
    """

    def __init__(
        self, path: Path, ranks: int, wanted: str = "", after: Callable[[], None] = lambda: None
    ) -> None:
        self.path, self.ranks, self.wanted, self.after = path, ranks, wanted, after
        self.done: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def find(self, spec: Spec) -> dict[str, Any] | None:
        """Return the run with this specification, or None."""
        return next((run for run in self.done if run["settings"] == spec), None)

    def make(self, spec: Spec, **options: Any) -> None:
        """Train, unless the run is finished or not selected.

        Args:
            spec: "algorithm", any names that begin with "part", and fields of ``TrainSettings``.
            options: further fields, which do not identify runs.
        """
        name = " ".join(f"{value}" for value in spec.values())
        if self.wanted not in name or self.find(spec):
            return
        started = time.perf_counter()
        fields = {k: v for k, v in spec.items() if k != "algorithm" and not k.startswith("part")}
        if spec["algorithm"] == "dense":
            fields.pop("density", None)  # it identifies the run, but dense has no such setting
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
        partial = self.path.with_suffix(".partial")  # an interruption here loses only one run
        partial.write_text(json.dumps(self.done, indent=1) + "\n")
        partial.replace(self.path)
        Console().print(f"{name}: eval loss {run['eval_loss']}, {run['seconds']:.0f} s")
        self.after()


def spread(values: list[float]) -> str:
    """Format the mean and the standard deviation.

    Example:
        >>> spread([1.0, 3.0]), spread([2.0])
        ('2.0000 ± 1.4142', '2.0000')
    """
    return f"{fmean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")
