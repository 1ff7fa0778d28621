"""``Machine``: the seconds that links and ranks need per message, byte, element and entry."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sparsync.errors import ConfigurationError, require

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """The seconds per unit of all parts of an exchange, measured by calibration or given.

    The defaults for the ranks' work were measured on one core with the native kernels
    (``sparsync doctor``); the defaults for the links are the same as in ``Links``.

    Attributes:
        alpha: latency in seconds per message, including the work at both ends.
        beta: seconds per byte, on each port.
        gamma: seconds per byte of dense sums.
        select: seconds per element for accumulating and selecting.
        encode: seconds per packed entry.
        decode: seconds per entry for unpacking and merging.
        distance: the part of alpha, in seconds, for which a message is in flight.  Messages that are sent
            together share this part; the rest of alpha counts for each of them.
        turn: seconds lost whenever a rank has finished work and waits for other ranks' entries: one of
            the system's time slices if there are more ranks than cores, 0 if each rank has its own core.

    Example:
        >>> gigabit = Machine(alpha=50e-6, beta=8e-9)
        >>> Machine.from_dict(gigabit.as_dict()) == gigabit
        True
    """

    alpha: float = 50e-6
    beta: float = 8e-9
    gamma: float = 0.16e-9
    select: float = 1.1e-9
    encode: float = 3e-9
    decode: float = 6e-9
    turn: float = 0.0
    distance: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            fits = isinstance(value, int | float) and 0 <= value < math.inf
            require(fits, f"Machine: {name} is {value!r}; give seconds >= 0")
        shares = self.distance <= self.alpha
        require(
            shares, f"Machine: distance is {self.distance!r}; give at most alpha ({self.alpha!r})"
        )

    def as_dict(self) -> dict[str, float]:
        """Return the fields as plain numbers, by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Machine:
        """Return the machine described by a result of ``as_dict``; missing numbers get defaults.

        Raises:
            ConfigurationError: a name is unknown, or a number is invalid.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        require(not unknown, f"Machine has no {', '.join(unknown)}; it has {', '.join(known)}")
        return cls(**given)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Read the ``"machine"`` entry of a report written by ``sparsync doctor --json``.

        Raises:
            ConfigurationError: the text is not such a report.
        """
        try:
            machine = dict(json.loads(text)["machine"])
        # deeply nested brackets raise a RecursionError
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                'it describes no machine; give a file that "sparsync doctor --json FILE" wrote'
            ) from error
        return cls.from_dict(machine)
