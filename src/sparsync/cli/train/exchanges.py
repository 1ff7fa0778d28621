"""Exchanges of a training: plain DDP, PyTorch's hooks, presets on gradients or updates, schemes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from sparsync.api import connect
from sparsync.averaging.base import Averager
from sparsync.averaging.outer import OuterStep
from sparsync.averaging.schemes import SCHEMES, options_of
from sparsync.cli.network import transport_of
from sparsync.cli.train.settings import TrainSettings
from sparsync.cli.workloads import is_hidden_matrix
from sparsync.errors import ConfigurationError
from sparsync.integrations.adam import LocalAdamW
from sparsync.integrations.attach import attach
from sparsync.integrations.options import Compression, Transport
from sparsync.presets import preset, presets
from sparsync.transports.communicator import Communicator

__all__ = [
    "HOOKS",
    "Allreduced",
    "Attached",
    "Averaged",
    "Connected",
    "Exchange",
    "LocalProgress",
    "PowerSgd",
    "check_algorithms",
    "dense_bytes_per_step",
    "make_exchange",
]

_GROUP = "sparsync.spaces"  # of entry points: (settings, name, model) -> Exchange
HOOKS = ("fp16", "powersgd")
_SCHEME_OPTIONS = ("period", "group_size", "sync_period", "neighbours", "deadline")


def dense_bytes_per_step(parameters: int, world_size: int, itemsize: int = 4) -> int:
    """Return the bytes that a rank sends in a bandwidth-optimal allreduce of ``parameters`` elements.

    Example:
        >>> dense_bytes_per_step(parameters=1000, world_size=4)  # 2 n (P - 1) / P elements
        6000
    """
    return -(-2 * parameters * itemsize * (world_size - 1) // world_size)


def check_algorithms(settings: TrainSettings, algorithms: Sequence[str]) -> None:
    """Refuse unknown algorithms, options that none of them has, and a target that nobody sets."""
    known = [*sorted(presets()), *HOOKS, *SCHEMES]
    for name in algorithms:
        if name not in known:
            raise ConfigurationError(
                f"unknown algorithm {name!r}; choose one of {', '.join(known)}"
            )
    schemes, target = [name for name in algorithms if name in SCHEMES], settings.target_step
    if target is not None and not 1 <= target <= settings.steps:
        raise ConfigurationError(
            f"target_step is {target}; give a step of the run, from 1 to {settings.steps}"
        )
    if target is not None and "dense" not in algorithms:
        raise ConfigurationError(
            f"--target-step {target} asks for the loss of dense, which is not among the algorithms "
            f"{', '.join(algorithms)}; add dense"
        )
    if schemes and target is not None:
        raise ConfigurationError(
            f"--target-step looks at all ranks' loss after each step, so none could be ahead in "
            f"{schemes[0]}; leave it out"
        )
    for option in _SCHEME_OPTIONS:
        value = getattr(settings, option)
        if value is None or (option == "period" and settings.space == "local"):
            continue
        if not any(option in options_of(name) for name in schemes):
            having = [name for name in SCHEMES if option in options_of(name)]
            raise ConfigurationError(
                f"{option} is {value}, but none of {', '.join(algorithms)} has it; leave it out, or "
                f"choose one of {', '.join(having)}"
            )
    for name in schemes:
        SCHEMES[name](None, **_scheme_options(settings, name))


def make_exchange(settings: TrainSettings, name: str, model: nn.Module) -> Exchange:
    """Prepare this rank's model for "dense" (plain DDP), one of ``HOOKS``, a preset, or a scheme."""
    if name in SCHEMES:
        return Averaged(settings, name, model)
    if name in ("dense", "fp16") and settings.space != "local":
        return Allreduced(model, half=name == "fp16")
    if name == "powersgd":
        return PowerSgd(model)
    if settings.space == "local":
        return LocalProgress(settings, name, model)
    if settings.space == "gradient":
        return Attached(settings, name, model)
    for point in entry_points(group=_GROUP, name=settings.space):
        added: Exchange = point.load()(settings, name, model)
        return added
    raise ConfigurationError(
        f"--space {settings.space} is of the package sparsync-papers, which is not installed; "
        "install it, or choose gradient or local"
    )


