"""What every integration shares: the checks, the agreement, statistics and saved state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsync.collectives.agreement import agree
from sparsync.correction import Velocity
from sparsync.errors import ConfigurationError
from sparsync.reducer import Reducer
from sparsync.residual import Residual
from sparsync.selection.shares import SharesState
from sparsync.state import Stateful
from sparsync.transports.base import run
from sparsync.transports.ledger import STAGES
from sparsync.units import Unit
from sparsync.wire.base import Codec

__all__ = [
    "agree_on_reducer",
    "load_reducer_state",
    "reducer_state",
    "reducer_stats",
    "weights_digest",
]

_VERSION = 1


def agree_on_reducer(reducer: Reducer, **settings: object) -> None:
    """Compare the set-up, and what else the integration was told, with all ranks.

    Raises:
        PeerError: names what differs and on which ranks.
    """
    parameters = [(slot.name, slot.size) for unit in reducer.units for slot in unit.slots]
    run(
        agree(
            reducer.comm,
            {
                "the version of the saved state": _VERSION,
                "the algorithm": reducer.algorithm.name,
                "its options": reducer.algorithm.options,
                "its parts": [_settings(p) for p in (*reducer.selectors, *reducer.collectives)],
                "density": reducer.density,
                "the warm-up": reducer.warmup,
                "the correction": reducer.correction,
                "other settings": sorted(settings.items()),
                "the parameters (names and sizes)": parameters,
                "the units (parameters of each, dtypes, dense or not, output or not)": [
                    (len(unit.slots), str(unit.dtype), unit.dense, unit.output)
                    for unit in reducer.units
                ],
            },
        )
    )


def _settings(part: Stateful) -> tuple[object, ...]:
    """Return the type of a selector or collective, and what of its settings are plain values."""
    plain = (bool, int, float, str, type(None), Codec)
    kept = [(k, repr(v)) for k, v in sorted(vars(part).items()) if isinstance(v, plain)]
    return (type(part).__name__, *(pair for pair in kept if not pair[0].startswith("_")))


def weights_digest(parameters: Mapping[Any, Tensor]) -> str:
    """Return a fingerprint of weights that must be equal on all ranks: DDP would have sent them."""
    digest = hashlib.sha256()
    for parameter in parameters.values():
        flat = parameter.detach().reshape(-1).contiguous().view(torch.uint8)
        digest.update(flat.cpu().numpy().tobytes())
    return digest.hexdigest()


def reducer_stats(reducer: Reducer) -> dict[str, Any]:
    """Return plain numbers about the run so far: steps, bytes per phase, residual norms."""
    ledger = reducer.comm.ledger
    return {
        "algorithm": reducer.algorithm.name,
        "density": reducer.density,
        "steps": reducer.step,
        "skipped_steps": reducer.skipped,
        "units": [
            {"parameters": len(u.slots), "size": u.size, "k": k}
            for u, k in zip(reducer.units, reducer.quotas, strict=True)
        ],
        "bytes_sent_last_step": ledger.last_step.sent,
        "bytes_received_last_step": ledger.last_step.received,
        "bytes_sent_per_step_max": ledger.sent_max,
        "bytes_received_per_step_max": ledger.received_max,
        "phases": {phase: t.as_dict() for phase, t in ledger.by_phase().items()},
        "stages": {stage: ledger.stages.get(stage, 0.0) for stage in STAGES},
        "layers": [layer for unit in range(len(reducer.units)) for layer in _layers(reducer, unit)],
        "lost_norm": [float(torch.linalg.vector_norm(v.values)) for v in reducer.lost],
        "residual_norm": [
            0.0 if r.value is None else float(torch.linalg.vector_norm(r.value))
            for r in reducer.residuals
        ],
    }


def _layers(reducer: Reducer, unit: int) -> list[dict[str, Any]]:
    """Return every parameter of a unit, with the method that selects from it."""
    planned, selector = reducer.units[unit], reducer.selectors[unit]
    methods = selector.methods(planned.layers)
    return [
        {
            "name": slot.name,
            "size": slot.size,
            "unit": unit,
            "method": "dense" if planned.dense else method,
        }
        for slot, method in zip(planned.slots, methods, strict=True)
    ]


def reducer_state(reducer: Reducer) -> dict[str, Any]:
    """Return everything that the next step depends on: plain tensors and numbers, one per rank.

    Residuals are keyed by parameter name.  Loadable with ``torch.load(..., weights_only=True)``.
    """
    residual, velocity = {}, {}
    for unit, kept, moving in _pairs(reducer):
        for slot in unit.slots:
            here = slice(slot.start, slot.start + slot.size)
            if kept.value is not None:
                residual[slot.name] = kept.value[here].clone()
            if moving.value.numel():
                velocity[slot.name] = moving.value[here].clone()
    return {
        "version": _VERSION,
        "algorithm": reducer.algorithm.name,
        "rank": reducer.comm.rank,
        "world_size": reducer.comm.world_size,
        "momentum": reducer.correction.momentum,
        "step": reducer.step,
        "skipped": reducer.skipped,
        "quotas": list(reducer.shares.quotas),
        "quota_key": reducer.shares.key,
        "units": [[slot.name for slot in unit.slots] for unit in reducer.units],
        "residual": residual,
        "velocity": velocity,
        "previous_norm": reducer.clipper.previous,
        "selectors": [selector.state_dict() for selector in reducer.selectors],
        "collectives": [collective.state_dict() for collective in reducer.collectives],
    }


def load_reducer_state(reducer: Reducer, state: Mapping[str, Any]) -> None:
    """Restore what ``reducer_state`` returned on this rank: the next step continues bit for bit.

    All ranks call it together: they compare the step and what must be equal on all of them.  Nothing
    is changed unless everything fits.

    Raises:
        ConfigurationError: the state is of another algorithm, rank, world size or set of units, or
            not a state at all.
        PeerError: the ranks' states are of different steps.
    """
    expected = {
        "version": _VERSION,
        "algorithm": reducer.algorithm.name,
        "rank": reducer.comm.rank,
        "world_size": reducer.comm.world_size,
        "momentum": reducer.correction.momentum,
        "units": [[slot.name for slot in unit.slots] for unit in reducer.units],
    }
    for name, value in expected.items():
        if state.get(name) != value:
            raise ConfigurationError(
                f"the saved state has {name} {_brief(state.get(name))}, this run has "
                f"{_brief(value)}; load each rank's own state into the same set-up"
            )
    pieces = [
        (_saved(state, "residual", unit, kept), _saved(state, "velocity", unit, kept))
        for unit, kept, _ in _pairs(reducer)
    ]
    previous = _saved_norm(state)
    step, skipped = (_saved_count(state, name) for name in ("step", "skipped"))
    parts = [*reducer.selectors, *reducer.collectives]
    saved_parts = [*state.get("selectors", ()), *state.get("collectives", ())]
    if len(saved_parts) != len(parts):
        raise ConfigurationError(
            f"the saved state has {len(saved_parts)} selectors and collectives, this run has "
            f"{len(parts)}; load a state that state_dict() returned"
        )
    states = [part.parsed_state(saved) for part, saved in zip(parts, saved_parts, strict=True)]
    shares = _saved_shares(state, reducer)
    shared = [step, shares, *states[len(reducer.selectors) :]]
    run(agree(reducer.comm, {"the step of the saved state": step, "its collectives": shared}))
    for (_, kept, moving), (residual, velocity) in zip(_pairs(reducer), pieces, strict=True):
        kept.load(residual)
        if moving.value.numel():
            moving.load(velocity)
    reducer.clipper.previous = previous
    for part, parsed in zip(parts, states, strict=True):
        part.state = parsed
    reducer.step, reducer.skipped, reducer.shares = step, skipped, shares
    reducer.settle()


def _pairs(reducer: Reducer) -> list[tuple[Unit, Residual, Velocity]]:
    return list(zip(reducer.units, reducer.residuals, reducer.velocities, strict=True))


def _saved(state: Mapping[str, Any], what: str, unit: Unit, kept: Residual) -> Tensor | None:
    """Put a unit's residual or velocity together from the parameters' pieces; None if all are zero."""
    saved = state.get(what, {})
    pieces = [saved.get(slot.name) for slot in unit.slots]
    if all(piece is None for piece in pieces):
        return None
    for slot, piece in zip(unit.slots, pieces, strict=True):
        if not isinstance(piece, Tensor) or piece.shape != (slot.size,):
            raise ConfigurationError(
                f"the saved {what} of '{slot.name}' is "
                f"{tuple(piece.shape) if isinstance(piece, Tensor) else _brief(piece)}, expected a "
                f"tensor of {slot.size} elements; was it saved from this model?"
            )
    return torch.cat([piece.to(kept.accumulated) for piece in pieces])


def _saved_shares(state: Mapping[str, Any], reducer: Reducer) -> SharesState:
    value, key = state.get("quotas"), state.get("quota_key")
    sizes = [unit.size for unit in reducer.units]
    if (
        not isinstance(value, list)
        or len(value) != len(sizes)
        or not all(type(k) is int and 0 <= k <= n for k, n in zip(value, sizes, strict=True))
        or not (key is None or type(key) is int)
    ):
        raise ConfigurationError(
            f"the saved state has quotas {_brief(value)} and quota_key {_brief(key)}, expected a "
            "number of entries per unit and a number or None"
        )
    expected = sum(unit.entries(reducer.density) for unit in reducer.units)
    if sum(value) != expected:
        raise ConfigurationError(
            f"the saved state selects {sum(value)} entries per step, this run {expected}; "
            "load it with the density that it was saved with"
        )
    return SharesState(tuple(value), key)


def _saved_norm(state: Mapping[str, Any]) -> float | None:
    value = state.get("previous_norm")
    if value is not None and not (isinstance(value, float) and value >= 0):
        raise ConfigurationError(
            f"the saved state has previous_norm {_brief(value)}, expected a norm or None"
        )
    return value


def _saved_count(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(
            f"the saved state has {name} {_brief(value)}, expected a whole number >= 0"
        )
    return value


def _brief(value: object, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."
