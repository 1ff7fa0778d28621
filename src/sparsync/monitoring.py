"""Observe training: a log of every step, and an estimate of xi (Assumption 1).

This module never changes a step.  Without a log and without ``xi_period``, none of its code runs.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.collectives.collective import Reduced
from sparsync.errors import ConfigurationError
from sparsync.selection.selector import mixed_seed
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.transports.ledger import STAGES
from sparsync.units import Unit

__all__ = ["Measured", "Monitor", "Sink", "XiProbe", "sink_of"]


@final
class Monitor:
    """Measures every stage of a reducer's steps, estimates xi, and writes each step's numbers to a sink.

    ============================  =====================================================================
    bytes_sent, bytes_received    bytes of this rank in this step, headers included
    imbalance                     bytes received / bytes sent: if all ranks send the same number, this
                                  rank's load relative to the mean load; absent if nothing was sent
    density                       the intended k / n
    density_local, _delivered     fraction of entries selected on this rank, and fraction delivered
    density_reduced               fraction of entries in the total
    threshold                     smallest magnitude selected; absent if all entries were selected
    residual_norm                 2-norm of everything this rank has not delivered yet
    seconds_accumulate, ...       seconds spent in each stage of the ledger
    skipped                       1 if nothing was applied because of NaN or Inf on some rank, otherwise
                                  0; if 1, densities are absent
    xi, signal_to_noise           in steps where they are measured (``xi_period``)
    ============================  =====================================================================

    Cost: with a sink, one pass over every residual.  On a GPU, the end of the step waits for this pass.
    """

    def __init__(
        self,
        comm: Communicator,
        units: Sequence[Unit],
        sink: Sink | None = None,
        xi_period: int | None = None,
        start: int = 0,
    ) -> None:
        self._ledger, self._sink = comm.ledger, sink
        self.xi = XiProbe(xi_period, units, start=start)
        self.selected: dict[int, Vector] = {}  # by unit, in the open step
        self._seconds: Mapping[str, float] = {}
        self._pending: list[tuple[int, dict[str, float]]] = []

    def record(
        self,
        step: int,
        reduced: Sequence[Reduced],
        residuals: Sequence[Tensor | None],
        quotas: Sequence[int],
        measured: Measured | None = None,
    ) -> None:
        """Record a step that was applied or, if ``reduced`` is empty, skipped.

        Call this before the ledger opens the next step.  ``residuals`` holds the residuals after the
        step, with None for zeros.
        """
        # if a state was loaded in the middle of this step, only later fragments have selected entries
        selected = [self.selected[unit] for unit in sorted(self.selected)] if reduced else []
        self.selected.clear()
        if self._sink is None:
            return
        traffic = self._ledger.current_step()
        values: dict[str, float] = {"bytes_sent": traffic.sent, "bytes_received": traffic.received}
        if traffic.sent:
            values["imbalance"] = traffic.received / traffic.sent
        before, self._seconds = self._seconds, dict(self._ledger.stages)
        for stage in STAGES:
            values[f"seconds_{stage}"] = self._seconds.get(stage, 0.0) - before.get(stage, 0.0)
        values["skipped"] = 0.0 if reduced else 1.0
        if reduced:
            size = max(sum(vector.size for vector in selected), 1)
            values["density"] = sum(quotas) / size
            values["density_local"] = sum(vector.nnz for vector in selected) / size
            values["density_delivered"] = sum(result.delivered.nnz for result in reduced) / size
            values["density_reduced"] = sum(result.total.nnz for result in reduced) / size
            norms = (torch.linalg.vector_norm(r) for r in residuals if r is not None)
            values["residual_norm"] = math.hypot(*map(float, norms))
        if measured is not None:
            numbers = {"xi": measured.xi, "signal_to_noise": measured.signal_to_noise}
            values.update({name: x for name, x in numbers.items() if math.isfinite(x)})
        sparse = [v.values for v in selected if not isinstance(v, DenseVector) and v.nnz]
        if sparse:
            values["threshold"] = min(float(entries.abs().min()) for entries in sparse)
        local = self._ledger.local_step
        self._pending.append((step if local is None else local, values))

    def write(self) -> None:
        """Write the recorded steps to the sink, in order.

        If the sink fails, a warning is issued and logging ends; training continues.
        """
        while self._pending and self._sink is not None:
            step, values = self._pending.pop(0)
            try:
                self._sink.write(step, values)
            except Exception as error:
                self._sink = None
                warnings.warn(
                    f"the log of sparsync.attach failed at step {step} and ends here; the step itself "
                    f"is whole: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        """Write the remaining steps, and close the sink."""
        self.write()
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()


# ---- where numbers go ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sink:
    """Receives the numbers of each step, in order, and is closed at the end."""

    write: Callable[[int, dict[str, float]], object]
    close: Callable[[], object] = lambda: None


def sink_of(log: Any, rank: int) -> Sink:
    """Return the sink that writes to ``log``, as given to ``attach``.

    Each rank decides for itself whether to log, and writes its own file.  Lines are appended, so a
    resumed run continues its file; if a step was repeated, its last line counts.

    Args:
        log: one of these:

            - a path that ends in ``.jsonl``, for a line of JSON per step, ``{"step": 0, "bytes_sent":
              ...}``, in ``name.rank0.jsonl``;
            - TensorBoard's ``SummaryWriter``, or any object with ``add_scalar(tag, value, step)``;
            - a W&B run, which logs the numbers together with the user's next ones;
            - an OpenTelemetry meter, whose gauges carry the attribute "rank";
            - a function of (step, values).

            Names have the form ``sparsync/threshold`` (for OpenTelemetry ``sparsync.threshold``).
        rank: rank of this process.

    Raises:
        ConfigurationError: ``log`` is none of these, or this rank cannot write to it.
    """
    if isinstance(log, str | os.PathLike) and Path(log).suffix == ".jsonl":
        path = Path(log).with_suffix(f".rank{rank}.jsonl")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # with line buffering, a step's numbers reach the file when the step ends, even if the process
            # dies in the next step
            file = path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"rank {rank}: log: cannot write '{path}' ({error.strerror}); give a path in a folder "
                "that every rank can write"
            ) from error

        def lines(step: int, values: Mapping[str, float]) -> None:
            # JSON has no Infinity: the norm of a large residual may overflow
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            file.write(json.dumps({"step": step, **finite}) + "\n")

        return Sink(lines, file.close)
    if callable(getattr(log, "add_scalar", None)):

        def scalars(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                log.add_scalar(f"sparsync/{name}", value, step)

        return Sink(scalars, getattr(log, "flush", lambda: None))  # the user closes the writer
    if callable(getattr(log, "create_gauge", None)):

        def gauges(_step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():  # the meter returns the same gauge for the same name
                log.create_gauge(f"sparsync.{name}").set(value, {"rank": rank})

        return Sink(gauges)
    # W&B: numbers are logged without ``step=`` and not committed.  If they advanced the run's step, the
    # run would reject the user's own numbers for earlier steps.
    if callable(getattr(log, "define_metric", None)):

        def metrics(step: int, values: Mapping[str, float]) -> None:
            named = {f"sparsync/{name}": value for name, value in {"step": step, **values}.items()}
            log.log(named, commit=False)

        return Sink(metrics, lambda: log.log({}))
    if callable(log):
        return Sink(log)
    raise ConfigurationError(
        f"log is {log!r}; give a path that ends in .jsonl, a SummaryWriter of TensorBoard, a run of "
        "Weights & Biases, a meter of OpenTelemetry, or a function of (step, values)"
    )


# ---- xi -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One measurement, bit-identical on all ranks.

    Attributes:
        xi: the norm of the difference between this step's average and the k largest entries of the mean
            accumulated vector, relative to the norm of the mean gradient.  A value below P is harmless
            (section 5.1).
        signal_to_noise: the squared norm of the mean gradient's expectation, divided by the squared
            norm of its noise, which comes from finite batches.  0 means only noise; infinity means no
            noise, or that world_size is 1.
    """

    xi: float
    signal_to_noise: float