class Exchange(ABC):
    """A model, the exchange of its gradients or updates, and the bytes that it sends."""

    model: nn.Module  # called and trained: wrapped in DDP, or plain
    transport: str = "torch"  # carries the gradients
    counted: str = "formula"  # or "ledger": the bytes are counted, not worked out
    sparse: bool = False  # entries are selected: density means something
    sums: bool = False  # gradients are summed over ranks, not averaged
    clips: bool = False  # gradients are clipped here; else the training does it, after ``backward``
    options: Mapping[str, object] | None = None  # of a scheme of averaging

    @abstractmethod
    def bytes_sent(self) -> int:
        """Return the bytes that this rank sent in the step that has just ended."""

    def make_optimizer(self, settings: TrainSettings) -> torch.optim.Optimizer:
        """Build the optimizer."""
        return settings.make_optimizer(self.model)

    def after_step(self) -> None:  # noqa: B027 (most do nothing)
        """Do what follows the optimizer's step."""

    def finish(self) -> int:
        """Make the replicas equal; return the bytes that this rank sent for it."""
        return 0

    def close(self) -> None:  # noqa: B027
        """End what runs in the background."""


# ---- PyTorch's own ----------------------------------------------------------------------------------


@final
class Allreduced(Exchange):
    """Plain DDP; or its ``fp16_compress_hook``: the same allreduce of 16-bit floats."""

    def __init__(self, model: nn.Module, *, half: bool) -> None:
        self.model = ddp = _in_ddp(model)
        self.itemsize = 2 if half else 4
        if half:
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def bytes_sent(self) -> int:
        """See ``Exchange``."""
        return dense_bytes_per_step(_elements(self.model), dist.get_world_size(), self.itemsize)


@final
class PowerSgd(Exchange):
    """PyTorch's ``powerSGD_hook``, set up as it is strongest and safe on gloo.

    The bytes are the elements that the hook itself says it allreduces.  The whole model is one bucket:
    with more, the hook waits for a collective inside a callback and hangs on gloo.
    """

    def __init__(self, model: nn.Module) -> None:
        nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.model = ddp = _in_ddp(model, bucket_cap_mb=nbytes // 2**20 + 1)
        # the hook's documentation suggests rank 1 to 4; it needs two dense steps, and its own default
        # of 1000 would mean dense for a short run
        self.state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        self.before = 0
        ddp.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)

    def bytes_sent(self) -> int:
        """See ``Exchange``."""
        so_far = self.state.total_numel_after_compression
        compressed, self.before = so_far - self.before, so_far
        return dense_bytes_per_step(compressed or _elements(self.model), dist.get_world_size())


# ---- presets ----------------------------------------------------------------------------------------


class Attached(Exchange):
    """``sparsync.attach`` to a DDP model."""

    counted = "ledger"
    sparse = clips = True

    def __init__(self, settings: TrainSettings, name: str, model: nn.Module) -> None:
        self.model = ddp = _in_ddp(model)
        self.correction = settings.correction(preset(name).corrects)
        # SparCML compresses some layers, too (section 8.4)
        compress = is_hidden_matrix if name == "sparcml" else None
        self.sync = attach(
            ddp,
            algorithm=name,
            density=settings.density,
            correction=self.correction,
            compression=Compression(compress=compress, warmup_steps=settings.warmup_steps),
            transport=Transport(settings.transport, settings.timeout, settings.curve_keys),
        )
        self.transport = transport_of(self.sync.reducer.comm)
        self.sums = not self.sync.reducer.algorithm.average

    def make_optimizer(self, settings: TrainSettings) -> torch.optim.Optimizer:
        """See ``Exchange``; the correction has taken over momentum and decay."""
        return settings.make_optimizer(self.model, self.correction)

    def bytes_sent(self) -> int:
        """See ``Exchange``."""
        return self.sync.reducer.comm.ledger.last_step.sent

    def close(self) -> None:
        """End the engine and its connection."""
        self.sync.close()


