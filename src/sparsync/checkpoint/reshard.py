"""Rebuilds saved states for a different number of ranks, or for different shards of the parameters.

A residual is the part of the ranks' gradients or updates that has not been delivered yet, its undelivered
mass.  Any rank that holds it can deliver it, so only the sum over ranks must be preserved, element by
element.  P ranks become P' ranks as follows:

* fewer ranks: new rank r adds up the residuals of the old ranks r, r + P', r + 2 P', ...;
* more ranks: old rank r distributes its elements over the new ranks r, r + P, r + 2 P, ...; each element
  goes to one rank as a whole.

Distributing does not round.  Sums of integers are exact; other sums may round, within the tolerance of
the conservation law.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, require
from sparsync.feedback.reducer_state import check_fields
from sparsync.fields import Fields, opened, sealed
from sparsync.state import fits
from sparsync.units import Piece, is_finite
from sparsync.updates.contributions import shown_of
from sparsync.updates.gradient_noise import marks_of

__all__ = ["reshard", "state_like"]

State = Mapping[str, Any]
# saved states, each with the pieces of all its parameters
Olds = Sequence[tuple[State, Mapping[str, Piece]]]

# fields that are equal on all ranks; all other fields may differ
_EQUAL: Final = ("algorithm", "world_size", "momentum", "scale", "step", "skipped", "density")


def reshard(states: Sequence[State], world_size: int) -> list[dict[str, Any]]:
    """Return the states of ``world_size`` ranks, built from the states of all former ranks.

    The states must come from handles that exchange gradients.  If a handle exchanges updates, a new
    rank's state also depends on that rank's set-up, which only ``sparsync.load`` knows.

    ========================  =====================================================================
    residual, velocity        placed as above; their sums over the ranks stay the same
    thresholds, boundaries    reset: they depend on the former sums and ranks
    shares of units           kept: they are equal on all ranks
    norm for clipping         the mean of all ranks' norms
    step, scale, density      kept: they are equal on all ranks
    ========================  =====================================================================

    Args:
        states: the ``state_dict()`` of all ranks' handles, in any order; they are not modified.
        world_size: the new number of ranks P', by which residuals are divided when they are delivered.

    Returns:
        One state per new rank.  If parameters are sharded, their shards stay the same.

    Raises:
        ConfigurationError: a state's handle does not exchange gradients, a rank or shard is missing,
            states are from different steps, or a residual has the wrong size or contains NaN.

    Cost: a few passes over the residuals of all ranks.

    Example:
        >>> import torch
        >>> from sparsync.updates import OuterAverager
        >>> from sparsync.feedback.reducer_state import reducer_state
        >>> sync = OuterAverager(torch.nn.Linear(2, 1, bias=False), algorithm="dense")
        >>> kept = reducer_state(sync.reducer)
        >>> kept["residual"]["weight"] = torch.tensor([3.0, 4.0])
        >>> two = reshard([sealed("gradients", {"reducer": kept, "pieces": {}})], 2)
        >>> [state["content"]["reducer"]["residual"]["weight"].tolist() for state in two]
        [[3.0, 0.0], [0.0, 4.0]]
        >>> reshard(two, 1)[0]["content"]["reducer"]["residual"]["weight"].tolist()
        [3.0, 4.0]
    """
    if type(world_size) is not int or world_size < 1:
        raise ConfigurationError(f"world_size is {world_size!r}; give at least 1 rank")
    olds = [_flat(content) for content in _contents(states, "gradients", ("reducer", "pieces"))]
    _check_states(olds)
    # a single state, unless parameters are sharded
    shards = [old for old in olds if old["rank"] == 0]
    new = (
        {**shard, "rank": rank, "world_size": world_size}
        for rank in range(world_size)
        for shard in shards
    )
    return [
        sealed("gradients", {"reducer": _like(its, olds), "pieces": its["pieces"]}) for its in new
    ]


def state_like(template: State, states: Sequence[State]) -> dict[str, Any]:
    """Return the state of one new rank, built from the states of all old ranks; see ``reshard``.

    Args:
        template: this rank's ``state_dict()`` before loading; it provides the rank, the number of ranks,
            the units, and the pieces of the parameters.  If it is the state of an optimizer, new rank r
            takes torch's part of the state (learning rates, local moments) from old rank r modulo P.
        states: the states of all old ranks.

    Raises:
        ConfigurationError: a state's kind differs from the template's kind, or is "averager"; see also
            ``reshard``.
    """
    kind, here = template["kind"], template["content"]
    olds = _contents(states, kind, here)
    if kind == "updates":
        at, content = _updates_like(here, olds)
    else:
        reducer = _checked_like(_flat(here), [_flat(old) for old in olds])
        at = _place_of(reducer["rank"], olds)
        # torch's part of an optimizer's state comes from the old rank, the pieces from this run
        content = {**(here if kind == "gradients" else olds[at]), "reducer": reducer}
    return {**states[at], "content": content}


def _contents(states: Sequence[State], kind: str, fields: Iterable[str]) -> list[dict[str, Any]]:
    """Return the contents of these states; refuse one of the wrong kind, or without these fields."""
    content = Fields(dict.fromkeys(fields, object))
    contents = [opened(state, kind, content) for state in states]
    if kind == "averager":
        raise ConfigurationError(
            f"OuterStep: each of {len(states)} ranks has its own weights and residuals, which cannot be "
            "divided; use attach(), or continue with as many ranks, or call finish() first and save only "
            "the model"
        )
    for one in contents:
        check_fields(one["reducer"])
    return contents


def _flat(content: State) -> dict[str, Any]:
    """Return a reducer's state, with the pieces of its parameters as one more field."""
    return {**content["reducer"], "pieces": content.get("pieces", {})}


