"""What every integration shares: the checks, the agreement, statistics and saved state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsync.collectives.agreement import agree
from sparsync.errors import ConfigurationError
from sparsync.reducer import Reducer
from sparsync.transports.base import run

__all__ = ["agree_on_reducer", "load_reducer_state", "reducer_state", "reducer_stats"]

_VERSION = 1


def agree_on_reducer(reducer: Reducer) -> None:
    """Compare the set-up with all ranks before the first step.

    Raises:
        PeerError: names what differs and on which ranks.
    """
    layout = [(slot.name, slot.size) for unit in reducer.units for slot in unit.slots]
    run(
        agree(
            reducer.comm,
            {
                "the version of the saved state": _VERSION,
                "the algorithm": reducer.algorithm.name,
                "density": reducer.density,
                "warmup_steps": reducer.warmup_steps,
                "the parameters (names and sizes)": layout,
                "dtypes": [str(unit.dtype) for unit in reducer.units],
            },
        )
    )


def reducer_stats(reducer: Reducer) -> dict[str, Any]:
    """Return plain numbers about the run so far: steps, bytes per phase, residual norms."""
    ledger = reducer.comm.ledger
    return {
        "algorithm": reducer.algorithm.name,
        "density": reducer.density,
        "steps": reducer.step,
        "skipped_steps": reducer.skipped,
        "units": [
            {"parameters": len(u.slots), "size": u.size, "k": u.entries(reducer.density)}
            for u in reducer.units
        ],
        "bytes_sent_last_step": ledger.last_step.sent,
        "bytes_received_last_step": ledger.last_step.received,
        "bytes_sent_per_step_max": ledger.sent_max,
        "bytes_received_per_step_max": ledger.received_max,
        "phases": {phase: t.as_dict() for phase, t in ledger.by_phase().items()},
        "residual_norm": [
            0.0 if r.value is None else float(torch.linalg.vector_norm(r.value))
            for r in reducer.residuals
        ],
    }


def reducer_state(reducer: Reducer) -> dict[str, Any]:
    """Return everything that the next step depends on: plain tensors and numbers, one per rank.

    Residuals are keyed by parameter name.  Loadable with ``torch.load(..., weights_only=True)``.
    """
    residual = {}
    for unit, kept in zip(reducer.units, reducer.residuals, strict=True):
        for slot in unit.slots:
            if kept.value is not None:
                residual[slot.name] = kept.value[slot.start : slot.start + slot.size].clone()
    return {
        "version": _VERSION,
        "algorithm": reducer.algorithm.name,
        "rank": reducer.comm.rank,
        "world_size": reducer.comm.world_size,
        "step": reducer.step,
        "skipped": reducer.skipped,
        "units": [[slot.name for slot in unit.slots] for unit in reducer.units],
        "residual": residual,
        "selectors": [selector.state_dict() for selector in reducer.selectors],
        "collectives": [collective.state_dict() for collective in reducer.collectives],
    }


def load_reducer_state(reducer: Reducer, state: Mapping[str, Any]) -> None:
    """Restore what ``reducer_state`` returned on this rank: the next step continues bit for bit.

    Raises:
        ConfigurationError: the state is of another algorithm, rank, world size or set of units.
    """
    expected = {
        "version": _VERSION,
        "algorithm": reducer.algorithm.name,
        "rank": reducer.comm.rank,
        "world_size": reducer.comm.world_size,
        "units": [[slot.name for slot in unit.slots] for unit in reducer.units],
    }
    for name, value in expected.items():
        if state.get(name) != value:
            raise ConfigurationError(
                f"the saved state has {name} {_brief(state.get(name))}, this run has "
                f"{_brief(value)}; load each rank's own state into the same set-up"
            )
    for unit, kept in zip(reducer.units, reducer.residuals, strict=True):
        saved = state["residual"]
        kept.value = None
        if any(slot.name in saved for slot in unit.slots):
            kept.value = torch.cat([saved[slot.name].to(kept.accumulated) for slot in unit.slots])
    for selector, saved_state in zip(reducer.selectors, state["selectors"], strict=True):
        selector.load_state_dict(saved_state)
    for collective, saved_state in zip(reducer.collectives, state["collectives"], strict=True):
        collective.load_state_dict(saved_state)
    reducer.step, reducer.skipped = state["step"], state["skipped"]
    reducer.settle()


def _brief(value: object, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."
