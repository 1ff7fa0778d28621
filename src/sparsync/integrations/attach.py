"""``sync = sparsync.attach(model, density=0.01)``: one line for every kind of model."""

from __future__ import annotations

import warnings
from dataclasses import replace
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
from sparsync.presets import Algorithm, check_density, resolve

__all__ = ["attach", "check_optimizer"]

# and whatever has betas, as Adam; by name: older versions of torch have no Adafactor
_ADAPTIVE = ("Adafactor", "Adagrad", "Adadelta", "RMSprop", "Rprop")


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
        optimizer: the one that will be used.  It is only checked: an error if it repeats what the
            correction does, a warning for Adam.
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
    for option, kind in (
        (compression, Compression),
        (transport, Transport),
        (monitoring, Monitoring),
    ):
        if option is not None and not isinstance(option, kind):
            raise ConfigurationError(
                f"{kind.__name__.lower()} is {option!r}; give a sparsync.{kind.__name__}(...)"
            )
    chosen, given = resolve(algorithm), compression or Compression()
    if not isinstance(density, AdaptiveDensity):
        density = check_density(density)
    check_optimizer(optimizer, correction, sparse="dense" not in chosen.name and density != 1)
    completed = replace(
        given,
        unit_bytes=chosen.unit_bytes if given.unit_bytes is None else given.unit_bytes,
        compress=given.compress or chosen.compress,
    )
    options = Options(
        chosen, density, correction, completed, transport or Transport(), monitoring or Monitoring()
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


def check_optimizer(
    optimizer: torch.optim.Optimizer | None,
    correction: Correction | None = None,
    *,
    sparse: bool = False,
) -> None:
    """Refuse an optimizer that does again what the correction has done.

    If only some entries of gradients are exchanged (``sparse``), warn of one that loses by it.
    """
    if optimizer is None:
        return
    name = type(optimizer).__name__
    kinds = {base.__name__ for base in type(optimizer).__mro__}
    adaptive = not kinds.isdisjoint(_ADAPTIVE) or "betas" in optimizer.defaults
    if adaptive and sparse:
        warnings.warn(
            f"{name} divides by its second moment, and rarely delivered entries distort that estimate: "
            "expect 20 to 28 % more loss at 1 %. sparsync.OuterStep(model, residual='weights') keeps up "
            "with dense training; see docs/optimizers.md",
            stacklevel=3,  # the caller of attach
        )
    if correction is None:
        return
    if correction.momentum and adaptive:
        raise ConfigurationError(
            f"momentum correction is for SGD, but the optimizer is {name}, which divides by "
            "moments of its own; omit the correction, or use sparsync.OuterStep"
        )
    for group in optimizer.param_groups:
        for what in ("momentum", "weight_decay"):
            if getattr(correction, what) and group.get(what):
                raise ConfigurationError(
                    f"{name} has {what} {group[what]}, which the correction does before the "
                    f"exchange ({what}={getattr(correction, what)}): it would be applied twice; "
                    f"build the optimizer with {what}=0"
                )
