"""Weigh the updates of ranks by what each has seen since its last exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from sparsync.errors import PeerError, require
from sparsync.feedback.reducer import Reducer
from sparsync.fields import Common, Each, Either, Exactly, Fields, Kind, Number
from sparsync.state import fits
from sparsync.updates.fragments import Exchange

__all__ = ["Contributions", "Weight", "contributions_kind", "shown_of"]

_KINDS: Final = ("nothing", "numbers", "tokens", "samples")
_LEAST_SHOWN: Final = (
    1e-9  # one over the weight of the only rank of very many that has seen something
)


@dataclass(frozen=True)
class Weight:
    """The weight of one rank's update in an exchange.

    Attributes:
        weight: a factor on the update; the mean over ranks is 1, or all are 0.
        ranks: as many equal ones would average as much noise away, ``(sum n)^2 / sum n^2``; 0: nobody
            has seen anything.
    """

    weight: float
    ranks: float


@final
class Contributions:
    """Counts what this rank has seen, and turns all ranks' counts n into weights of their updates.

    ::

        weight = P n / sum over ranks(n)
        accumulated = residual + weight * (how far this rank has moved)
        sum over ranks(residual + weight * moved) == total + sum over ranks(residual)

    Weights are known before anything is rounded, so what waits in a residual is a part of the average
    already, whatever other ranks see later.  (Sent with the updates and divided by afterwards, they would
    cost no round; but then what waits is divided by the numbers of the period in which it is delivered:
    after a short last batch ten times its size.)

    Whether anybody counts is found out in the first exchange; where nobody does, nothing more is sent.

    A weight above 1 makes a residual larger than the rank's own steps.  In the rank's own weights
    (``residual="weights"``) it is ``shown`` divided by that, as the steps that it has made.

    Cost: 8 bytes per fragment and rank, one round before an exchange.
    State: ``state_dict()``, of this rank.

    Attributes:
        weighs: whether ranks count; None: it is not known yet.
        ranks: see ``Weight``; of the last exchange in which anybody had seen something.
        shown: by fragment, the factor on the residual in this rank's own weights.
    """

    def __init__(self, *, weighs: bool | None = False) -> None:
        self.weighs, self.ranks = weighs, 0.0
        self._kind, self._total = 0, 0.0
        self._sent: list[float] = []  # by fragment: the total at its last exchange
        self.shown: list[float] = []

    def plan(self, fragments: int) -> None:
        """Begin with as many fragments, unless they were loaded."""
        self._sent = self._sent or [0.0] * fragments
        self.shown = self.shown or [1.0] * fragments

    def add(self, seen: float | None, tokens: float | None, samples: float | None) -> None:
        """Count what this rank's next step has seen, in one of these.

        Raises:
            ConfigurationError: not one finite number >= 0, another kind than before, or exchanges were
                made before anybody counted.
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
        """Return what this rank has seen since the last exchange of a fragment, and count from 0."""
        seen, self._sent[part] = self._total - self._sent[part], self._total
        return seen

    def drop(self) -> None:
        """Forget what was seen in steps that are taken back."""
        self._sent = [self._total] * len(self._sent)

    async def weigh(self, seen: Sequence[float], reducer: Reducer) -> list[Weight]:
        """Return the weights of fragments; all ranks call it, or none does.

        Raises:
            PeerError: ranks count different things.
        """
        if self.weighs is False:
            return [Weight(1.0, reducer.comm.world_size)] * len(seen)
        mine = torch.tensor([*seen, float(self._kind)], dtype=torch.float64)
        try:
            gathered = await reducer.channel("contributions").allgather(mine, "contributions")
        except BaseException:
            reducer.fail()
            raise
        *columns, kinds = zip(*(one.tolist() for one in gathered), strict=True)
        counted = sorted({int(kind) for kind in kinds} - {0})
        if len(counted) > 1:
            raise PeerError(
                f"contribute(): ranks count {' and '.join(_KINDS[kind] for kind in counted)}; count the "
                "same on all of them"
            )
        if self.weighs is None:
            self.weighs = bool(counted)
        if not self.weighs:
            return [Weight(1.0, reducer.comm.world_size)] * len(seen)
        own = reducer.comm.rank
        return [_weight(column, column[own]) for column in columns]

    async def weigh_(self, exchange: Exchange, moved: Tensor, reducer: Reducer) -> None:
        """Weigh how far this rank has moved, in place."""
        (its,) = await self.weigh([exchange.seen], reducer)
        exchange.weight, exchange.ranks = its.weight, its.ranks
        if its.weight != 1:
            moved.mul_(its.weight)

    async def weigh_all(self, reducer: Reducer) -> list[Weight]:
        """Return the weights of all fragments, and count from 0."""
        return await self.weigh([self.take(part) for part in range(len(self._sent))], reducer)

    def applied(self, exchange: Exchange) -> bool:
        """Take note of an exchange that is applied; return whether anybody had seen something."""
        self.shown[exchange.part] = shown_of(exchange.weight)
        self.ranks = exchange.ranks or self.ranks
        return exchange.ranks > 0

    # ---- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        named = {name.lstrip("_"): value for name, value in vars(self).items()}
        return {k: list(v) if isinstance(v, list) else v for k, v in named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was counted."""
        self.weighs, self.ranks, self._kind = state["weighs"], state["ranks"], state["kind"]
        self._total = state["total"]
        self._sent, self.shown = list(state["sent"]), list(state["shown"])


def contributions_kind(fragments: int, state: Any) -> Kind:
    """Return what every field of a saved state has to be; nothing is sent that was not counted."""
    total: Any = state.get("total") if isinstance(state, Mapping) else None
    counted = Number(0, total if fits(total, float) else math.inf)
    return Fields(
        {
            "weighs": Common(Either((Exactly(None), bool))),
            # of this rank; one that has not counted yet has no kind
            "kind": Number(0, len(_KINDS) - 1, whole=True),
            "total": Number(0),
            "sent": Each((counted,) * fragments),
            "ranks": Common(Number(0)),
            "shown": Each((Number(_LEAST_SHOWN, 1),) * fragments),
        }
    )


def shown_of(weight: float) -> float:
    """Return the factor on the residual of an update of this weight in a rank's own weights."""
    return 1 / max(weight, 1.0)


def _weight(everyones: Sequence[float], own: float) -> Weight:
    """Return the weight of a rank among all.

    Example:
        >>> _weight([1.0, 3.0], 3.0), _weight([0.0, 0.0], 0.0)
        (Weight(weight=1.5, ranks=1.6), Weight(weight=0.0, ranks=0.0))
    """
    whole, squares = math.fsum(everyones), math.fsum(n * n for n in everyones)
    if not whole:
        return Weight(0.0, 0.0)
    return Weight(len(everyones) * own / whole, whole * whole / squares)
