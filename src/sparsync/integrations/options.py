"""The options of ``sparsync.attach``, each checked when it is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sparsync.errors import ConfigurationError
from sparsync.feedback.agreement import agree_on_reducer
from sparsync.feedback.commit import Consensus, decide_alone
from sparsync.feedback.correction import Correction
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import AdaptiveDensity, Warmup, as_density
from sparsync.monitoring import sink_of
from sparsync.presets import Algorithm, resolve
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator, check_timeout
from sparsync.transports.connect import check_transport, connect_group
from sparsync.transports.driver import run
from sparsync.transports.process_group import TorchCommunicator
from sparsync.units import Unit, output_parameters, plan_units

__all__ = [
    "Compress",
    "Compression",
    "Monitoring",
    "Nonfinite",
    "Options",
    "Sentinel",
    "Transport",
    "check_optimizer",
    "check_output_layer",
    "replicated_tensors",
]

Nonfinite = Literal["raise", "skip", "propagate"]
Compress = Callable[[str, Tensor], bool]

# and whatever has betas, as Adam; by name: older versions of torch have no Adafactor
_ADAPTIVE = ("Adafactor", "Adagrad", "Adadelta", "RMSprop", "Rprop")


@dataclass(frozen=True)
class Compression:
    """Which parameters are exchanged sparsely, in which groups, and from which step on.

    Equal on all ranks.

    Attributes:
        unit_bytes: select over groups of consecutive parameters of at least this many bytes, or over
            the whole model (None: as the algorithm's paper does: the whole model; "sparcml": single
            parameters).  Several units are exchanged while the backward pass goes on, each with its
            share of the global k.
        compress: ``compress(name, parameter)`` tells whether a parameter is exchanged sparsely; the
            others are exchanged dense.  None: as the algorithm does: all; "redsync": those that gain.
        output_layer: names of the parameters of the output layer, which some algorithms treat apart.
            None: those of the module that was registered last.
        warmup_steps: the first steps, which are dense unless ``warmup_densities`` are given.
        warmup_densities: densities of the warm-up, each for an equal part of it (``DGC_RAMP``).
        overlap: exchange a unit as soon as its gradients are complete.  False, without DDP: when all
            gradients are; needed if FSDP2 modules run several times per forward pass.

    Raises:
        ConfigurationError: from the constructor: says what to change.
    """

    unit_bytes: int | None = None
    compress: Compress | None = None
    output_layer: Collection[str] | None = None
    warmup_steps: int = 0
    warmup_densities: Sequence[float] = ()
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.compress is not None and not callable(self.compress):
            raise ConfigurationError(
                f"compress is {self.compress!r}; give a function of a parameter's name and tensor that "
                "returns False for what is to be exchanged dense"
            )
        self.warmup()

    def warmup(self) -> Warmup:
        """Return the schedule of the first steps."""
        return Warmup(self.warmup_steps, tuple(self.warmup_densities))


@dataclass(frozen=True)
class Transport:
    """Which ranks exchange with each other, and over what.

    Attributes:
        name: "zmq" (sockets of its own), "torch" (gloo), "mpi", or "auto": the fastest one (zmq).
        timeout: seconds that any wait may take before ``backward()`` raises.
        curve_keys: folder with one certificate per rank: zmq encrypts and authenticates.
        hierarchy: of DDP: dense inside a node, sparse between nodes.  "node": as many consecutive ranks
            as the launcher started on a machine; or a mesh (nodes, ranks of a node).
        world: without DDP, the ranks that train the model together, which refuse steps together.
            None: all ranks.

    Raises:
        ConfigurationError: from the constructor: an unknown transport, keys for one that does not
            encrypt, or a bad timeout.
    """

    name: str = "auto"
    timeout: float = 300.0
    curve_keys: Path | str | None = None
    hierarchy: DeviceMesh | str | None = None
    world: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        check_transport(self.name, self.curve_keys)


@dataclass(frozen=True, eq=False)
class Sentinel:
    """Replicas compared every ``period`` steps, and what follows if they differ.

    Parameters, trained or frozen, and the running statistics of ``SyncBatchNorm`` are compared.  Those of
    other normalisation layers are local: each rank updates them with its own batch, and DDP sends those
    of rank 0 at the next forward pass (``broadcast_buffers=True``), or never.

    Attributes:
        period: steps between comparisons.
        policy: when something differs: "raise" ``PeerError`` from ``backward()`` on all ranks, "warn" and
            go on, or "heal": ranks in the minority get the tensor of the majority, in place.  Without
            a majority (two ranks, or two halves) "heal" raises.
        buffers: names of other buffers that should be equal.
        optimizer: whose state is to be compared, and healed, too.  Without it a healed parameter may
            keep momentum that is its own, and differs again soon.

    Cost, every ``period`` steps: two passes over the compared memory and a message of 16 bytes per
    rank, one more where a replica is divided (``docs/checkpoints.md`` has seconds); for a GPU one wait.

    Example:
        >>> Sentinel(period=50, policy="heal").period
        50
    """

    period: int = 100
    policy: Literal["raise", "warn", "heal"] = "raise"
    buffers: Collection[str] = ()
    optimizer: torch.optim.Optimizer | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if type(self.period) is not int or self.period < 1:
            raise ConfigurationError(
                f"Sentinel: period is {self.period!r}; give a whole number of steps >= 1"
            )
        if self.policy not in ("raise", "warn", "heal"):
            raise ConfigurationError(
                f"Sentinel: policy is {self.policy!r}; choose one of raise, warn, heal"
            )
        named = isinstance(self.buffers, Collection) and not isinstance(self.buffers, str)
        if not named or not all(isinstance(name, str) for name in self.buffers):
            raise ConfigurationError(f"Sentinel: buffers is {self.buffers!r}; give a list of names")
        if not isinstance(self.optimizer, torch.optim.Optimizer | None):
            raise ConfigurationError(
                f"Sentinel: optimizer is {self.optimizer!r}; give a torch.optim.Optimizer"
            )

    def due(self, step: int) -> bool:
        """Tell whether the replicas are compared when step ``step`` (0-based) is over."""
        return (step + 1) % self.period == 0

    def tensors(self, model: nn.Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the tensors that should be equal on all ranks, by name; of a DTensor the local part.

        Args:
            model: as it is now.
            ignored: names of parameters and buffers that are each rank's own.

        Raises:
            ConfigurationError: ``buffers`` has a name that is none.

        Example:
            >>> layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
            >>> list(Sentinel(buffers=["1.num_batches_tracked"]).tensors(layers))
            ['0.weight', '1.weight', '1.bias', '1.num_batches_tracked']
        """
        buffers = dict(model.named_buffers())
        unknown = [name for name in self.buffers if name not in buffers]
        if unknown:
            raise ConfigurationError(
                f"Sentinel: buffers has {unknown[0]!r}, which is no name of a buffer; the model has "
                f"{', '.join(buffers) or 'none'}"
            )
        chosen = {name: _local(buffers[name]) for name in self.buffers if name not in ignored}
        moments = {
            f"{kind} of {name}": _local(value)
            for name, parameter in model.named_parameters()
            if self.optimizer is not None and name not in ignored
            for kind, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, Tensor)
        }
        return {**replicated_tensors(model, ignored), **chosen, **moments}


