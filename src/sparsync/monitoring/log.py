"""The log of a training: what every step sent, selected and kept, without waiting for a device."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsync.collectives.base import Reduced
from sparsync.monitoring.sinks import Sink
from sparsync.monitoring.xi import Measured
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.ledger import STAGES, Ledger

__all__ = ["Log", "StepSeen"]


@dataclass(frozen=True, eq=False)
class StepSeen:
    """A step that has just been closed on this rank.

    Attributes:
        step: its number.
        ledger: whose current step it still is.
        quotas: k of every unit.
        selected: by every unit.
        reduced: of every unit; none if the step was skipped.
        residuals: after the step, of every unit; None stands for zeros.
        measured: of xi, if it was.
    """

    step: int
    ledger: Ledger
    quotas: Sequence[int]
    selected: Sequence[Vector] = ()
    reduced: Sequence[Reduced] = ()
    residuals: Sequence[Tensor | None] = ()
    measured: Measured | None = None


@final
class Log:
    """Hands the numbers of every step to a sink, or (None) to nobody.

    ============================  =====================================================================
    bytes_sent, bytes_received    by this rank, all that this step sent, headers included
    imbalance                     received over sent.  Over all ranks the two are equal: where ranks send
                                  alike it is this rank's load over the mean.  Absent if nothing was sent
    density                       k / n asked for
    density_local, _delivered     of what this rank selected, and of what came of it
    density_reduced               of the total
    threshold                     smallest magnitude selected; absent where all was
    residual_norm                 of what this rank has not delivered yet (2-norm)
    seconds_mask, ...             of the stages of the ledger
    skipped                       1: NaN or Inf on some rank, nothing was applied, densities are absent
    xi, signal_to_noise           if measured (``xi_period``)
    ============================  =====================================================================

    Thresholds and norms of CUDA tensors are copied while the GPU goes on, and written on a later step:
    nothing waits for it.
    """

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._seconds: Mapping[str, float] = {}
        self._pending: deque[_Pending] = deque()

    def record(self, seen: StepSeen) -> None:
        """Note a step; raises nothing of a sink's."""
        if self._sink is None:
            return
        values = {**_traffic(seen.ledger), **self._stages(seen.ledger)}
        values["skipped"] = 0.0 if seen.reduced else 1.0
        if seen.reduced:
            values.update(_densities(seen))
        if seen.measured is not None:
            measured = {"xi": seen.measured.xi, "signal_to_noise": seen.measured.signal_to_noise}
            values.update({name: x for name, x in measured.items() if math.isfinite(x)})
        sparse = [v.values for v in seen.selected if not isinstance(v, DenseVector) and v.nnz]
        thresholds = [entries.abs().min() for entries in sparse]
        kept = [residual for residual in seen.residuals if residual is not None]
        norms = [torch.linalg.vector_norm(residual) for residual in kept]
        self._pending.append(_Pending(seen.step, values, thresholds, norms))

    def write(self, *, wait: bool = False) -> None:
        """Hand on what is there, in the order of steps; ``wait`` for what is not.

        A sink that fails is warned of, and gets nothing more: training goes on.
        """
        while self._sink is not None and self._pending and self._pending[0].ready(wait=wait):
            pending = self._pending.popleft()
            try:
                self._sink.write(pending.step, pending.numbers())
            except Exception as error:
                self._sink = None
                self._pending.clear()
                warnings.warn(
                    f"the log of sparsync.attach failed at step {pending.step} and ends here; the "
                    f"step itself is whole: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        """Write the rest, and close the sink."""
        self.write(wait=True)
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()

    def _stages(self, ledger: Ledger) -> dict[str, float]:
        """Return the seconds of this step, from those of the whole run."""
        before, self._seconds = self._seconds, dict(ledger.stages)
        return {f"seconds_{s}": self._seconds.get(s, 0.0) - before.get(s, 0.0) for s in STAGES}


@final
class _Pending:
    """The numbers of one step, of which some may still be on their way from a GPU."""

    def __init__(
        self,
        step: int,
        values: Mapping[str, float],
        thresholds: Sequence[Tensor],
        norms: Sequence[Tensor],
    ) -> None:
        self.step, self._values = step, values
        self._thresholds = [number.to("cpu", non_blocking=True) for number in thresholds]
        self._norms = [number.to("cpu", non_blocking=True) for number in norms]
        devices = {number.device for number in (*thresholds, *norms) if number.is_cuda}
        self._copied = [torch.cuda.current_stream(d).record_event() for d in devices]

    def ready(self, *, wait: bool) -> bool:
        """Tell whether all numbers are there."""
        for event in self._copied if wait else ():
            event.synchronize()
        return all(event.query() for event in self._copied)

    def numbers(self) -> dict[str, float]:
        """Return all numbers, of all units together."""
        values = dict(self._values)
        if self._thresholds:
            values["threshold"] = min(map(float, self._thresholds))
        if not values["skipped"]:
            values["residual_norm"] = math.hypot(*map(float, self._norms))
        return values


def _traffic(ledger: Ledger) -> dict[str, float]:
    traffic = ledger.current_step()
    values: dict[str, float] = {"bytes_sent": traffic.sent, "bytes_received": traffic.received}
    if traffic.sent:
        values["imbalance"] = traffic.received / traffic.sent
    return values


def _densities(seen: StepSeen) -> dict[str, float]:
    size = max(sum(vector.size for vector in seen.selected), 1)
    return {
        "density": sum(seen.quotas) / size,
        "density_local": sum(vector.nnz for vector in seen.selected) / size,
        "density_delivered": sum(result.delivered.nnz for result in seen.reduced) / size,
        "density_reduced": sum(result.total.nnz for result in seen.reduced) / size,
    }
