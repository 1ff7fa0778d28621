"""What exchanges the gradients of a training: plain DDP, PyTorch's own hooks, or this library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from sparsync.bench.connection import transport_of
from sparsync.correction import Correction
from sparsync.errors import ConfigurationError
from sparsync.integrations.ddp import attach
from sparsync.presets import PRESETS, resolve
from sparsync.workloads import is_hidden_matrix

__all__ = [
    "HOOKS",
    "Exchange",
    "check_algorithm",
    "corrects",
    "dense_bytes_per_step",
    "make_exchange",
]

HOOKS = ("fp16", "powersgd")
_HALF_BYTES = 2
_MEBIBYTE = 2**20


def dense_bytes_per_step(parameters: int, world_size: int, itemsize: int = 4) -> int:
    """Return what a rank sends in a bandwidth-optimal allreduce: ``2 n (P - 1) / P`` elements.

    Example:
        >>> dense_bytes_per_step(parameters=1000, world_size=4)
        6000
    """
    return -(-2 * parameters * itemsize * (world_size - 1) // world_size)


def check_algorithm(name: str) -> None:
    """Refuse what is neither a preset nor one of PyTorch's hooks."""
    if name in HOOKS:
        return
    try:
        resolve(name)
    except ConfigurationError:
        known = ", ".join([*sorted(PRESETS), *HOOKS])
        raise ConfigurationError(f"unknown algorithm {name!r}; choose one of {known}") from None


def corrects(name: str) -> bool:
    """Tell whether an algorithm is published with momentum correction."""
    return name not in HOOKS and resolve(name).corrects


class Exchange(ABC):
    """A model under DDP, and what its exchange sends.

    Attributes:
        ddp: the wrapped model.
        transport: what carries the gradients.
        counted: "ledger", or "formula" where what is sent is not counted but worked out.
        sparse: entries are selected: density means something.
        sums: gradients are summed over ranks, not averaged.
    """

    ddp: DistributedDataParallel
    transport: str = "torch"
    counted: str = "formula"
    sparse: bool = False
    sums: bool = False

    @abstractmethod
    def bytes_sent(self) -> int:
        """Return what this rank sent in the step that has just ended."""

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """End what runs beside the training."""


def make_exchange(
    name: str,
    model: nn.Module,
    *,
    density: float,
    warmup_steps: int,
    correction: Correction,
    timeout: float,
    transport: str,
    curve_keys: Path | None,
) -> Exchange:
    """Wrap a model; every rank calls it.

    Args:
        name: "dense" (plain DDP), "fp16" or "powersgd" (PyTorch's hooks), or a preset.
        model: of this rank.
        density: for presets, as the others; see ``sparsync.attach``.
        warmup_steps: first steps that presets exchange dense.
        correction: what presets do to local gradients.
        timeout: seconds that a rank waits for another.
        transport: of presets; DDP and its hooks use gloo.
        curve_keys: folder of keys, for zmq.
    """
    if name in ("dense", "fp16"):
        return _Allreduced(model, half=name == "fp16")
    if name == "powersgd":
        return _PowerSgd(model)
    return _Attached(
        model,
        name,
        density=density,
        warmup_steps=warmup_steps,
        correction=correction,
        timeout=timeout,
        transport=transport,
        curve_keys=curve_keys,
    )


@final
class _Allreduced(Exchange):
    """Plain DDP; or its ``fp16_compress_hook``: the same allreduce of 16-bit floats."""

    def __init__(self, model: nn.Module, *, half: bool) -> None:
        self.ddp, self.model = DistributedDataParallel(model), model
        self.itemsize = _HALF_BYTES if half else 4
        if half:
            self.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def bytes_sent(self) -> int:
        elements = sum(parameter.numel() for parameter in self.model.parameters())
        return dense_bytes_per_step(elements, dist.get_world_size(), self.itemsize)


@final
class _PowerSgd(Exchange):
    """PyTorch's ``powerSGD_hook``, set up as it is strongest and safe on gloo.

    The bytes are the elements that the hook itself says it allreduces.

    Args:
        model: of this rank.
        matrix_rank: of the approximation (the hook's documentation suggests 1 to 4).
        first_step: 0-based, of the first compressed step: the hook needs two dense ones.  Its own
            default, 1000, would mean dense for a short run.

    The whole model is one bucket: with more, the hook waits for a collective inside a callback and
    hangs on gloo.
    """

    def __init__(self, model: nn.Module, *, matrix_rank: int = 4, first_step: int = 2) -> None:
        nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=nbytes // _MEBIBYTE + 1)
        self.elements = sum(parameter.numel() for parameter in model.parameters())
        self.state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=matrix_rank,
            start_powerSGD_iter=first_step,
        )
        self.before = 0
        self.ddp.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)

    def bytes_sent(self) -> int:
        so_far = self.state.total_numel_after_compression
        compressed, self.before = so_far - self.before, so_far
        return dense_bytes_per_step(compressed or self.elements, dist.get_world_size())


@final
class _Attached(Exchange):
    """``sparsync.attach``: what the others are compared with."""

    counted = "ledger"
    sparse = True

    def __init__(self, model: nn.Module, name: str, **options: Any) -> None:
        self.ddp = DistributedDataParallel(model)
        if name == "sparcml":  # the paper compresses some layers, too (section 8.4)
            options["compress"] = is_hidden_matrix
        self.sync = attach(self.ddp, name, **options)
        self.transport = transport_of(self.sync.reducer.comm)
        self.sums = not self.sync.reducer.algorithm.average

    def bytes_sent(self) -> int:
        return self.sync.reducer.comm.ledger.last_step.sent

    def close(self) -> None:
        self.sync.close()
