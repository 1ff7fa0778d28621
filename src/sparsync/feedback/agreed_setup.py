"""Compare a reducer's set-up across ranks, and report its numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsync.algorithm import settings_of
from sparsync.feedback.reducer import Reducer
from sparsync.fields import STATE_VERSION
from sparsync.transports.agree import agree, digest
from sparsync.transports.driver import run
from sparsync.transports.ledger import STAGES, Traffic

__all__ = ["agree_on_reducer", "number_of", "reducer_stats", "set_up_digest", "weights_digest"]


def agree_on_reducer(reducer: Reducer, **settings: object) -> None:
    """Compare the set-up of a reducer, and further settings, across all ranks.

    Raises:
        PeerError: the set-ups differ; the message names the first difference and the ranks.
    """
    run(agree(reducer.comm, _facts(reducer, settings)))


def set_up_digest(reducer: Reducer, **settings: object) -> int:
    """Return a 63-bit hash of everything that ``agree_on_reducer`` compares."""
    text = "".join(f"{name}={value};" for name, value in _facts(reducer, settings).items())
    return number_of(text)


def number_of(text: str) -> int:
    """Return a 63-bit hash of a text."""
    # ``hash`` differs between processes; only 63 bits are used, because the number is sent as an int64
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _facts(reducer: Reducer, settings: Mapping[str, object]) -> dict[str, object]:
    parameters = [(slot.name, slot.size) for unit in reducer.units for slot in unit.slots]
    # Only the first difference is reported, so causes come before their consequences: if algorithms
    # differ, so do selectors and collectives; if parameters differ, so do units.
    return {
        "the version of the saved state": STATE_VERSION,
        "the algorithm": reducer.algorithm.name,
        "its options": reducer.algorithm.options,
        "settings": ", ".join(f"{name}={value}" for name, value in sorted(settings.items())),
        "its parts": [settings_of(p) for p in (*reducer.selectors, *reducer.collectives)],
        "density": reducer.plan.density,
        "xi_period": reducer.xi_period,
        "the warm-up": reducer.plan.warmup,
        "the correction": reducer.correction,
        "the parameters (names and sizes)": parameters,
        "the units (parameters of each, dtypes, dense or not, output or not)": [
            (len(unit.slots), str(unit.dtype), unit.dense, unit.output) for unit in reducer.units
        ],
    }


def weights_digest(parameters: Iterable[Tensor]) -> str:
    """Return a fingerprint of weights, equal if and only if their bits are equal."""
    return hashlib.sha256(" ".join(map(digest, parameters)).encode()).hexdigest()


def reducer_stats(
    reducer: Reducer, steps: int | None = None, before: tuple[int, Traffic] | None = None
) -> dict[str, Any]:
    """Return plain numbers about the run so far: steps, bytes per phase, residual norms.

    Args:
        reducer: the reducer.
        steps: the number of local steps (each exchange follows one or more of them); by default the
            number of exchanges.
        before: the number of local steps before this process started, and the traffic before its first
            step.  Means over local steps exclude both, and also the traffic outside of steps
            (``finish``).
    """
    ledger = reducer.comm.ledger
    total, (resumed, set_up) = ledger.of_steps(), before or (0, Traffic())
    local_steps = reducer.step if steps is None else steps
    count = max(local_steps - resumed, 1)
    return {
        "algorithm": reducer.algorithm.name,
        "options": {
            name: value if isinstance(value, int | float | str | None) else str(value)
            for name, value in reducer.algorithm.options
        },
        "density": reducer.plan.density,
        "dense_share": reducer.algorithm.dense_share(
            reducer.units, reducer.plan.density, reducer.comm.world_size
        ),
        "scale": reducer.scale,
        "local_steps": local_steps,
        "exchanges": reducer.step,
        "refused_exchanges": reducer.skipped,
        "units": [
            {"parameters": len(u.slots), "size": u.size, "k": k}
            for u, k in zip(reducer.units, reducer.plan.quotas, strict=True)
        ],
        "bytes_sent_last_exchange": ledger.last_step.sent,
        "bytes_received_last_exchange": ledger.last_step.received,
        "bytes_sent_per_local_step": (total.sent - set_up.sent) / count,
        "bytes_received_per_local_step": (total.received - set_up.received) / count,
        "bytes_sent_per_exchange_max": ledger.sent_max,
        "bytes_received_per_exchange_max": ledger.received_max,
        "bytes_sent_by_finish": ledger.outside.sent,
        "bytes_received_by_finish": ledger.outside.received,
        "phases": {phase: t.as_dict() for phase, t in ledger.by_phase().items()},
        "stages": {stage: ledger.stages.get(stage, 0.0) for stage in STAGES},
        "layers": [
            {
                "name": slot.name,
                "size": slot.size,
                "unit": number,
                "method": "dense" if unit.dense else selector.method(4 * slot.size),
            }
            for number, unit, selector in zip(
                range(len(reducer.units)), reducer.units, reducer.selectors, strict=True
            )
            for slot in unit.slots
        ],
        "choices": [c.explain() for c in reducer.collectives],
        # norms of the rounding errors that are dropped, i.e. that no residual keeps
        "lost_norm": [float(torch.linalg.vector_norm(v.values)) for v in reducer.lost],
        "residual_norm": [
            0.0 if r.value is None else float(torch.linalg.vector_norm(r.value)) / reducer.scale
            for r in reducer.residuals
        ],
    }
