"""The state of a reducer between steps: save, restore and rescale it.

Under a GradScaler, hooks see gradients multiplied by the scale.  Residual, velocity and thresholds are
scaled as well, and must change with the scale: ``residual = residual * new / old``.  This does not round
as long as scales are powers of two, as they are by default.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import CommunicationError, ConfigurationError, DisagreementError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.shares import SharesState
from sparsync.fields import Either, Exactly, Fields, Number, check_saved
from sparsync.state import Stateful, brief
from sparsync.transports.agree import agree, on_all_or_none, worst
from sparsync.transports.communicator import Communicator
from sparsync.units import Unit

__all__ = [
    "ParsedState",
    "agree_state",
    "check_fields",
    "parse_state",
    "reducer_state",
    "rescale_",
    "rescaled_key",
    "restore_reducer",
    "take_state",
]

_CURE: Final = "load a state that state_dict() returned"
_SHOWN: Final = 60  # longest text in a message, in characters
_MAGNITUDES = ("key", "threshold_key")  # state fields that are keys of magnitudes
_NAME: Final = "state['reducer']"  # path of a reducer's state in saved states, for errors
_COUNT: Final = Number(0, whole=True)
# The fields of a saved state.  All of them are checked before anything is changed.  Selectors and
# collectives check their own states (``Stateful.parsed_state``).
_FIELDS: Final = Fields(
    {
        "algorithm": str,
        "rank": _COUNT,
        "world_size": _COUNT,
        "momentum": Number(),
        "scale": Number(sys.float_info.min),
        "step": _COUNT,
        "skipped": _COUNT,
        "density": Number(sys.float_info.min, 1),
        "quotas": Sequence[int],
        "quota_key": int | None,
        "units": Sequence[Sequence[str]],
        "sizes": Sequence[Sequence[int]],
        "residual": Mapping,
        "velocity": Mapping,
        "previous_norm": Either((Exactly(None), Number(0))),
        # None after a resharding, which resets them
        "selectors": list | tuple | None,
        "collectives": list | tuple | None,
    },
    {"committed": Sequence[int]},
)


def reducer_state(reducer: Reducer) -> dict[str, Any]:
    """Return everything that the next step depends on: plain tensors and numbers, by parameter name."""
    # tensors are saved by parameter, not by unit, so that ``reshard`` can move them to other ranks and
    # shards
    corrector = reducer.corrector
    moving = corrector.velocities if corrector and _momentum(reducer) else []
    # a step of several fragments may be open; its committed units are then also saved
    committed = {"committed": reducer.committed} if reducer.committed else {}
    return {
        **committed,
        "algorithm": reducer.algorithm.name,
        "rank": reducer.comm.rank,
        "world_size": reducer.comm.world_size,
        "momentum": _momentum(reducer),
        "scale": reducer.scale,
        "step": reducer.step,
        "skipped": reducer.skipped,
        "density": reducer.plan.density,
        "quotas": list(reducer.plan.shares.quotas),
        "quota_key": reducer.plan.shares.key,
        "units": [[slot.name for slot in unit.slots] for unit in reducer.units],
        "sizes": [unit.layers for unit in reducer.units],
        "residual": _by_name(reducer, [residual.value for residual in reducer.residuals]),
        "velocity": _by_name(reducer, moving),
        "previous_norm": corrector.previous_norm if corrector else None,
        "selectors": [selector.state_dict() for selector in reducer.selectors],
        "collectives": [collective.state_dict() for collective in reducer.collectives],
    }


def _by_name(reducer: Reducer, of_units: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {
        slot.name: values[slot.start : slot.start + slot.size].clone()
        for unit, values in zip(reducer.units, of_units, strict=False)
        if values is not None
        for slot in unit.slots
    }


@dataclass(frozen=True, eq=False)
class ParsedState:
    """A saved state that fits a reducer, and its parts in the form that the reducer needs."""

    saved: Mapping[str, Any]
    shares: SharesState
    residuals: list[Tensor | None]
    velocities: list[Tensor | None]
    parts: list[Any]  # states of all selectors, then of all collectives

    def common(self) -> dict[str, object]:
        """Return the facts that must be equal on all ranks, by name."""
        saved, units = self.saved, len(self.residuals)
        counts = [saved["step"], saved["skipped"], float(saved["scale"]), self.shares]
        counts += saved.get("committed", ())
        return {
            "its collectives": [*counts, *self.parts[units:]],
            # None stands for zeros, i.e. no rank has withheld an entry
            "which residuals and velocities it has": [
                values is not None for values in (*self.residuals, *self.velocities)
            ],
        }


def parse_state(reducer: Reducer, state: Mapping[str, Any]) -> ParsedState:
    """Check a saved state against a reducer, without changing the reducer; return the state's parts.

    Raises:
        ConfigurationError: the state is from a different algorithm, rank, world size or set of units,
            contains NaN or Inf, or is not a state at all.
    """
    check_fields(state)
    _check_setup(reducer, state)
    residuals, velocities = (
        [_saved_values(state, what, unit) for unit in reducer.units]
        for what in ("residual", "velocity")
    )
    shares = _saved_shares(reducer, state)
    return ParsedState(state, shares, residuals, velocities, _saved_parts(reducer, state))


async def agree_state(
    comm: Communicator,
    parsed: ParsedState,
    facts: Mapping[str, str] | None = None,
    *,
    parts: Communicator | None = None,
) -> None:
    """Compare the saved states of all ranks, each already validated by its own rank; change nothing.

    Args:
        comm: the ranks that hold the same part of the model.
        parsed: the result of ``parse_state`` on this rank.
        facts: further facts that must be equal, by name.
        parts: the ranks that hold the other shards or stages of this replica; they also call this.

    Raises:
        PeerError: the states are from different steps or different saves; raised on all ranks.
    """
    with comm.exchange():
        await _agree(comm, parts, parsed.saved["step"], {**parsed.common(), **(facts or {})})


def take_state(reducer: Reducer, parsed: ParsedState, *, keep_scale: bool = False) -> None:
    """Restore a state validated by ``parse_state``; the next step continues bit for bit.

    Args:
        reducer: the reducer that was given to ``parse_state``.
        parsed: the result of ``parse_state``.
        keep_scale: continue with the saved scale; for callers that also restore a GradScaler.
            Otherwise the saved residuals are rescaled to the reducer's scale.

    Raises:
        ConfigurationError: the state overflows at the reducer's scale; part of it was already restored.
    """
    saved, wanted = parsed.saved, reducer.scale
    scale = float(saved["scale"])
    for residual, value in zip(reducer.residuals, parsed.residuals, strict=True):
        residual.load(value)
    for part, state in zip((*reducer.selectors, *reducer.collectives), parsed.parts, strict=True):
        part.state = state
    if reducer.corrector:
        reducer.corrector.load(parsed.velocities, saved["previous_norm"], scale)
    reducer.resume(saved["step"], saved["skipped"])
    reducer.set_scale(scale)
    reducer.plan.take(parsed.shares)
    reducer.open()
    # rescaling comes last, when residuals, velocities and keys all have the saved scale
    if not keep_scale:
        rescale_(reducer, wanted)
    reducer.resume_committed(saved.get("committed", ()))


async def restore_reducer(
    reducer: Reducer, state: Mapping[str, Any], *, keep_scale: bool = False
) -> None:
    """Restore a state that ``reducer_state`` returned on this rank, or that ``reshard`` made for it.

    This is collective; if one rank's state does not fit, all ranks raise.  After a resharding, thresholds
    and boundaries are reset.
    """

    def parse() -> ParsedState:
        return parse_state(reducer, state)

    parsed = await on_all_or_none([reducer.comm], parse, "load its saved state")
    await agree_state(reducer.comm, parsed)
    take_state(reducer, parsed, keep_scale=keep_scale)


async def _agree(
    comm: Communicator, parts: Communicator | None, step: int, common: Mapping[str, object]
) -> None:
    """Refuse states from different steps, among replicas and among the parts of this replica."""
    failure: CommunicationError | None = None
    what = "step" if comm.ledger.local_step is None else "exchange"
    try:
        await agree(comm, {f"the {what} of the saved state": step, **common})
    except CommunicationError as error:
        # the error is raised later, because the other parts of this replica wait for this part's outcome
        failure = error
    divided = [] if parts is None else [parts]
    found = await worst(divided, int(failure is not None), str(failure or ""), "agreement")
    if found.severity:
        raise failure or DisagreementError(found.words)
    for one in divided:
        await agree(one, {f"the {what} of the saved states of a replica's parts": step})


# ---- checks of a saved state ------------------------------------------------------------------------


def check_fields(state: object) -> None:
    """Refuse a value that is not a reducer's state: a field is missing, unknown, or of the wrong type."""
    check_saved(state, _FIELDS, _NAME, _CURE)


