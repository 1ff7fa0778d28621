"""One decision for all parts of a model: shards, stages and what else holds other parameters.

Ranks that exchange with each other see the same totals and decide alike without a word.  Ranks that
hold other parts of the same replica do not: if one part refuses a step, all must.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, final

import torch

from sparsync.errors import CommunicationError, PeerError
from sparsync.reducer import Reducer
from sparsync.transports.base import Communicator, run

__all__ = ["Verdict"]

_NAME_BYTES: Final = 120  # of a parameter's name that travel
_FINE, _BROKEN, _FAILED = 0, 1, 2


@final
class Verdict:
    """Asks the other parts of this replica before a step is committed.

    Args:
        parts: the ranks that hold them, this one included.
        reducer: of this part.

    Attributes:
        carries: more bytes for the other parts; as many on each, all the time.
        heard: what the parts' last messages carried.

    Cost: an allgather of 121 bytes and what is carried per part, once per step.
    """

    def __init__(self, parts: Communicator, reducer: Reducer) -> None:
        self._parts, self._reducer = parts, reducer
        self.carries = b""
        self.heard: list[bytes] = []

    def __call__(self, broken: str | None) -> str | None:
        """Return the name of a parameter that is not finite, on whatever part; None: all are.

        Raises:
            PeerError: the exchange of another part failed.
        """
        answers = self._ask(_FINE if broken is None else _BROKEN, broken or "")
        for rank, (outcome, name) in enumerate(answers):
            if outcome == _FAILED:
                me, step = self._reducer.comm.rank, self._reducer.step
                raise PeerError(
                    f"rank {me}, step {step}: the exchange of part {rank} of this replica failed, its "
                    "own error says why; no part applied the step"
                )
            if outcome == _BROKEN and broken is None:
                broken = name
        return broken

    def fail(self) -> None:
        """Tell the other parts that this one's exchange failed, so that none commits or waits."""
        with suppress(CommunicationError):  # they may be gone, too: the first error counts
            self._ask(_FAILED, "")

    def _ask(self, outcome: int, name: str) -> list[tuple[int, str]]:
        self._parts.ledger.begin_step(self._reducer.step)
        text = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        mine = torch.tensor([outcome, *text, *self.carries], dtype=torch.uint8)
        messages = [
            bytes(theirs.tolist()) for theirs in run(self._parts.allgather(mine, "verdict"))
        ]
        self.heard = [message[1 + _NAME_BYTES :] for message in messages]
        return [_answer(message) for message in messages]


def _answer(message: bytes) -> tuple[int, str]:
    text = message[1 : 1 + _NAME_BYTES]
    return message[0], text.rstrip(b"\0").decode(errors="ignore")