def _place_of(rank: int, olds: Sequence[State]) -> int:
    """Return where ``olds`` holds the old rank from which ``rank`` continues: ``rank`` modulo P."""
    wanted = rank % olds[0]["reducer"]["world_size"]
    return next(at for at, old in enumerate(olds) if old["reducer"]["rank"] == wanted)


def _checked_like(template: State, states: Sequence[State]) -> dict[str, Any]:
    _check_states(states)
    expected = _pieces_of(template)
    for state in states:
        for name, piece in _pieces_of(state).items():
            size = math.prod(piece["shape"])
            wanted = math.prod(expected.get(name, piece)["shape"])
            if size != wanted:
                raise ConfigurationError(
                    f"the saved parameter '{name}' of rank {state['rank']} has {size} elements, this "
                    f"run's {wanted}; was it saved from this model?"
                )
    return _like(template, states)


def _like(template: State, states: Sequence[State]) -> dict[str, Any]:
    olds = [(state, _pieces_of(state)) for state in states]
    before, rank, world_size = states[0]["world_size"], template["rank"], template["world_size"]
    own = {key: template[key] for key in ("rank", "world_size", "units", "sizes")}
    new: dict[str, Any] = {key: states[0][key] for key in template if key != "pieces"} | own
    pieces = _pieces_of(template)
    for what in ("residual", "velocity"):
        new[what] = {}
        # go unit by unit, because either all parameters of a unit have a residual or none
        for names, sizes in zip(template["units"], template["sizes"], strict=True):
            placed = [_placed(olds, what, name, before, rank, world_size) for name in names]
            if all(values is None for values in placed):
                continue
            like = next(values for values in placed if values is not None)
            for name, size, values in zip(names, sizes, placed, strict=True):
                if values is None:
                    new[what][name] = like.new_zeros(size)
                else:
                    new[what][name] = _box(values, pieces[name]).flatten().clone()
    norms = [s["previous_norm"] for s in states if s["previous_norm"] is not None]
    new["previous_norm"] = sum(norm / len(norms) for norm in norms) if norms else None
    # every unit has a share of k, so shares are reset if the units differ
    same = template["units"] == states[0]["units"] and template["sizes"] == states[0]["sizes"]
    new["quotas"] = list(states[0]["quotas"] if same else template["quotas"])
    new["quota_key"] = new["selectors"] = new["collectives"] = None
    return new


# ---- updates: ranks have their own weights and moments -----------------------------------------------