@dataclass(frozen=True)
class Monitoring:
    """Logs, the policy on NaN and Inf, and checks that replicas stay equal.

    Attributes:
        nonfinite: what all ranks do when NaN or Inf is in the sum: "raise" from ``backward()``,
            "skip" (gradients become None, so the optimizer does nothing), or "propagate" (every
            gradient of every rank becomes NaN, so that a GradScaler skips on all).  Residuals stay as
            they were.  None: "propagate" with ``scaler``, else "raise".
        scaler: the ``GradScaler`` whose scale the gradients have: the residual follows it, and overflows
            are propagated to it.
        sentinel: compares replicas every ``Sentinel.period`` steps.  None: only at ``attach``.
        log: takes the numbers of every step (``sparsync.monitoring.Monitor``) on this rank: a path
            ending in ``.jsonl``, a folder for TensorBoard, an object with
            ``add_scalar(tag, value, step)``, or a function of (step, values).
        xi_period: steps between estimates of Assumption 1's xi (``XiProbe``).  None: not measured.

    Raises:
        ConfigurationError: from the constructor: says what to change.
    """

    nonfinite: Nonfinite | None = None
    scaler: Any = None
    sentinel: Sentinel | None = None
    log: Any = None
    xi_period: int | None = None

    def __post_init__(self) -> None:
        if self.nonfinite not in (None, "raise", "skip", "propagate"):
            raise ConfigurationError(
                f"nonfinite is {self.nonfinite!r}; choose one of raise, skip, propagate"
            )
        if self.sentinel is not None and not isinstance(self.sentinel, Sentinel):
            raise ConfigurationError(
                f"sentinel is {self.sentinel!r}; give a sparsync.Sentinel(period=100)"
            )
        if self.scaler is None:
            return
        if not callable(getattr(self.scaler, "get_scale", None)):
            raise ConfigurationError(
                f"scaler is {type(self.scaler).__name__}, which has no get_scale(); give a "
                "torch.amp.GradScaler"
            )
        if self.nonfinite not in (None, "propagate"):
            raise ConfigurationError(
                f"with nonfinite={self.nonfinite!r} the GradScaler sees no overflow and never lowers its "
                "scale; omit nonfinite, or give 'propagate'"
            )

    @property
    def policy(self) -> Nonfinite:
        """The policy on NaN and Inf; a scaler decides where none was given."""
        return self.nonfinite or ("raise" if self.scaler is None else "propagate")


