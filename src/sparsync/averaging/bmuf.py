"""BMUF: block momentum on the mean of the models, every ``period`` steps."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from sparsync.averaging.base import Averager, mean
from sparsync.errors import ConfigurationError
from sparsync.transports.base import Communicator

__all__ = ["Bmuf"]


@final
class Bmuf(Averager):
    """Filters the change of the mean over a block of steps: ``change = eta * change + zeta * moved``.

    ``moved`` leads from the model that the block began with to the mean at its end.  All ranks go on
    with ``begin + change``, or with Nesterov's ``begin + zeta * moved + eta * change``.  The mean
    over ranks is *not* preserved: that is the point.

    Args:
        model: as for ``Averager``.
        period: local steps in a block; ours, as ``LocalSgd``'s.
        momentum: eta in [0, 1); None: 1 - 1/world_size, the paper's.
        learning_rate: of blocks, zeta > 0; 1 is the paper's.
        nesterov: the paper's NBM rather than CBM, the classical one.
        binding: the other arguments of ``Averager``.

    Cost: one dense allreduce every ``period`` steps.
    State: in ``memory`` two vectors, ``begin`` and ``change``.
    Differs from the paper: ``finish`` leaves the mean, no filter applied, and under NBM the
    look-ahead; a block that it falls into goes on.

    Raises:
        ConfigurationError: an argument outside its range.

    Example:
        >>> averager = Bmuf(nn.Linear(2, 1), period=4)
        >>> averager.step(); averager.finish(); sorted(averager.memory)
        ['begin']

    References: Chen and Huo, "Scalable training of deep learning machines by incremental block
    training with intra-block parallel optimization and blockwise model-update filtering", ICASSP
    2016.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        period: int = 8,
        momentum: float | None = None,
        learning_rate: float = 1.0,
        nesterov: bool = False,
        **binding: Any,
    ) -> None:
        if period < 1:
            raise ConfigurationError(f"Bmuf: period is {period}; give at least 1 step")
        if momentum is not None and not 0 <= momentum < 1:
            raise ConfigurationError(f"Bmuf: momentum is {momentum}; give one in [0, 1), or None")
        if not learning_rate > 0:
            raise ConfigurationError(f"Bmuf: learning_rate is {learning_rate}; give one > 0")
        self.period, self.momentum, self.nesterov = period, momentum, nesterov
        self.learning_rate = learning_rate
        super().__init__(model, **binding)

    async def begin(self, comm: Communicator, vector: Tensor, step: int) -> None:
        """Remember what the first block begins with, unless it was loaded."""
        self.memory.setdefault("begin", vector)

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the filtered mean when the block closes, the model itself otherwise."""
        if (step + 1) % self.period:
            return vector
        momentum = 1 - 1 / comm.world_size if self.momentum is None else self.momentum
        begin = self.memory["begin"]
        moved = self.learning_rate * (await mean(comm, vector) - begin)
        change = momentum * self.memory.get("change", torch.zeros_like(begin)) + moved
        model = begin + (moved + momentum * change if self.nesterov else change)
        self.memory = {"begin": model, "change": change}
        return model
