"""Call the actor that runs next to a rank's training, and wait for its reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from sparsync.transports.actors import Actor, Reply
from sparsync.transports.communicator import Communicator

__all__ = ["Companion"]


@final
class Companion:
    """Runs an actor next to this rank's training, and calls it.

    Args:
        comm: of this rank; all ranks make one together.  It ends the actor when it is closed, or when
            it is given another one.
        actor: to run.
    """

    def __init__(self, comm: Communicator, actor: Actor) -> None:
        old = comm.companions.pop("averaging", None)
        if old is not None:
            old.close()
        self.comm = comm
        self._host = comm.companions["averaging"] = comm.host(actor)

    def tell(self, function: Callable[[], None]) -> None:
        """Let the actor's thread call ``function``."""
        self._host.call(function)

    async def ask(self, step: int, function: Callable[[Reply], None]) -> Any:
        """Let it call ``function(reply)``; wait for the reply and return it.

        Raises:
            DeadlineError: that takes longer than the communicator's timeout.
        """
        where = f"rank {self.comm.rank}, step {step}: phase 'average'"
        return await self._host.ask(function, lambda: where)
