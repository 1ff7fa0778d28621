"""The methods in the table, with their exchanges, fixed settings and tuned knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import sparsync
from frontier.onebit import OneBitAdam
from frontier.tasks import BETAS, grouped, make_optimizers
from sparsync.algorithm import Algorithm
from sparsync.cli.train.exchanges import dense_bytes_per_step
from sparsync.feedback.correction import Correction
from sparsync.options import Transport
from sparsync.presets import resolve
from sparsync.transports.ledger import Ledger
from sparsync.updates import OUTER_SETTINGS, AdaptivePeriod, OuterStep

TIMEOUT = 1800.0  # seconds; a dense step of 8.4 M parameters takes 40 s at 10 Mbit/s


class Volume(NamedTuple):
    """Bytes that this rank has sent and received since the first step."""

    sent: int
    received: int


def nothing() -> None:
    """Do nothing."""


def share_hidden(sync: Any) -> float | None:
    """Return the share of exchange time for which the training thread did not wait."""
    stats = sync.stats()
    busy = stats["exchange_seconds"]
    return max(0.0, 1 - stats["waited_seconds"] / busy) if busy else None


@dataclass
class Exchange:
    """A model, its optimizers, whose steps include the exchanges, and a count of bytes."""

    model: nn.Module  # the module to call, either wrapped in DDP or plain
    optimizers: Sequence[torch.optim.Optimizer]
    volume: Callable[[int], Volume]  # returns the bytes after this many steps
    counted: str  # "ledger": as sent; "formula": computed for a bandwidth-optimal allreduce
    dense_steps: int = 0  # number of steps at the start in which all gradients are allreduced
    shared: Callable[[], AbstractContextManager[Any]] = nullcontext  # shows the weights to evaluate
    settle: Callable[[], object] = nothing  # waits for an exchange that is under way
    close: Callable[[], object] = nothing
    # share of exchange time for which training did not wait
    hidden: Callable[[], float | None] = nothing


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        make: ``make(model, kind, lr, steps, **settings)`` wraps this rank's model.
        settings: fixed settings, which are not tuned.
        knobs: the method's two tuned knobs, with the values to try; tuning starts from the first.
        optimizers: the optimizers with which the method runs.
    """

    make: Callable[..., Exchange]
    settings: Mapping[str, Any] = field(default_factory=dict)
    knobs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ("adamw", "muon")

    @property
    def untuned(self) -> dict[str, Any]:
        """The first value of every knob."""
        return {knob: values[0] for knob, values in self.knobs.items()}


# ---- gradients ---------------------------------------------------------------------------------------


def in_ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap a model in DDP without broadcasting its weights, which the seed makes equal."""
    return DistributedDataParallel(model, init_sync=False, **options)


def elements(model: nn.Module) -> int:
    """Count the trained elements."""
    return sum(parameter.numel() for parameter in model.parameters())


def allreduced(count: int, itemsize: int = 4) -> Volume:
    """Return the bytes of an allreduce of ``count`` elements."""
    return Volume(*2 * (dense_bytes_per_step(count, dist.get_world_size(), itemsize),))


def dense(model: nn.Module, kind: str, lr: float, steps: int, *, half: bool = False) -> Exchange:
    """Use plain DDP, or DDP with PyTorch's float16 hook."""
    ddp = in_ddp(model)
    if half:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    each = allreduced(elements(model), 2 if half else 4)
    return Exchange(
        ddp,
        make_optimizers(model, kind, lr),
        lambda made: Volume(made * each.sent, made * each.received),
        "formula",
    )


