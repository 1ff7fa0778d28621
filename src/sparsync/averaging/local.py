"""Average all models on every step, or every ``period`` steps."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from sparsync.averaging.base import Averager, mean
from sparsync.errors import ConfigurationError
from sparsync.transports.communicator import Communicator

__all__ = ["AllreduceAverage", "LocalSgd"]


@final
class AllreduceAverage(Averager):
    """Averages all models on every step.

    With plain SGD from equal models this is averaging the gradients.

    Cost: one dense allreduce per step.   State: none.   Differs from the paper: nothing.

    Example:
        >>> with AllreduceAverage(nn.Linear(2, 1)) as averager: averager.step()

    References: Li et al., WAGMA-SGD, IEEE TPDS 2021, "Allreduce-SGD".
    """

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the mean of all models."""
        return await mean(comm, vector)


@final
class LocalSgd(Averager):
    """Averages all models when ``(step + 1) % period == 0``.

    Args:
        model: as for ``Averager``.
        period: local steps between averages, H.
        binding: the other arguments of ``Averager``.

    Cost: one dense allreduce every ``period`` steps.   State: none.
    Differs from the paper: nothing.

    Example:
        >>> averager = LocalSgd(nn.Linear(2, 1), period=4)
        >>> averager.step(); averager.finish(); averager.state_dict()["steps"]
        1

    References: Li et al., WAGMA-SGD, IEEE TPDS 2021, "local SGD"; Stich, ICLR 2019.
    """

    def __init__(self, model: nn.Module | None = None, *, period: int = 8, **binding: Any) -> None:
        if period < 1:
            raise ConfigurationError(f"LocalSgd: period is {period}; give at least 1 step")
        self.period = period
        super().__init__(model, **binding)

    def is_due(self, step: int) -> bool:
        """Tell whether the period closes with local step ``step``."""
        return (step + 1) % self.period == 0

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the mean when the period closes, the model itself otherwise."""
        return await mean(comm, vector) if self.is_due(step) else vector