def _updates_like(template: State, states: Sequence[State]) -> tuple[int, dict[str, Any]]:
    """Return the position of old rank r modulo P in ``states``, and new rank r's content.

    The content includes the shared weights and this rank's part of the undelivered mass.  Moments and
    step counts come from old rank r modulo P.  Exchanges in flight are applied first.  If an exchange was
    refused, or would be refused because a rank's weights are broken, all ranks drop their local steps
    since the last exchange, and broken moments.
    """
    different = {str([state[key] for key in ("steps", "state")]) for state in states}
    require(
        len(different) == 1,
        f"the saved states have (steps, state) {different}; give the states of a single save",
    )
    require(
        not any(state["dct"] for state in (template, *states)),
        "OuterStep: residuals are cosine coefficients of units, and cannot be divided; continue with as "
        "many ranks, or call finish() first and save only the model",
    )
    divided = [_is_divided(state) for state in (template, *states)]
    require(
        not any(divided),
        f"the nodes of {'this run' if divided[0] else 'the saved run'} (hierarchy=) divide each exchange "
        "of updates among their ranks, whose states cannot be divided anew; continue in as many nodes of "
        "as many ranks, or call finish() first and save only the model",
    )
    returns = any(
        state["broken"] or any(one["refused"] for one in state["under_way"]) for state in states
    )
    if returns:
        states = [_without_broken_moments(state, states) for state in states]
    # Convert vectors to the form of a reducer's residual (tensors by name), so that the same rules apply
    # to them.  Momentum, shared weights and moments are not summed, but assembled from their pieces.
    flats = [_by_name(state, returns) for state in states]
    place = _flat(template)
    reducer = _checked_like(place, flats)
    olds = [(flat, _pieces_of(flat)) for flat in flats]
    pieces, rank = _pieces_of(place), reducer["rank"] % flats[0]["world_size"]

    def part(what: str, name: str, of: int = 0) -> Tensor | None:
        whole = _whole(olds, what, name, of)
        return None if whole is None else _box(whole, pieces[name]).flatten().clone()

    names, memory = list(template["layout"]), {}
    for what in ("shared", "momentum"):
        parts = [values for name in names if (values := part(f"{what} vector", name)) is not None]
        if parts:
            memory[what] = torch.cat(parts)
    at = _place_of(reducer["rank"], states)
    donor, whole_moments = states[at], flats[at]["moments"]
    moments = {name: dict(kept) for name, kept in donor["moments"].items()}
    for key, name in whole_moments:
        values = part(key, name, rank)
        assert values is not None
        moments[name][key.removeprefix("moment ")] = values.view(template["parameters"][name].shape)
    begun: dict[str, Any] = {
        "memory": memory,
        "reducer": reducer,
        "moments": moments,
        "parameters": None,
    }
    begun |= {"broken": False}
    same = ("steps", "state", "sent", "present_period", "groups", "scaler", "left_out")
    common = {key: donor[key] for key in same if key in donor}
    counted = template["contributions"]
    if counted["weighs"] is None and donor["contributions"]["weighs"]:
        common["contributions"] = {**counted, "weighs": True}
    return at, {**template, **common, **begun, "under_way": []}


def _is_divided(state: State) -> bool:
    """Return whether a state is from a rank in a node, which exchanges only a run of each tensor."""
    own = state["parameters"]
    return any(own[name].numel() != size for name, size in state["layout"].items() if name in own)


def _without_broken_moments(state: State, states: Sequence[State]) -> State:
    """Return a state without the moments that contain NaN or Inf in any part of its replica."""
    rank = state["reducer"]["rank"]
    broken = {
        name
        for one in states
        if one["reducer"]["rank"] == rank
        for name, kept in one["moments"].items()
        if not all(is_finite(v) for v in kept.values() if isinstance(v, Tensor))
    }
    moments = {n: marks_of(k) if n in broken else k for n, k in state["moments"].items()}
    return {**state, "moments": moments}


