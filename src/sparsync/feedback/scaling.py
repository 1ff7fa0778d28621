"""When a GradScaler changes its scale: what waits in the residual is brought to the new one.

A hook sees gradients times the scale.  So residual, velocity and thresholds are in units of it, and
follow it: ``residual = residual * new / old``.  Scales are powers of two, unless a user sets others:
then nothing is rounded.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from sparsync import kernels
from sparsync.errors import ConfigurationError
from sparsync.feedback.reducer import Reducer

__all__ = ["check_scale", "rescale_", "rescaled_key"]

_MAGNITUDES = ("key", "threshold_key")  # fields of states that are keys of magnitudes


def check_scale(scale: object) -> float:
    """Return a scale that gradients can have been multiplied by.

    Raises:
        ConfigurationError: not a finite number > 0.
    """
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ConfigurationError(f"the scale is {scale!r}; give a finite number > 0")
    return float(scale)


def rescale_(reducer: Reducer, scale: float) -> None:
    """Bring a reducer to gradients that are multiplied by ``scale``, between two steps.

    Exact where ``scale / reducer.scale`` is a power of two and nothing leaves the range of float32; any
    other factor rounds every element of the residual once, by at most 2^-24 of it.

    Args:
        reducer: no step of it is open.
        scale: by which the next gradients are multiplied; the same on all ranks.

    Where a residual or velocity would leave the range of float32, it stays as it is, and this rank's next
    step overflows instead: all ranks refuse it, and their GradScaler returns to a lower scale.

    Raises:
        ConfigurationError: no scale, or a residual or velocity overflows at a scale <= 1, where none is
            lower: nothing is changed.

    Cost: nothing if the scale is the present one; else a pass over the residual, and where it grows
    another.

    Example:
        >>> from sparsync.presets import resolve
        >>> from sparsync.transports.driver import run
        >>> from sparsync.transports.communicator import SoloCommunicator
        >>> from sparsync.units import plan_units
        >>> units = plan_units([("w", torch.zeros(4))])
        >>> reducer = Reducer(SoloCommunicator(), units, resolve("allgather"), 0.25)
        >>> _ = run(reducer.reduce([torch.tensor([1.0, 2.0, 3.0, 4.0])]))
        >>> rescale_(reducer, 0.5); reducer.residuals[0].value.tolist()
        [0.5, 1.0, 1.5, 0.0]
    """
    factor = check_scale(scale) / reducer.scale
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
    if overflowing:  # the states return when the step is refused
        reducer.overflows = True
        return
    for residual in reducer.residuals:
        residual.scale_(factor)
    if reducer.corrector:
        for velocity in reducer.corrector.velocities:
            velocity.mul_(factor)
        reducer.corrector.scale = scale
    if reducer.residuals:  # shares are of units of one dtype
        dtype = reducer.residuals[0].accumulated.dtype
        reducer.plan.shares = _moved(reducer.plan.shares, factor, dtype)
    reducer.scale = scale
    reducer.open()


def rescaled_key(key: int, factor: float, dtype: torch.dtype) -> int:
    """Return the key of a magnitude times ``factor``; 1, which stands for all but zero, stays.

    Example:
        >>> two, = kernels.magnitude_keys(torch.tensor([2.0])).tolist()
        >>> half, = kernels.magnitude_keys(torch.tensor([0.5])).tolist()
        >>> rescaled_key(two, 0.25, torch.float32) == half
        True
    """
    if key <= 1:
        return key
    integer = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
    value = torch.tensor([key], dtype=integer).view(dtype) * factor
    return max(int(kernels.magnitude_keys(value)), 1)


def _overflowing(reducer: Reducer, factor: float) -> str:
    """Name what overflows: Inf in a residual would be refused on every step from then on."""
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
    """Return a state whose magnitudes are multiplied, those of its parts included."""
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
