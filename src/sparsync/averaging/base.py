"""The seam of model averaging: who averages models with whom, and when."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsync.state import Stateful
from sparsync.transports.base import Communicator, run

__all__ = ["Averager", "ModelAverager", "mean"]


class Averager(Stateful):
    """Averages one flat model vector per rank.  Its memory is ``self.state``."""

    @abstractmethod
    async def average(self, comm: Communicator, model: Tensor, step: int) -> Tensor:
        """Return what this rank's model becomes after local step ``step``.

        Args:
            comm: the group.
            model: `[n]`, this rank's parameters after its optimizer step; not modified.
            step: 0-based; an average closes a period p when ``(step + 1) % p == 0``.
        """

    @abstractmethod
    async def finish(self, comm: Communicator, model: Tensor) -> Tensor:
        """Return the model that all ranks share at the end of training."""


@final
class ModelAverager:
    """Applies an ``Averager`` to a module: call ``step()`` after ``optimizer.step()``.

    Args:
        model: a plain module (not DDP); its parameters are averaged in place.
        averager: who averages with whom, when.
        comm: default ``sparsync.connect()``.

    Example:
        >>> from sparsync.averaging import LocalSgd
        >>> averager = ModelAverager(nn.Linear(2, 1), LocalSgd(period=4))
        >>> averager.step(); averager.finish(); averager.state_dict()["step"]
        1
    """

    def __init__(
        self, model: nn.Module, averager: Averager, comm: Communicator | None = None
    ) -> None:
        from sparsync.api import connect

        self.model, self.averager = model, averager
        self.comm = comm or connect()
        self.steps = 0

    def step(self) -> None:
        """Average, if the averager's schedule says so; blocks until done."""
        flat = self._flat()
        averaged = run(self.averager.average(self.comm, flat, self.steps))
        if averaged is not flat:
            self._copy_back_(averaged)
        self.steps += 1
        self.comm.ledger.begin_step(self.steps)

    def finish(self) -> None:
        """Leave all replicas equal."""
        self._copy_back_(run(self.averager.finish(self.comm, self._flat())))

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the averager's state."""
        return {"step": self.steps, "averager": self.averager.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.steps = int(state["step"])
        self.averager.load_state_dict(state["averager"])

    def _flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    @torch.no_grad()
    def _copy_back_(self, flat: Tensor) -> None:
        """Write a vector into the parameters: same tensors, dtypes and strides as before."""
        sizes = [p.numel() for p in self.model.parameters()]
        pieces = torch.split(flat, sizes)
        for parameter, piece in zip(self.model.parameters(), pieces, strict=True):
            parameter.copy_(piece.view(parameter.shape))


async def mean(comm: Communicator, model: Tensor) -> Tensor:
    """Average a vector over all ranks."""
    return await comm.allreduce(model, "average") / comm.world_size
