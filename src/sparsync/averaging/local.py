"""Local SGD: ranks train alone and average their models every ``period`` steps."""

from __future__ import annotations

from typing import final

from torch import Tensor

from sparsync.averaging.base import Averager, mean
from sparsync.errors import ConfigurationError
from sparsync.transports.base import Communicator

__all__ = ["LocalSgd"]


@final
class LocalSgd(Averager):
    """Averages all models when ``(step + 1) % period == 0``.

    Cost: one dense allreduce every ``period`` steps.   State: none.
    Differs from the paper: nothing.

    References: Li et al., WAGMA-SGD, IEEE TPDS 2021, "local SGD"; Stich, ICLR 2019.
    """

    def __init__(self, period: int = 8) -> None:
        """Set the number of local steps between averages, H."""
        if period < 1:
            raise ConfigurationError(f"LocalSgd: period is {period}; give at least 1 step")
        self.period = period

    async def average(self, comm: Communicator, model: Tensor, step: int) -> Tensor:
        """Return the mean when the period closes, the model itself otherwise."""
        return await mean(comm, model) if (step + 1) % self.period == 0 else model

    async def finish(self, comm: Communicator, model: Tensor) -> Tensor:
        """Return the mean of all models."""
        return await mean(comm, model)