def _by_name(state: State, returns: bool) -> dict[str, Any]:
    """Return a reducer's state with all undelivered mass in the residual, and all vectors by name.

    If the rank ``returns`` to its last exchange, its local steps since then are dropped.
    """
    sizes = state["layout"]
    shared = state["memory"]["shared"].clone()
    left_out = {name for name, out in state["left_out"].items() if out}
    held = {name: state["parameters"][name] for name in sizes if name in state["parameters"]}
    vectors = [torch.zeros_like(v) if name in left_out else v for name, v in held.items()]
    if (noise := state["noise"]) is not None:
        vectors.append(noise["values"])
    own = torch.cat([vector.flatten().to(shared.dtype) for vector in vectors])
    require(
        own.shape == shared.shape and sum(sizes.values()) == shared.numel(),
        f"a saved state has shared weights of {shared.numel()} elements, and own weights of "
        f"{own.numel()}; give states that state_dict() returned",
    )
    kept = state["reducer"]["residual"]
    residual = torch.cat([kept.get(name, shared.new_zeros(size)) for name, size in sizes.items()])
    in_weights = state["residual"] == "weights"
    # If an update's weight exceeds 1, a rank's own weights show only part of the residual
    # (``Contributions``). The hidden part is not contained in shared - own, so add it.
    hidden = torch.zeros_like(residual)
    for place, shown in zip(state["spans"], state["contributions"]["shown"], strict=True):
        hidden[slice(*place)] = residual[slice(*place)] * (1 - shown)
    for exchange in state["under_way"]:
        span = slice(*state["spans"][exchange["part"]])
        if exchange["refused"]:
            continue
        hidden[span] = residual[span] * (1 - shown_of(exchange["weight"]))
        if exchange["late"]:
            shared[span] = exchange["shared"]
            own[span] += exchange["weights"]
        else:  # this rank continues from the shared weights
            own[span] = shared[span] - (residual - hidden)[span] * in_weights
    if returns:
        own = shared - (residual - hidden) if in_weights else shared
    # shared - own contains the local steps since the last exchange and, with residual="weights", the
    # shown residual. The steps of all ranks get the same weight, because later counts are unknown here.
    missing = shared - own + (hidden if in_weights else residual)
    momentum = state["memory"].get("momentum", shared[:0])
    named = {"shared vector": shared, "momentum vector": momentum, "residual": missing}
    found: dict[str, Any] = {**_flat(state), "moments": []}
    for what, vector in named.items():
        found[what], end = {}, 0
        for name, size in sizes.items():
            if end + size <= vector.numel():
                found[what][name] = vector[end : end + size]
            end += size
    for name, kept in state["moments"].items():
        for key, value in kept.items():
            whole = isinstance(value, Tensor) and value.dim() and value.layout == torch.strided
            if whole and value.numel() == sizes.get(name):
                found.setdefault(f"moment {key}", {})[name] = value.flatten()
                found["moments"].append((f"moment {key}", name))
    return found


