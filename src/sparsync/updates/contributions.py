"""Weigh each rank's update by the tokens or samples that the rank has seen since the last exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from sparsync.errors import DisagreementError, require
from sparsync.feedback.reducer import Reducer
from sparsync.fields import Common, Each, Either, Exactly, Fields, Kind, Number
from sparsync.state import fits
from sparsync.updates.fragments import Exchange

__all__ = ["Contributions", "Weight", "contributions_kind", "shown_of"]

_KINDS: Final = ("nothing", "numbers", "tokens", "samples")
# The least factor ``shown`` in a saved state.  A factor is the inverse of a weight, and a weight is at
# most the number of ranks (if only one has seen any data), so a smaller factor means damage.
_LEAST_SHOWN: Final = 1e-9


@dataclass(frozen=True)
class Weight:
    """The weight of one rank's update in an exchange.

    Attributes:
        weight: a factor on the update; its mean over ranks is 1, unless all weights are 0.
        ranks: the number of equally weighted ranks whose average would be as noisy,
            ``(sum n)^2 / sum n^2``; 0 if no rank has seen any data.
    """

    weight: float
    ranks: float


@final
class Contributions:
    """Counts the samples that this rank has seen, and turns the counts n of all ranks into weights.

    ::

        weight = P n / sum over ranks(n)
        accumulated = residual + weight * (how far this rank has moved)
        sum over ranks(residual + weight * moved) == total + sum over ranks(residual)

    Weights are applied before an update is rounded, so the undelivered mass in a residual is already
    weighted, however many samples other ranks see later.  (Sending the counts along with the updates and
    dividing afterwards would save a round.  But undelivered mass would then be divided by the counts of
    the period that delivers it: after a short last batch, it could count ten times.)

    The first exchange determines whether any rank counts; if none does, no more counts are sent.  A
    ``finish`` before the first exchange determines nothing, unless a rank has counted.

    A weight above 1 makes a residual larger than the rank's own steps.  With ``residual="weights"``, the
    rank's own weights include the residual divided by this weight, so that the rank's own steps count
    once.

    Cost: one round before an exchange, with 8 bytes per fragment and rank.
    State: ``state_dict()``, of this rank.

    Attributes:
        weighs: whether ranks count; None if not known yet.
        ranks: as in ``Weight``, from the last exchange in which any rank had seen data.
        shown: for each fragment, the factor by which the residual enters this rank's own weights; 0 after
            a ``finish`` that could not deliver the residual.
    """

    def __init__(self, *, weighs: bool | None = False) -> None:
        self.weighs, self.ranks = weighs, 0.0
        # Fragments are exchanged at different times, and each counts from its own last exchange.
        # So ``_sent`` stores, for each fragment, the total at its last exchange.
        self._kind, self._total = 0, 0.0
        self._sent: list[float] = []
        self.shown: list[float] = []

    def plan(self, fragments: int) -> None:
        """Set the number of fragments, unless a state was loaded."""
        self._sent = self._sent or [0.0] * fragments
        self.shown = self.shown or [1.0] * fragments

    def add(self, seen: float | None, tokens: float | None, samples: float | None) -> None:
        """Count the tokens or samples of this rank's next step, given in exactly one argument.

        Raises:
            ConfigurationError: there is not exactly one number, or it is not finite and >= 0; the kind
                has changed; or the first call comes after an exchange.
        """
        given = [(kind, n) for kind, n in enumerate((seen, tokens, samples), 1) if n is not None]
        require(
            len(given) == 1,
            f"contribute() was given {len(given)} numbers; give one: contribute(tokens=n), samples=n, or "
            "just n",
        )
        ((kind, number),) = given
        count = float(number)
        require(
            0 <= count < math.inf,
            f"contribute({_KINDS[kind]}={count!r}); give a finite number >= 0",
        )
        require(
            self.weighs is not False,
            "contribute() was called after an exchange without it; call it before every "
            "optimizer.step(), from the first one on",
        )
        require(
            self._kind in (0, kind),
            f"contribute() was given {_KINDS[self._kind]} before and {_KINDS[kind]} now; give the same "
            "kind in every step",
        )
        self._kind, self._total = kind, self._total + count

    def take(self, part: int) -> float:
        """Return the data that this rank has counted since a fragment's last exchange; restart at 0."""
        seen, self._sent[part] = self._total - self._sent[part], self._total
        return seen

    def drop(self) -> None:
        """Forget the counts of steps that were undone."""
        self._sent = [self._total] * len(self._sent)

    async def weigh(
        self, seen: Sequence[float], reducer: Reducer, *, decides: bool = True
    ) -> list[Weight]:
        """Return this rank's weights for fragments, given its counts; this is collective.

        With ``decides``, weighing is switched off for good if no rank has counted yet.

        Raises:
            DisagreementError: ranks count different units.
        """
        if self.weighs is False:
            return [Weight(1.0, reducer.comm.world_size)] * len(seen)
        # float64 represents token counts exactly, so all ranks compute equal weights
        mine = torch.tensor([*seen, float(self._kind)], dtype=torch.float64, device="cpu")
        try:
            gathered = await reducer.channel("contributions").allgather(mine, "contributions")
        except BaseException:
            reducer.fail()  # otherwise, the other parts of this replica would wait for this part
            raise
        *columns, kinds = zip(*(one.tolist() for one in gathered), strict=True)
        # kind 0 means that the rank has not counted anything so far
        counted = sorted({int(kind) for kind in kinds} - {0})
        if len(counted) > 1:
            raise DisagreementError(
                f"contribute(): ranks count {' and '.join(_KINDS[kind] for kind in counted)}; count the "
                "same on all of them"
            )
        if self.weighs is None and (counted or decides):
            self.weighs = bool(counted)  # the same on all ranks, because all see the same counts
        if not self.weighs:
            return [Weight(1.0, reducer.comm.world_size)] * len(seen)
        own = reducer.comm.rank
        return [_weight(column, column[own]) for column in columns]

    async def weigh_(self, exchange: Exchange, reducer: Reducer) -> None:
        """Set this rank's weight in an exchange."""
        (its,) = await self.weigh([exchange.seen], reducer)
        exchange.weigh(its.weight, its.ranks)

    async def weigh_all(self, reducer: Reducer) -> list[Weight]:
        """Return this rank's weights for all fragments, and restart their counts."""
        seen = [self.take(part) for part in range(len(self._sent))]
        return await self.weigh(seen, reducer, decides=False)

    def applied(self, exchange: Exchange) -> bool:
        """Record an exchange that is applied; return whether any rank had seen data."""
        self.shown[exchange.part] = shown_of(exchange.weight)
        self.ranks = exchange.ranks or self.ranks
        return exchange.ranks > 0

    # ---- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        named = {name.lstrip("_"): value for name, value in vars(self).items()}
        return {k: list(v) if isinstance(v, list) else v for k, v in named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved counts."""
        self.weighs, self.ranks, self._kind = state["weighs"], state["ranks"], state["kind"]
        self._total = state["total"]
        self._sent, self.shown = list(state["sent"]), list(state["shown"])


def contributions_kind(fragments: int, state: Any) -> Kind:
    """Return the kind of every field of a saved state."""
    # The total at a fragment's last exchange cannot exceed the current total. If the current total is
    # damaged, any number is allowed here, so that the error names the total.
    total: Any = state.get("total") if isinstance(state, Mapping) else None
    counted = Number(0, total if fits(total, float) else math.inf)
    return Fields(
        {
            "weighs": Common(Either((Exactly(None), bool))),
            # not ``Common`` (equal on all ranks): a rank that has not counted yet has the kind 0
            "kind": Number(0, len(_KINDS) - 1, whole=True),
            "total": Number(0),
            "sent": Each((counted,) * fragments),
            "ranks": Common(Number(0)),
            "shown": Each((Either((Exactly(0.0), Number(_LEAST_SHOWN, 1))),) * fragments),
        }
    )


def shown_of(weight: float) -> float:
    """Return the factor by which the residual of an update with this weight enters the rank's weights."""
    return 1 / max(weight, 1.0)


def _weight(everyones: Sequence[float], own: float) -> Weight:
    """Return the weight of a rank, given the counts of all ranks and its own.

    Example:
        >>> _weight([1.0, 3.0], 3.0), _weight([0.0, 0.0], 0.0)
        (Weight(weight=1.5, ranks=1.6), Weight(weight=0.0, ranks=0.0))
    """
    # fsum rounds only once, so that the order of ranks does not matter
    whole, squares = math.fsum(everyones), math.fsum(n * n for n in everyones)
    if not whole:
        return Weight(0.0, 0.0)
    return Weight(len(everyones) * own / whole, whole * whole / squares)
