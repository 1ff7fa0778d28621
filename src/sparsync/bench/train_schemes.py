"""Trainings that average models: a scheme by its name, its options, what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import nn

from sparsync.api import connect
from sparsync.averaging.base import Averager
from sparsync.averaging.schemes import SCHEMES, options_of
from sparsync.bench.connection import transport_of
from sparsync.bench.train_hooks import Exchange
from sparsync.bench.train_settings import TrainSettings
from sparsync.errors import ConfigurationError

__all__ = ["Averaged", "check_schemes"]

_OPTIONS = ("period", "group_size", "sync_period", "neighbours", "deadline")


def check_schemes(settings: TrainSettings, algorithms: Sequence[str]) -> None:
    """Refuse, before any rank starts, options that a scheme refuses or that no algorithm has."""
    schemes = [name for name in algorithms if name in SCHEMES]
    if schemes and settings.target_step is not None:
        raise ConfigurationError(
            f"--target-step looks at all ranks' loss after each step, so none could be ahead in "
            f"{schemes[0]}; leave it out"
        )
    for option in _OPTIONS:
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
        _make(settings, name)


@final
class Averaged(Exchange):
    """A model that trains alone, and a scheme that averages it with others."""

    counted = "ledger"

    def __init__(self, settings: TrainSettings, name: str, model: nn.Module) -> None:
        self.model = model
        self.comm = connect(
            settings.timeout, transport=settings.transport, curve_keys=settings.curve_keys
        )
        self.transport = transport_of(self.comm)
        self.averager = _make(settings, name, model, comm=self.comm, buffers=settings.buffers)
        self.sparse = options_of(name).get("density", 1.0) < 1
        chosen = {key: getattr(self.averager, key, None) for key in options_of(name)}
        plain = {
            key: value for key, value in chosen.items() if isinstance(value, int | float | str)
        }
        self.options = {"buffers": settings.buffers, **_options(settings, name), **plain}
        self._before = self.comm.ledger.total().sent  # the comparison of the models at the start

    def after_step(self) -> None:
        """Average, if it is time."""
        self.averager.step()

    def bytes_sent(self) -> int:
        """Return what this rank sent since the last call, also beside its steps."""
        before, self._before = self._before, self.comm.ledger.total().sent
        return self._before - before

    def finish(self) -> int:
        """Leave all replicas equal."""
        self.averager.finish()
        return self.bytes_sent()

    def close(self) -> None:
        """End what runs beside the training, and the connection."""
        self.averager.close()


def _make(
    settings: TrainSettings, name: str, model: nn.Module | None = None, **binding: Any
) -> Averager:
    return SCHEMES[name](model, **_options(settings, name), **binding)


def _options(settings: TrainSettings, name: str) -> dict[str, object]:
    """Return what was asked for of what this scheme has; for the rest it has its own defaults."""
    has = options_of(name)
    given = {option: getattr(settings, option) for option in (*_OPTIONS, "seed")}
    if has.get("density", 1.0) < 1:  # a dense exchange has none
        given["density"] = settings.density
    return {key: value for key, value in given.items() if key in has and value is not None}
