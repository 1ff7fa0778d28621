"""Saved states for another number of ranks, or for other shards of the parameters.

The residual is what ranks have not delivered yet.  It belongs to nobody in particular: whoever has it
delivers it.  So its sum over ranks is kept, element by element:

* fewer ranks: new rank r adds up those of the old ranks r, r + P', r + 2 P', ...;
* more ranks: old rank r deals its elements, each of them whole, to the new ranks r, r + P, r + 2 P, ...

What is dealt is not rounded; sums of whole numbers are exact, and others are rounded as in the law.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final, Literal

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.reducer_state import STATE_VERSION

__all__ = ["Conserve", "reshard", "state_like"]

Conserve = Literal["sum", "average"]
State = Mapping[str, Any]

# what all ranks have in common
_EQUAL: Final = (
    "version",
    "algorithm",
    "world_size",
    "momentum",
    "scale",
    "step",
    "skipped",
    "density",
)
_OWN: Final = ("rank", "units", "sizes", "quotas", "residual", "velocity", "previous_norm")


def reshard(
    states: Sequence[State], world_size: int, *, conserve: Conserve = "sum"
) -> list[dict[str, Any]]:
    """Return the states of ``world_size`` ranks, made from those of all ranks before.

    ========================  =====================================================================
    residual, velocity        placed as above; nothing appears or is lost
    thresholds, boundaries    start afresh: they were of other sums, and boundaries of other ranks
    shares of units           kept: they are the same on all ranks
    norm for clipping         the mean of all ranks'
    step, scale, density      kept: they are the same on all ranks
    ========================  =====================================================================

    Args:
        states: of all ranks, in any order, as ``state_dict()`` gave them; not modified.
        world_size: the new number of ranks P'.
        conserve: "sum": the sum over ranks of what waits.  It is divided by P' when it is delivered,
            where it would have been divided by P.  "average": everything that waits is multiplied by
            P' / P, so that weights move as far by it as they would have.

    Returns:
        One state per new rank; for the same shards of the parameters, if they are divided.

    Raises:
        ConfigurationError: a rank or shard is missing, states are of different steps, a residual has
            the wrong size or holds NaN.

    Cost: a few passes over the residuals of all ranks.

    Example:
        >>> import sparsync, torch
        >>> sync = sparsync.UpdateSpaceSGD(torch.nn.Linear(2, 1, bias=False), lr=1.0, algorithm="dense")
        >>> saved = sync.state_dict()["sparsync"]
        >>> saved["residual"]["weight"] = torch.tensor([3.0, 4.0])
        >>> two = reshard([saved], 2)
        >>> [state["residual"]["weight"].tolist() for state in two]
        [[3.0, 0.0], [0.0, 4.0]]
        >>> reshard(two, 1)[0]["residual"]["weight"].tolist()
        [3.0, 4.0]
    """
    if type(world_size) is not int or world_size < 1:
        raise ConfigurationError(f"world_size is {world_size!r}; give at least 1 rank")
    _check(states)
    shards = [state for state in states if state["rank"] == 0]  # one, unless parameters are divided
    return [
        _like({**shard, "rank": rank, "world_size": world_size}, states, conserve)
        for rank in range(world_size)
        for shard in shards
    ]


def state_like(
    template: State, states: Sequence[State], *, conserve: Conserve = "sum"
) -> dict[str, Any]:
    """Return the state of one new rank, from those of all old ones.

    Args:
        template: what this rank's ``state_dict()`` returns before anything is loaded: it says which rank
            of how many it is, its units, and which pieces of the parameters it holds.
        states: of all old ranks; see ``reshard``.
        conserve: see there.

    Raises:
        ConfigurationError: as ``reshard``; or a parameter of the template is in no state.
    """
    _check(states)
    return _like(template, states, conserve)


def _like(template: State, states: Sequence[State], conserve: Conserve) -> dict[str, Any]:
    if conserve not in ("sum", "average"):
        raise ConfigurationError(f"conserve is {conserve!r}; choose sum or average")
    before, rank, world_size = states[0]["world_size"], template["rank"], template["world_size"]
    factor = world_size / before if conserve == "average" else 1.0
    own = {key: template[key] for key in ("rank", "world_size", "units", "sizes")}
    new: dict[str, Any] = {**states[0], **own}
    new.pop("pieces", None)
    pieces = template.get("pieces", {})
    if pieces:
        new["pieces"] = pieces
    for what in ("residual", "velocity"):
        new[what] = {}
        for names, sizes in zip(template["units"], template["sizes"], strict=True):
            placed = [_placed(states, what, name, rank, world_size) for name in names]
            if all(values is None for values in placed):
                continue
            for name, size, values in zip(names, sizes, placed, strict=True):
                if values is None:
                    new[what][name] = torch.zeros(size)
                    continue
                mine = _box(values, pieces[name]).reshape(-1) if name in pieces else values
                new[what][name] = mine * factor if factor != 1 else mine.clone()
    norms = [s["previous_norm"] for s in states if s["previous_norm"] is not None]
    new["previous_norm"] = fmean(norms) if norms else None
    same = template["units"] == states[0]["units"] and template["sizes"] == states[0]["sizes"]
    new["quotas"] = list(states[0]["quotas"] if same else template["quotas"])
    new["quota_key"] = new["selectors"] = new["collectives"] = None
    return new


def _placed(
    states: Sequence[State], what: str, name: str, rank: int, world_size: int
) -> Tensor | None:
    """Return what of a whole parameter a new rank gets; None for zeros."""
    before = states[0]["world_size"]
    if world_size <= before:
        olds = [_finite(states, what, name, r) for r in range(rank, before, world_size)]
        parts = [old for old in olds if old is not None]
        return functools.reduce(torch.add, parts) if parts else None
    old = _finite(states, what, name, rank % before)
    if old is None:
        return None
    heirs = len(range(rank % before, world_size, before))
    new = torch.zeros_like(old)
    new[rank // before :: heirs] = old[rank // before :: heirs]
    return new


def _finite(states: Sequence[State], what: str, name: str, rank: int) -> Tensor | None:
    """Return a parameter's residual on one old rank, None for zeros; refuse NaN, which would stay."""
    values = _whole(states, what, name, rank)
    if values is not None and not bool(torch.isfinite(values).all()):
        raise ConfigurationError(
            f"the saved {what} of '{name}' on rank {rank} holds NaN or Inf; load another checkpoint"
        )
    return values