@final
class XiProbe:
    """Estimates xi every ``period`` steps, from a random sample of one coordinate in ``every``.

    ::

        xi = | TopK(mean of accumulated) - average | / | mean of gradients |         (equation 5)

    ``average`` is the vector that is applied, including the errors of collective and codec.  Learning
    rates cancel.  Means and norms are taken over the sample.  It consists of one coordinate from every
    run of ``every`` elements, is the same on all ranks, and is drawn again for every measurement.

    Args:
        period: steps between measurements; None for no measurements.
        units: units of the reducer; those that are exchanged whole are left out.
        start: the first step that may be measured, after any warm-up in which everything is exchanged.
        every: length of the runs from which one element is sampled (not in the paper); 1 is exact.
        seed: seed of the samples; must be equal on all ranks.

    Cost: an allreduce of ``2 n / every + 1`` words during the exchange, every ``period`` steps.  The
    relative error of the estimate is about ``(every / k) ** 0.5``.   State: none that outlasts a step.

    References: Li & Hoefler, Ok-Topk, PPoPP 2022, section 4, Assumption 1 and Figure 5.
    """

    def __init__(
        self,
        period: int | None,
        units: Sequence[Unit],
        *,
        start: int = 0,
        every: int = 64,
        seed: int = 0,
    ) -> None:
        if period is not None and (type(period) is not int or period < 1):
            raise ConfigurationError(
                f"xi_period is {period!r}; give a whole number of steps >= 1, or None"
            )
        self.period, self.start, self.every, self.seed = period, start, every, seed
        self.sizes = [0 if unit.dense else unit.size for unit in units]
        self._step: int | None = None
        self._ranks = 1
        self._samples: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._sums: Tensor | None = None

    def due(self, step: int) -> bool:
        """Return whether xi is measured in a step."""
        return self.period is not None and step >= self.start and step % self.period == 0

    def accumulate(self, step: int, unit: int, start: int, gradient: Tensor) -> None:
        """Sample a gradient before it is accumulated; see ``Reducer.accumulate`` for the arguments."""
        if not self.due(step):
            return
        if step != self._step:
            self._open(step)
        sample = self._samples[unit]
        bounds = torch.tensor([start, start + gradient.numel()], device="cpu")
        low, high = torch.searchsorted(sample, bounds).tolist()
        here = (sample[low:high] - start).to(gradient.device, non_blocking=True)
        self._gradients[unit] = self._gradients[unit].to(gradient)
        self._gradients[unit][low:high] = gradient[here]

    async def share(self, step: int, comm: Communicator, accumulated: Sequence[Tensor]) -> None:
        """Sum the samples of accumulated vectors and gradients, and the squared norms, over ranks."""
        if not self.due(step):
            return
        self._ranks = comm.world_size
        pairs = zip(accumulated, self._samples, strict=True)
        sampled = [unit[sample.to(unit.device, non_blocking=True)] for unit, sample in pairs]
        parts = [part.to(comm.device, torch.float32) for part in (*sampled, *self._gradients)]
        squares = torch.cat(parts[len(sampled) :]).double().square().sum().float()
        self._sums = await comm.allreduce(torch.cat([*parts, squares.view(1)]), "xi")

    def measure(
        self, step: int, totals: Sequence[Vector], quotas: Sequence[int]
    ) -> Measured | None:
        """Estimate xi from the totals, which are not averaged yet.

        Return None if no measurement is due, or if all gradients are zero.
        """
        if not self.due(step):
            return None
        assert self._sums is not None, "share comes first"
        drawn = sum(sample.numel() for sample in self._samples)
        sums = self._sums.double()
        accumulated, gradients = sums[:drawn], sums[drawn:-1]
        pairs = zip(totals, self._samples, strict=True)
        lacking = -torch.cat([_at(total, sample) for total, sample in pairs]).double()
        k = sum(quota for quota, size in zip(quotas, self.sizes, strict=True) if size)
        largest = kernels.top(accumulated, math.ceil(k * drawn / max(sum(self.sizes), 1)))
        lacking[largest] += accumulated[largest]
        # sums serve as means, because the factors 1 / P cancel in equation 5
        square = _square(gradients)
        if not square > 0:
            return None
        xi = math.sqrt(_square(lacking) / square)
        return Measured(xi, _signal_to_noise(square, float(sums[-1]), self._ranks))

    def _open(self, step: int) -> None:
        """Draw the sample of a step."""
        self._step, self._sums = step, None
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, step))
        self._samples = []
        for size in self.sizes:
            runs = torch.arange(0, size, self.every, device="cpu")
            drawn = runs + torch.randint(self.every, runs.shape, generator=generator, device="cpu")
            self._samples.append(drawn[drawn < size])  # the last run may be shorter
        self._gradients = [torch.zeros(sample.shape, device="cpu") for sample in self._samples]


def _square(x: Tensor) -> float:
    """Return the squared norm, correctly rounded, so that the order of additions does not matter."""
    return math.fsum(x.square().tolist())


def _at(total: Vector, indices: Tensor) -> Tensor:
    """Return the elements of a total at ascending indices, on the CPU."""
    where = indices.to(total.values.device)
    if isinstance(total, DenseVector):
        return total.values[where].cpu()
    here = total.restrict(where)
    values = total.values.new_zeros(indices.shape)
    values[torch.searchsorted(where, here.indices)] = here.values
    return values.cpu()


def _signal_to_noise(square_of_sum: float, sum_of_squares: float, ranks: int) -> float:
    """Return ``|E g|^2 / (Var g / P)``, with unbiased estimates of both, from P independent gradients g.

    Example:
        >>> _signal_to_noise(16.0, 4.0, 4)  # four equal gradients of norm 1
        inf
    """
    mean, each = square_of_sum / ranks**2, sum_of_squares / ranks
    noise = (each - mean) / (ranks - 1) if ranks > 1 else 0.0  # Var g / P, the noise in the mean
    return max(mean - noise, 0.0) / noise if noise > 0 else math.inf
