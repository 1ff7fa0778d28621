"""Describe saved states field by field, and check a state against its schema.

A schema is derived from the live state, so it contains the names, shapes and counts of this run.  A
saved state is untrusted, so all of it is checked before anything changes.

Every saved state is wrapped in an envelope with its kind and a version: see ``sealed`` and ``opened``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, UnionType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.state import brief, fits
from sparsync.units import is_finite

__all__ = [
    "STATE_KINDS",
    "STATE_VERSION",
    "Common",
    "Each",
    "Either",
    "Exactly",
    "Fields",
    "Kind",
    "Number",
    "Plain",
    "Values",
    "check_saved",
    "common_facts",
    "like",
    "opened",
    "same",
    "sealed",
]

STATE_VERSION: Final = 3
"""Increment this if older states of any kind would be misread; ranks compare it in ``attach``."""

STATE_KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gradients": "a handle that exchanges gradients",
        "updates": "a handle that exchanges updates",
        "averager": "an averager",
        "optimizer": "an optimizer that exchanges its own steps",
        "elastic gradients": "a rank that joins others that exchange gradients",
        "elastic updates": "a rank that joins others that exchange updates",
    }
)
"""All kinds of saved states, each with the object that saves and loads it."""


@dataclass(frozen=True)
class Values:
    """A dense tensor of this shape and dtype, without NaN or Inf unless ``finite`` is False.

    With ``sparse``, the tensor may also be a sparse one (COO).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    least: float = -math.inf
    finite: bool = True
    sparse: bool = False

    def __str__(self) -> str:
        bounds = "" if self.least == -math.inf else f" >= {self.least:g}"
        numbers = f" of finite numbers{bounds}" if self.finite else ""
        return f"{brief(torch.empty(self.shape, dtype=self.dtype, device='meta'))}{numbers}"


@dataclass(frozen=True)
class Number:
    """A finite number from ``least`` to ``most``; bools are refused."""

    least: float = -math.inf
    most: float = math.inf
    whole: bool = False

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.least:g}"
        return (
            f"a {'whole' if self.whole else 'finite'} number from {self.least:g} to {self.most:g}"
        )


@dataclass(frozen=True)
class Exactly:
    """A value equal to this one, which comes from the current run."""

    value: Any

    def __str__(self) -> str:
        return brief(self.value)


@dataclass(frozen=True)
class Fields:
    """A dictionary with all ``required`` keys, and any of the ``optional`` ones.

    Values under other keys must match ``more``; if it is None, other keys are refused.
    """

    required: Mapping[str, Kind]
    optional: Mapping[str, Kind] = field(default_factory=dict)
    more: Kind | None = None

    def __str__(self) -> str:
        return "a dictionary"


@dataclass(frozen=True)
class Each:
    """A list or tuple with one item for each of these kinds; each item must match its kind."""

    kinds: tuple[Kind, ...]

    def __str__(self) -> str:
        return f"a list of {len(self.kinds)}"


@dataclass(frozen=True)
class Either:
    """One of several kinds; if none fits, the error of the last kind is reported."""

    kinds: tuple[Kind, ...]

    def __str__(self) -> str:
        return " or ".join(map(str, self.kinds))


@dataclass(frozen=True)
class Common:
    """A value that is equal on all ranks."""

    kind: Kind

    def __str__(self) -> str:
        return str(self.kind)


@dataclass(frozen=True)
class Plain:
    """A number, tensor, string, None, or a list or dictionary of these, without further constraints.

    With ``named``, the value must be a dictionary.
    """

    named: bool = False
    finite: bool = True

    def __str__(self) -> str:
        kind = "a dictionary of plain values" if self.named else "plain values"
        return f"{kind}{' without NaN or Inf' * self.finite}"


Kind: TypeAlias = (
    Values | Number | Exactly | Fields | Each | Either | Common | Plain | type[Any] | UnionType
)
"""One of the classes above, or a type as annotations write it, e.g. ``Sequence[int]``."""


