"""``sync = sparsync.attach(model, density=0.01)``: one line for every kind of model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from sparsync.errors import ConfigurationError
from sparsync.feedback.correction import Correction
from sparsync.feedback.schedule import AdaptiveDensity
from sparsync.integrations.ddp import attach_ddp
from sparsync.integrations.options import Compression, Monitoring, Options, Transport
from sparsync.integrations.sync import Sync
from sparsync.presets import Algorithm

__all__ = ["attach"]


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    algorithm: str | Algorithm = "budgeted",
    density: float | AdaptiveDensity = 0.01,
    *,
    correction: Correction | None = None,
    replicate: DeviceMesh | ProcessGroup | None = None,
    schedule: Any = None,
    compression: Compression | None = None,
    transport: Transport | None = None,
    monitoring: Monitoring | None = None,
) -> Sync:
    """Exchange a model's gradients sparsely; the training loop stays as it is.

    Args:
        model: a ``DistributedDataParallel`` module without a communication hook; with ``replicate`` any
            other: FSDP2's, a stage of a pipeline, tensor-parallel, plain (``docs/fsdp.md``).
        optimizer: the one that will be used.  It is checked: it must not repeat what the correction
            does, and Adam is warned of.
        algorithm: a preset's name ("budgeted", "auto", "oktopk", ...), or an ``Algorithm``, e.g. a preset
            with options: ``sparsync.presets.resolve("oktopk", threshold_period=128)``.
        density: fraction k / n of every unit that is exchanged, in (0, 1]; an ``AdaptiveDensity``
            changes it as training goes on.
        correction: momentum, decay and clipping, applied to local gradients before they are accumulated.
        replicate: the ranks that hold the same part of the model as this one: a one-dimensional mesh,
            e.g. ``mesh["replicate"]``, or a process group.
        schedule: of a pipeline, from ``torch.distributed.pipelining``; after each ``schedule.step()``
            call ``step()`` of the handle.  Without it ``backward()`` closes the step, as DDP's does.
        compression: units, dense parameters, warm-up (``Compression``).
        transport: what carries the messages, time limits, nodes (``Transport``).
        monitoring: NaN and Inf, GradScaler, sentinel, logs (``Monitoring``).

    Returns:
        A handle with ``stats()``, ``state_dict()``, ``load_state_dict()``, ``no_sync()``, ``step()`` (for
        pipelines) and ``close()``; as a context manager it closes itself.

    Raises:
        ConfigurationError: neither DDP nor ``replicate``, a second attach, unknown algorithm, bad
            density.
        PeerError: ranks disagree on any of it, or a rank is gone.
        DeadlineError: a rank does not attach; it is named.

    Cost: one thread and one gloo process group, and with zmq its sockets; memory n elements
    (the residual) and O(k + n / P), see ``benchmarks/memory.md``; dense steps take 2 n more.
    """
    options = Options.of(
        optimizer, algorithm, density, correction, compression, transport, monitoring
    )
    if replicate is None:
        if schedule is not None or options.transport.world or not options.compression.overlap:
            raise ConfigurationError(
                "schedule, Transport(world=...) and Compression(overlap=False) need replicate=; give it, "
                "too"
            )
        return attach_ddp(model, options)
    if isinstance(model, DistributedDataParallel) or options.transport.hierarchy is not None:
        raise ConfigurationError(
            "replicate= is for models without DDP, which knows its own ranks; omit it, or give the plain "
            "module (for dense exchange inside a node: Transport(hierarchy=...) with DDP, or fully_shard)"
        )
    from sparsync.integrations.replicas import attach_replicas  # DTensor takes 0.4 s to import

    return attach_replicas(model, options, replicate, schedule)