class Connected(Exchange):
    """An exchange on a connection of its own, which the ledger counts."""

    counted = "ledger"
    sparse = True

    def __init__(self, settings: TrainSettings, model: nn.Module) -> None:
        self.model = model
        self.comm: Communicator = connect(
            settings.timeout, transport=settings.transport, curve_keys=settings.curve_keys
        )
        self.transport = transport_of(self.comm)

    def bytes_sent(self) -> int:
        """See ``Exchange``."""
        return self.comm.ledger.last_step.sent

    def close(self) -> None:
        """Close the connection."""
        self.comm.close()


@final
class LocalProgress(Connected):
    """Local steps whose residual stays in the weights: ``OuterStep``."""

    def __init__(self, settings: TrainSettings, name: str, model: nn.Module) -> None:
        super().__init__(settings, model)
        self.local = OuterStep(
            model,
            algorithm=name,
            residual="weights",
            buffers="local",
            density=settings.density,
            period=settings.period,
            warmup_steps=settings.warmup_steps,
            comm=self.comm,
        )
        self._exchanges = 0

    def make_optimizer(self, settings: TrainSettings) -> torch.optim.Optimizer:
        """See ``Exchange``."""
        if settings.optimizer == "sgd":
            return settings.make_optimizer(self.model)
        return LocalAdamW(
            self.model.parameters(),
            dist.get_world_size(),
            lr=settings.learning_rate,
            weight_decay=settings.decay,
        )

    def after_step(self) -> None:
        """Exchange, if it is time."""
        self.local.step()

    def bytes_sent(self) -> int:
        """See ``Exchange``."""
        before, self._exchanges = self._exchanges, self.local.reducer.step
        if self._exchanges == before:
            return 0
        if self.local.reducer.algorithm.name == "dense":  # native: its ledger has the same number
            return dense_bytes_per_step(_elements(self.model), dist.get_world_size())
        return super().bytes_sent()

    def finish(self) -> int:
        """Deliver what is left, dense, once."""
        before = self.comm.ledger.total().sent
        self.local.finish()
        return self.comm.ledger.total().sent - before


# ---- schemes of averaging ---------------------------------------------------------------------------


@final
class Averaged(Connected):
    """A model that trains alone, and a scheme that averages it with others."""

    def __init__(self, settings: TrainSettings, name: str, model: nn.Module) -> None:
        super().__init__(settings, model)
        given, has = _scheme_options(settings, name), options_of(name)
        self.averager: Averager = SCHEMES[name](
            model, **given, comm=self.comm, buffers=settings.buffers
        )
        self.sparse = has.get("density", 1.0) < 1
        chosen = {key: getattr(self.averager, key, None) for key in has}
        plain = {k: value for k, value in chosen.items() if isinstance(value, int | float | str)}
        self.options = {"buffers": settings.buffers, **given, **plain}
        self._before = self.comm.ledger.total().sent  # the comparison of the models at the start

    def after_step(self) -> None:
        """Average, if it is time."""
        self.averager.step()

    def bytes_sent(self) -> int:
        """Return the bytes that this rank sent since the last call, also between its steps."""
        before, self._before = self._before, self.comm.ledger.total().sent
        return self._before - before

    def finish(self) -> int:
        """Leave all replicas equal."""
        self.averager.finish()
        return self.bytes_sent()

    def close(self) -> None:
        """End the scheme's background work, and the connection."""
        self.averager.close()


def _scheme_options(settings: TrainSettings, name: str) -> dict[str, Any]:
    """Return the given options that this scheme has; for the rest it has its own defaults."""
    has = options_of(name)
    given = {option: getattr(settings, option) for option in (*_SCHEME_OPTIONS, "seed")}
    if has.get("density", 1.0) < 1:  # a dense exchange has none
        given["density"] = settings.density
    return {key: value for key, value in given.items() if key in has and value is not None}


def _in_ddp(model: nn.Module, bucket_cap_mb: float | None = None) -> DistributedDataParallel:
    """Wrap a model, without sending the first weights over a slow link: the seed makes them equal."""
    return DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, init_sync=False)


def _elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
