"""What is no set of saved states: files may come from anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.reducer_state import STATE_VERSION
from sparsync.state import fits

__all__ = ["check_sizes", "check_states"]

State = Mapping[str, Any]

# what all ranks have in common, and what is each rank's own
_EQUAL: Final = (
    ("version", int),
    ("algorithm", str),
    ("world_size", int),
    ("momentum", float),
    ("scale", float),
    ("step", int),
    ("skipped", int),
    ("density", float),
)
_OWN: Final = (
    ("rank", int),
    ("units", Sequence[Sequence[str]]),
    ("sizes", Sequence[Sequence[int]]),
    ("quotas", Sequence[int]),
    ("residual", Mapping),
    ("velocity", Mapping),
    ("previous_norm", float | None),
)
_PIECE: Final = ("shape", "offset", "size")


def check_states(states: Sequence[State]) -> None:
    """Refuse what is not the states of all ranks at one step, before anything is made of its size.

    Raises:
        ConfigurationError: says which state has what, and what was expected.
    """
    if not states:
        raise ConfigurationError("no states came; give those of all ranks")
    for state in states:
        for key, kind in (*_EQUAL, *_OWN):
            if not isinstance(state, Mapping) or key not in state:
                raise ConfigurationError(
                    f"a saved state has no {key!r}; give what state_dict() of every rank returned"
                )
            if not fits(state[key], kind):
                raise ConfigurationError(
                    f"a saved state has {key} {str(state[key])[:60]}, expected "
                    f"{getattr(kind, '__name__', kind)}; give what state_dict() of every rank returned"
                )
    if states[0]["version"] != STATE_VERSION:
        raise ConfigurationError(
            f"the saved states have version {states[0]['version']}, expected {STATE_VERSION}; load them "
            "with the sparsync that saved them"
        )
    for key, _ in _EQUAL:
        different = [s for s in states if s[key] != states[0][key]]
        if different:
            raise ConfigurationError(
                f"the saved states of ranks {states[0]['rank']} and {different[0]['rank']} have {key} "
                f"{states[0][key]} and {different[0][key]}; give those of one save"
            )
    _check_ranks(states)
    for state in states:
        _check_pieces(state)
        for what in ("residual", "velocity"):
            _check_tensors(state, what)


def check_sizes(template: State, states: Sequence[State]) -> None:
    """Refuse checked states whose parameters, put together, are of other sizes than the template's.

    Raises:
        ConfigurationError: names the first.
    """
    expected = _whole_sizes(template)
    for state in states:
        for name, size in _whole_sizes(state).items():
            if size != expected.get(name, size):
                raise ConfigurationError(
                    f"the saved parameter '{name}' of rank {state['rank']} has {size} elements, this "
                    f"run's {expected[name]}; was it saved from this model?"
                )


def _whole_sizes(state: State) -> dict[str, int]:
    whole = {name: math.prod(piece["shape"]) for name, piece in state.get("pieces", {}).items()}
    return {**_sizes(state), **whole}


def _check_ranks(states: Sequence[State]) -> None:
    world_size, ranks = states[0]["world_size"], [state["rank"] for state in states]
    wrong = [rank for rank in ranks if not 0 <= rank < world_size]
    if wrong:
        raise ConfigurationError(
            f"a saved state is of rank {wrong[0]} of {world_size}; give those of one save"
        )
    missing = next((rank for rank in range(world_size) if rank not in set(ranks)), None)
    if missing is not None:  # the first: a damaged world_size may be any number
        raise ConfigurationError(
            f"the saved state of rank {missing} of {world_size} is missing; give those of all ranks"
        )


def _check_tensors(state: State, what: str) -> None:
    """Refuse a residual or velocity of a wrong kind or size, or with NaN."""
    sizes = _sizes(state)
    for name, values in state[what].items():
        where = f"the saved {what} of '{name}' on rank {state['rank']}"
        plain = isinstance(values, Tensor) and values.layout == torch.strided and not values.is_meta
        if not plain or not values.is_floating_point():
            raise ConfigurationError(f"{where} is no tensor of floating-point numbers")
        if values.shape != (sizes.get(name),):
            raise ConfigurationError(
                f"{where} has shape {tuple(values.shape)}, expected {sizes.get(name, 'none')} elements"
            )


def _check_pieces(state: State) -> None:
    """Refuse pieces that are no boxes, or of other sizes than the state has."""
    sizes, pieces = _sizes(state), state.get("pieces", {})
    if not isinstance(pieces, Mapping):
        raise ConfigurationError(f"the saved pieces of rank {state['rank']} are no dictionary")
    for name, piece in pieces.items():
        if not _is_box(piece) or math.prod(piece["size"]) != sizes.get(name):
            raise ConfigurationError(
                f"the saved piece of '{name}' on rank {state['rank']} is {str(piece)[:60]}, expected "
                f"shape, offset and size of {sizes.get(name, 'no')} elements"
            )


def _is_box(piece: Any) -> bool:
    """Tell whether it has a shape, and inside that an offset and a size, in as many dimensions."""
    numbers: list[Any] = [piece.get(k) for k in _PIECE] if isinstance(piece, Mapping) else [None]
    if not all(fits(extents, Sequence[int]) for extents in numbers):
        return False
    if len({len(extents) for extents in numbers}) > 1:
        return False
    return all(
        0 <= start <= start + size <= whole for whole, start, size in zip(*numbers, strict=True)
    )


def _sizes(state: State) -> dict[str, int]:
    """Return the number of elements of every parameter."""
    if [*map(len, state["units"])] != [*map(len, state["sizes"])]:
        raise ConfigurationError(
            f"a saved state has sizes {str(state['sizes'])[:60]}, expected one for each of its units' "
            "parameters"
        )
    pairs = zip(state["units"], state["sizes"], strict=True)
    return {name: size for unit, its in pairs for name, size in zip(unit, its, strict=True)}
