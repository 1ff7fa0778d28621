"""Every error that sparsync raises on purpose.

::

    SparsyncError
     ├─ ConfigurationError (ValueError)      an argument that cannot work; says what to do instead
     ├─ WireFormatError (ValueError)         bytes that are not a message of this library
     ├─ CheckpointError (OSError)            a checkpoint that could not be written or read
     │   └─ NoCheckpointError                no checkpoint exists yet: start from scratch
     ├─ NonFiniteGradientError (ArithmeticError)  NaN or Inf in a reduced gradient; nothing was applied
     └─ CommunicationError (RuntimeError)
         ├─ PeerError                        a peer died; names rank, phase and step
         │   └─ DisagreementError            ranks disagree, or replicas differ; raised on all of them
         ├─ DeadlineError (TimeoutError)     a wait ran past its deadline; names rank, phase and step
         └─ DeadlockError                    the simulator found ranks waiting for each other
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
    "DisagreementError",
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
    """Base class of all errors that sparsync raises on purpose."""


class ConfigurationError(SparsyncError, ValueError):
    """An argument cannot work; the message says what was given, what was expected, and what to do."""


class CheckpointError(SparsyncError, OSError):
    """A checkpoint could not be written, or is incomplete; earlier checkpoints are untouched."""


class NoCheckpointError(CheckpointError):
    """No rank sees a complete checkpoint in the folder: start training, or name another folder."""


class WireFormatError(SparsyncError, ValueError):
    """Bytes are not a valid message: they are truncated, corrupted, or from a different version."""


class NonFiniteGradientError(SparsyncError, ArithmeticError):
    """A reduced gradient contains NaN or Inf; every rank refuses the step and keeps its residuals."""


class CommunicationError(SparsyncError, RuntimeError):
    """Communication between ranks failed."""


class PeerError(CommunicationError):
    """A peer died, closed its connection, or disagrees about the call."""


class DisagreementError(PeerError):
    """Ranks disagree, or replicas differ; all ranks raise this error, and no message is in flight."""


class DeadlineError(CommunicationError, TimeoutError):
    """A wait ran past its deadline."""


class DeadlockError(CommunicationError):
    """Simulated ranks wait for each other and no message is in flight."""


_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_DETAIL: Final = 200  # most characters of a list of names in a message
_REFUSED: Final = "WeightsUnpickler error:"  # the text before the reason in torch's message


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the part that gives the reason."""
    text = str(error)
    # torch's unpickling error fills a page and advises the user to trust the file; only one sentence
    # gives the reason
    if isinstance(error, pickle.UnpicklingError):
        text = _COLOUR.sub("", text).rpartition(_REFUSED)[2].strip().split(". ")[0]
    lines = (text.strip() or type(error).__name__).splitlines()
    if lines[0].endswith(":") and len(lines) > 1:
        # torch's state_dict error names the mismatched keys on the second line
        lines[0] = f"{lines[0]} {lines[1].strip()[:_DETAIL]}"
    return lines[0]


def require(fits: bool, message: str) -> None:
    """Raise a ``ConfigurationError`` with this message unless ``fits`` is true."""
    if not fits:
        raise ConfigurationError(message)


def check_numbers(owner: str, types: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Check that arguments annotated as numbers are numbers; the caller checks their ranges.

    Args:
        owner: the name of the function or class, for the message.
        types: the annotation of each argument, as a type or a string.
        given: the value of each argument.

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
        # Two values need extra tests: True is an int, and would pass as a period of 1; and NaN passes
        # range checks, because every comparison with it is false.
        number = isinstance(value, Integral if "int" in kinds else Real) and not isinstance(
            value, bool
        )
        expected = "a whole number" if "int" in kinds else "a number"
        require(
            number and value == value,
            f"{owner}: {name} is {value!r}; give {expected}{', or None' * ('None' in kinds)}",
        )


def check_number_fields(settings: Any) -> None:
    """Check the number fields of a dataclass against their annotations (``check_numbers``)."""
    types = {field.name: field.type for field in fields(settings)}
    check_numbers(type(settings).__name__, types, {name: getattr(settings, name) for name in types})
