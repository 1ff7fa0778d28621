"""The part of a handle that lets its rank leave the group, and helps other ranks to join."""

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
from sparsync.handle import Presence
from sparsync.transports.driver import Engine

__all__ = ["Membership"]


@final
class Membership(Presence):
    """One rank's membership in a group whose ranks may join and leave; the model's handle owns it.

    On SIGTERM or on request, it lets this rank leave, in its own training steps or between them.  It also
    holds the states that a joining rank takes over.

    Args:
        attendance: represents this rank in quorums.
        engine: the handle's engine, on whose thread this rank leaves without training steps.
        take_part: takes part in the other ranks' steps, on that thread and without training, until this
            rank has left.  It must not keep the handle alive.
        needs_steps: the reason why this rank can leave only in training steps; empty if it can also
            leave between them.

    Attributes:
        turns: prevents training steps and a departure from overlapping.
        gone: whether this rank has left between two training steps; the program may not know yet.
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
        # use a weak reference: Python's table of signal handlers lives as long as the process, and would
        # keep this object and its model alive
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
        """Stop watching for SIGTERM, and stop serving copies."""
        try:
            self._notice.close()
        finally:
            self.attendance.group.copies.close()

    # ---- for the user ------------------------------------------------------------------------------

    @property
    def left(self) -> bool:
        """Whether this rank has left; its program should then end."""
        return self.attendance.members.left

    def carry(self, **named: Any) -> None:
        """Name further objects whose states a joining rank takes over, e.g. ``scheduler=scheduler``.

        The objects need ``state_dict()`` and ``load_state_dict()``.  Their states must be small (64 MiB
        in all) and consist of plain values and tensors.
        """
        for name, one in named.items():
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise ConfigurationError(
                    f"{name} is {type(one).__name__}; give an object with state_dict() and "
                    "load_state_dict()"
                )
        self._carried |= named

    def stats(self) -> dict[str, Any]:
        """Return plain numbers under "elastic": the current members, changes, and lost residuals."""
        return {"elastic": self.attendance.members.state()}

    def leave(self) -> None:
        """Leave with the next two steps; the first of them deals this rank's residual to other ranks.

        On SIGTERM, the library calls this method, and ends the process once this rank has left.  The rank
        leaves in its own steps or, between them, in its peers' steps.
        """
        self.attendance.members.leave()

    # ---- leaving between steps ---------------------------------------------------------------------

    def leave_within(self, seconds: float) -> str:
        """Once this rank's step has ended, take part in its peers' steps until this rank has left.

        Returns:
            A line that says why this rank has not left; empty if it has left, or if it has not joined any
            other rank yet.
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
        """Return the reason why this rank cannot leave between steps, or an empty text."""
        # a rank that fetches a copy of this rank's weights needs the rates of this rank's next steps to
        # bring the copy up to date
        fetched = "another rank is fetching this rank's weights" if self.attendance.offered else ""
        return fetched or self._needs_steps

    def _leave_alone(self, until: float) -> str:
        """Leave on the engine's thread; training steps wait for this, even beyond ``until``.

        Returns:
            The reason why this rank has not left; empty if it has.
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
        # let steps proceed only when the job ends: the wait below may time out while the job still uses
        # the reducer and the model
        leaving.add_done_callback(lambda _: self.turns.end_leaving())
        if not wait([leaving], max(until - time.monotonic(), 0)).done:
            return "the others did not take the three steps that leaving needs"
        failure = leaving.exception()
        return "" if failure is None else (str(failure) or type(failure).__name__).splitlines()[0]

    # ---- for the handle, on the training thread ----------------------------------------------------

    def watch(self) -> None:
        """Install this rank's SIGTERM handler again if the program has replaced it."""
        self._notice.watch()

    def ask(self) -> None:
        """Ask for the next step's quorum, unless this rank is leaving."""
        self.turns.unless_leaving(self.attendance.ask)

    def check_here(self) -> None:
        """Refuse a further step if this rank has left; also ``watch`` for SIGTERM again."""
        self.watch()
        if self.left:
            raise PeerError("this rank has left; end it, or start another one")
        if self.attendance.members.idle:  # the averages were not applied on this rank
            raise PeerError("this rank failed to leave; end it, or start another one")

    def end_of_leaving(self) -> None:
        """End the process if this rank has left because of SIGTERM."""
        if self.left and self._notice.came:
            self._notice.pass_on()

    def told(self) -> dict[str, Any]:
        """Return the states that a joining rank takes over once it has caught up."""
        return {f"carried {name}": one.state_dict() for name, one in self._carried.items()}

    def take_over(
        self, extras: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Take over the optimizers' rates, and the states returned by ``told``."""
        for one, groups in zip(optimizers, extras["present"], strict=True):
            for group, its in zip(one.param_groups, groups, strict=True):
                group.update(its)
        for name, one in self._carried.items():
            if f"carried {name}" in extras:
                one.load_state_dict(extras[f"carried {name}"])
