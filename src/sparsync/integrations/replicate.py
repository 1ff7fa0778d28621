"""``sparsync.attach(model, replicate=mesh["replicate"])``: the set-up of ``ReplicaSync``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor, nn

from sparsync.collectives.agreement import agree
from sparsync.collectives.equality import check_equal_parameters
from sparsync.errors import ConfigurationError
from sparsync.integrations.fsdp import Gate
from sparsync.integrations.placement import Placed, local_of, placed_parameters, ranks_of
from sparsync.integrations.replicas import GradientHook, Microbatches, ReplicaSync
from sparsync.integrations.settings import Settings
from sparsync.integrations.usage import places_of
from sparsync.integrations.watch import Watch
from sparsync.integrations.wires import OwnGroups
from sparsync.reducer import Reducer
from sparsync.transports.base import Communicator, run
from sparsync.transports.torch import TorchCommunicator
from sparsync.units import Unit
from sparsync.warmup import AdaptiveDensity

__all__ = ["attach_replicas"]

_CHANNEL: Final = 2  # behind the units', the shares' and xi's


def attach_replicas(
    model: nn.Module,
    settings: Settings,
    replicate: Any,
    *,
    schedule: Any = None,
    overlap: bool = True,
    world: dist.ProcessGroup | None = None,
) -> ReplicaSync:
    """Exchange gradients between the replicas of what this rank holds; see ``attach``."""
    _check_free(model)
    microbatches = _microbatches(schedule)
    ranks = ranks_of(replicate)
    placed = placed_parameters(model, ranks)
    gate = Gate(model)
    gate.check_covers(placed)
    groups = OwnGroups(world, settings.wires.timeout)
    try:
        inner = groups.make(_other_parts(ranks, groups))
        parts = TorchCommunicator(inner, timeout=settings.wires.timeout)
        settings = _for_parts(settings, parts, placed)
        units = _units(settings, model, placed)
        reducer = settings.reducer(groups.make(ranks), units, scheduled=schedule is not None)
        places = places_of(placed, parts)
        watch = Watch(model, gate, [p.parameter for p in placed], settings.correction)
    except BaseException:
        groups.close()
        raise
    weights = {p.name: p.parameter for p in placed}
    return ReplicaSync(
        reducer,
        placed,
        gate,
        watch,
        places,
        parts,
        groups,
        nonfinite=settings.nonfinite,
        microbatches=microbatches,
        overlap=overlap,
        first=lambda reducer: _equal_weights(reducer, weights),
    )


def _microbatches(schedule: Any) -> Microbatches | None:
    """Return what a schedule does to gradients in a step.

    It scales them when all have come; those that are under way then are scaled here.
    """
    if schedule is None:
        return None
    count, scales = (getattr(schedule, name, None) for name in ("_n_microbatches", "scale_grads"))
    if not isinstance(count, int) or not isinstance(scales, bool):
        raise ConfigurationError(
            f"schedule is {type(schedule).__name__}; give the schedule of torch.distributed.pipelining "
            "that runs this stage, as ScheduleGPipe or Schedule1F1B"
        )
    return Microbatches(count, 1 / count if scales else 1.0)


def _check_free(model: nn.Module) -> None:
    """Refuse a second attach: gradients would be averaged twice."""
    for name, parameter in model.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if any(isinstance(hook, GradientHook) for hook in hooks.values()):
            raise ConfigurationError(
                f"the gradient of '{name}' is exchanged already; attach once, or close() the first "
                "handle before"
            )


def _other_parts(ranks: Sequence[int], groups: OwnGroups) -> list[int]:
    """Return the global ranks that hold the parts of this rank's replica, this one's included.

    They are those that have the same place among their own replicas.
    """
    place = sorted(ranks).index(dist.get_rank())
    world = dist.get_process_group_ranks(groups.world)
    places = groups.gathered([place])
    return [rank for rank, its in zip(world, places, strict=True) if its == [place]]


def _for_parts(settings: Settings, parts: Communicator, placed: Sequence[Placed]) -> Settings:
    """Agree with the other parts, and leave what differs from part to part out of common decisions.

    Raises:
        ConfigurationError: what only a single part, or parameters of a single kind, can have.
        PeerError: parts were told different things.
    """
    run(agree(parts, settings.facts))
    if parts.world_size > 1 and settings.correction.clip is not None:
        raise ConfigurationError(
            "Correction(clip=...) needs the norm of whole local gradients, but each rank holds a shard "
            "or a stage; leave it away and clip the averages with torch.nn.utils.clip_grad_norm_"
        )
    kinds = {p.kind for p in placed}
    if len(kinds) == 1:
        return settings
    adapts = isinstance(settings.density, AdaptiveDensity)
    if adapts or settings.algorithm.prepare is not None:
        what = "AdaptiveDensity" if adapts else f"the algorithm '{settings.algorithm.name}'"
        raise ConfigurationError(
            f"{what} decides by what a rank holds, and parameters that lie on several ranks "
            f"({', '.join(sorted(kinds))}) would be treated differently there; give a fixed density and "
            "another algorithm"
        )
    return replace(settings, algorithm=replace(settings.algorithm, shared=False))


def _units(settings: Settings, model: nn.Module, placed: Sequence[Placed]) -> list[Unit]:
    """Plan units of one kind each.

    A parameter that is replicated over tensor-parallel ranks must be selected from by itself: together
    with shards, which differ from rank to rank, other entries of it would be chosen on each of them.
    """
    units: list[Unit] = []
    for kind in dict.fromkeys(p.kind for p in placed):
        alike = [(p.name, local_of(p.parameter)) for p in placed if p.kind == kind]
        units += settings.units(alike, model)
    return units


async def _equal_weights(reducer: Reducer, weights: dict[str, Tensor]) -> None:
    """Refuse replicas that began with different weights: DDP would have sent rank 0's."""
    if reducer.step + reducer.skipped:
        return
    channel = reducer.comm.channel(len(reducer.units) + _CHANNEL)
    await check_equal_parameters(channel, [(name, local_of(w)) for name, w in weights.items()])
