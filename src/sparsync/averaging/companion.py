"""An averager whose actor runs next to this rank's training, and answers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsync.averaging.base import Averager
from sparsync.errors import ConfigurationError
from sparsync.transports.actors import Actor, Reply
from sparsync.transports.communicator import Communicator

__all__ = ["Accompanied"]


class Accompanied(Averager):
    """Runs an actor next to this rank's training, and calls it."""

    _comm: Communicator | None = None

    def _run(self, comm: Communicator, actor: Actor) -> None:
        """Run an actor on all ranks, until the communicator is closed or given another one."""
        old = comm.companions.pop("averaging", None)
        if old is not None:
            old.close()
        self._comm = comm
        self._host = comm.companions["averaging"] = comm.host(actor)

    async def _ask(self, step: int, function: Callable[[Reply], None]) -> Any:
        """Let the actor's thread call ``function(reply)``; wait for the reply and return it.

        Raises:
            DeadlineError: that takes longer than the communicator's timeout.
        """
        if self._comm is None:
            raise ConfigurationError(
                f"{type(self).__name__}: call begin() before average() and conclude()"
            )
        where = f"rank {self._comm.rank}, step {step}: phase 'average'"
        return await self._host.ask(function, lambda: where)
