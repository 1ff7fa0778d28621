"""Save and restore the state of a reducer: everything that the next step depends on, per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.errors import CommunicationError, ConfigurationError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.scaling import check_scale, rescale_
from sparsync.feedback.shares import SharesState
from sparsync.state import Stateful, fits
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator
from sparsync.units import Unit

__all__ = [
    "STATE_VERSION",
    "ParsedState",
    "apply_state",
    "check_fields",
    "parse_state",
    "reducer_state",
    "restore_reducer",
]

STATE_VERSION: Final = 2
# of a saved state, by type; those of selectors and collectives are their own affair
_FIELDS: Final[tuple[tuple[str, Any], ...]] = (
    ("version", int),
    ("algorithm", str),
    ("world_size", int),
    ("momentum", float),
    ("scale", float),
    ("step", int),
    ("skipped", int),
    ("density", float),
    ("rank", int),
    ("units", Sequence[Sequence[str]]),
    ("sizes", Sequence[Sequence[int]]),
    ("quotas", Sequence[int]),
    ("quota_key", int | None),
    ("residual", Mapping),
    ("velocity", Mapping),
    ("previous_norm", float | None),
)
_COUNTS: Final = ("world_size", "step", "skipped", "rank")


def reducer_state(reducer: Reducer) -> dict[str, Any]:
    """Return everything that the next step depends on: plain tensors and numbers, one per rank.

    Residuals are keyed by parameter name.  Loadable with ``torch.load(..., weights_only=True)``.
    """
    waiting: dict[str, dict[str, Tensor]] = {"residual": {}, "velocity": {}}
    for i, unit in enumerate(reducer.units):
        moving = (
            reducer.corrector.velocities[i] if _momentum(reducer) and reducer.corrector else None
        )
        for what, values in (("residual", reducer.residuals[i].value), ("velocity", moving)):
            if values is not None:
                for slot in unit.slots:
                    here = slice(slot.start, slot.start + slot.size)
                    waiting[what][slot.name] = values[here].clone()
    return {
        "version": STATE_VERSION,
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
        **waiting,
        "previous_norm": reducer.corrector.previous_norm if reducer.corrector else None,
        "selectors": [selector.state_dict() for selector in reducer.selectors],
        "collectives": [collective.state_dict() for collective in reducer.collectives],
    }


@dataclass(frozen=True, eq=False)
class ParsedState:
    """A saved state that was found to fit a reducer."""

    saved: Mapping[str, Any]
    density: float
    shares: SharesState
    residuals: list[Tensor | None]
    velocities: list[Tensor | None]
    parts: list[Any]  # of all selectors, then of all collectives


def parse_state(reducer: Reducer, state: Mapping[str, Any]) -> ParsedState:
    """Return what a saved state holds for a reducer, which is not changed.

    Raises:
        ConfigurationError: the state is of another algorithm, rank, world size or set of units, holds
            NaN or Inf, or is not a state at all.
    """
    check_fields(state)
    _check_setup(reducer, state)
    check_scale(state["scale"])
    density = _saved_density(state, reducer)
    return ParsedState(
        saved=state,
        density=density,
        shares=_saved_shares(state, reducer, density),
        residuals=[_saved(state, "residual", unit) for unit in reducer.units],
        velocities=[_saved(state, "velocity", unit) for unit in reducer.units],
        parts=_saved_parts(reducer, state),
    )


def check_fields(state: object) -> None:
    """Refuse what is no saved state: without a field, or with one of another type.

    Raises:
        ConfigurationError: names the first.
    """
    for name, kind in _FIELDS:
        if not isinstance(state, Mapping) or name not in state:
            raise ConfigurationError(
                f"a saved state has no '{name}'; give what state_dict() of every rank returned"
            )
        value = state[name]
        if not fits(value, kind) or (name in _COUNTS and value < 0):
            least = " >= 0" if name in _COUNTS else ""
            expected = f"{getattr(kind, '__name__', kind)}{least}"
            raise ConfigurationError(
                f"a saved state has {name} {_brief(value)}, expected {expected}; give what "
                "state_dict() of every rank returned"
            )
    if state["version"] != STATE_VERSION:  # type: ignore[index]  # it is a mapping
        raise ConfigurationError(
            f"the saved state has version {state['version']}, expected {STATE_VERSION}; load it with "  # type: ignore[index]
            "the sparsync that saved it"
        )


async def apply_state(
    reducer: Reducer,
    parsed: ParsedState,
    *,
    keep_scale: bool = False,
    parts: Communicator | None = None,
) -> None:
    """Restore a parsed state on all ranks, which call it together: the next step continues bit for bit.

    They compare the step and what must be equal on all of them; nothing is changed unless it is.

    Args:
        reducer: that ``parse_state`` was given.
        parsed: what it returned.
        keep_scale: go on at the saved scale, as when a GradScaler is restored as well; else what was
            saved is brought to the reducer's.
        parts: the ranks that hold the other shards or stages of this replica; they call it as well.

    Raises:
        PeerError: the ranks' states are of different steps, or other ranks of a part's were.
    """
    saved, wanted, units = parsed.saved, reducer.scale, len(reducer.units)
    scale = float(saved["scale"])
    shared = [saved["step"], scale, parsed.density, parsed.shares, *parsed.parts[units:]]
    await _agree(reducer.comm, parts, saved["step"], shared)
    for residual, value in zip(reducer.residuals, parsed.residuals, strict=True):
        residual.load(value)
    for part, state in zip((*reducer.selectors, *reducer.collectives), parsed.parts, strict=True):
        part.state = state
    if reducer.corrector:
        reducer.corrector.load(parsed.velocities, saved["previous_norm"])
        reducer.corrector.scale = scale
    reducer.step, reducer.skipped, reducer.scale = saved["step"], saved["skipped"], scale
    reducer.plan.density, reducer.plan.shares = parsed.density, parsed.shares
    reducer.open()
    if not keep_scale:
        rescale_(reducer, wanted)


async def restore_reducer(
    reducer: Reducer,
    state: Mapping[str, Any],
    *,
    keep_scale: bool = False,
    parts: Communicator | None = None,
) -> None:
    """Restore what ``reducer_state`` returned on this rank, or what ``reshard`` made for it.

    See ``parse_state`` and ``apply_state``.  Of a resharded state, thresholds and boundaries start
    again.
    """
    await apply_state(reducer, parse_state(reducer, state), keep_scale=keep_scale, parts=parts)


async def _agree(
    comm: Communicator, parts: Communicator | None, step: int, shared: Sequence[object]
) -> None:
    """Refuse states of different steps: among replicas, and among the parts of this one."""
    failure: CommunicationError | None = None
    try:
        await agree(comm, {"the step of the saved state": step, "its collectives": shared})
    except CommunicationError as error:
        failure = error  # the other parts wait for an answer
    if parts is not None:
        told = {
            "the step of the saved states of a replica's parts": step,
            "whether the replicas of a part fit together": failure is None,
        }
        try:
            await agree(parts, told)
        except CommunicationError as error:
            raise (failure or error) from None
    if failure is not None:
        raise failure


def _check_setup(reducer: Reducer, state: Mapping[str, Any]) -> None:
    """Refuse a state of another set-up."""
    expected = {
        "algorithm": reducer.algorithm.name,
        "world_size": reducer.comm.world_size,
        "rank": reducer.comm.rank,
        "momentum": _momentum(reducer),
        "units": [[slot.name for slot in unit.slots] for unit in reducer.units],
        "sizes": [unit.layers for unit in reducer.units],
    }
    for name, value in expected.items():
        if state[name] != value:
            advice = "load each rank's own state into the same set-up"
            if name == "world_size":
                advice = (
                    "sparsync.load, or sparsync.reshard, brings states to another number of ranks"
                )
            raise ConfigurationError(
                f"the saved state has {name} {_brief(state[name])}, this run has {_brief(value)}; "
                f"{advice}"
            )


def _saved_parts(reducer: Reducer, state: Mapping[str, Any]) -> list[Any]:
    """Return the states of all selectors and collectives; fresh ones after a resharding."""
    saved = [state.get("selectors", ()), state.get("collectives", ())]
    if saved == [None, None]:
        pairs = [reducer.algorithm.for_unit(unit) for unit in reducer.units]
        return [part.state for kind in zip(*pairs, strict=True) for part in kind]
    parts: list[Stateful] = [*reducer.selectors, *reducer.collectives]
    flat = [its for kind in saved if isinstance(kind, list | tuple) for its in kind]
    if len(flat) != len(parts):
        raise ConfigurationError(
            f"the saved state has {len(flat)} selectors and collectives, this run has "
            f"{len(parts)}; load a state that state_dict() returned"
        )
    return [part.parsed_state(its) for part, its in zip(parts, flat, strict=True)]


def _saved(state: Mapping[str, Any], what: str, unit: Unit) -> Tensor | None:
    """Put a unit's residual or velocity together from its parameters; None if all are zero."""
    found = [state[what].get(slot.name) for slot in unit.slots]
    if all(piece is None for piece in found):
        return None
    for slot, piece in zip(unit.slots, found, strict=True):
        if not isinstance(piece, Tensor) or piece.shape != (slot.size,):
            shape = tuple(piece.shape) if isinstance(piece, Tensor) else _brief(piece)
            raise ConfigurationError(
                f"the saved {what} of '{slot.name}' is {shape}, expected a tensor of {slot.size} "
                "elements; was it saved from this model?"
            )
    wide = torch.promote_types(unit.dtype, torch.float32)
    whole = torch.cat([piece.to(unit.device, wide) for piece in found])
    if not bool(torch.isfinite(whole).all()):
        at = int(torch.isfinite(whole).logical_not().nonzero()[0])
        raise ConfigurationError(
            f"the saved {what} of '{unit.name_at(at)}' holds NaN or Inf, which no step leaves behind; "
            "load another checkpoint"
        )
    return whole


