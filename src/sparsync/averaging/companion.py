"""Averagers with an actor next to the training, which answers peers whatever its rank computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsync.averaging.base import Averager
from sparsync.errors import ConfigurationError, PeerError
from sparsync.transports.actors import Actor, Reply
from sparsync.transports.communicator import Communicator
from sparsync.transports.ledger import Ledger, Parts

__all__ = ["Accompanied", "Companion"]


class Companion(Actor):
    """An actor that books its messages; its rank takes the books over with every answer."""

    def __init__(self) -> None:
        self.ledger = Ledger()

    def post(self, dest: int, head: bytes, body: Tensor | None = None) -> None:
        """Send a head, of whole words so that values after it are aligned, and values."""
        message = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if body is not None:
            message = torch.cat([message, body.contiguous().view(torch.uint8)])
        parts = Parts(header=len(head), value=message.numel() - len(head))
        self.ledger.sent("average", message.numel(), parts)
        self.host.send(dest, message)

    def answer(self, reply: Reply, result: object) -> None:
        """Give a rank the result that it waits for."""
        traffic, self.ledger = self.ledger, Ledger()
        reply((result, traffic))

    def failure(self, peer: int, step: int, reason: str) -> PeerError:
        """Return the error of a wait for a peer that is gone."""
        where = f"rank {self.host.rank}, step {step}, phase 'average'"
        return PeerError(f"{where}: rank {peer}: {reason}")


class Accompanied(Averager):
    """Runs a companion next to this rank's training, and asks it."""

    _comm: Communicator | None = None

    def _run(self, comm: Communicator, actor: Actor) -> None:
        """Run an actor on all ranks, until the communicator is closed or given another one."""
        old = comm.companions.pop("averaging", None)
        if old is not None:
            old.close()
        self._comm = comm
        self._host = comm.companions["averaging"] = comm.host(actor)

    async def _ask(self, step: int, function: Callable[[Reply], None]) -> Any:
        """Let the actor's thread call ``function(reply)``; return what it answers.

        Raises:
            DeadlineError: that takes longer than the communicator's timeout.
        """
        if self._comm is None:
            raise ConfigurationError(
                f"{type(self).__name__}: call begin() before average() and conclude()"
            )
        where = f"rank {self._comm.rank}, step {step}: phase 'average'"
        result, traffic = await self._host.ask(function, lambda: where)
        self._comm.ledger.take(traffic)
        return result