def _placed(
    olds: Olds, what: str, name: str, before: int, rank: int, world_size: int
) -> Tensor | None:
    """Return a new rank's part of a whole parameter's residual; None stands for zeros."""
    if world_size <= before:
        wholes = [_whole(olds, what, name, r) for r in range(rank, before, world_size)]
        parts = [whole for whole in wholes if whole is not None]
        return functools.reduce(torch.add, parts) if parts else None
    old = _whole(olds, what, name, rank % before)
    if old is None:
        return None
    # deal elements out one by one rather than in ranges, to spread layers with large entries evenly
    heirs = len(range(rank % before, world_size, before))
    new = torch.zeros_like(old)
    new[rank // before :: heirs] = old[rank // before :: heirs]
    return new


def _whole(olds: Olds, what: str, name: str, rank: int) -> Tensor | None:
    """Assemble a parameter's residual on one old rank from its pieces; None stands for zeros."""
    # the keys are pieces, because several ranks may hold the same piece
    found: dict[str, tuple[Piece, Tensor | None]] = {}
    for state, pieces in olds:
        if state["rank"] != rank or name not in pieces:
            continue
        piece, values = pieces[name], state[what].get(name)
        if values is not None and not bool(torch.isfinite(values).all()):
            raise ConfigurationError(
                f"the saved {what} of '{name}' on rank {rank} holds NaN or Inf; load another checkpoint"
            )
        _, known = found.setdefault(str(piece), (piece, values))
        if known is not values and (known is None or values is None or not known.equal(values)):
            raise ConfigurationError(
                f"two saved states of rank {rank} differ in the {what} of '{name}'; give those of one "
                "save"
            )
    if not found:
        raise ConfigurationError(
            f"no saved state of rank {rank} has parameter '{name}'; was it saved from this model?"
        )
    present = [(piece, values) for piece, values in found.values() if values is not None]
    if not present:
        return None
    shapes = {tuple(piece["shape"]) for piece, _ in found.values()}
    size = math.prod(min(shapes))
    # every element must be present exactly once: a missing shard would lose part of the residual, and an
    # overlapping shard would double it
    taken, whole = torch.zeros(size, dtype=torch.uint8, device="cpu"), present[0][1].new_zeros(size)
    if len(shapes) == 1:
        for piece, _ in found.values():
            _box(taken, piece).add_(1)
    if not bool((taken == 1).all()):
        raise ConfigurationError(
            f"the saved states hold {int((taken == 1).sum())} of the {size} elements of '{name}' on rank "
            f"{rank} exactly once; give those of all ranks of one save"
        )
    for piece, values in present:
        _box(whole, piece).copy_(values.view(piece["size"]))
    return whole


def _box(whole: Tensor, piece: Piece) -> Tensor:
    """Return a view of a piece within a whole parameter."""
    box = whole.view(piece["shape"])
    for dim, (start, length) in enumerate(zip(piece["offset"], piece["size"], strict=True)):
        box = box.narrow(dim, start, length)
    return box


# ---- checks: files are untrusted ------------------------------------------------------------------


def _check_states(states: Sequence[State]) -> None:
    """Refuse anything but the states of all ranks at the same step, before memory is allocated."""
    if not states:
        raise ConfigurationError("no states were given; give the states of all ranks")
    for key in _EQUAL:
        different = [s for s in states if s[key] != states[0][key]]
        if different:
            raise ConfigurationError(
                f"the saved states of ranks {states[0]['rank']} and {different[0]['rank']} have {key} "
                f"{states[0][key]} and {different[0][key]}; give the states of a single save"
            )
    world_size, ranks = states[0]["world_size"], {state["rank"] for state in states}
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise ConfigurationError(
                f"a saved state belongs to rank {rank} of {world_size}; give the states of a single save"
            )
    missing = next((rank for rank in range(world_size) if rank not in ranks), None)
    # name only the first missing rank, because a damaged world_size may be any number
    if missing is not None:
        raise ConfigurationError(
            f"the saved state of rank {missing} of {world_size} is missing; give those of all ranks"
        )
    for state in states:
        _check_tensors(state)


def _check_tensors(state: State) -> None:
    """Refuse pieces that are not boxes, and residuals or velocities of the wrong kind or size."""
    if [*map(len, state["units"])] != [*map(len, state["sizes"])]:
        raise ConfigurationError(
            f"a saved state has sizes {str(state['sizes'])[:60]}, expected one for each of its units' "
            "parameters"
        )
    sizes, pieces = _sizes(state), state["pieces"]
    if not isinstance(pieces, Mapping):
        raise ConfigurationError(f"the saved pieces of rank {state['rank']} are not a dictionary")
    for name, piece in pieces.items():
        if not _is_box(piece) or math.prod(piece["size"]) != sizes.get(name):
            raise ConfigurationError(
                f"the saved piece of '{name}' on rank {state['rank']} is {str(piece)[:60]}, expected "
                f"shape, offset and size of {sizes.get(name, 'no')} elements"
            )
    for what in ("residual", "velocity"):
        for name, values in state[what].items():
            where = f"the saved {what} of '{name}' on rank {state['rank']}"
            strided = isinstance(values, Tensor) and values.layout == torch.strided
            if not strided or values.is_meta or not values.is_floating_point():
                raise ConfigurationError(f"{where} is not a tensor of floating-point numbers")
            if values.shape != (sizes.get(name),):
                raise ConfigurationError(
                    f"{where} has shape {tuple(values.shape)}, expected {sizes.get(name, 'none')} "
                    "elements"
                )


def _is_box(piece: Any) -> bool:
    """Return whether a piece has a shape, an offset and a size of equal dimensions, within the shape."""
    names = ("shape", "offset", "size")
    numbers: list[Any] = [piece.get(k) for k in names] if isinstance(piece, Mapping) else [None]
    if not all(fits(extents, Sequence[int]) for extents in numbers):
        return False
    if len({len(extents) for extents in numbers}) > 1:
        return False
    return all(
        0 <= start <= start + size <= whole for whole, start, size in zip(*numbers, strict=True)
    )


def _sizes(state: State) -> dict[str, int]:
    """Return the number of elements of every parameter in a state."""
    pairs = zip(state["units"], state["sizes"], strict=True)
    return {name: size for unit, its in pairs for name, size in zip(unit, its, strict=True)}


def _pieces_of(state: State) -> dict[str, Piece]:
    """Return the piece of every parameter in a state."""
    wholes = {n: {"shape": [k], "offset": [0], "size": [k]} for n, k in _sizes(state).items()}
    return {**wholes, **state["pieces"]}
