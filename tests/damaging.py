"""Every way to damage a field of a saved state."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from sparsync.errors import SparsyncError

from .on_ranks import gathered

__all__ = ["equal", "loaded_in_spite_of_damage"]

Path = tuple[Any, ...]
_UNKNOWN = "a field that nobody knows"


def loaded_in_spite_of_damage(sync: Any, saved: Any) -> Iterator[tuple[Path, str]]:
    """Yield the damages of rank 1's state with which a handle loads it, or fails other than in words.

    Refused means: all ranks raise, and the state of each of them is what it was.
    """
    before = sync.state_dict()
    for path, what, damaged in _damages(saved):
        refused = False
        try:
            sync.load_state_dict(damaged if dist.get_rank() == 1 else saved)
        except SparsyncError as error:
            refused = "\n" not in str(error) and equal(sync.state_dict(), before)
        if not all(gathered(refused)):
            yield path, what
            sync.load_state_dict(before)


def _damages(state: Any) -> Iterator[tuple[Path, str, Any]]:
    """Yield places in a state, what is wrong there, and a state in which it is.

    Every field is missing; every dictionary has one more; every value has other types; every tensor
    another shape, size or dtype, NaN or Inf in it, or no memory; every number is NaN, Inf, or beyond 64
    bits.
    """
    for path in _places(state):
        value = _at(state, path)
        yield path, "missing", _changed(state, path, remove=True)
        if isinstance(value, dict):
            yield (*path, _UNKNOWN), "unknown", _changed(state, (*path, _UNKNOWN), 1)
        for what, wrong in _wrong(value):
            yield path, what, _changed(state, path, wrong)


def _wrong(value: Any) -> Iterator[tuple[str, Any]]:
    others = {"text": "x", "list": [[]], "dictionary": {"a": 1}, "tensor": torch.ones(7, 3)}
    kind = {str: "text", list: "list", tuple: "list", dict: "dictionary"}.get(type(value), "")
    yield from ((f"a {what}", other) for what, other in others.items() if what != kind)
    if isinstance(value, torch.Tensor):
        yield "no tensor", 3
        yield "another shape", value.unsqueeze(0)
        yield "another size", torch.cat([value.flatten(), value.flatten()[:1]])
        yield "another dtype", value.to(torch.float16)
        yield "no memory", value.to("meta")
        if value.is_floating_point():
            for number in (torch.nan, torch.inf):
                broken = value.clone()
                broken.view(-1)[-1:] = number
                yield str(number), broken
    elif isinstance(value, bool):
        yield "a number", 0.5
    elif isinstance(value, int | float):
        yield from (("nan", torch.nan), ("inf", torch.inf), ("long", 2**70), ("True", True))


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    keyed = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in keyed if isinstance(value, dict | list | tuple) else ():
        yield from _places(inner, (*path, key))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _changed(value: Any, path: Path, other: Any = None, *, remove: bool = False) -> Any:
    """Return a copy with another value at a place; what lies elsewhere is shared."""
    if not path:
        return other
    key, *rest = path
    changed = copy.copy(list(value) if isinstance(value, tuple) else value)
    if remove and not rest:
        del changed[key]
    else:
        inner = changed[key] if isinstance(changed, list) else changed.get(key)
        changed[key] = _changed(inner, tuple(rest), other, remove=remove)
    return tuple(changed) if isinstance(value, tuple) else changed


def equal(one: Any, other: Any) -> bool:
    """Compare states, bit for bit."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype
        return same and bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