def _misfit(name: str, value: object, expected: object) -> ConfigurationError:
    return ConfigurationError(
        f"the saved state has {name} {_brief(value)}, expected {_brief(expected)}; {_CURE}"
    )


def _brief(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= _SHOWN else brief(value)


def _check_setup(reducer: Reducer, state: Mapping[str, Any]) -> None:
    """Refuse a state that was saved in a different set-up."""
    named = {slot.name for unit in reducer.units for slot in unit.slots}
    for what in ("residual", "velocity"):
        unknown = [name for name in state[what] if name not in named]
        if unknown:
            raise ConfigurationError(
                f"the saved {what} has '{_brief(unknown[0])}', which is not a parameter here; load "
                "each "
                "rank's own state into the same set-up"
            )
    expected = {
        "algorithm": reducer.algorithm.name,
        "world_size": reducer.comm.world_size,
        "rank": reducer.comm.rank,
        "momentum": _momentum(reducer),
        "density": reducer.plan.density,
        "units": [[slot.name for slot in unit.slots] for unit in reducer.units],
        "sizes": [unit.layers for unit in reducer.units],
    }
    cures = {
        "world_size": "sparsync.load, or reshard for gradients, makes states for other world sizes",
        "density": "load it with the density that it was saved with",
    }
    for name, value in expected.items():
        cure = cures.get(name, "load each rank's own state into the same set-up")
        check_saved(state[name], Exactly(value), f"{_NAME}['{name}']", cure)
    committed, units = state.get("committed", []), {*range(len(reducer.units))}
    if committed and (sorted(set(committed)) != list(committed) or not set(committed) < units):
        raise _misfit("committed units", committed, f"some of {len(reducer.units)}, in order")


def _saved_parts(reducer: Reducer, state: Mapping[str, Any]) -> list[Any]:
    """Return the states of all selectors and collectives; after a resharding, initial states."""
    saved = [state["selectors"], state["collectives"]]
    if saved == [None, None]:
        pairs = [reducer.algorithm.for_unit(unit) for unit in reducer.units]
        return [part.state for kind in zip(*pairs, strict=True) for part in kind]
    parts: list[Stateful] = [*reducer.selectors, *reducer.collectives]
    flat = [its for kind in saved for its in kind or ()]
    if len(flat) != len(parts):
        raise _misfit("selectors and collectives:", len(flat), len(parts))
    return [part.parsed_state(its) for part, its in zip(parts, flat, strict=True)]


def _saved_values(state: Mapping[str, Any], what: str, unit: Unit) -> Tensor | None:
    """Assemble a unit's residual or velocity from its parameters; return None if none was saved."""
    found = [state[what].get(slot.name) for slot in unit.slots]
    if all(piece is None for piece in found):
        return None
    wide = torch.promote_types(unit.dtype, torch.float32)
    for slot, piece in zip(unit.slots, found, strict=True):
        dense = isinstance(piece, Tensor) and piece.layout == torch.strided and not piece.is_meta
        if not dense or piece.shape != (slot.size,) or piece.dtype != wide:
            known = isinstance(piece, Tensor)
            given = f"{tuple(piece.shape)} {piece.dtype}" if known else _brief(piece)
            raise ConfigurationError(
                f"the saved {what} of '{slot.name}' is {given}, expected a tensor of {slot.size} "
                f"elements of {wide}; was it saved from this model?"
            )
    whole = torch.cat([piece.to(unit.device, wide) for piece in found])
    # NaN in a residual would be selected in every later step, and all these steps would be refused
    broken = (~torch.isfinite(whole)).nonzero()
    if broken.numel():
        raise ConfigurationError(
            f"the saved {what} of '{unit.name_at(int(broken[0]))}' holds NaN or Inf, which no step "
            "produces; load another checkpoint"
        )
    return whole


def _saved_shares(reducer: Reducer, state: Mapping[str, Any]) -> SharesState:
    """Return the shares; they must sum to the number of entries that the density implies."""
    quotas = state["quotas"]
    sizes = [unit.size for unit in reducer.units]
    if len(quotas) != len(sizes) or any(
        not 0 <= k <= n for k, n in zip(quotas, sizes, strict=True)
    ):
        raise _misfit("quotas", quotas, f"a number of entries for each of {len(sizes)} units")
    expected = sum(unit.entries(reducer.plan.density) for unit in reducer.units)
    if sum(quotas) != expected:
        raise _misfit("a sum of quotas of", sum(quotas), expected)
    return SharesState(tuple(quotas), state["quota_key"])


def _momentum(reducer: Reducer) -> float:
    return reducer.correction.momentum if reducer.correction else 0.0


# ---- the scale --------------------------------------------------------------------------------------


def _check_scale(scale: object) -> float:
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ConfigurationError(f"the scale is {scale!r}; give a finite number > 0")
    return float(scale)


def rescale_(reducer: Reducer, scale: float) -> None:
    """Adapt a reducer, between two steps, to gradients that are multiplied by ``scale``.

    If a residual or velocity would exceed the range of float32, none of them changes.  Instead, this
    rank's next step overflows: all ranks refuse that step, and their GradScalers return to a lower scale.
    At a scale <= 1, where that would not help, ConfigurationError is raised, and nothing is changed.

    Cost: a pass over the residual, or two passes if the residual grows.

    Example:
        >>> from sparsync.presets import resolve
        >>> from sparsync.transports.driver import run
        >>> from sparsync.transports.groups import SoloCommunicator
        >>> from sparsync.units import plan_units
        >>> units = plan_units([("w", torch.zeros(4))])
        >>> reducer = Reducer(SoloCommunicator(), units, resolve("allgather"), 0.25)
        >>> _ = run(reducer.reduce([torch.tensor([1.0, 2.0, 3.0, 4.0])]))
        >>> rescale_(reducer, 0.5); reducer.residuals[0].value.tolist()
        [0.5, 1.0, 1.5, 0.0]
    """
    factor = _check_scale(scale) / reducer.scale
    if factor == 1:
        return
    overflowing = _overflowing(reducer, factor)
    if overflowing and scale <= 1:
        raise ConfigurationError(
            f"the {overflowing} overflows when the scale goes from {reducer.scale:g} to {scale:g}; load "
            "another checkpoint, or lower the learning rate"
        )
    for selector, collective, residual in zip(
        reducer.selectors, reducer.collectives, reducer.residuals, strict=True
    ):
        for part in (selector, collective):
            part.state = _moved(part.state, factor, residual.accumulated.dtype)
    if overflowing:
        # the states changed above are undone when the step is refused
        reducer.overflow()
        return
    for residual in reducer.residuals:
        residual.scale_(factor)
    if reducer.corrector:
        reducer.corrector.rescale_(factor, scale)
    if reducer.residuals:
        # any residual will do, because units that divide k among themselves have the same dtype
        dtype = reducer.residuals[0].accumulated.dtype
        reducer.plan.take(_moved(reducer.plan.shares, factor, dtype))
    reducer.set_scale(scale)
    # the step is planned again, because the keys from which entries are collected have changed, and a
    # refusal must return to the new states
    reducer.open()


def rescaled_key(key: int, factor: float, dtype: torch.dtype) -> int:
    """Return the key of a magnitude times ``factor``; 1, which stands for all nonzero values, stays 1."""
    # A key consists of the bits of |x|.  It is multiplied as a float, because adding octaves to it would
    # be wrong for denormal numbers and for factors that are not powers of two.
    if key <= 1:
        return key
    integer = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
    value = torch.tensor([key], dtype=integer, device="cpu").view(dtype) * factor
    return max(int(kernels.magnitude_keys(value)), 1)


def _overflowing(reducer: Reducer, factor: float) -> str:
    """Return the name of a residual or velocity that would overflow, or ""."""
    # Inf in a residual would be selected in every later step, and all these steps would be refused
    if factor < 1:
        return ""
    waiting = [("residual", [residual.value for residual in reducer.residuals])]
    if reducer.corrector:
        waiting.append(("velocity", [*reducer.corrector.velocities]))
    for what, of_units in waiting:
        for unit, values in zip(reducer.units, of_units, strict=True):
            if values is None or not values.numel():
                continue
            limit = torch.finfo(values.dtype).max / factor
            if max(map(abs, map(float, values.aminmax()))) > limit:
                return f"{what} of '{unit.name_at(int(values.abs().argmax()))}'"
    return ""


def _moved(state: Any, factor: float, dtype: torch.dtype) -> Any:
    """Return a copy of a state, and of states nested in it, with all magnitudes times ``factor``."""
    if isinstance(state, tuple):
        return tuple(_moved(part, factor, dtype) for part in state)
    if not is_dataclass(state) or isinstance(state, type):
        return state
    changes = {}
    for field in fields(state):
        value = getattr(state, field.name)
        if field.name in _MAGNITUDES and value is not None:
            changes[field.name] = rescaled_key(value, factor, dtype)
        else:
            changes[field.name] = _moved(value, factor, dtype)
    return replace(state, **changes)
