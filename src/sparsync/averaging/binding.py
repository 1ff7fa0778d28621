"""A model as one flat vector: its parameters, and by rule its buffers and its optimizer's moments."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor, nn

from sparsync.errors import ConfigurationError
from sparsync.transports.base import Communicator

__all__ = ["Binding", "BufferRule", "MomentRule"]

BufferRule = Literal["average", "local"]
MomentRule = Literal["average", "local"]


@final
class Binding:
    """Reads a model as a vector, and writes a vector into the same tensors."""

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        buffers: BufferRule,
        optimizer: torch.optim.Optimizer | None,
        moments: MomentRule,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigurationError(
                "averaging needs models that train alone but this one is wrapped in DDP, which "
                "averages gradients; give the plain module"
            )
        self.model, self.comm = model, comm
        self.buffers, self.optimizer, self.moments = buffers, optimizer, moments

    def read(self) -> Tensor:
        """Return a new vector."""
        return torch.cat([p.detach().reshape(-1) for p in self._tensors()])

    @torch.no_grad()
    def write_(self, vector: Tensor) -> None:
        """Write a vector back: same tensors, dtypes and strides as before."""
        tensors = self._tensors()
        pieces = torch.split(vector, [t.numel() for t in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))

    async def settle(self) -> None:
        """Make equal on all ranks what did not travel with the vector."""

    def _tensors(self) -> list[Tensor]:
        return list(self.model.parameters())
