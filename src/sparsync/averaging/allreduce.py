"""Allreduce-SGD in model space: all ranks average their models after every step."""

from __future__ import annotations

from typing import final

from torch import Tensor

from sparsync.averaging.base import Averager, mean
from sparsync.transports.base import Communicator

__all__ = ["AllreduceAverage"]


@final
class AllreduceAverage(Averager):
    """Averages all models on every step.

    With plain SGD from equal models this is averaging the gradients.

    Cost: one dense allreduce per step.   State: none.   Differs from the paper: nothing.

    Example:
        >>> from torch import nn
        >>> with AllreduceAverage(nn.Linear(2, 1)) as averager: averager.step()

    References: Li et al., WAGMA-SGD, IEEE TPDS 2021, "Allreduce-SGD".
    """

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the mean of all models."""
        return await mean(comm, vector)
