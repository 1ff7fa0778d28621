"""The weights from which training begins, after ``attach`` and after a load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from sparsync.errors import require
from sparsync.feedback.changes import Changes
from sparsync.transports.communicator import Communicator
from sparsync.updates.outer_engine import OuterEngine
from sparsync.updates.rank_state import Moments, same_moments
from sparsync.updates.ranks import UpdateRanks
from sparsync.updates.weights import ModelWeights

__all__ = ["Start"]


@final
class Start:
    """Determines, before the first step, from which weights all ranks begin.

    After ``attach``, or after the handle has loaded its state, a program may load weights, e.g. from a
    checkpoint.  All ranks must then load the same ones.  Training begins from them, because otherwise
    the difference between the loaded and the old weights would be delivered as an update.

    Attributes:
        pending: whether the first step is still to come.
    """

    def __init__(
        self, outer: OuterEngine, weights: ModelWeights, changes: Changes, ranks: UpdateRanks
    ) -> None:
        self._outer, self._weights, self._changes, self._ranks = outer, weights, changes, ranks
        self.pending = True
        self._resumed = False  # whether the handle has loaded a state
        self._noted: tuple[Tensor | None] | None = (
            None  # the result of ``loaded``, as ``note`` found it
        )
        self._moments: list[Moments] = []  # the loaded moments, until the first step after a load

    def resume(self) -> None:
        """Begin again, after the handle has loaded a state."""
        self.pending, self._resumed, self._noted = True, True, None
        self._moments = [one.state for one in self._outer.optimizers]

    def note(self) -> None:
        """Before the first forward pass, record the weights that this rank begins with.

        The record must precede the rank's first batch, because SAM changes weights, and so do layers that
        initialise themselves on the first batch.  Other ranks are asked later (``agree``), because a rank
        may run passes alone, e.g. to find its batch size.
        """
        if self.pending and (self._noted is None or self._changes.replaced()):
            self._noted = (self.loaded(),)
            self._changes.remember()

    def loaded(self) -> Tensor | None:
        """Return the weights that were loaded after ``attach`` and before the first step, or None."""
        if not self.pending:
            return None
        # the record is valid unless the program has replaced the weights since, e.g. from a checkpoint
        if self._noted is not None and not self._changes.replaced():
            return self._noted[0]
        own, shared = self._outer.read(self._weights), self._outer.memory["shared"]
        end = self._outer.layout.end
        # Buffers (from ``end`` on) are taken from the shared weights: a batch may already have changed
        # this rank's buffers, and buffers are averaged anyway.
        return torch.cat([own[:end], shared[end:]]) if self._changed(own) else None

    def agree(self, comms: Sequence[Communicator]) -> None:
        """Before the first step, begin from weights loaded after ``attach``, if all ranks loaded them.

        Every rank asks once, even if it has loaded nothing, because its peers may have loaded weights.

        Raises:
            PeerError: ranks have loaded different weights, or only some have loaded any.
        """
        since = "attach"
        if self._resumed:
            self._ranks.check_together(comms, self._check_moments)
            since = "the handle's state"
        loaded, outer = self.loaded(), self._outer
        self.pending, self._noted, self._moments, end = False, None, [], outer.layout.end
        begins = outer.memory["shared"] if loaded is None else loaded
        if self._ranks.begin_together(comms, loaded is not None, begins[:end], since):
            outer.begin_again(begins)
            self._changes.remember()

    def refuse_loaded(self) -> None:
        """Refuse weights loaded after ``attach`` if the program itself calls ``step``.

        Its first call is too late for ``agree``, because the optimizer has already changed the weights.
        """
        self.pending = False
        require(
            not self._changed(self._outer.read(self._weights)),
            "weights were loaded after attach; load them before, or give attach the optimizer",
        )

    def _check_moments(self) -> None:
        """Refuse moments that have replaced those loaded by the handle, e.g. rank 0's moments."""
        for one, loaded in zip(self._outer.optimizers, self._moments, strict=True):
            require(
                same_moments(one.state, loaded),
                f"the state of {type(one).__name__} was replaced after the handle had loaded this "
                "rank's own; load the optimizer before the handle, or leave it out (dcp.load loads in "
                "alphabetical order of the keys)",
            )

    def _changed(self, own: Tensor) -> bool:
        """Return whether this rank's weights have changed since ``attach`` or the handle's last load."""
        if self._resumed:  # the ranks' weights differ from the shared ones by design
            return self._changes.differ()
        end = self._outer.layout.end
        return not own[:end].equal(self._outer.memory["shared"][:end])
