"""D-PSGD: ranks average their models with both neighbours on a ring, after every step."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from sparsync.averaging.base import Averager
from sparsync.averaging.gossip import exchange
from sparsync.averaging.graphs import Ring
from sparsync.errors import ConfigurationError
from sparsync.transports.base import Communicator

__all__ = ["Dpsgd"]


@final
class Dpsgd(Averager):
    """Takes the mean of the own model and those of both neighbours, 1/3 each (two ranks: 1/2).

    Args:
        model: as for ``Averager``.
        mixing_steps: rounds with the neighbours per step (WAGMA-SGD, section 5.2, doubles them).
        binding: the other arguments of ``Averager``.

    Cost: ``2 mixing_steps`` messages and models sent and received per step (two ranks: half).
    State: none.
    Differs from the paper: always averages behind the update; the paper allows either order.

    Example:
        >>> import torch; from sparsync import simulate
        >>> async def program(comm):
        ...     model = torch.tensor([3.0 * comm.rank])
        ...     return (await Dpsgd().average(comm, model, step=0)).item()
        >>> simulate(program, world_size=4).results
        [4.0, 3.0, 6.0, 5.0]

    References: Lian et al., `D-PSGD <https://arxiv.org/abs/1705.09056>`_, NeurIPS 2017.
    """

    def __init__(
        self, model: nn.Module | None = None, *, mixing_steps: int = 1, **binding: Any
    ) -> None:
        if mixing_steps < 1:
            raise ConfigurationError(f"Dpsgd: mixing_steps is {mixing_steps}; give at least 1")
        self.mixing_steps = mixing_steps
        super().__init__(model, **binding)

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the mean over this rank and its neighbours."""
        for _ in range(self.mixing_steps):
            models = await exchange(comm, Ring(), vector, step, "gossip")
            total = models[0].clone()
            for theirs in models[1:]:
                total += theirs
            vector = total.div_(len(models))
        return vector