def _whole(states: Sequence[State], what: str, name: str, rank: int) -> Tensor | None:
    """Put a parameter's residual on one old rank together from its pieces; None for zeros."""
    holders = [s for s in states if s["rank"] == rank and any(name in unit for unit in s["units"])]
    if not holders:
        raise ConfigurationError(
            f"no saved state of rank {rank} has parameter '{name}'; was it saved from this model?"
        )
    found: dict[str, tuple[Any, Tensor | None]] = {}  # by piece: several ranks may hold the same
    for state in holders:
        piece, values = state.get("pieces", {}).get(name), state[what].get(name)
        _, known = found.setdefault(str(piece), (piece, values))
        if not _same(known, values):
            raise ConfigurationError(
                f"two saved states of rank {rank} differ in the {what} of '{name}'; give those of one "
                "save"
            )
    if list(found) == ["None"]:
        return found["None"][1]
    return _joined(list(found.values()), f"'{name}' on rank {rank}")


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _joined(found: Sequence[tuple[Any, Tensor | None]], where: str) -> Tensor | None:
    """Put the pieces of a parameter side by side; refuse a hole or an overlap."""
    shapes = {tuple(piece["shape"]) for piece, _ in found if piece is not None}
    size = math.prod(next(iter(shapes)))
    taken = torch.zeros(size, dtype=torch.uint8)
    if len(shapes) == 1 and all(piece is not None for piece, _ in found):
        for piece, _ in found:
            _box(taken, piece).add_(1)
    if not bool((taken == 1).all()):
        raise ConfigurationError(
            f"the saved states hold {int((taken == 1).sum())} of the {size} elements of {where} exactly "
            "once; give those of all ranks of one save"
        )
    present = [(piece, values) for piece, values in found if values is not None]
    if not present:
        return None
    whole = torch.zeros(size, dtype=present[0][1].dtype)
    for piece, values in present:
        _box(whole, piece).copy_(values.view(piece["size"]))
    return whole


def _box(whole: Tensor, piece: Mapping[str, Sequence[int]]) -> Tensor:
    """Return the view of a piece in a whole parameter (see ``integrations.pieces.Piece``)."""
    box = whole.view(piece["shape"])
    for dim, (start, length) in enumerate(zip(piece["offset"], piece["size"], strict=True)):
        box = box.narrow(dim, start, length)
    return box


# ---- what is no set of saved states ---------------------------------------------------------------


def _check(states: Sequence[State]) -> None:
    """Refuse what is not the states of all ranks at one step."""
    if not states:
        raise ConfigurationError("no states came; give those of all ranks")
    for state in states:
        missing = [
            key for key in (*_EQUAL, *_OWN) if not isinstance(state, Mapping) or key not in state
        ]
        if missing:
            raise ConfigurationError(
                f"a saved state has no {missing[0]!r}; give what state_dict() of every rank returned"
            )
    if states[0]["version"] != STATE_VERSION:
        raise ConfigurationError(
            f"the saved states have version {states[0]['version']}, expected {STATE_VERSION}; load them "
            "with the sparsync that saved them"
        )
    for key in _EQUAL:
        different = [s for s in states if s[key] != states[0][key]]
        if different:
            raise ConfigurationError(
                f"the saved states of ranks {states[0]['rank']} and {different[0]['rank']} have {key} "
                f"{states[0][key]} and {different[0][key]}; give those of one save"
            )
    _check_ranks(states)
    for state in states:
        for what in ("residual", "velocity"):
            _check_tensors(state, what)


def _check_ranks(states: Sequence[State]) -> None:
    world_size, ranks = states[0]["world_size"], [state["rank"] for state in states]
    if type(world_size) is not int or world_size < 1:
        raise ConfigurationError(f"the saved world_size is {world_size!r}, expected a number >= 1")
    wrong = [rank for rank in ranks if rank not in range(world_size)]
    if wrong:
        raise ConfigurationError(
            f"a saved state is of rank {wrong[0]} of {world_size}; give those of one save"
        )
    missing = [rank for rank in range(world_size) if rank not in ranks]
    if missing:
        raise ConfigurationError(
            f"the saved state of rank {missing[0]} of {world_size} is missing; give those of all ranks"
        )


def _check_tensors(state: State, what: str) -> None:
    """Refuse a residual or velocity of a wrong kind or size, or with NaN."""
    saved = state[what]
    if not isinstance(saved, Mapping):
        raise ConfigurationError(f"the saved {what} of rank {state['rank']} is no dictionary")
    pairs = zip(state["units"], state["sizes"], strict=True)
    sizes = {name: size for unit, its in pairs for name, size in zip(unit, its, strict=True)}
    for name, values in saved.items():
        where = f"the saved {what} of '{name}' on rank {state['rank']}"
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise ConfigurationError(f"{where} is no tensor of floating-point numbers")
        if values.shape != (sizes.get(name),):
            raise ConfigurationError(
                f"{where} has shape {tuple(values.shape)}, expected {sizes.get(name, 'none')} elements"
            )
