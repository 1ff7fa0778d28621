"""The actor that works beside a rank's training, as the rank sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from sparsync.transports.actors import Actor, Signal
from sparsync.transports.base import Communicator

__all__ = ["Companion"]

_NAME = "averaging"


@final
class Companion:
    """Runs an actor beside this rank, and calls it.

    Args:
        comm: of this rank; all ranks make one together.  It ends the actor when it is closed, or when
            it is given another one.
        actor: to run.
    """

    def __init__(self, comm: Communicator, actor: Actor) -> None:
        old = comm.companions.pop(_NAME, None)
        if old is not None:
            old.close()
        self.comm = comm
        self._host = comm.companions[_NAME] = comm.host(actor)

    def tell(self, function: Callable[[], None]) -> None:
        """Let the actor's thread call ``function``."""
        self._host.call(function)

    async def ask(self, step: int, function: Callable[[Signal], None]) -> Any:
        """Let it call ``function``, and wait until that has set the signal; return what it was set to.

        Raises:
            DeadlineError: that takes longer than the communicator's timeout.
        """
        signal = self._host.signal(lambda: f"rank {self.comm.rank}, step {step}: phase 'average'")
        self.tell(lambda: function(signal))
        await signal
        return signal.value
