"""Channels of one model: the one place that numbers what is in flight at the same time."""

from __future__ import annotations

from typing import final

from sparsync.transports.communicator import Communicator

__all__ = ["Channels"]


@final
class Channels:
    """Hands out the channels of a communicator: the units have the first, other exchanges the next.

    Args:
        comm: of the ranks that exchange a model.
        units: how many units they exchange.

    Example:
        >>> from sparsync import connect
        >>> Channels(connect(), units=3).xi.tag
        4
    """

    def __init__(self, comm: Communicator, units: int) -> None:
        self._comm, self._units = comm, units

    def unit(self, unit: int) -> Communicator:
        """Return the channel of a unit's exchange."""
        return self._comm.channel(unit)

    @property
    def shares(self) -> Communicator:
        """The next step's shares of k."""
        return self._comm.channel(self._units)

    @property
    def xi(self) -> Communicator:
        """The estimate of xi."""
        return self._comm.channel(self._units + 1)

    @property
    def weights(self) -> Communicator:
        """Comparisons of weights between replicas."""
        return self._comm.channel(self._units + 2)

    @property
    def used(self) -> Communicator:
        """The parameters that replicas used in a step."""
        return self._comm.channel(self._units + 3)

    @property
    def retry(self) -> Communicator:
        """The agreement to begin a step again."""
        return self._comm.channel(self._units + 4)