def check_saved(value: Any, kind: Kind, name: str, cure: str) -> None:
    """Refuse a saved value that does not match a kind; nothing is changed, and nothing is sent.

    Args:
        value: an untrusted value of any type.
        kind: the expected kind.
        name: name of the value in the message.
        cure: the end of the message, which says what to do.

    Raises:
        ConfigurationError: the value does not match; the message names the first field that is
            missing, unknown, or of the wrong kind.

    Cost: a pass over all tensors.

    Example:
        >>> steps = Fields({"steps": Number(0, whole=True)})
        >>> check_saved({"steps": 3}, steps, "state", "load another")
        >>> check_saved({"steps": 0.5}, steps, "state", "load another")
        Traceback (most recent call last):
        sparsync.errors.ConfigurationError: the saved state['steps'] is 0.5, expected a whole number \
from 0 to inf; load another
    """
    wrong = next(_wrong(value, kind, name), None)
    if wrong is not None:
        raise ConfigurationError(f"{wrong}; {cure}")


def _wrong(value: Any, kind: Kind, name: str) -> Iterator[str]:
    """Yield a sentence for every mismatch of a value; yield nothing if the value matches the kind."""
    if isinstance(kind, Common):
        yield from _wrong(value, kind.kind, name)
    elif isinstance(kind, Either):
        found = [next(_wrong(value, one, name), None) for one in kind.kinds]
        if None not in found:
            yield str(found[-1])
    elif isinstance(kind, Fields) and isinstance(value, Mapping):
        known = {**kind.required, **kind.optional}
        missing = [key for key in kind.required if key not in value]
        unknown = [key for key in value if key not in known and kind.more is None]
        yield from (f"the saved state has no {_at(name, key)}" for key in missing)
        yield from (f"the saved state has an unknown {_at(name, key)}" for key in unknown)
        for key, inner in value.items():
            if (its := known.get(key, kind.more)) is not None:
                yield from _wrong(inner, its, _at(name, key))
    elif isinstance(kind, Each) and _is_list(value) and len(value) == len(kind.kinds):
        for at, (inner, one) in enumerate(zip(value, kind.kinds, strict=True)):
            yield from _wrong(inner, one, _at(name, at))
    elif not _is(value, kind):
        tensor = isinstance(value, Tensor) and not value.is_meta
        broken = " with NaN or Inf" if tensor and not is_finite(value) else ""
        expected = getattr(kind, "__name__", kind)
        yield f"the saved {name} is {brief(value)}{broken}, expected {expected}"


def _is(value: Any, kind: Kind) -> bool:
    """Return whether a value matches ``kind``, which must have no fields or items."""
    if isinstance(kind, Number):
        return fits(value, int if kind.whole else float) and kind.least <= value <= kind.most
    if isinstance(kind, Values):
        return (
            (_is_dense(value) or (kind.sparse and _is_sparse(value)))
            and tuple(value.shape) == kind.shape
            and value.dtype == kind.dtype
            and _in_range(value._values() if value.is_sparse else value, kind)
        )
    if isinstance(kind, Exactly):
        return same(value, kind.value)
    if isinstance(kind, Plain):
        return (isinstance(value, Mapping) or not kind.named) and _is_plain(value, kind.finite)
    return not isinstance(kind, Fields | Each) and fits(value, kind)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.sparse_coo and not value.is_meta


def _in_range(value: Tensor, kind: Values) -> bool:
    """Return whether a tensor has no element below the minimum, and no NaN or Inf unless allowed."""
    if not value.numel():
        return True
    if value.is_complex():
        return not kind.finite or bool(torch.isfinite(value).all())
    if value.is_floating_point() and kind.finite:
        least, most = map(float, value.aminmax())  # both are NaN if the tensor contains NaN
        return kind.least <= least and math.isfinite(least) and math.isfinite(most)
    return kind.least == -math.inf or not bool((value < kind.least).any())


def _is_plain(value: Any, finite: bool = True) -> bool:
    if isinstance(value, Mapping):
        return all(
            isinstance(key, str | int) and _is_plain(its, finite) for key, its in value.items()
        )
    if _is_list(value):
        return all(_is_plain(its, finite) for its in value)
    if isinstance(value, Tensor):
        return _is(value, Values(tuple(value.shape), value.dtype, finite=finite))
    loose = isinstance(value, float) and not finite
    return value is None or isinstance(value, bool | str) or loose or fits(value, float)


def same(value: Any, expected: Any) -> bool:
    """Return whether two plain values are equal.

    True differs from 1, but a tuple equals a list, because files store tuples as lists.
    """
    if _is_list(expected):
        return _is_list(value) and len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(expected, Mapping):
        return (
            isinstance(value, Mapping)
            and [*value] == [*expected]  # the order matters: parts lie in a vector in this order
            and all(same(value[key], its) for key, its in expected.items())
        )
    plain = isinstance(value, bool | int | float | str | None)
    return plain and isinstance(value, bool) == isinstance(expected, bool) and value == expected


