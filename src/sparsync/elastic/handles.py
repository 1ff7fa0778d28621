"""The members that both kinds of handles have in addition where ranks come and go."""

from __future__ import annotations

from typing import Any, Protocol

from sparsync.elastic.membership import Membership

__all__ = ["carry", "last_step", "leave", "left"]

# Functions that the classes take over, and no base class: these handles have another one each, and a
# handle inherits from one class.


class _Elastic(Protocol):
    """A handle of elastic training."""

    membership: Membership


def left(sync: _Elastic) -> bool:
    """Return whether this rank has left; its program is to end."""
    return sync.membership.left


def last_step(sync: _Elastic) -> tuple[int, int, bool]:
    """Return the last step's group, its number of contributors, and whether this rank was one."""
    return sync.membership.attendance.last_step


def carry(sync: _Elastic, **named: Any) -> None:
    """Name further objects whose states a rank that joins takes over, as ``scheduler=scheduler``.

    They have ``state_dict()`` and ``load_state_dict()``; states are small (64 MiB in all), and of
    plain values and tensors.

    Raises:
        ConfigurationError: an object without one of these.
    """
    sync.membership.carry(**named)


def leave(sync: _Elastic) -> None:
    """Leave with the next two exchanges, of which the first deals the residual to others.

    SIGTERM calls it, and ends the process when this rank has ``left``.
    """
    sync.membership.leave()