def power_sgd(
    model: nn.Module, kind: str, lr: float, steps: int, *, rank: int, start: int, least_gain: float
) -> Exchange:
    """Use PyTorch's PowerSGD hook with one bucket (two hang), error feedback and warm start."""
    ddp = in_ddp(model, bucket_cap_mb=4 * elements(model) // 2**20 + 1)
    state = powerSGD_hook.PowerSGDState(
        None, rank, start_powerSGD_iter=start, min_compression_rate=least_gain
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def volume(made: int) -> Volume:
        before = min(made, start) * elements(model)
        return allreduced(before + state.total_numel_after_compression)

    return Exchange(ddp, make_optimizers(model, kind, lr), volume, "formula", dense_steps=start)


def gradients(
    model: nn.Module,
    kind: str,
    lr: float,
    steps: int,
    *,
    algorithm: str,
    density: float,
    beta2: float | None,
    local_clip: float | None,
) -> Exchange:
    """Attach a preset to DDP's gradients; ``local_clip`` also clips before the exchange."""
    ddp = in_ddp(model)
    sync = sparsync.attach(
        ddp,
        algorithm=algorithm,
        density=density,
        exchange="gradients",
        correction=None if local_clip is None else Correction(clip=local_clip),
        transport=Transport(timeout=TIMEOUT),
    )
    optimizers = make_optimizers(model, kind, lr)
    for group in optimizers[-1].param_groups if beta2 is not None else ():
        group["betas"] = (group["betas"][0], beta2)
    return Exchange(ddp, optimizers, since(sync.reducer.comm.ledger), "ledger", close=sync.close)


def one_bit_adam(
    model: nn.Module, kind: str, lr: float, steps: int, *, warmup: float, block: int
) -> Exchange:
    """Train with 1-bit Adam; ``warmup`` is the fraction of steps that are dense."""
    ddp, comm = in_ddp(model), sparsync.connect(TIMEOUT)
    groups, dense_steps = grouped(dict(model.named_parameters())), max(1, round(warmup * steps))
    optimizer = OneBitAdam(groups, comm, dense_steps, lr, BETAS, block)
    ddp.register_comm_hook(optimizer, averaged_if_dense)
    momentum, each = since(comm.ledger), allreduced(elements(model))

    def volume(made: int) -> Volume:
        so_far, before = momentum(made), min(made, dense_steps)
        return Volume(so_far.sent + before * each.sent, so_far.received + before * each.received)

    return Exchange(ddp, [optimizer], volume, "ledger", dense_steps, close=comm.close)


# no annotations: DDP would compare them, and they are strings in this module
def averaged_if_dense(optimizer, bucket):  # type: ignore[no-untyped-def]
    """Average a bucket's gradients in the warm-up, and return them unchanged afterwards."""
    if optimizer.is_dense:
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def since(ledger: Ledger) -> Callable[[int], Volume]:
    """Count the traffic that a ledger records from now on, so that the set-up is excluded."""
    before = ledger.total()

    def volume(made: int) -> Volume:
        now = ledger.total()
        return Volume(now.sent - before.sent, now.received - before.received)

    return volume


# ---- updates -----------------------------------------------------------------------------------------


def updates(model: nn.Module, kind: str, lr: float, steps: int, **settings: Any) -> Exchange:
    """Take local steps, and exchange their updates."""
    optimizers = make_optimizers(model, kind, lr)
    sync = sparsync.attach(
        model,
        optimizers,
        OuterStep(**settings),
        exchange="updates",
        transport=Transport(timeout=TIMEOUT),
    )
    return Exchange(
        model,
        optimizers,
        since(sync.reducer.comm.ledger),
        "ledger",
        shared=sync.shared,
        settle=sync.state_dict,  # waits for an exchange that is under way
        close=sync.close,
        hidden=lambda: share_hidden(sync),
    )


def selected_twice(
    model: nn.Module, kind: str, lr: float, steps: int, *, density: float, **settings: Any
) -> Exchange:
    """Attach ``budgeted`` with a density at which it receives as much as an allgather at ``density``.

    The allgather receives (P - 1) k pairs, and ``budgeted`` 2 (P - 1) / P times its own k.
    """
    settings |= {"algorithm": "budgeted", "density": density * dist.get_world_size() / 2}
    return updates(model, kind, lr, steps, **settings)


# ---- the table ---------------------------------------------------------------------------------------


def _updates(knobs: Mapping[str, tuple[Any, ...]] | None = None, **settings: Any) -> Method:
    """Return a row with an outer step; all such rows tune the outer rate, and momentum or decay."""
    free = {k: v for k, v in settings.items() if knobs is None or k not in knobs}
    # sign-based methods are meant for SGD
    kinds = ("sgd",) if settings.get("sign") else ("adamw", "muon")
    return Method(updates, free, _OUTER_KNOBS if knobs is None else knobs, kinds)


def _local(algorithm: str | Algorithm, **settings: Any) -> Method:
    """Return a row that sends every element and keeps the residual in the rank's own weights."""
    return _updates(algorithm=algorithm, density=1.0, residual="weights", **settings)


# the default for a million parameters or more; also used for smaller tasks, because their curves
# represent larger models
_TWO_BITS = {
    **OUTER_SETTINGS["updates"],
    "algorithm": resolve("quantised", bits=2, block=512),
    "period": 2,
}
_ONE_BIT = {**_TWO_BITS, "algorithm": resolve("quantised", bits=1, block=512)}
_HOOK_KNOBS = {"start": (10, 5, 20), "least_gain": (2.0, 1.0, 4.0)}
_GRADIENT_KNOBS = {"beta2": (0.99, 0.95, 0.999), "local_clip": (None, 1.0, 2.0)}
_OUTER_KNOBS = {"outer_lr": (1.0, 0.8, 1.2), "momentum": (0.0, 0.3, 0.6)}
_DILOCO_KNOBS = {"outer_lr": (0.7, 0.4, 1.0), "momentum": (0.9, 0.6, 0.3)}
_PUBLISHED_KNOBS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "updates": {},  # ``attach(model, optimizer)`` with its defaults
    "bmuf": {"outer_lr": (1.0, 0.7, 1.2), "momentum": (None, 0.5, 0.25)},
    "qsparse-local": {"outer_lr": (1.0, 0.8, 1.2), "residual_decay": (1.0, 0.95, 0.9)},
    "diloco": _DILOCO_KNOBS,
    "streaming-diloco": _DILOCO_KNOBS,
    "muloco": _DILOCO_KNOBS,
    "demo": {"outer_lr": (1.0, 0.3, 0.1), "residual_decay": (0.999, 0.99, 0.95)},
    "sparseloco": {"outer_lr": (1.0, 0.7, 0.4), "residual_decay": (0.95, 0.9, 1.0)},
}

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "dense": Method(dense, optimizers=("adamw", "muon", "sgd")),
        "fp16": Method(dense, {"half": True}),
        **{f"powersgd-r{r}": Method(power_sgd, {"rank": r}, _HOOK_KNOBS) for r in (2, 4, 8)},
        "top-k": Method(gradients, {"algorithm": "allgather", "density": 0.01}, _GRADIENT_KNOBS),
        "budgeted": Method(gradients, {"algorithm": "budgeted", "density": 0.01}, _GRADIENT_KNOBS),
        # ``attach(model, optimizer)`` with SGD
        "gradients": Method(
            gradients,
            {"algorithm": "budgeted", "density": 0.01, "beta2": None, "local_clip": None},
            optimizers=("sgd",),
        ),
        "1-bit-adam": Method(
            one_bit_adam,
            knobs={"warmup": (0.2, 0.15, 0.25), "block": (256, 2048, 16384)},
            optimizers=("adamw",),
        ),
        # as published, then DiLoCo with periods other than 500
        **{
            name: _updates(_PUBLISHED_KNOBS.get(name), **settings)
            for name, settings in ({**OUTER_SETTINGS, "updates": _TWO_BITS}).items()
        },
        **{
            f"diloco-h{h}": _updates(_DILOCO_KNOBS, **{**OUTER_SETTINGS["diloco"], "period": h})
            for h in (30, 100)
        },
        # rows that separate the sources of loss: period, rounding, delay, selection
        **{f"2bit-h{h}": _local("quantised", period=h) for h in (1, 2, 10, 20)},
        **{
            f"2bit-h{h}-overlap": _local("quantised", period=h, fragments=10, delay=2)
            for h in (10, 20)
        },
        "1bit-h2": _local(resolve("quantised", bits=1), period=2),
        # steps as long as with averaged gradients, as in "updates"
        **{
            f"{bits}bit-h{h}-corrected": _local(
                resolve("quantised", bits=bits, block=512),
                period=h,
                noise_correction=True,
            )
            for bits, h in ((1, 1), (1, 4), (1, 10), (1, 20), (2, 2), (2, 10))
        },
        **{
            f"updates-drift{drift}": _updates(
                {}, **{**_ONE_BIT, "period": AdaptivePeriod(drift, most=16)}
            )
            for drift in (0.04, 0.08)
        },
        # rows for slower links: half the bits, other periods, one part of the model after the other
        "updates-1bit": _updates({}, **_ONE_BIT),
        "updates-overlap": _updates({}, **_ONE_BIT, fragments=2, delay=1),
        **{
            f"updates-h{h}-overlap{delay}": _updates(
                {}, **{**_ONE_BIT, "period": h}, fragments=h, delay=delay
            )
            for h, delay in ((4, 1), (4, 2), (10, 2))
        },
        **{
            f"updates-h{h}-delay{delay}": _updates({}, **{**_ONE_BIT, "period": h}, delay=delay)
            for h, delay in ((3, 1), (4, 0), (4, 1))
        },
        **{f"fp32-h{h}": _local("dense", period=h) for h in (1, 2, 10)},
        **{f"{name}-h2": _updates(algorithm=name, period=2) for name in ("allgather", "budgeted")},
        "budgeted-h2-received": Method(
            selected_twice, {"density": 0.01, "period": 2}, _OUTER_KNOBS
        ),
    }
)
