"""What a reducer shows of its steps: to the estimate of xi, and to the log.  It changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from sparsync.collectives.base import Reduced
from sparsync.monitoring.log import Log, StepSeen
from sparsync.monitoring.xi import Measured, XiProbe
from sparsync.residual import Residual
from sparsync.sparse import Vector
from sparsync.transports.base import Communicator

__all__ = ["Monitor"]


@final
class Monitor:
    """Sees every stage of a step.

    Attributes:
        xi: what is measured, and when.
        log: takes the numbers of every step.
        selected: by every unit, in the open step.
    """

    def __init__(self, xi: XiProbe, comm: Communicator) -> None:
        self.xi, self._comm = xi, comm
        self.log = Log(None)
        self.selected: dict[int, Vector] = {}

    def accumulate(self, step: int, unit: int, start: int, gradient: Tensor) -> None:
        """See a gradient that is about to be accumulated."""
        if self.xi.due(step):
            self.xi.accumulate(step, unit, start, gradient)

    async def share(self, step: int, accumulated: Sequence[Tensor]) -> None:
        """Sum over ranks what xi needs, beside the exchange."""
        if self.xi.due(step):
            channel = self._comm.channel(len(accumulated) + 1)  # units and their shares have others
            await self.xi.share(channel, accumulated)

    def measure(
        self, step: int, reduced: Sequence[Reduced], quotas: Sequence[int]
    ) -> Measured | None:
        """Return what was measured on this step, before totals become averages; mostly None."""
        if not self.xi.due(step):
            return None
        return self.xi.measure([r.total for r in reduced], quotas, self._comm.world_size)

    def record(
        self,
        step: int,
        reduced: Sequence[Reduced],
        residuals: Sequence[Residual],
        quotas: Sequence[int],
        measured: Measured | None = None,
    ) -> None:
        """Log a step that was applied, or (nothing reduced) skipped."""
        selected = [self.selected[unit] for unit in range(len(reduced))]
        kept = [residual.value for residual in residuals]
        ledger = self._comm.ledger
        self.log.record(StepSeen(step, ledger, quotas, selected, reduced, kept, measured))
        self.selected.clear()
