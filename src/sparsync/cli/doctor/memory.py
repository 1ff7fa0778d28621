"""Check whether a model fits into the ranks' memory, for ``sparsync doctor --model-size``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from sparsync.cli.doctor.checks import Check
from sparsync.cli.doctor.machine_facts import Facts
from sparsync.cost.memory import Footprint, Optimizer, footprints
from sparsync.cost.wording import format_bytes

__all__ = ["check_memory"]

# assumed density of the gradients; at this density, the entries take 3 % of the residual's bytes
_DENSITY: Final = 0.01


def check_memory(everyone: Sequence[Facts], size: int, optimizer: Optimizer) -> Check:
    """Check whether training fits with ``attach``, only without it, or not at all; ignore activations.

    The free memory of a machine is divided among its ranks; the rank with the least memory decides.

    Args:
        everyone: the facts of all ranks.
        size: number of trained parameters of the model, in float32.
        optimizer: kind of the optimizer.
    """
    training, *ways = footprints(size, int(_DENSITY * size), optimizer)
    devices = [facts.device_memory for facts in everyone]
    ranks = Counter(facts.machine for facts in everyone)
    hosts = [facts.memory and facts.memory // ranks[facts.machine] for facts in everyone]
    device, host = _least(devices), _least(hosts)
    model = f"{optimizer}, {size:,} parameters"
    if host is None or (device is None and any(devices)):
        need = _text(training, ways[0], apart=device is not None)
        return Check("note", f"{model}: a rank takes {need}; how much is free here is unknown")
    apart = device is not None
    free = f"{format_bytes(device)} and {format_bytes(host)}" if device else format_bytes(host)
    plain = f"a rank has {free} left, without activations"
    # first the default, then the settings that ``attach`` chooses if the default does not fit
    for at, way in enumerate(ways[:2]):
        if _fits(training, way, device, host):
            what = f"{model}: {_text(training, way, apart)}; {plain}"
            if at:
                return Check("note", what, f"{way.name}: attach chooses it by itself")
            return Check("ok", what)
        if not apart:
            break  # without an accelerator, offloading to the host frees nothing
    nothing = Footprint("", 0, 0)
    if _fits(training, nothing, device, host):
        need = _text(training, ways[0], apart)
        do = "a smaller model, a rank with more memory, or shards: docs/fsdp.md"
        return Check("bad", f"{model}: fits alone, but with attach takes {need}; {plain}", do)
    do = "divide it among ranks with FSDP2, and attach along the replicas: docs/fsdp.md"
    return Check("bad", f"{model}: {_text(training, nothing, apart)}; {plain}", do)


def _least(values: Sequence[int | None]) -> int | None:
    """Return the smallest value, or None if any value is unknown."""
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None


def _fits(training: Footprint, way: Footprint, device: int | None, host: int) -> bool:
    on_device = training.device + way.device
    if device is None:
        return on_device + training.host + way.host <= host
    return on_device <= device and training.pinned + way.pinned <= host


def _text(training: Footprint, way: Footprint, apart: bool) -> str:
    """Format a rank's bytes; with ``apart``, list the device's and the host's memory separately."""
    device, host = training.device + way.device, training.pinned + way.pinned
    if not apart:
        return format_bytes(device + training.host + way.host)
    return f"{format_bytes(device)} on the device and {format_bytes(host)} on the host"
