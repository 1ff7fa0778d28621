"""What is elastic about a handle: its rank leaves the group, and others join it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any, final

import torch

from sparsync.elastic.attendance import Attendance
from sparsync.elastic.notice import Notice
from sparsync.elastic.turns import Turns
from sparsync.errors import ConfigurationError, PeerError
from sparsync.transports.driver import Engine

__all__ = ["Membership"]


@final
class Membership:
    """One rank's membership of a group whose ranks come and go; the handle of its model holds it.

    It watches for SIGTERM, lets this rank leave, in steps of its own or without, and knows the states
    that a rank which joins takes over.

    Args:
        attendance: of this rank.
        engine: the handle's, on whose thread this rank leaves without steps of its own.
        take_part: does the others' steps, on that thread and without training, until this rank has left.
            It must not keep the handle alive.
        needs_steps: why this rank can leave in steps of its own only; empty if it can without.

    Attributes:
        turns: of the training thread's steps and a leaving.
        gone: this rank has left between two steps, and the program may not know yet.
    """

    def __init__(
        self,
        attendance: Attendance,
        engine: Engine,
        take_part: Callable[[], None],
        needs_steps: str = "",
    ) -> None:
        self.attendance, self.turns, self.gone = attendance, Turns(), False
        self._engine, self._take_part, self._needs_steps = engine, take_part, needs_steps
        self._carried: dict[str, Any] = {}
        # weakly: Python's table of signal handlers lives as long as the process, this as its model
        me = weakref.ref(self)

        def begin() -> bool:
            if (membership := me()) is not None:
                membership.leave()
            return membership is not None

        def leave(seconds: float) -> str:
            membership = me()
            return "" if membership is None else membership.leave_within(seconds)

        self._notice = Notice(begin, leave)

    def close(self) -> None:
        """Watch for SIGTERM no more, and serve no copies."""
        try:
            self._notice.close()
        finally:
            self.attendance.group.copies.close()

    # ---- for the user ------------------------------------------------------------------------------

    @property
    def left(self) -> bool:
        """Whether this rank has left; its program is to end."""
        return self.attendance.members.left

    def carry(self, **named: Any) -> None:
        """Name further objects whose states a rank that joins takes over, as ``scheduler=scheduler``.

        They have ``state_dict()`` and ``load_state_dict()``; states are small (64 MiB in all), and of
        plain values and tensors.
        """
        for name, one in named.items():
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise ConfigurationError(
                    f"{name} is {type(one).__name__}; give an object with state_dict() and "
                    "load_state_dict()"
                )
        self._carried |= named

    def leave(self) -> None:
        """Leave with the next two steps, of which the first deals the residual to others.

        SIGTERM calls it, and ends the process when this rank has left: in steps of its own, or between
        them in the others' steps.
        """
        self.attendance.members.leave()

    # ---- leaving between steps ---------------------------------------------------------------------

    def leave_within(self, seconds: float) -> str:
        """Take part in the others' steps until this rank has left, once its own step has ended.

        Returns:
            A line that says why it has not left; nothing if it has, or has met nobody yet.
        """
        until, members = time.monotonic() + seconds, self.attendance.members
        if not self.turns.begin_leaving(seconds):
            why = "a step of its own was under way"
        elif self.left or not members.attempt:
            self.turns.end_leaving()
            return ""
        elif why := self._held_up():
            self.turns.end_leaving()
        else:
            why = self._leave_alone(until)
        rest = "the others have its residual" if members.spent else "its residual is lost"
        return why and (
            f"this rank has not left within {seconds:g} s of SIGTERM ({why}); it ends, and {rest}"
        )

    def _held_up(self) -> str:
        """Say why this rank cannot leave without steps of its own, if so."""
        # the copy is brought up to date with the rates of this rank's next steps
        fetched = "another rank fetches its weights" if self.attendance.offered else ""
        return fetched or self._needs_steps

    def _leave_alone(self, until: float) -> str:
        """Leave on the engine's thread; steps wait until that is over, however long this waits.

        Returns:
            Why it has not left; nothing if it has.
        """

        def job() -> None:
            self.attendance.withdraw()
            self._take_part()
            self.gone = True

        try:
            leaving = self._engine.submit(job)
        except ConfigurationError as error:
            self.turns.end_leaving()
            return str(error)
        # not after the wait below, which may give up while the job still uses reducer and model
        leaving.add_done_callback(lambda _: self.turns.end_leaving())
        if not wait([leaving], max(until - time.monotonic(), 0)).done:
            return "the others did not take the three steps that leaving needs"
        if leaving.cancelled():
            return "its handle was closed"
        failure = leaving.exception()
        return "" if failure is None else (str(failure) or type(failure).__name__).splitlines()[0]

    # ---- for the handle, on the training thread ----------------------------------------------------

    def watch(self) -> None:
        """Take over a new handler of SIGTERM."""
        self._notice.watch()

    def ask(self) -> None:
        """Ask for the next step's quorum, unless this rank leaves."""
        self.turns.unless_leaving(self.attendance.ask)

    def check_here(self) -> None:
        """Refuse another step of a rank that has left; take over a new handler of SIGTERM."""
        self.watch()
        if self.left:
            raise PeerError("this rank has left; end it, or start another one")
        if self.attendance.members.idle:  # averages were not applied here
            raise PeerError("this rank was leaving, and that failed; end it, or start another one")

    def end_of_leaving(self) -> None:
        """End the process if this rank has left and SIGTERM has asked for that."""
        if self.left and self._notice.came:
            self._notice.pass_on()

    def told(self) -> dict[str, Any]:
        """Return the states that a rank takes over when it has caught up."""
        return {f"carried {name}": one.state_dict() for name, one in self._carried.items()}

    def take_over(
        self, extras: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Take over learning rates and the like, and the states that ``told`` returned."""
        for one, groups in zip(optimizers, extras["present"], strict=True):
            for group, its in zip(one.param_groups, groups, strict=True):
                group.update(its)
        for name, one in self._carried.items():
            if f"carried {name}" in extras:
                one.load_state_dict(extras[f"carried {name}"])