@dataclass(frozen=True)
class Options:
    """Everything that ``attach`` was given but the model, checked and completed."""

    algorithm: Algorithm
    density: float | AdaptiveDensity
    correction: Correction
    compression: Compression
    transport: Transport
    monitoring: Monitoring

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer | None,
        algorithm: str | Algorithm,
        density: float | AdaptiveDensity,
        correction: Correction | None,
        compression: Compression | None,
        transport: Transport | None,
        monitoring: Monitoring | None,
    ) -> Options:
        """Fill in the defaults of the algorithm, and check what has to fit together.

        Raises:
            ConfigurationError: says what to change.
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
        chosen, density, correction = (
            resolve(algorithm),
            as_density(density),
            correction or Correction(),
        )
        check_optimizer(optimizer, correction, sparse="dense" not in chosen.name and density != 1)
        given = compression or Compression()
        completed = replace(
            given,
            unit_bytes=chosen.unit_bytes if given.unit_bytes is None else given.unit_bytes,
            compress=given.compress or chosen.compress,
        )
        return cls(
            chosen,
            density,
            correction,
            completed,
            transport or Transport(),
            monitoring or Monitoring(),
        )

    @property
    def facts(self) -> dict[str, object]:
        """Settings that must be equal on ranks that hold other parts of the model."""
        watched = self.monitoring
        return {
            "the algorithm": (self.algorithm.name, self.algorithm.options),
            "density": self.density,
            "nonfinite": watched.policy,
            "the warm-up": self.compression.warmup(),
            "the correction": self.correction,
            "the sentinel and whether there is a scaler": (
                watched.sentinel,
                watched.scaler is not None,
            ),
        }

    def units(self, trained: Iterable[tuple[str, Tensor]], module: nn.Module) -> list[Unit]:
        """Plan the units of named parameters, or of this rank's shards of them.

        Args:
            trained: names, and tensors of the shapes that gradients have on this rank.
            module: the plain model, whose last module is the output layer.
        """
        apart = check_output_layer(self.compression.output_layer, module)
        output = apart if self.algorithm.output else ()
        return plan_units(trained, self.compression.unit_bytes, self.compression.compress, output)

    def reducer(
        self,
        group: dist.ProcessGroup,
        units: Sequence[Unit],
        consensus: Consensus = decide_alone,
        **agreed: object,
    ) -> Reducer:
        """Connect the ranks of a group, which agree on everything, and build their reducer.

        Args:
            group: a group of its own.
            units: what is exchanged.
            consensus: of the ranks that hold other parts of this replica.
            agreed: more settings that must be equal on all ranks.

        Raises:
            PeerError: ranks disagree; no sockets are left behind.
        """
        comm: Communicator | None = None
        watched, carried = self.monitoring, self.transport
        try:
            # first of all, and over gloo: ranks that differ here may not even compare the same
            wanted = {
                "the version of sparsync": _version(),
                "the version of torch": torch.__version__,
                "transport": carried.name,
                "encryption": carried.curve_keys is not None,
            }
            run(agree(TorchCommunicator(group, timeout=carried.timeout), wanted))
            comm = connect_group(
                group,
                transport=carried.name,
                timeout=carried.timeout,
                curve_keys=carried.curve_keys,
            )
            reducer = Reducer(
                comm,
                units,
                run(self.algorithm.on(comm)),
                self.density,
                self.compression.warmup(),
                self.correction,
                watched.xi_period,
                consensus,
                None if watched.log is None else sink_of(watched.log, comm.rank),
            )
            agreed = {
                **agreed,
                "nonfinite": watched.policy,
                "unit_bytes": self.compression.unit_bytes,
            }
            agreed = {**agreed, "sentinel": watched.sentinel, "scaler": watched.scaler is not None}
            agree_on_reducer(reducer, **agreed)
        except BaseException:
            if comm is not None:
                comm.close()
            raise
        return reducer


def check_optimizer(
    optimizer: torch.optim.Optimizer | None, correction: Correction, *, sparse: bool = False
) -> None:
    """Refuse an optimizer that does again what the correction has done; warn of what loses.

    Args:
        optimizer: the one that will be used; None: unknown.
        correction: of local gradients.
        sparse: entries of gradients are exchanged, not all of them.

    Raises:
        ConfigurationError: says what to change.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        >>> try: check_optimizer(sgd, Correction(momentum=0.9))
        ... except ConfigurationError as error: str(error).split(";")[1]
        ' build the optimizer with momentum=0'
    """
    if optimizer is None:
        return
    name = type(optimizer).__name__
    kinds = {base.__name__ for base in type(optimizer).__mro__}
    adaptive = not kinds.isdisjoint(_ADAPTIVE) or "betas" in optimizer.defaults
    if adaptive and sparse:
        warnings.warn(
            f"{name} divides by its second moment, which entries that arrive rarely break: expect 20 "
            "to 28 % more loss at 1 %. sparsync.OuterStep(model, residual='weights') keeps up with "
            "dense training; see docs/optimizers.md",
            stacklevel=4,  # the caller of attach
        )
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


def check_output_layer(given: Collection[str] | None, model: nn.Module) -> Collection[str]:
    """Return the names of the output layer's parameters: those given, or of the last module.

    Raises:
        ConfigurationError: not names of parameters.
    """
    if given is None:
        return output_parameters(model)
    known = [name for name, _ in model.named_parameters()]
    unknown = [given] if isinstance(given, str) else [name for name in given if name not in known]
    if unknown:
        raise ConfigurationError(
            f"output_layer has {unknown[0]!r}, which is no name of a parameter; give a list of names, "
            f"e.g. {output_parameters(model)}"
        )
    return given


def replicated_tensors(model: nn.Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the tensors that replicas share: parameters, and the statistics of ``SyncBatchNorm``.

    Args:
        model: a plain module, as it is now.
        ignored: names of parameters and buffers that are each rank's own.
    """
    synchronised = {
        f"{name}.{buffer}" if name else buffer: tensor
        for name, module in model.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
        for buffer, tensor in module.named_buffers(recurse=False)
    }
    named = {**dict(model.named_parameters()), **synchronised}
    return {name: _local(tensor) for name, tensor in named.items() if name not in ignored}


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)  # a DTensor's; to import that takes 0.4 s
    return tensor if to_local is None else to_local()


def _version() -> str:
    try:
        return version("sparsync")
    except PackageNotFoundError:  # from a folder on the path, without installation
        return "unknown"
