"""What ``attach`` returns: the handle of one model's sparse synchronisation on this rank."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from sparsync.errors import ConfigurationError
from sparsync.integrations.base import reducer_stats
from sparsync.integrations.pieces import Piece, saved_pieces
from sparsync.integrations.upkeep import Upkeep
from sparsync.integrations.verdict import Verdict
from sparsync.integrations.wires import OwnGroups
from sparsync.reducer import Reducer
from sparsync.reducer_state import reducer_state, restore_reducer
from sparsync.transports.base import Communicator, run
from sparsync.transports.engine import Engine

__all__ = ["Sync"]


class Sync(ABC):
    """The state, the thread and the groups of one model; subclasses know when gradients come.

    Args:
        reducer: of what this rank exchanges.
        groups: made for it; ``close`` ends them.
        inner: the ranks that hold the other shards or stages of this replica, if there are any.
        pieces: what part of each parameter this rank exchanges; of those left out: all of it.
    """

    def __init__(
        self,
        reducer: Reducer,
        groups: OwnGroups,
        inner: Communicator | None = None,
        pieces: Mapping[str, Piece] | None = None,
    ) -> None:
        self.reducer = reducer
        self._groups, self._inner, self._pieces = groups, inner, dict(pieces or {})
        self._verdict = None if inner is None else Verdict(inner, reducer)
        if self._verdict is not None:
            reducer.verdict = self._verdict
        self.upkeep = Upkeep()
        self._engine = Engine(reducer.algorithm.name)
        # a forgotten handle keeps neither its thread nor its sockets
        weakref.finalize(self, _release, self._engine, reducer.comm)

    @property
    def communicators(self) -> list[Communicator]:
        """The replicas, and the parts of this replica where it is divided."""
        return [self.reducer.comm, *([] if self._inner is None else [self._inner])]

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: steps, skipped steps, bytes per step and phase, residual norms.

        "inner" has the phases between shards of one replica, whose bytes count nowhere else.
        """
        stats = reducer_stats(self.reducer)
        if self._inner is not None:
            phases = self._inner.ledger.by_phase()
            stats["inner"] = {phase: traffic.as_dict() for phase, traffic in phases.items()}
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to be saved per rank; see ``load_state_dict``.

        Residuals are those of this rank's pieces of parameters; "pieces" says which (``Piece``).
        After a ``backward()`` that broke off it is the state of before that step.
        """
        if self._engine.running:
            self._engine.submit(self.reducer.refuse).result()
        state = reducer_state(self.reducer)
        return {**state, "pieces": saved_pieces(self._pieces)} if self._pieces else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where this rank's ``state_dict`` was taken, bit for bit; all ranks call it.

        What a ``backward()`` that broke off has begun is undone before.

        Raises:
            ConfigurationError: the state is of another set-up, or of other pieces of the parameters.
            PeerError: the ranks' states are of different steps, or do not fit on a rank that holds
                another part of this replica.
        """
        mine, saved = saved_pieces(self._pieces), state.get("pieces", {})
        if saved != mine:
            names = [name for name in {**mine, **saved} if mine.get(name) != saved.get(name)]
            raise ConfigurationError(
                f"the saved state has piece {saved.get(names[0])} of '{names[0]}', this rank holds "
                f"{mine.get(names[0])}; load each rank's own state into the same set-up"
            )
        self._discard()
        keep_scale = self.upkeep.follows_scale
        run(restore_reducer(self.reducer, state, keep_scale=keep_scale, parts=self._inner))
        self.upkeep.loaded()

    def close(self) -> None:
        """End the engine thread and the process groups; train with this model no more."""
        self._unhook()
        self._engine.close()
        self.reducer.comm.close()
        self._groups.close()
        self.reducer.monitor.log.close()

    def _discard(self) -> None:
        """Undo what a broken backward pass has begun."""
        self._engine.submit(self.reducer.refuse).result()

    def _land(self, jobs: Sequence[Future[None]]) -> None:
        """Wait for the exchanges of a step; if one failed, tell the other shards and stages."""
        try:
            for job in jobs:
                job.result()
        except BaseException:
            if self._verdict is not None:
                self._verdict.fail()
            raise

    @abstractmethod
    def _unhook(self) -> None:
        """Take away what calls this handle, where that can be done."""


def _release(engine: Engine, comm: Communicator) -> None:
    """Let the thread end, then close the sockets that it used."""
    engine.submit(comm.close) if engine.running else comm.close()
    engine.stop()
