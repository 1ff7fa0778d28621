"""What exchanges the gradients of a training: plain DDP, PyTorch's own hooks, or this library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from sparsync.averaging.schemes import SCHEMES
from sparsync.bench.connection import transport_of
from sparsync.bench.train_settings import TrainSettings
from sparsync.errors import ConfigurationError
from sparsync.integrations.adam import ArrivalAdamW
from sparsync.integrations.attach import attach
from sparsync.presets import PRESETS, resolve
from sparsync.workloads import is_hidden_matrix

__all__ = [
    "HOOKS",
    "Allreduced",
    "Attached",
    "Exchange",
    "PowerSgd",
    "check_algorithm",
    "dense_bytes_per_step",
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
    """Refuse what is no preset, none of PyTorch's hooks, and no scheme of averaging."""
    if name in HOOKS or name in SCHEMES:
        return
    try:
        resolve(name)
    except ConfigurationError:
        known = ", ".join([*sorted(PRESETS), *HOOKS, *SCHEMES])
        raise ConfigurationError(f"unknown algorithm {name!r}; choose one of {known}") from None


class Exchange(ABC):
    """A model, what exchanges its gradients or updates, and what that sends.

    Attributes:
        model: what is called and trained: wrapped in DDP, or plain.
        transport: what carries the gradients.
        counted: "ledger", or "formula" where what is sent is not counted but worked out.
        sparse: entries are selected: density means something.
        sums: gradients are summed over ranks, not averaged.
        clips: gradients are clipped here; else the training does it, behind ``backward``.
        options: of a scheme of averaging.
    """

    model: nn.Module
    transport: str = "torch"
    counted: str = "formula"
    sparse: bool = False
    sums: bool = False
    clips: bool = False
    options: Mapping[str, object] | None = None

    @abstractmethod
    def bytes_sent(self) -> int:
        """Return what this rank sent in the step that has just ended."""

    def make_optimizer(self, settings: TrainSettings) -> torch.optim.Optimizer:
        """Build the optimizer."""
        return settings.make_optimizer(self.model)

    def after_step(self) -> None:  # noqa: B027 (most do nothing)
        """Do what comes behind the optimizer's step."""

    def finish(self) -> int:
        """Leave in the model what all ranks share; return the bytes that this rank sent for it."""
        return 0

    def close(self) -> None:  # noqa: B027
        """End what runs beside the training."""


@final
class Allreduced(Exchange):
    """Plain DDP; or its ``fp16_compress_hook``: the same allreduce of 16-bit floats."""

    def __init__(self, model: nn.Module, *, half: bool) -> None:
        self.model = ddp = DistributedDataParallel(model)
        self.itemsize = _HALF_BYTES if half else 4
        if half:
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def bytes_sent(self) -> int:
        """Return what this rank sent in the step that has just ended."""
        elements = sum(parameter.numel() for parameter in self.model.parameters())
        return dense_bytes_per_step(elements, dist.get_world_size(), self.itemsize)


@final
class PowerSgd(Exchange):
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
        self.model = ddp = DistributedDataParallel(model, bucket_cap_mb=nbytes // _MEBIBYTE + 1)
        self.elements = sum(parameter.numel() for parameter in model.parameters())
        self.state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=matrix_rank,
            start_powerSGD_iter=first_step,
        )
        self.before = 0
        ddp.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)

    def bytes_sent(self) -> int:
        """Return what this rank sent in the step that has just ended."""
        so_far = self.state.total_numel_after_compression
        compressed, self.before = so_far - self.before, so_far
        return dense_bytes_per_step(compressed or self.elements, dist.get_world_size())


@final
class Attached(Exchange):
    """``sparsync.attach``: what the others are compared with."""

    counted = "ledger"
    sparse = clips = True

    def __init__(self, settings: TrainSettings, name: str, model: nn.Module) -> None:
        self.model = ddp = DistributedDataParallel(model)
        self.correction = settings.correction(resolve(name).corrects)
        # SparCML compresses some layers, too (section 8.4)
        compress = is_hidden_matrix if name == "sparcml" else None
        self.sync = attach(
            ddp,
            name,
            density=settings.density,
            compress=compress,
            warmup_steps=settings.warmup_steps,
            correction=self.correction,
            timeout=settings.timeout,
            transport=settings.transport,
            curve_keys=settings.curve_keys,
        )
        self.transport = transport_of(self.sync.reducer.comm)
        self.sums = not self.sync.reducer.algorithm.average

    def make_optimizer(self, settings: TrainSettings) -> torch.optim.Optimizer:
        """Build the optimizer that goes with it."""
        if settings.space == "arrival":
            lr, decay = settings.learning_rate, settings.decay
            return ArrivalAdamW(self.model.parameters(), lr, weight_decay=decay)
        return settings.make_optimizer(self.model, self.correction)

    def bytes_sent(self) -> int:
        """Return what this rank sent in the step that has just ended."""
        return self.sync.reducer.comm.ledger.last_step.sent

    def close(self) -> None:
        """End the engine and its connection."""
        self.sync.close()
