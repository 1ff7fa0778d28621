"""Keep state in frozen dataclasses.  They are replaced, never modified, so a reference is a snapshot."""

from __future__ import annotations

import io
import sys
import warnings
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import wraps
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from sparsync.errors import ConfigurationError

__all__ = [
    "NoState",
    "Stateful",
    "brief",
    "fits",
    "load_plainly",
    "outside_inference",
    "packed",
    "parse_parts",
    "unpacked",
]

_MAX_INT = 2**63 - 1  # the largest integer that kernels accept
_SHOWN = 60  # longest value in a message, in characters

Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True)
class NoState:
    """The state of an object without state."""


def outside_inference(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Make a function leave ``torch.inference_mode()``, because no step can update tensors made there."""

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        inside = torch.is_inference_mode_enabled()
        # do this only inside inference mode, because ``inference_mode(False)`` also turns gradients on
        with torch.inference_mode(False) if inside else nullcontext():
            return function(*args, **kwargs)

    return call


class Stateful(ABC):  # noqa: B024 (subclasses give a ``state``, no method)
    """An object whose only memory is ``self.state``, a frozen dataclass of plain numbers.

    When a step is refused, the previous ``state`` object is put back, so nothing is ever copied.
    """

    state: Any = NoState()

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of the state."""
        return {field.name: getattr(self.state, field.name) for field in fields(self.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state with one returned by ``state_dict``."""
        self.state = self.parsed_state(state)

    def parsed_state(self, state: Mapping[str, Any]) -> Any:
        """Return the state object for a saved dictionary; refuse wrong fields and wrong types."""
        names = sorted(field.name for field in fields(self.state))
        if not isinstance(state, Mapping) or sorted(state) != names:
            raise ConfigurationError(
                f"the saved state of {type(self).__name__} has "
                f"{sorted(state) if isinstance(state, Mapping) else type(state).__name__}, expected "
                f"{names}; load a state that state_dict() returned"
            )
        # JSON and other file formats turn tuples into lists
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in state.items()}
        for name, hint in get_type_hints(type(self.state)).items():
            if not fits(values[name], hint):
                raise ConfigurationError(
                    f"the saved {name} of {type(self).__name__} is {brief(values[name])}, expected "
                    f"{getattr(hint, '__name__', hint)}; load a state that state_dict() returned"
                )
        return type(self.state)(**values)


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value read from a file matches an annotated type.

    Any finite number is a float, and a list or a tuple is a ``Sequence``.  An int must fit into 64 bits
    and must not be a bool.

    Example:
        >>> fits(3, int | None), fits((1, 2), tuple[int, ...]), fits([1, "a"], Sequence[int])
        (True, True, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin in (tuple, Sequence):
        kinds = tuple if origin is tuple else list | tuple
        return isinstance(value, kinds) and all(fits(one, inner[0]) for one in value)
    if hint in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if hint is int:
            return whole and abs(value) <= _MAX_INT
        return (whole or isinstance(value, float)) and abs(value) <= sys.float_info.max
    return hint is Any or isinstance(value, hint)


def brief(value: object) -> str:
    """Return a value as one short line; for a tensor, its dtype and shape instead of its elements.

    Example:
        >>> brief(torch.ones(2, 3)), brief("x" * 99)[:5]
        ('a tensor float32[2, 3]', "'xxxx")
    """
    if isinstance(value, torch.Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def parse_parts(owner: Stateful, parts: Sequence[Stateful], saved: object) -> tuple[Any, ...]:
    """Return the state objects of an owner's parts, parsed from their saved dictionaries."""
    if not isinstance(saved, list) or len(saved) != len(parts):
        raise ConfigurationError(
            f"the saved state of {type(owner).__name__} has "
            f"{len(saved) if isinstance(saved, list) else 'no'} parts, expected {len(parts)}; load a "
            "state that state_dict() returned"
        )
    return tuple(part.parsed_state(its) for part, its in zip(parts, saved, strict=True))


# ---- as bytes ------------------------------------------------------------------------------------


def packed(value: object) -> bytearray:
    """Serialise a value; ``unpacked`` is the inverse."""
    written = io.BytesIO()
    torch.save(value, written)
    return bytearray(written.getvalue())


def load_plainly(file: Any, **options: Any) -> Any:
    """Call ``torch.load`` for plain values and tensors, without its warning about sparse tensors.

    torch (2.14) checks the indices of sparse tensors, and warns that this takes time.  The check is
    wanted, because the file is not trusted.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
        return torch.load(file, weights_only=True, **options)


def unpacked(raw: Any, classes: Sequence[type[Any]] = ()) -> Any:
    """Undo ``packed``; refuse everything but plain values, tensors and objects of ``classes``."""
    # the bytes come from a file or another rank, and unrestricted unpickling could run any code
    with torch.serialization.safe_globals(list(classes)):
        return load_plainly(io.BytesIO(raw))
