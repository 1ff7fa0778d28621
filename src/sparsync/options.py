"""The settings of ``sparsync.attach``, each checked on construction."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sparsync.algorithm import LARGE, Algorithm, default_density
from sparsync.collectives.costs import allreduce
from sparsync.console import say
from sparsync.errors import ConfigurationError, check_number_fields, require
from sparsync.feedback.agreed_setup import agree_on_reducer
from sparsync.feedback.correction import Correction
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import Warmup
from sparsync.feedback.step import Consensus, Proposal
from sparsync.gradients.sentinel import Sentinel
from sparsync.monitoring import sink_of
from sparsync.names import naming_options
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator, check_timeout
from sparsync.transports.driver import run
from sparsync.transports.process_group import (
    Groups,
    TorchCommunicator,
    check_transport,
    connect_group,
)
from sparsync.units import Unit, check_unit_bytes, output_parameters, plan_units

__all__ = [
    "DISABLE",
    "Compress",
    "Compression",
    "Monitoring",
    "Nonfinite",
    "Options",
    "Transport",
    "disabled",
]

DISABLE = "SPARSYNC_DISABLE"  # an environment variable: 1 leaves the exchange to DDP

Nonfinite = Literal["raise", "skip", "propagate"]
Compress = Callable[[str, Tensor], bool]


@naming_options
@dataclass(frozen=True)
class Compression:
    """Settings that decide which parameters are exchanged sparsely, in which groups, and when.

    All settings must be equal on all ranks.  Each is checked on construction
    (``ConfigurationError``).

    Attributes:
        unit_bytes: select over units, groups of consecutive parameters of at least this many bytes.
            None selects over the groups that the algorithm's paper uses: usually the whole model, but
            with "sparcml" each parameter.  If there are several units, each is exchanged during the
            backward pass, with its share of the global k.
        compress: ``compress(name, parameter)`` returns whether a parameter is exchanged sparsely; the
            others are exchanged dense.  None means the algorithm's own rule: usually all parameters, but
            with "redsync" only parameters that are large enough to gain.  If ``density`` is not given
            and the model is small enough to be exchanged whole, every parameter is dense.
        output_layer: names of the parameters of the output layer, which some algorithms treat
            separately.  None means the parameters of the module that was registered last.
        warmup_steps: the number of initial steps that are dense, or use ``warmup_densities``.  If
            updates are exchanged, the period grows during these steps (``OuterStep``).
        warmup_densities: the densities of equally long parts of the warm-up (``DGC_RAMP``).
        overlap: exchange a unit as soon as its gradients are complete.  False waits until all gradients
            are complete, and is only for models without DDP.  FSDP2 modules that run several times
            per forward pass need False.
        offload: only for updates, and for a model on an accelerator.  True keeps the shared weights,
            the residual and the outer momentum in host memory; False keeps them on the device.  None
            keeps only the residual in host memory, unless the device has no room for the shared weights.
        schedule: for a pipeline, the schedule of ``torch.distributed.pipelining`` that runs this stage.
    """

    unit_bytes: int | None = None
    compress: Compress | None = None
    output_layer: Collection[str] | None = None
    warmup_steps: int = 0
    warmup_densities: Sequence[float] = ()
    overlap: bool = True
    offload: bool | None = None
    schedule: Any = None

    def __post_init__(self) -> None:
        check_number_fields(self)
        if self.compress is not None and not callable(self.compress):
            raise ConfigurationError(
                f"compress is {self.compress!r}; give a function of a parameter's name and tensor that "
                "returns False for a parameter that is to be exchanged dense"
            )
        check_unit_bytes(self.unit_bytes)
        known = self.offload in (None, True, False)
        require(
            known, f"offload is {self.offload!r}; give True, False, or None to let attach decide"
        )
        several = isinstance(self.warmup_densities, Sequence)
        require(several, f"warmup_densities is {self.warmup_densities!r}; give a list of fractions")
        self.warmup()

    def warmup(self) -> Warmup | None:
        """Return the schedule of the warm-up, or None if there is no warm-up."""
        if not self.warmup_steps and not self.warmup_densities:
            return None
        return Warmup(self.warmup_steps, tuple(self.warmup_densities))


@naming_options
@dataclass(frozen=True)
class Transport:
    """Settings that decide which ranks exchange with each other, and over which transport.

    Attributes:
        name: "zmq" (its own sockets), "torch" (gloo), "mpi", or "auto": the fastest one (zmq).
        timeout: seconds that any wait may take before ``backward()`` raises.  This is also how long a
            rank may pause.
        curve_keys: folder with one certificate per rank; zmq then encrypts and authenticates.
        interface, port_range, advertise: settings of zmq's sockets, see ``sparsync.connect``.
        hierarchy: for DDP, average gradients densely inside a node on every step, and exchange sparse
            gradients or updates between nodes.  With "node", a node is a machine: the launcher numbers
            its ranks consecutively, and those in DDP's group form the node.  With "links", a node is a
            site, found by measuring all links at ``attach``.  Or give a mesh (nodes, ranks of a node).
        world: without DDP, the ranks that train the model together, and refuse steps together; None
            means all ranks.  With DDP, ``attach`` uses the ranks of DDP's group.
        connect_timeout: seconds that ``attach`` may take to open the connections between ranks.
    """

    name: str = "auto"
    timeout: float = 300.0
    curve_keys: Path | str | None = None
    hierarchy: DeviceMesh | str | None = None
    world: dist.ProcessGroup | None = None
    interface: str | None = None
    port_range: tuple[int, int] | None = None
    advertise: str | None = None
    connect_timeout: float = 60.0

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        check_timeout(self.connect_timeout, "connect_timeout")
        check_transport(self.name, self.sockets)

    @property
    def waits(self) -> dict[str, float]:
        """The time limits by name; every transport accepts them."""
        return {"timeout": self.timeout, "connect_timeout": self.connect_timeout}

    @property
    def sockets(self) -> dict[str, Any]:
        """The socket settings by name; only zmq accepts them."""
        names = "curve_keys", "interface", "port_range", "advertise"
        return {name: getattr(self, name) for name in names}


@naming_options
@dataclass(frozen=True)
class Monitoring:
    """Settings for logs, for NaN and Inf, and for the check that replicas stay equal.

    Attributes:
        nonfinite: what all ranks do when the sum of gradients contains NaN or Inf.  "raise" raises from
            ``backward()``.  With "skip", gradients become None, so the optimizer does nothing.  With
            "propagate", every gradient of every rank becomes NaN, so a GradScaler skips the step on all
            ranks.  Residuals keep their values.  None means "propagate" with ``scaler``, and otherwise
            "raise".  Must be None when updates are exchanged (``OuterStep`` says what happens then).
        scaler: the ``GradScaler`` that scales the gradients.  The residual is rescaled whenever the
            scale changes, and overflows are propagated to the scaler.
        sentinel: compares replicas every ``Sentinel.period`` steps.  None compares them only at
            ``attach``.
        log: receives the numbers of every step (``sparsync.monitoring.Monitor``) on this rank: a path
            ending in ``.jsonl``, a TensorBoard ``SummaryWriter``, a W&B run, an OpenTelemetry meter, or
            a function of (step, values).  If updates are exchanged, ``step`` is the local step after
            which the exchange began.
        xi_period: steps between estimates of Assumption 1's xi (``XiProbe``); None for no estimates.
    """

    nonfinite: Nonfinite | None = None
    scaler: Any = None
    sentinel: Sentinel | None = None
    log: Any = None
    xi_period: int | None = None

    def __post_init__(self) -> None:
        check_number_fields(self)
        sparse = self.xi_period is None or self.xi_period >= 1
        require(sparse, f"xi_period is {self.xi_period}; give a number of steps >= 1, or None")
        known = self.nonfinite in (None, "raise", "skip", "propagate")
        require(known, f"nonfinite is {self.nonfinite!r}; choose one of raise, skip, propagate")
        # None compares replicas only at ``attach``
        fits = self.sentinel is None or isinstance(self.sentinel, Sentinel)
        require(fits, f"sentinel is {self.sentinel!r}; give a sparsync.Sentinel(period=100)")
        if self.scaler is None:
            return
        given = f"scaler is {type(self.scaler).__name__}, which has no get_scale()"
        scales = callable(getattr(self.scaler, "get_scale", None))
        require(scales, f"{given}; give a torch.amp.GradScaler")
        # the scaler finds an overflow as Inf in the gradients that it unscales, but with "raise" and
        # "skip" a step with Inf leaves no gradients
        if self.nonfinite not in (None, "propagate"):
            raise ConfigurationError(
                f"with nonfinite={self.nonfinite!r} the GradScaler sees no overflow and never lowers its "
                "scale; omit nonfinite, or give 'propagate'"
            )

    @property
    def policy(self) -> Nonfinite:
        """The policy on NaN and Inf; its default depends on whether there is a scaler."""
        return self.nonfinite or ("raise" if self.scaler is None else "propagate")


@dataclass(frozen=True)
class Options:
    """All arguments of ``attach`` except the model and its optimizers, checked and completed.

    A ``density`` of None means that ``for_size`` will choose ``default_density``, once the model's size
    is known.  With "auto", ``decided`` is the reason for exchanging gradients or updates.
    """

    algorithm: Algorithm
    density: float | None
    correction: Correction | None
    compression: Compression
    transport: Transport
    monitoring: Monitoring
    decided: str = ""

    def tell(self, line: str) -> None:
        """Print a line, but only on the first of the ranks that train the model together."""
        if dist.get_rank(self.transport.world) == 0:
            say(line)

    def for_size(self, elements: int, tell: Callable[[str], object]) -> Options:
        """Choose the density for a model with this many trained elements, if none was given.

        ``tell`` receives a line about the choice.
        """
        if self.density is not None:
            return self
        if self.algorithm.result == "whole":  # nothing is selected, so there is nothing to choose
            return replace(self, density=1.0)
        density, given = default_density(elements), self.compression
        said = f"{100 * density:.3g} % of {elements:,} gradient entries on every step"
        if density == 1:
            said = f"all {elements:,} gradient entries on every step"
            if self.algorithm.name != "budgeted":  # not the default, so the user has chosen it
                said += f", densely; {self.algorithm.name} is not used"
            # the dense collective is bit-identical to plain DDP, and a sparse exchange of all entries
            # is not
            given = replace(given, compress=given.compress or _nothing)
        lag = "in a model this small, delay costs more than bytes"
        if elements >= LARGE:
            lag = (
                f"other entries wait about {1 / density:.0f} steps, which matters if a training has only "
                "a few hundred steps: then give density=0.1"
            )
        tell(f"exchanges {said} (density= overrides this); {lag}")
        return replace(self, density=density, compression=given)

    def tell_of_bytes(
        self, units: Sequence[Unit], world_size: int, tell: Callable[[str], object]
    ) -> None:
        """Tell the user if a step sends more bytes than a dense step would, or mostly dense layers."""
        density, name = self.density, self.algorithm.name
        # say nothing at density 1, which asks for dense training, nor if the algorithm selects nothing
        # and so ignores the density
        if density is None or density == 1 or self.algorithm.result == "whole":
            return
        sent = self.algorithm.bytes_of(units, density, world_size)
        if sent is None or sum(sent) == 0:
            return
        needed = allreduce(sum(unit.size for unit in units), world_size).nbytes
        # import this here, because ``import sparsync`` would otherwise load the tables of algorithms
        from sparsync.cost.wording import format_bytes
        from sparsync.presets import PRESETS

        if sum(sent) > needed:
            tell(
                f"{name}: at density {density:.3g} and {world_size} ranks, a rank sends or receives "
                f"{format_bytes(sum(sent))} per step, but {format_bytes(needed)} with dense; give a "
                "lower density=, or another algorithm (sparsync plan compares them)"
            )
        rule, share = self.compression.compress, sent[0] / sum(sent)
        # print nothing about the user's own rule
        if rule is None or rule is not self.algorithm.compress or share <= 0.5:
            return
        part = sum(unit.size for unit in units if unit.dense) / sum(unit.size for unit in units)
        own = PRESETS.get(name)
        known = own is not None and "compress_thd" in own.options
        option = f"sparsync.presets.resolve({name!r}, compress_thd=0), or " if known else ""
        tell(
            f"{name}: layers that are too small to compress are {100 * part:.3g} % of the "
            f"gradient and {100 * share:.0f} % of the bytes of a step, because they travel dense "
            f"({option}"
            "Compression(compress=...) overrides this)"
        )

    def _tell_of_one(self, units: Sequence[Unit]) -> None:
        """Tell the user that the algorithm is not used, unless the exchange would be dense anyway."""
        exact = self.algorithm.result == "whole" and self.algorithm.bits is None
        if not exact and not all(unit.dense for unit in units):
            self.tell(
                f"there is only one replica, so {self.algorithm.name} is not used: nothing is "
                "rounded or kept back"
            )

    def agree_with(self, parts: Communicator) -> None:
        """Compare the settings that must be equal on all ranks that together hold a replica.

        Raises:
            ConfigurationError: the correction clips, which needs the norm of whole gradients.
            PeerError: ranks were given different settings.
        """
        watched = self.monitoring
        facts = {
            "the algorithm": (self.algorithm.name, self.algorithm.options),
            "density": self.density,
            "nonfinite": watched.policy,
            "the warm-up": self.compression.warmup(),
            "the correction": self.correction,
            "the sentinel": watched.sentinel,
            "whether there is a scaler": watched.scaler is not None,
        }
        run(agree(parts, facts))
        if parts.world_size > 1 and self.correction and self.correction.clip is not None:
            raise ConfigurationError(
                "Correction(clip=...) needs the norm of whole local gradients, but each rank holds a "
                "part of them; omit it and clip the averages with torch.nn.utils.clip_grad_norm_"
            )

    def parts(self, ranks: Sequence[int], groups: Groups) -> TorchCommunicator:
        """Connect the ranks that together hold this replica.

        ``ranks`` lists the ranks that hold the same part of the model as this one.  The ranks that are at
        the same position in their own lists hold one whole replica.
        """
        # a rank knows only the ranks that hold the same part; its position among them is the number of
        # its replica
        place = [sorted(ranks).index(dist.get_rank())]
        world = dist.get_process_group_ranks(groups.world or dist.group.WORLD)
        places = zip(world, groups.gathered(place), strict=True)
        inner = groups.make([rank for rank, its in places if its == place])
        parts = TorchCommunicator(inner, timeout=self.transport.timeout)
        self.agree_with(parts)
        return parts

    def units(self, trained: Iterable[tuple[str, Tensor]], module: nn.Module) -> list[Unit]:
        """Plan the units of a plain module's parameters, or of this rank's shards of them."""
        given = self.compression
        apart = output_parameters(module, given.output_layer)
        output = apart if self.algorithm.output else ()
        return plan_units(trained, given.unit_bytes, given.compress, output)

    def connect(self, group: dist.ProcessGroup) -> Communicator:
        """Connect the ranks of a dedicated group over the chosen transport.

        Raises:
            PeerError: ranks ask for different transports, or run different versions.
        """
        carried = self.transport
        # Versions are compared first, because a different version might compare different facts next.
        # They are compared over gloo, which works on all ranks, whichever transport each one asks for.
        wanted = {
            "the version of sparsync": _version(),
            "the version of torch": torch.__version__,
            "transport": carried.name,
            "encryption": carried.curve_keys is not None,
        }
        run(agree(TorchCommunicator(group, timeout=carried.timeout), wanted))
        return connect_group(group, transport=carried.name, **carried.waits, **carried.sockets)

    def reducer(
        self,
        group: dist.ProcessGroup,
        units: Sequence[Unit],
        consensus: Consensus = Proposal.broken,
        *,
        on_host: bool = False,
        **agreed: object,
    ) -> Reducer:
        """Connect the ranks of a dedicated group, check that they agree, and build their reducer.

        ``consensus`` makes decisions together with the ranks that hold the other parts of this replica.
        With ``on_host``, residuals live in host memory.  ``agreed`` holds further settings that must be
        equal on all ranks.
        """
        assert self.density is not None, "for_size comes first"
        watched, comm = self.monitoring, self.connect(group)
        warmup = self.compression.warmup()
        if comm.world_size == 1:
            warmup = Warmup(sys.maxsize)  # all steps are dense: no rank would receive a selection
            self._tell_of_one(units)
        try:
            reducer = Reducer(
                comm,
                units,
                run(self.algorithm.on(comm)),
                self.density,
                warmup,
                self.correction,
                watched.xi_period,
                consensus,
                None if watched.log is None else sink_of(watched.log, comm.rank),
                on_host=on_host,
            )
            self.tell_of_bytes(units, comm.world_size, self.tell)
            agree_on_reducer(
                reducer,
                nonfinite=watched.policy,
                unit_bytes=self.compression.unit_bytes,
                sentinel=watched.sentinel,
                scaler=watched.scaler is not None,
                **agreed,
            )
        except BaseException:
            comm.close()  # no handle owns it yet
            raise
        return reducer


def disabled() -> bool:
    """Return whether the environment variable ``DISABLE`` asks for plain DDP.

    Raises:
        ConfigurationError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(DISABLE, "")
    known = value in ("", "0", "1")
    require(known, f"{DISABLE} is {value!r}; give 1 for plain DDP, or 0 to attach")
    return value == "1"


def _nothing(_name: str, _parameter: Tensor) -> bool:
    """Return False for every parameter, so that all are exchanged dense."""
    return False


def _version() -> str:
    try:
        return version("sparsync")
    except PackageNotFoundError:  # imported from a folder on the path, without installation
        return "unknown"