def _saved_density(state: Mapping[str, Any], reducer: Reducer) -> float:
    """Return the density, which only an adaptive run has changed."""
    rule, value = reducer.plan.adaptive, state["density"]
    if rule is None:
        return reducer.plan.density
    if not rule.low <= value <= rule.high:
        raise ConfigurationError(
            f"the saved state has density {_brief(value)}, expected one from {rule.low} to "
            f"{rule.high}; load it with the density that it was saved with"
        )
    return float(value)


def _saved_shares(state: Mapping[str, Any], reducer: Reducer, density: float) -> SharesState:
    quotas, sizes = state["quotas"], [unit.size for unit in reducer.units]
    in_range = [0 <= k <= n for k, n in zip(quotas, sizes, strict=False)]
    if len(quotas) != len(sizes) or not all(in_range):
        raise ConfigurationError(
            f"the saved state has quotas {_brief(quotas)}, expected a number of entries for each of "
            f"{len(sizes)} units"
        )
    expected = sum(unit.entries(density) for unit in reducer.units)
    if sum(quotas) != expected:
        raise ConfigurationError(
            f"the saved state selects {sum(quotas)} entries per step, this run {expected}; "
            "load it with the density that it was saved with"
        )
    return SharesState(tuple(quotas), state["quota_key"])


def _momentum(reducer: Reducer) -> float:
    return reducer.correction.momentum if reducer.correction else 0.0


def _brief(value: object, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."
