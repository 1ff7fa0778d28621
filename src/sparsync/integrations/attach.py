"""``sync = sparsync.attach(model, density=0.01)``: one line for every kind of model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from sparsync.correction import Correction
from sparsync.errors import ConfigurationError
from sparsync.integrations.checks import check_model
from sparsync.integrations.ddp import DdpSync, attach_ddp
from sparsync.integrations.sentinel import Sentinel
from sparsync.integrations.settings import Compress, Nonfinite, Settings, settings_of
from sparsync.integrations.upkeep import Upkeep
from sparsync.presets import Algorithm
from sparsync.warmup import AdaptiveDensity

if TYPE_CHECKING:
    from sparsync.integrations.replicas import ReplicaSync

__all__ = ["attach"]


@overload
def attach(
    model: DistributedDataParallel, algorithm: str | Algorithm = ..., **settings: Any
) -> DdpSync: ...


@overload
def attach(
    model: nn.Module,
    algorithm: str | Algorithm = ...,
    *,
    replicate: DeviceMesh | ProcessGroup,
    **settings: Any,
) -> ReplicaSync: ...


def attach(
    model: nn.Module,
    algorithm: str | Algorithm = "budgeted",
    *,
    density: float | AdaptiveDensity = 0.01,
    unit_bytes: int | None = None,
    compress: Compress | None = None,
    warmup_steps: int = 0,
    warmup_densities: Sequence[float] = (),
    correction: Correction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    output_layer: Collection[str] | None = None,
    nonfinite: Nonfinite | None = None,
    timeout: float = 300.0,
    transport: str = "auto",
    curve_keys: Path | str | None = None,
    log: Any = None,
    xi_period: int | None = None,
    scaler: Any = None,
    sentinel: Sentinel | None = None,
    hierarchy: DeviceMesh | str | None = None,
    replicate: DeviceMesh | ProcessGroup | None = None,
    schedule: Any = None,
    overlap: bool = True,
    world: ProcessGroup | None = None,
    **options: Any,
) -> DdpSync | ReplicaSync:
    """Exchange a model's gradients sparsely; the training loop stays as it is.

    Args:
        model: a ``DistributedDataParallel`` module without a communication hook; with ``replicate`` any
            other: FSDP2's, a stage of a pipeline, tensor-parallel, plain (``docs/fsdp.md``).
        algorithm: a preset's name ("budgeted", "auto", "oktopk", ...), or an ``Algorithm``.
        density: fraction k / n of every unit that is exchanged, in (0, 1]; an ``AdaptiveDensity``
            changes it as training goes on.
        unit_bytes: what is selected together: runs of parameters of at least this many bytes, or
            the whole model (None: as the algorithm's paper has it: the whole; "sparcml": single
            parameters).  Several units are exchanged while the backward pass goes on, each with its
            share of the global k.
        compress: ``compress(name, parameter)`` tells whether a parameter is exchanged sparsely;
            others are exchanged whole.  Equal on all ranks.  None: as the algorithm has it: all;
            "redsync": what is worth it.
        warmup_steps: the first steps run dense, or
        warmup_densities: at these densities, each for an equal part of them (``DGC_RAMP``).
        correction: momentum, decay and clipping, done to local gradients before they are accumulated.
        optimizer: the one that will be used, to be checked: it must not do again what the correction
            does.
        output_layer: names of its parameters, which some algorithms treat apart (default: those of
            the module that was registered last).
        nonfinite: what all ranks do when NaN or Inf is in the sum: "raise" from ``backward()``,
            "skip" (gradients become None: the optimizer passes), or "propagate" (every gradient of
            every rank becomes NaN, so that a GradScaler skips on all).  Residuals stay as they were.
            None: "propagate" with ``scaler``, else "raise".
        timeout: seconds that any wait may take before ``backward()`` raises.
        transport: "zmq", "torch" (gloo), or "auto": the faster one (zmq).
        curve_keys: folder with one certificate per rank: zmq encrypts and authenticates.
        log: takes the numbers of every step (``sparsync.monitoring.Log``) on this rank: a path ending in
            ``.jsonl``, a folder for TensorBoard, an object with ``add_scalar(tag, value, step)``, or
            a function of (step, values).
        xi_period: steps between estimates of Assumption 1's xi (``XiProbe``).  None: it is not measured.
        scaler: the ``GradScaler`` whose scale gradients have: the residual follows it, and overflows are
            propagated to it.
        sentinel: compares replicas every so many steps (``Sentinel``).  None: only now.
        hierarchy: of DDP: dense inside a node, sparse between nodes.  "node": as many consecutive ranks
            as the launcher started on a machine; or a mesh (nodes, ranks of a node).
        replicate: the ranks that hold the same part of the model as this one: a one-dimensional mesh, as
            ``mesh["replicate"]``, or a process group.
        schedule: of a pipeline, from ``torch.distributed.pipelining``; after each ``schedule.step()``
            call ``step()`` of the handle.  Without it ``backward()`` closes the step, as DDP's does.
        overlap: exchange units as soon as their gradients have come.  False: when all have; needed if
            FSDP2 modules run several times per forward pass.
        world: with ``replicate``, the ranks that train the model together, which refuse steps together;
            default: all.
        options: of the preset, e.g. ``cap=None``, ``threshold_period=128``.

    Returns:
        A handle with ``stats()``, ``state_dict()``, ``load_state_dict()``, ``close()``; with
        ``replicate`` also ``no_sync()`` and ``step()``.

    Raises:
        ConfigurationError: neither DDP nor ``replicate``, a second attach, unknown algorithm or option,
            bad density.
        PeerError: ranks disagree on any of it.

    Cost: one thread and one gloo process group, and with zmq its sockets; memory n elements
    (the residual) and O(k + n / P), see ``benchmarks/memory.md``; dense steps take 2 n more.
    """
    settings = settings_of(
        algorithm,
        density=density,
        unit_bytes=unit_bytes,
        compress=compress,
        warmup_steps=warmup_steps,
        warmup_densities=warmup_densities,
        correction=correction,
        optimizer=optimizer,
        output_layer=output_layer,
        nonfinite=nonfinite,
        timeout=timeout,
        transport=transport,
        curve_keys=curve_keys,
        log=log,
        xi_period=xi_period,
        scaler=scaler,
        sentinel=sentinel,
        options=options,
    )
    return _attached(model, settings, hierarchy, replicate, schedule, overlap, world)


def _attached(
    model: Any,
    settings: Settings,
    hierarchy: Any,
    replicate: Any,
    schedule: Any,
    overlap: bool,
    world: Any,
) -> DdpSync | ReplicaSync:
    """Attach to the kind of model that came."""
    if replicate is None:
        if schedule is not None or world is not None or not overlap:
            raise ConfigurationError(
                "schedule, overlap and world go with replicate=; give that, too"
            )
        check_model(model)
        upkeep = Upkeep(
            model.module, model.parameters_to_ignore, settings.scaler, settings.sentinel
        )
        sync = attach_ddp(model, settings, hierarchy)
        try:
            upkeep.compare(sync.communicators)
        except BaseException:
            sync.close()
            raise
        sync.upkeep = upkeep
        return sync
    if isinstance(model, DistributedDataParallel) or hierarchy is not None:
        raise ConfigurationError(
            "replicate= is for models without DDP, which knows its own ranks; leave it away, or give the "
            "plain module (for dense exchange inside a node: hierarchy= with DDP, or fully_shard)"
        )
    from sparsync.integrations.replicate import attach_replicas  # DTensor takes 0.4 s to import

    upkeep = Upkeep(model, (), settings.scaler, settings.sentinel)
    replicas = attach_replicas(
        model, settings, replicate, schedule=schedule, overlap=overlap, world=world
    )
    replicas.upkeep = upkeep
    return replicas
