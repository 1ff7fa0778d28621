"""Methods that both kinds of handles gain in elastic training."""

from __future__ import annotations

from typing import Any, Protocol

from sparsync.elastic.membership import Membership

__all__ = ["carry", "last_step", "leave", "left"]

# These are functions that the classes adopt, instead of a base class, because each of these handles
# already has one, and a handle inherits from a single class.


class _Elastic(Protocol):
    """A handle of elastic training."""

    membership: Membership


def left(sync: _Elastic) -> bool:
    """Return whether this rank has left; its program should then end."""
    return sync.membership.left


def last_step(sync: _Elastic) -> tuple[int, int, bool]:
    """Return the last step's group, its number of contributors, and whether this rank was one."""
    return sync.membership.attendance.last_step


def carry(sync: _Elastic, **named: Any) -> None:
    """Name further objects whose states a joining rank takes over, e.g. ``scheduler=scheduler``.

    They need ``state_dict()`` and ``load_state_dict()``. States must be small (64 MiB in all) and consist
    of plain values and tensors.

    Raises:
        ConfigurationError: an object lacks one of these methods.
    """
    sync.membership.carry(**named)


def leave(sync: _Elastic) -> None:
    """Leave with the next two exchanges; the first of them deals the residual to others.

    SIGTERM calls this, and ends the process once this rank has ``left``.
    """
    sync.membership.leave()
