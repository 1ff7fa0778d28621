"""Local updates: every rank trains its own weights, and exchanges what it did to them.

The residual is not put aside here: it stays in the rank's own weights, where the next gradients see
it.  Mass that waits is then not stale to its own rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from sparsync.api import connect
from sparsync.errors import ConfigurationError, NonFiniteGradientError
from sparsync.feedback.agreement import agree_on_reducer, reducer_stats, weights_digest
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import Warmup
from sparsync.feedback.state import ParsedState, apply_state, parse_state, reducer_state
from sparsync.presets import Algorithm, check_density, resolve
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.units import Unit, check_same_parameters, output_parameters, plan_units

__all__ = ["LocalUpdates"]

_COO_BITS = 64  # of an entry


@final
class LocalUpdates:
    """Exchanges the updates of any optimizer, sparsely or quantised; call ``step()`` after its own.

    ::

        optimizer.step()                                on the rank's own weights, local moments
        accumulated = weights - shared                  every ``period`` steps
        delivered, total = exchange(accumulated)
        shared = shared + total / P                     bit-identical on all ranks
        weights = shared + (accumulated - delivered)    the residual stays in the weights

    With Adam this is what keeps up with dense training (``benchmarks/adam.md``): exchanging sparse
    gradients breaks its second moment, and exchanging updates of shared weights makes them stale.

    Args:
        model: a plain module (not DDP), equal on all ranks.  Its parameters are this rank's own; those
            that all ranks share are there within ``with shared():``, and after ``finish()``.
        algorithm: a preset's name or an ``Algorithm``: "signs" sends one bit per element and a scale per
            block; any sparse one sends the largest entries.
        density: what is sent per step, as k / n of index-value pairs.
        period: steps between exchanges, H.  Default: for algorithms that send every element, the number
            at which the bytes are those of pairs at this density; 1 for sparse ones.
        warmup_steps: over these first steps the period doubles from 1 to H, each for an equal part: what
            ranks do alone costs most while weights move fast (as DGC's ramp of densities).
        comm: default ``sparsync.connect()``.
        unit_bytes: what is selected together, as in ``sparsync.attach``.
        compress: which parameters are exchanged compressed, as in ``sparsync.attach``.
        optimizer: whose moments of a parameter are dropped when they hold NaN or Inf; without it they
            stay broken, and the second refused exchange in a row raises.
        nonfinite: when NaN or Inf is in the sum, all ranks return to the weights of their last exchange;
            "raise" an error after that, or "skip" on.
        options: of the preset.

    Raises:
        ConfigurationError: a DDP model, a bad density or period, an unknown algorithm or option.
        NonFiniteGradientError: from ``step``.
        PeerError: from the first exchange: the ranks began with different weights.

    Cost: memory 2 n elements (shared weights, residual); every ``period`` steps one exchange.
    State: shared weights, residuals, step: one per rank.  With it, save this rank's own model and
    optimizer.
    Differs from the paper: Qsparse-local-SGD keeps the residual apart from the weights.

    Example:
        >>> model = nn.Linear(2, 1, bias=False); _ = nn.init.zeros_(model.weight)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> local = LocalUpdates(model, "allgather", density=0.5)
        >>> model(torch.tensor([[1.0, 4.0]])).sum().backward(); optimizer.step(); local.step()
        >>> with local.shared(): print(model.weight.tolist())
        [[0.0, -4.0]]
        >>> model.weight.tolist()
        [[-1.0, -4.0]]

    References: Basu et al., Qsparse-local-SGD, NeurIPS 2019; Douillard et al., DiLoCo, 2023.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: str | Algorithm = "signs",
        *,
        density: float = 0.01,
        period: int | None = None,
        warmup_steps: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        comm: Communicator | None = None,
        unit_bytes: int | None = None,
        compress: Callable[[str, Tensor], bool] | None = None,
        nonfinite: Literal["raise", "skip"] = "raise",
        **options: Any,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigurationError(
                "LocalUpdates needs local gradients but the model is wrapped in DDP, which averages "
                "them; give it the plain module"
            )
        if nonfinite not in ("raise", "skip"):
            raise ConfigurationError(f"nonfinite is {nonfinite!r}; choose raise or skip")
        chosen, density = resolve(algorithm, **options), check_density(density)
        self.period = _period(period, chosen, density)
        self.warmup_steps = Warmup(warmup_steps).steps
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.model, self.nonfinite, self.optimizer = model, nonfinite, optimizer
        self._refused = 0  # exchanges in a row
        self.steps = self.since = 0  # optimizer steps in all, and since the last exchange
        self._parameters = dict(named)
        unit_bytes = chosen.unit_bytes if unit_bytes is None else unit_bytes
        output = output_parameters(model) if chosen.output else ()
        units = plan_units(named, unit_bytes, compress or chosen.compress, output)
        comm = comm or connect()
        self.reducer = Reducer(comm, units, run(chosen.on(comm)), density)
        agree_on_reducer(
            self.reducer,
            unit_bytes=unit_bytes,
            period=self.period,
            warmup_steps=warmup_steps,
        )
        self._shared = [self._flat(unit) for unit in units]

    def step(self) -> None:
        """Count an optimizer step; exchange when the period closes.  Blocks until that is done."""
        check_same_parameters(self.model, self._parameters.values())
        due = self.period_at(self.steps)
        self.steps += 1
        self.since += 1
        if self.since >= due:
            self.since = 0
            self._exchange()

    def period_at(self, step: int) -> int:
        """Return how many steps lie between exchanges at a 0-based step."""
        if step >= self.warmup_steps:
            return self.period
        doublings = math.ceil(math.log2(self.period))
        part = step * (doublings + 1) // self.warmup_steps
        return int(min(2**part, self.period))

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Show the weights that all ranks share, to evaluate or save them; the own ones come back."""
        own = [self._flat(unit) for unit in self.reducer.units]
        self._write_(self._shared)
        try:
            yield
        finally:
            self._write_(own)

    @torch.no_grad()
    def finish(self, *, flush: bool = True) -> None:
        """Leave weights that are equal on all ranks in the model: the end of training.

        Args:
            flush: exchange all that has not been delivered, once, dense; False: it is dropped.

        Raises:
            NonFiniteGradientError: what was to be flushed is NaN or Inf on some rank; all ranks have
                dropped it, and have equal weights.
        """
        broken = False
        for unit, whole, kept in zip(
            self.reducer.units, self._shared, self.reducer.residuals, strict=True
        ):
            if flush:
                comm, missing = self.reducer.comm, self._flat(unit).sub_(whole)
                total = run(comm.allreduce(missing, "flush"))
                finite = bool(torch.isfinite(total).all())  # totals are equal: ranks decide alike
                broken |= not finite
                if finite:
                    whole.add_(total, alpha=1 / comm.world_size)
            kept.load(None)
        self.since = 0
        self._write_(self._shared)
        if broken:
            raise NonFiniteGradientError(
                "finish: weights are NaN or Inf on some rank; what they had not delivered is dropped"
            )

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: exchanges (as steps), bytes per exchange and phase, residual norms."""
        return {**reducer_stats(self.reducer), "period": self.period, "local_steps": self.steps}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to be saved per rank, with its own model and optimizer."""
        shared = {
            slot.name: whole[slot.start : slot.start + slot.size].clone()
            for unit, whole in zip(self.reducer.units, self._shared, strict=True)
            for slot in unit.slots
        }
        return {
            "steps": self.steps,
            "since": self.since,
            "period": self.period,
            "shared": shared,
            "sparsync": reducer_state(self.reducer),
        }

    def validate(self, state: Mapping[str, Any]) -> ParsedState:
        """Check on this rank alone that a saved state fits; nothing is changed.

        Raises:
            ConfigurationError: the state is of another set-up.
        """
        if not {"steps", "since", "period", "shared", "sparsync"} <= set(state):
            raise ConfigurationError(
                f"the saved state has {sorted(state)}; load what LocalUpdates.state_dict() returned"
            )
        if state["period"] != self.period:
            raise ConfigurationError(
                f"the saved state has period {state['period']}, this run {self.period}; "
                "build it with the density and the period that it was saved with"
            )
        names = [slot.name for unit in self.reducer.units for slot in unit.slots]
        if sorted(state["shared"]) != sorted(names):
            raise ConfigurationError(
                "the saved weights are of other parameters; load them into the model they were saved from"
            )
        return parse_state(self.reducer, state["sparsync"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where this rank's ``state_dict`` was taken, bit for bit; all ranks call it."""
        run(apply_state(self.reducer, self.validate(state)))
        self.steps, self.since = int(state["steps"]), int(state["since"])
        for unit, whole in zip(self.reducer.units, self._shared, strict=True):
            whole.copy_(torch.cat([state["shared"][slot.name] for slot in unit.slots]))

    @torch.no_grad()
    def _exchange(self) -> None:
        if not self.reducer.step + self.reducer.skipped:  # DDP would have sent rank 0's
            digest = weights_digest(self._shared)
            run(agree(self.reducer.comm, {"the initial weights (a digest)": digest}))
        updates = [
            self._flat(unit).sub_(base)
            for unit, base in zip(self.reducer.units, self._bases(), strict=True)
        ]
        try:
            run(self.reducer.reduce(updates))  # in place: they become averages
        except NonFiniteGradientError:
            self.reducer.skip()
            self._write_(self._bases())
            self._heal()
            self._refused += 1
            if self.nonfinite == "raise" or (self.optimizer is None and self._refused > 1):
                raise
            return
        except BaseException:
            self.reducer.refuse()
            raise
        self._refused = 0
        for whole, average in zip(self._shared, updates, strict=True):
            whole.add_(average)
        self._write_(self._bases())

    def _heal(self) -> None:
        """Drop the optimizer's state of parameters where it is not finite."""
        states = self.optimizer.state if self.optimizer is not None else {}
        for state in states.values():
            tensors = [v for v in state.values() if isinstance(v, Tensor)]
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                state.clear()

    def _bases(self) -> list[Tensor]:
        """Return what the weights were after the last exchange: shared + residual."""
        pairs = zip(self._shared, self.reducer.residuals, strict=True)
        return [whole if r.value is None else whole + r.value for whole, r in pairs]

    def _flat(self, unit: Unit) -> Tensor:
        """Return a copy of a unit's weights, float32 where they have 16 bits."""
        wide = torch.promote_types(unit.dtype, torch.float32)
        pieces = [self._parameters[slot.name].detach().reshape(-1) for slot in unit.slots]
        return torch.cat(pieces).to(wide, copy=len(pieces) == 1)

    @torch.no_grad()
    def _write_(self, weights: list[Tensor]) -> None:
        for unit, whole in zip(self.reducer.units, weights, strict=True):
            for slot in unit.slots:
                parameter = self._parameters[slot.name]
                parameter.copy_(whole[slot.start : slot.start + slot.size].view(parameter.shape))


def _period(period: int | None, algorithm: Algorithm, density: float) -> int:
    if period is None:
        bits = algorithm.bits
        return 1 if bits is None else max(1, math.ceil(bits / (_COO_BITS * density)))
    if not isinstance(period, int) or period < 1:
        raise ConfigurationError(
            f"period is {period!r}; give a whole number of steps >= 1, or None"
        )
    return period
