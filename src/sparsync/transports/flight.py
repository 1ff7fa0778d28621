"""Several coroutines under way at once: ``Flight``, and ``together`` for algorithms.

Whoever drives a flight blocks on its *oldest* member alone.  All ranks start their members in the
same order, so the oldest always finds its peers in the same member: there is no deadlock, even on a
transport that cannot be asked whether a message is there.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from sparsync.transports.base import Operation

__all__ = ["Flight", "together"]

T = TypeVar("T")
Program = Coroutine[Operation, None, Any]


@dataclass(eq=False)
class _Member:
    """A coroutine, the operation that it waits for, and who is to be told its end."""

    program: Program
    waits_for: Operation
    finish: Callable[[Any], None]


@final
class Flight:
    """Coroutines in the order in which they were started.

    An error of one member ends the flight: it comes out of the call that met it, and the other
    members are closed.
    """

    def __init__(self) -> None:
        self._members: list[_Member] = []

    def __len__(self) -> int:
        return len(self._members)

    @property
    def oldest(self) -> Operation:
        """The operation that the oldest member waits for."""
        return self._members[0].waits_for

    def start(self, program: Program, finish: Callable[[Any], None]) -> None:
        """Run ``program`` to its first wait; ``finish(result)`` is called at its end."""
        member = _Member(program, _Nothing(), finish)
        self._members.append(member)
        self._resume(member)

    def advance(self) -> None:
        """Take every member as far as it comes without waiting, the oldest first."""
        for member in list(self._members):
            while member in self._members and self._guarded(member.waits_for.poll, 0.0):
                self._resume(member)

    def wait(self, seconds: float) -> None:
        """Wait for the oldest operation, at most about ``seconds``; then ``advance``."""
        self._guarded(self.oldest.poll, seconds)
        self.advance()

    def close(self) -> None:
        """End every member."""
        members, self._members = self._members, []
        for member in members:
            member.program.close()

    def _resume(self, member: _Member) -> None:
        try:
            member.waits_for = self._guarded(member.program.send, None)
        except StopIteration as stop:
            self._members.remove(member)
            member.finish(stop.value)

    def _guarded(self, call: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return call(argument)
        except StopIteration:
            raise
        except BaseException:
            self.close()
            raise


@final
class _Nothing(Operation):
    """What a member waits for before it has run."""

    def wait(self) -> None:
        raise AssertionError("never waited for")


async def together(programs: Sequence[Coroutine[Operation, None, T]]) -> list[T]:
    """Run coroutines side by side, started in the order given; return their results in that order.

    Example:
        >>> from sparsync.transports.base import run
        >>> async def one(): return 1
        >>> async def two(): return 2
        >>> run(together([one(), two()]))
        [1, 2]
    """
    results: dict[int, T] = {}
    flight = Flight()
    try:
        for i, program in enumerate(programs):
            flight.start(program, lambda result, i=i: results.update({i: result}))  # type: ignore[misc]
        while flight:
            await flight.oldest
            flight.advance()
    finally:
        flight.close()
    return [results[i] for i in range(len(programs))]
