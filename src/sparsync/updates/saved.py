"""Schemas of the saved states of outer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparsync.fields import Common, Each, Exactly, Fields, Kind, Number, Plain, Values
from sparsync.state import fits
from sparsync.updates.contributions import contributions_kind
from sparsync.updates.fragments import Layout
from sparsync.updates.periods import AdaptivePeriod

__all__ = ["outer_kinds"]


def outer_kinds(
    state: Mapping[str, Any],
    layout: Layout,
    known: Mapping[str, Tensor],
    *,
    fragments: int,
    momentum: bool,
    rule: AdaptivePeriod | None,
) -> dict[str, Kind]:
    """Return the kinds of the fields that an ``OuterStep`` saves in addition to an averager's fields.

    Sizes are taken from the live vectors.  Before the first step there are no live vectors; sizes are
    then taken from the saved vector, which is compared with the model when the first step begins.

    Args:
        state: the saved state.  Only counts and the progress of its exchanges are taken from it.
        layout: the layout of the live vectors; it has no fragments before the first step.
        known: the live vectors.
        fragments: the configured number of fragments.
        momentum: whether the outer step has momentum, so that it may have saved a velocity.
        rule: the rule of an adaptive period.
    """
    # Any part of the state may be damaged, so no field is used before its type is tested.  Here, a field
    # of the wrong type counts as empty; the check against these kinds then names it in the error.
    shared = known.get("shared", _shared_in(state))
    like = None if shared is None else (tuple(shared.shape), shared.dtype)
    vector: Kind = Plain() if like is None else Values(*like)
    planned = layout.fragments and like is not None
    velocity: Kind = Values((layout.end,), like[1]) if like and planned else Plain()
    vectors: dict[str, Kind] = {"shared": Common(vector)}
    moving: dict[str, Kind] = {"momentum": Common(velocity)} if momentum else {}
    # a state saved before the first step may lack some vectors, so all of them are optional
    if state.get("reducer") is None:
        vectors, moving = {}, {**vectors, **moving}
    sent = state.get("sent")
    count = len(layout.fragments) or (len(sent) if isinstance(sent, list | tuple) else 0)
    dtype = None if like is None else like[1]
    under_way = [_exchange_kind(layout, dtype, fragments, one) for one in _exchanges(state)]
    kinds: dict[str, Kind] = {
        "memory": Fields(vectors, moving),
        "state": Fields({"refused": Common(Number(0, whole=True))}),
        "reducer": object,  # checked by ``parse_state``, against the live reducer
        "under_way": Each(tuple(under_way)),
        "sent": Each((Common(Number(-1, whole=True)),) * count),
        "contributions": contributions_kind(count, state.get("contributions")),
    }
    if rule is not None:
        kinds["present_period"] = Common(Number(rule.least, rule.most, whole=True))
    return kinds


def _shared_in(state: Mapping[str, Any]) -> Tensor | None:
    memory = state.get("memory")
    shared = memory.get("shared") if isinstance(memory, Mapping) else None
    return shared if isinstance(shared, Tensor) else None


def _exchanges(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the saved exchanges in flight; a malformed exchange counts as one without fields."""
    found = state.get("under_way")
    listed = found if isinstance(found, list | tuple) else ()
    return [one if isinstance(one, Mapping) else {} for one in listed]


def _exchange_kind(layout: Layout, dtype: Any, most: int, exchange: Mapping[str, Any]) -> Kind:
    """Describe an exchange; it holds new shared weights only if it is late and was not refused."""
    fragments = layout.fragments
    part: Any = exchange.get("part")
    refused = exchange.get("refused") is True
    nothing = refused or exchange.get("done") is False
    # a refused exchange still holds this rank's weights from its start, which may contain NaN or Inf
    own: Kind = Plain(finite=not refused)
    shared: Kind = Plain()
    if fragments:
        at = part if fits(part, int) and 0 <= part < len(fragments) else 0
        size = fragments[at].span.stop - fragments[at].span.start
        own, shared = Values((size,), dtype, finite=not refused), Values((size,), dtype)
    return Fields(
        {
            "part": Common(Number(0, (len(fragments) or most) - 1, whole=True)),
            "lands": Common(Number(0, whole=True)),
            "late": Common(bool),
            "weights": own if exchange.get("late") is True else Exactly(None),
            "shared": Common(
                shared if exchange.get("late") is True and not nothing else Exactly(None)
            ),
            "done": Common(bool),
            "refused": Common(bool),
            "lr": Common(Number(0)),
            "drift": Common(Number(0)),
            "seen": Number(0),
            "weight": Number(0),
            "ranks": Common(Number(0)),
        }
    )
