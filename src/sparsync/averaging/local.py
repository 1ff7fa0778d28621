"""Local SGD: ranks train alone and average their models every ``period`` steps."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from sparsync.averaging.base import Averager, mean
from sparsync.errors import ConfigurationError
from sparsync.transports.base import Communicator

__all__ = ["LocalSgd"]


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

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the mean when the period closes, the model itself otherwise."""
        return await mean(comm, vector) if (step + 1) % self.period == 0 else vector
