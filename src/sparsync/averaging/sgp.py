"""SGP, stochastic gradient push: ranks push shares of their models along a directed graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsync.averaging.base import Averager, mean
from sparsync.averaging.gossip import exchange
from sparsync.averaging.graphs import Exponential, Graph
from sparsync.transports.base import Communicator

__all__ = ["Sgp", "SgpState"]

_WEIGHT_BYTES = 8  # a float64 in front of every message


@dataclass(frozen=True)
class SgpState:
    """What SGP keeps.

    Attributes:
        weight: the push-sum weight w of this rank; they sum to world_size.
    """

    weight: float = 1.0


@final
class Sgp(Averager):
    """Pushes equal shares of the numerator x and of the weight w; the model is z = x / w.

    Updates enter x as they are, so that the mean over ranks moves by the mean of the updates whatever
    the weights are: behind one, ``x = w z + (model - z)``.

    Args:
        model: as for ``Averager``.
        neighbours: ranks pushed to per step, on the directed exponential graph.
        graph: another graph in its place, any that stays connected; neighbours may be unequally many.
        binding: the other arguments of ``Averager``.

    Cost: ``neighbours`` messages of a model and 8 bytes, sent and received per step.
    State: ``weight``; in ``memory`` the last model z while w is not 1 (on the exponential graph it is
    1, to rounding, on every step).
    Differs from the paper: nothing is overlapped.

    Raises:
        ConfigurationError: ``neighbours < 1``.

    Example:
        >>> from sparsync import simulate
        >>> async def program(comm):
        ...     averager, model = Sgp(), torch.tensor([2.0 * comm.rank])
        ...     for step in range(2): model = await averager.average(comm, model, step)
        ...     return model.item()
        >>> simulate(program, world_size=4).results
        [3.0, 3.0, 3.0, 3.0]

    References: Assran et al., `Stochastic Gradient Push <https://arxiv.org/abs/1811.10792>`_,
    ICML 2019, Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        neighbours: int = 1,
        graph: Graph | None = None,
        **binding: Any,
    ) -> None:
        self.neighbours = neighbours
        self.graph = graph or Exponential(neighbours)
        self.state = SgpState()
        super().__init__(model, **binding)

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return z behind this step's pushes."""
        share = 1 / (1 + len(self.graph.neighbours(comm.rank, comm.world_size, step)))
        weight = torch.tensor([share * self.state.weight], dtype=torch.float64)
        parts = [t.view(torch.uint8) for t in (weight.to(vector.device), share * self._x(vector))]
        messages = await exchange(comm, self.graph, torch.cat(parts), step, "gossip")
        total, weight_total = torch.zeros_like(vector), 0.0
        for message in messages:
            weight_total += message[:_WEIGHT_BYTES].view(torch.float64).item()
            total += message[_WEIGHT_BYTES:].view(vector.dtype)
        return self._keep(weight_total, total.div_(weight_total))

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the sum of all x over the sum of all w, which is world_size; weights start anew."""
        return self._keep(1.0, await mean(comm, self._x(vector)))

    def _x(self, vector: Tensor) -> Tensor:
        """Return the numerator behind the update that made z this vector."""
        z = self.memory.get("model")
        return vector if z is None else vector + (self.state.weight - 1) * z

    def _keep(self, weight: float, z: Tensor) -> Tensor:
        self.state = SgpState(weight)
        self.memory = {} if weight == 1 else {"model": z}
        return z
