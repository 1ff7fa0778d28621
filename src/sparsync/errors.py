"""Every error that sparsync raises on purpose.

::

    SparsyncError
     ├─ ConfigurationError (ValueError)      an argument that cannot work; says what to do instead
     ├─ WireFormatError (ValueError)         bytes that are not a message of this library
     ├─ CheckpointError (OSError)            a checkpoint that could not be written or read
     │   └─ NoCheckpointError                there is none yet: begin
     ├─ NonFiniteGradientError (ArithmeticError)  NaN or Inf in a reduced gradient; nothing was applied
     └─ CommunicationError (RuntimeError)
         ├─ PeerError                        a peer died, or ranks disagree; names rank, phase and step
         ├─ DeadlineError (TimeoutError)     a wait ran past its deadline; names rank, phase and step
         └─ DeadlockError                    the simulator found ranks that wait for each other
"""

import pickle
import re
from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Final

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "ConfigurationError",
    "DeadlineError",
    "DeadlockError",
    "NoCheckpointError",
    "NonFiniteGradientError",
    "PeerError",
    "SparsyncError",
    "WireFormatError",
    "check_number_fields",
    "check_numbers",
    "first_line",
    "require",
]


class SparsyncError(Exception):
    """Base of every error raised on purpose by sparsync."""


class ConfigurationError(SparsyncError, ValueError):
    """An argument that cannot work: what came, what was expected, what to do."""


class CheckpointError(SparsyncError, OSError):
    """A checkpoint that could not be written, or is not whole; earlier ones are untouched."""


class NoCheckpointError(CheckpointError):
    """No rank sees a whole checkpoint in the folder: start training, or name another folder."""


class WireFormatError(SparsyncError, ValueError):
    """Bytes that are not a valid message: truncated, corrupted, or of another version."""


class NonFiniteGradientError(SparsyncError, ArithmeticError):
    """A reduced gradient holds NaN or Inf: every rank refuses the step, residuals untouched."""


class CommunicationError(SparsyncError, RuntimeError):
    """Something went wrong between ranks."""


class PeerError(CommunicationError):
    """A peer died, closed its connection, or disagrees about the call."""


class DeadlineError(CommunicationError, TimeoutError):
    """A wait ran past its deadline."""


class DeadlockError(CommunicationError):
    """Simulated ranks wait for each other and no message is under way."""


_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_DETAIL: Final = 200  # characters of a list of names
_REFUSED: Final = "WeightsUnpickler error:"  # in the middle of torch's message on a file


def first_line(error: BaseException) -> str:
    """Return an error's message in one line."""
    text = str(error)
    # torch's message on unpickling fills a page, with advice to trust the file; the reason is one
    # sentence of it
    if isinstance(error, pickle.UnpicklingError):
        text = _COLOUR.sub("", text).rpartition(_REFUSED)[2].strip().split(". ")[0]
    lines = (text.strip() or type(error).__name__).splitlines()
    if lines[0].endswith(":") and len(lines) > 1:
        # torch's message on a state_dict names the keys that do not fit in the next line
        lines[0] = f"{lines[0]} {lines[1].strip()[:_DETAIL]}"
    return lines[0]


def require(fits: bool, message: str) -> None:
    """Raise a ``ConfigurationError`` with this message, unless the argument ``fits``."""
    if not fits:
        raise ConfigurationError(message)


def check_numbers(owner: str, types: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse what is no number for the arguments whose type is one; their ranges are the owner's.

    Args:
        owner: the function or class, for the message.
        types: annotations by argument, as types or as text; arguments of other types are passed over.
        given: values by argument.

    Example:
        >>> check_numbers("Correction", {"clip": "float | None"}, {"clip": True})
        Traceback (most recent call last):
            ...
        sparsync.errors.ConfigurationError: Correction: clip is True; give a number, or None
    """
    for name, value in given.items():
        annotation = types.get(name)
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", None)
        kinds = {part.strip() for part in (text or str(annotation)).split("|")}
        if kinds - {"None"} not in ({"int"}, {"float"}) or (value is None and "None" in kinds):
            continue
        # a bool is an int to Python: True would be a period of 1; NaN passes comparisons that refuse
        number = isinstance(value, Integral if "int" in kinds else Real) and not isinstance(
            value, bool
        )
        expected = "a whole number" if "int" in kinds else "a number"
        require(
            number and value == value,
            f"{owner}: {name} is {value!r}; give {expected}{', or None' * ('None' in kinds)}",
        )


def check_number_fields(settings: Any) -> None:
    """Hold the fields of a dataclass to their types, where these are numbers (``check_numbers``)."""
    types = {field.name: field.type for field in fields(settings)}
    check_numbers(type(settings).__name__, types, {name: getattr(settings, name) for name in types})
