"""What ``attach`` was told, checked once, for whatever it attaches to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsync.correction import Correction
from sparsync.errors import ConfigurationError
from sparsync.integrations.base import agree_on_reducer
from sparsync.integrations.checks import check_optimizer, check_output_layer
from sparsync.integrations.sentinel import Sentinel
from sparsync.integrations.upkeep import check_scaler
from sparsync.integrations.wires import Wires
from sparsync.monitoring import Log, sink_of
from sparsync.presets import Algorithm, resolve
from sparsync.reducer import Reducer
from sparsync.transports.base import Communicator, check_timeout, run
from sparsync.transports.connect import check_transport
from sparsync.units import Unit, plan_units
from sparsync.warmup import AdaptiveDensity, Warmup, as_density

__all__ = ["Compress", "Nonfinite", "Settings", "settings_of"]

Nonfinite = Literal["raise", "skip", "propagate"]
Compress = Callable[[str, Tensor], bool]


@dataclass(frozen=True)
class Settings:
    """The arguments of ``attach`` that every integration shares, checked and completed.

    Attributes:
        algorithm: with its options.
        density: k / n, or what adapts it.
        unit_bytes: of a unit; None: the whole model.
        compress: which parameters are exchanged sparsely; None: all.
        warmup: the first steps.
        correction: done to local gradients.
        output_layer: names of its parameters; None: those of the last module.
        nonfinite: what happens when a total holds NaN or Inf.
        wires: what carries the bytes.
        log: where the numbers of every step go.
        xi_period: steps between estimates of xi.
        scaler: a GradScaler, whose scale the residual follows.
        sentinel: compares replicas.
    """

    algorithm: Algorithm
    density: float | AdaptiveDensity
    unit_bytes: int | None
    compress: Compress | None
    warmup: Warmup
    correction: Correction
    output_layer: Collection[str] | None
    nonfinite: Nonfinite
    wires: Wires
    log: Any
    xi_period: int | None
    scaler: Any = None
    sentinel: Sentinel | None = None

    @property
    def facts(self) -> dict[str, object]:
        """What ranks that hold other parts of the model must be told alike."""
        return {
            "the algorithm": (self.algorithm.name, self.algorithm.options),
            "density": self.density,
            "nonfinite": self.nonfinite,
            "the warm-up": self.warmup,
            "the correction": self.correction,
            "the sentinel and whether there is a scaler": (self.sentinel, self.scaler is not None),
        }

    def units(self, trained: Iterable[tuple[str, Tensor]], module: nn.Module) -> list[Unit]:
        """Plan the units of named parameters, or of this rank's shards of them.

        Args:
            trained: names, and tensors of the shapes that gradients have on this rank.
            module: the plain model, whose last module is the output layer.
        """
        apart = check_output_layer(self.output_layer, module)
        output = apart if self.algorithm.output else ()
        return plan_units(trained, self.unit_bytes, self.compress, output)

    def reducer(self, group: dist.ProcessGroup, units: Sequence[Unit], **agreed: object) -> Reducer:
        """Connect the ranks of a group, which agree on everything, and build their reducer.

        Args:
            group: a group of its own.
            units: what is exchanged.
            agreed: more settings that must be equal on all ranks.

        Raises:
            PeerError: ranks disagree; no sockets are left behind.
        """
        comm: Communicator | None = None
        try:
            comm = self.wires.connect(group)
            reducer = Reducer(
                comm,
                units,
                run(self.algorithm.on(comm)),
                self.density,
                self.warmup,
                self.correction,
                self.xi_period,
            )
            agreed = {**agreed, "nonfinite": self.nonfinite, "unit_bytes": self.unit_bytes}
            agreed = {**agreed, "sentinel": self.sentinel, "scaler": self.scaler is not None}
            agree_on_reducer(reducer, **agreed)
            reducer.monitor.log = Log(sink_of(self.log, comm.rank))
        except BaseException:
            if comm is not None:
                comm.close()
            raise
        return reducer


def settings_of(
    algorithm: str | Algorithm,
    *,
    density: float | AdaptiveDensity,
    unit_bytes: int | None,
    compress: Compress | None,
    warmup_steps: int,
    warmup_densities: Sequence[float],
    correction: Correction | None,
    optimizer: torch.optim.Optimizer | None,
    output_layer: Collection[str] | None,
    nonfinite: Nonfinite | None,
    timeout: float,
    transport: str,
    curve_keys: Path | str | None,
    log: Any,
    xi_period: int | None,
    options: Mapping[str, Any],
    scaler: Any = None,
    sentinel: Sentinel | None = None,
) -> Settings:
    """Check the arguments of ``attach`` and fill in what the algorithm has for those left open.

    Raises:
        ConfigurationError: says what to change.
    """
    if nonfinite is None:
        nonfinite = "raise" if scaler is None else "propagate"
    check_scaler(scaler, nonfinite)
    if nonfinite not in ("raise", "skip", "propagate"):
        raise ConfigurationError(
            f"nonfinite is {nonfinite!r}; choose one of raise, skip, propagate"
        )
    _check_kinds(compress, sentinel)
    chosen, density = resolve(algorithm, **options), as_density(density)
    warmup, correction = Warmup(warmup_steps, tuple(warmup_densities)), correction or Correction()
    check_optimizer(optimizer, correction, sparse="dense" not in chosen.name and density != 1)
    check_transport(transport, curve_keys)
    return Settings(
        algorithm=chosen,
        density=density,
        unit_bytes=chosen.unit_bytes if unit_bytes is None else unit_bytes,
        compress=compress or chosen.compress,
        warmup=warmup,
        correction=correction,
        output_layer=output_layer,
        nonfinite=nonfinite,
        wires=Wires(transport, check_timeout(timeout), curve_keys),
        log=log,
        xi_period=xi_period,
        scaler=scaler,
        sentinel=sentinel,
    )


def _check_kinds(compress: object, sentinel: object) -> None:
    if sentinel is not None and not isinstance(sentinel, Sentinel):
        raise ConfigurationError(f"sentinel is {sentinel!r}; give a sparsync.Sentinel(period=100)")
    if compress is not None and not callable(compress):
        raise ConfigurationError(
            f"compress is {compress!r}; give a function of a parameter's name and tensor that returns "
            "False for what is to be exchanged dense"
        )