def like(value: Any) -> Kind:
    """Return the kind of values with the keys, counts, shapes and dtypes of a live value.

    Numbers must be finite.  A live None, usually an option that is not set, allows any plain value.
    """
    if isinstance(value, Tensor):
        return Values(tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return Fields({key: like(inner) for key, inner in value.items()})
    if _is_list(value):
        return Each(tuple(map(like, value)))
    if isinstance(value, bool | str):  # tested before numbers, because bool is a subclass of int
        return type(value)
    return Number() if isinstance(value, int | float) else Plain()


# ---- envelopes ---------------------------------------------------------------------------------------


def sealed(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap a state in the envelope of one of ``STATE_KINDS``."""
    return {"kind": kind, "version": STATE_VERSION, "content": dict(content)}


def opened(state: Any, kind: str, content: Kind = Mapping) -> dict[str, Any]:
    """Return the content of a saved state; refuse a state of a different kind or version.

    Args:
        state: an untrusted state of any type.  In a checkpoint file, the envelope contains further
            entries under "beside".
        kind: one of ``STATE_KINDS``.
        content: the kind that the content must match.

    Raises:
        ConfigurationError: a part of the envelope, or a field, is missing or wrong; the message
            names it.

    Example:
        >>> opened(sealed("averager", {"steps": 3}), "averager")
        {'steps': 3}
        >>> opened(sealed("averager", {"steps": 3}), "updates")
        Traceback (most recent call last):
        sparsync.errors.ConfigurationError: the saved state['kind'] is 'averager', expected 'updates'; \
it belongs in an averager; give a state of a handle that exchanges updates
    """
    given = state.get("kind") if isinstance(state, Mapping) else None
    other = next((its for name, its in STATE_KINDS.items() if same(given, name)), None)
    cure = f"load a state of {STATE_KINDS[kind]}"
    elsewhere = f"it belongs in {other}; give a state of {STATE_KINDS[kind]}"
    # Kind and version are checked first.  A state of a different kind or version may have different
    # fields, and the error must then name the kind or the version, not the first field that differs.
    envelope: dict[str, Kind] = {"kind": Exactly(kind)}
    check_saved(state, Fields(envelope, more=object), "state", elsewhere if other else cure)
    envelope["version"] = Number(STATE_VERSION, STATE_VERSION, whole=True)
    check_saved(
        state, Fields(envelope, more=object), "state", "load it with the sparsync that saved it"
    )
    envelope["content"] = Mapping
    check_saved(state, Fields(envelope, {"beside": Mapping}), "state", cure)
    check_saved(state["content"], content, "state", cure)
    return dict(state["content"])


# ---- values that all ranks share ---------------------------------------------------------------------


def common_facts(
    state: Mapping[str, Any], kind: Fields, digest: Callable[[Tensor], str]
) -> dict[str, str]:
    """Return a text for every key of a state that holds ``Common`` values.

    All ranks return the same number of texts.  Texts are equal if the values are equal.
    """
    found: dict[str, str] = {}
    for key, inner in {**kind.required, **kind.optional}.items():
        if _has_common(inner):
            said = _common(state[key], inner, digest) if key in state else ["nothing"]
            found[f"the saved {key}"] = ", ".join(said)
    return found


def _has_common(kind: Kind) -> bool:
    if isinstance(kind, Fields):
        return any(map(_has_common, (*kind.required.values(), *kind.optional.values())))
    inner = kind.kinds if isinstance(kind, Each | Either) else ()
    return isinstance(kind, Common) or any(map(_has_common, inner))


def _common(value: Any, kind: Kind, digest: Callable[[Tensor], str]) -> Iterator[str]:
    if isinstance(kind, Common):
        yield digest(value) if isinstance(value, Tensor) else str(value)
    elif isinstance(kind, Fields):
        known = {**kind.required, **kind.optional}
        for key in sorted(known.keys() & value.keys()):
            for text in _common(value[key], known[key], digest):
                yield f"{key} {text}"
    elif isinstance(kind, Each):
        for inner, one in zip(value, kind.kinds, strict=True):
            yield from _common(inner, one, digest)
    elif isinstance(kind, Either):
        for one in kind.kinds:
            if next(_wrong(value, one, ""), None) is None:
                yield from _common(value, one, digest)
                return


# ---- words ------------------------------------------------------------------------------------------


def _at(name: str, key: object) -> str:
    return f"{name}[{brief(key)}]"
