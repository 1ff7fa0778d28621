"""Local steps with a compressed outer step: BMUF, Qsparse-local-SGD, DiLoCo and SparseLoCo."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn

from sparsync.averaging.base import Averager, mean
from sparsync.collectives import Allgather
from sparsync.errors import ConfigurationError, NonFiniteGradientError, require
from sparsync.feedback.agreement import reducer_stats
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import Warmup
from sparsync.feedback.state import ParsedState, parse_state, reducer_state, restore_reducer
from sparsync.presets import Algorithm, check_density, resolve
from sparsync.selection import Blockwise
from sparsync.transports.communicator import Communicator
from sparsync.units import output_parameters, plan_units
from sparsync.wire import SparseQsgd

__all__ = ["OUTER_SETTINGS", "OuterState", "OuterStep", "sparseloco"]

_PAIR_BITS = 64  # of an index and a value
_REST = "(buffers and moments)"  # parentheses: no parameter has this name


@dataclass(frozen=True)
class OuterState:
    """Exchanges in a row that were refused because of NaN or Inf."""

    refused: int = 0


@final
class OuterStep(Averager):
    """Exchanges what ``period`` local steps did, compressed; an outer SGD applies it to shared weights.

    ::

        accumulated = decay * residual + (shared - weights)    every ``period`` steps
        delivered, total = exchange(accumulated)               select, encode, sum
        residual = accumulated - delivered
        shared = SGD(shared, gradient = total / P)             bit-identical on all ranks
        weights = shared

    With ``residual="weights"`` the residual stays in the rank's own weights, ``weights = shared -
    residual``, where the next gradients see it: mass that waits is not stale to its own rank.  With Adam
    this is what keeps up with dense training (``benchmarks/adam.md``).

    Buffers and moments that travel are averaged whole, without outer learning rate and momentum.

    When NaN or Inf is in the sum, no rank applies it: all return to their weights after the last
    exchange, residuals stay as they were, and the state of ``optimizer`` is dropped where it is broken.
    A second time in a row raises ``NonFiniteGradientError``.

    Args:
        model: its parameters are the units' names, without it there is one unit.
        algorithm: a preset's name or an ``Algorithm``; sums are divided by world_size, whatever it says.
        density: what is sent per exchange, as k / n of index-value pairs.
        period: local steps between exchanges, H.  None: 1 for sparse algorithms; for those that send
            every element, the number at which the bytes per step are those of pairs at this density.
        warmup_steps: over these first steps the period doubles from 1 to H, each for an equal part: what
            ranks do alone costs most while weights move fast.
        residual: "apart": all ranks continue from equal weights, as the papers have it; or "weights".
        outer_lr: the outer learning rate, > 0; 1 is averaging.
        momentum: of the outer optimizer, in [0, 1); None: 1 - 1 / world_size, as BMUF has it.
        nesterov: the outer momentum looks ahead, as ``torch.optim.SGD``'s.
        residual_decay: of the residual at every exchange, in [0, 1].

    Cost: one exchange of the algorithm every ``period`` steps; memory: residual and shared weights, 2 n
    elements, and n with momentum.
    State: ``memory``: the vectors ``shared`` and ``momentum``; ``OuterState``; that of the reducer.
    Differs from the paper: ``finish`` exchanges what is missing, dense and without momentum: the
    residuals and a period that it falls into.

    Example:
        >>> from sparsync import simulate
        >>> async def program(comm):
        ...     averager, shared = OuterStep(density=0.5, period=1), torch.zeros(2)
        ...     await averager.begin(comm, shared, 0)
        ...     local = shared + torch.tensor([1.0, 4.0 * comm.rank])
        ...     return (await averager.average(comm, local, 0)).tolist()
        >>> simulate(program, world_size=2).results
        [[0.5, 2.0], [0.5, 2.0]]

    References: Chen and Huo, blockwise model-update filtering (BMUF), ICASSP 2016; Basu et al.,
    Qsparse-local-SGD, NeurIPS 2019, Algorithm 1; Douillard et al., DiLoCo, 2023, Algorithm 1; Sarfi et
    al., `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025, Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        algorithm: str | Algorithm = "allgather",
        density: float = 0.01,
        period: int | None = None,
        warmup_steps: int = 0,
        residual: Literal["apart", "weights"] = "apart",
        outer_lr: float = 1.0,
        momentum: float | None = 0.0,
        nesterov: bool = False,
        residual_decay: float = 1.0,
        **binding: Any,
    ) -> None:
        counted = period is None or (type(period) is int and period >= 1)
        for name, value, fits, cure in (
            ("period", period, counted, "at least 1 step, or None"),
            ("residual", residual, residual in ("apart", "weights"), "'apart' or 'weights'"),
            ("outer_lr", outer_lr, 0 < outer_lr < math.inf, "a rate > 0"),
            ("momentum", momentum, momentum is None or 0 <= momentum < 1, "one in [0, 1), or None"),
            ("nesterov", nesterov, not nesterov or momentum != 0, "a momentum > 0, too, e.g. 0.9"),
            ("residual_decay", residual_decay, 0 <= residual_decay <= 1, "a factor in [0, 1]"),
        ):
            require(fits, f"OuterStep: {name} is {value!r}; give {cure}")
        # sums that are not divided, as SparCML's, would be an outer_lr of world_size
        self._chosen = replace(resolve(algorithm), average=True)
        self.algorithm = f"{self._chosen.name} {self._chosen.options}"  # ranks compare it
        self.density, bits = check_density(density), self._chosen.bits or 0
        # a dense exchange in 32 bits at 1 % of pairs of 64: every 50 steps
        self.period = period or max(1, math.ceil(bits / (_PAIR_BITS * density)))
        self.warmup_steps, self.residual = Warmup(warmup_steps).steps, residual
        self._warm = _warm_exchanges(self.warmup_steps, self.period)
        self.outer_lr, self.momentum, self.nesterov = outer_lr, momentum, nesterov
        self.residual_decay, self.state = residual_decay, OuterState()
        self._reducer: Reducer | None = None
        self._saved: Mapping[str, Any] | None = None
        super().__init__(model, nonfinite="spread", **binding)  # the exchange finds it on all ranks

    async def begin(self, comm: Communicator, vector: Tensor, step: int) -> None:
        """Plan the units; take over what was loaded, or share what all ranks begin with."""
        saved, self._saved = self._saved, None
        if saved is None:
            self.memory = {"shared": vector}
        require(
            self.memory["shared"].shape == vector.shape,
            f"the saved state is of {self.memory['shared'].numel()} elements, this model has "
            f"{vector.numel()}; load it into the model that it was saved with",
        )
        self._parameters = {"model": vector} if self._binding is None else self._binding.trained
        self._spans, self._end, named = dict[str, slice](), 0, list[tuple[str, Tensor]]()
        for name, parameter in self._parameters.items():
            start, self._end = self._end, self._end + parameter.numel()
            self._spans[name] = slice(start, self._end)
            named.append((name, vector[start : self._end].view(parameter.shape)))
        if self._end < vector.numel():
            self._spans[_REST] = slice(self._end, None)
            named.append((_REST, vector[self._end :]))
        compress = self._chosen.compress
        planned = plan_units(
            named,
            self._chosen.unit_bytes,
            lambda name, tensor: name != _REST and (compress is None or compress(name, tensor)),
            output_parameters(self._binding.model) if self._chosen.output and self._binding else (),
        )
        self._reducer = Reducer(comm, planned, await self._chosen.on(comm), self.density)
        if saved is not None:
            await restore_reducer(self._reducer, saved)

    def is_due(self, step: int) -> bool:
        """Tell whether the period closes with local step ``step``."""
        if step < self.warmup_steps:
            return step in self._warm
        return (step - max(self._warm, default=-1)) % self.period == 0

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the new shared weights when the period closes, the model itself otherwise."""
        if not self.is_due(step):
            return vector
        reducer, moved = self.reducer, self._moved(vector)
        deltas = [torch.cat([moved[self._spans[s.name]] for s in u.slots]) for u in reducer.units]
        for delta, residual in zip(deltas, reducer.residuals, strict=True):
            if residual.value is not None and self.residual_decay < 1:
                # here and not in the residual, which a refused exchange must leave as it is
                delta.sub_(residual.value, alpha=1 - self.residual_decay)
        try:
            await reducer.reduce(deltas)  # in place: they become averages
        except NonFiniteGradientError as error:
            reducer.skip()
            self.state = OuterState(self.state.refused + 1)
            self._heal()
            if self.state.refused > 1:
                raise NonFiniteGradientError(
                    f"step {step}: a second exchange in a row holds NaN or Inf; load a checkpoint, "
                    "lower the learning rate, or give optimizer=, whose broken moments are dropped"
                ) from error
            return self._base()
        except BaseException:
            reducer.refuse()
            raise
        self.state = OuterState()
        momentum = 1 - 1 / comm.world_size if self.momentum is None else self.momentum
        self._apply(self._joined(deltas), momentum)
        return self._base()

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the shared weights plus all that was not delivered; without that, if it is NaN."""
        if self.residual == "weights":
            missing = self.memory["shared"] - vector
        else:
            missing = self._moved(vector) + self._withheld()
        average = await mean(comm, missing)
        if not bool(torch.isfinite(average).all()):  # equal on all ranks: they decide alike
            return self.memory["shared"]
        for residual in self.reducer.residuals:
            residual.load(None)
        self._apply(average, momentum=0.0)
        return self.memory["shared"]

    # ---- applied to a model -----------------------------------------------------------------------

    @property
    def reducer(self) -> Reducer:
        """The exchange's state; of a model it begins, together with all ranks, when it is asked for."""
        if self._reducer is None and self._binding is not None:
            self._bound()
        if self._reducer is None:
            raise ConfigurationError("OuterStep: await begin() before average() and conclude()")
        return self._reducer

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Show the weights that all ranks share, to evaluate or save them; the own ones come back."""
        binding = self._bound()
        own = binding.read()
        binding.write_(self.memory["shared"])
        try:
            yield
        finally:
            binding.write_(own)

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: exchanges (as steps), bytes per exchange and phase, residual norms."""
        return {**reducer_stats(self.reducer), "period": self.period, "local_steps": self.steps}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to be saved per rank with its own model and optimizer."""
        saved = None if self._reducer is None else reducer_state(self._reducer)
        return {**super().state_dict(), "reducer": saved}

    def validate(self, state: Mapping[str, Any]) -> ParsedState:
        """Check on this rank alone that a saved state fits; nothing is changed."""
        self.check_place(state)
        return parse_state(self.reducer, state["reducer"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where this rank's ``state_dict`` was taken, bit for bit."""
        super().load_state_dict(state)
        self._saved = state["reducer"]

    # ---- the exchange -----------------------------------------------------------------------------

    def _base(self) -> Tensor:
        """Return what this rank's weights are after an exchange."""
        shared = self.memory["shared"]
        return shared if self.residual == "apart" else shared - self._withheld()

    def _withheld(self) -> Tensor:
        """Return the residuals as a vector."""
        kept = self.reducer.residuals
        return self._joined(
            [torch.zeros_like(r.accumulated) if r.value is None else r.value for r in kept]
        )

    def _joined(self, flats: Sequence[Tensor]) -> Tensor:
        """Return the vector whose parts the units hold."""
        vector = torch.empty_like(self.memory["shared"])
        for unit, flat in zip(self.reducer.units, flats, strict=True):
            for slot in unit.slots:
                vector[self._spans[slot.name]] = flat[slot.start : slot.start + slot.size]
        return vector

    def _moved(self, vector: Tensor) -> Tensor:
        """Return what the weights were after the last exchange, less what they are.

        A model of 16 bits began with those weights rounded.  Rounding is no move: fed back, it would be
        added to the residual at every exchange.
        """
        began = self._base().clone()
        for name, parameter in self._parameters.items():
            began[self._spans[name]] = began[self._spans[name]].to(parameter.dtype)
        return began.sub_(vector)

    def _apply(self, average: Tensor, momentum: float) -> None:
        """Take an outer step."""
        update = average.clone()
        gradient = update[: self._end]
        if momentum:
            velocity = gradient.clone()
            if "momentum" in self.memory:
                velocity.add_(self.memory["momentum"], alpha=momentum)
            self.memory["momentum"] = velocity
            gradient.copy_(gradient.add(velocity, alpha=momentum) if self.nesterov else velocity)
        gradient.mul_(self.outer_lr)
        self.memory["shared"] = self.memory["shared"] - update

    def _heal(self) -> None:
        """Drop the optimizer's state of parameters where it is not finite."""
        if self._binding is None or self._binding.optimizer is None:
            return
        for state in self._binding.optimizer.state.values():
            tensors = [value for value in state.values() if isinstance(value, Tensor)]
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                state.clear()

    def _place(self) -> dict[str, Any]:
        """Add what a saved residual depends on."""
        place = {"algorithm": self.algorithm, "density": self.density, "period": self.period}
        if self.residual == "weights":
            place["residual"] = self.residual
        return super()._place() | place


def _warm_exchanges(steps: int, period: int) -> tuple[int, ...]:
    """Return the steps of the warm-up that end with an exchange."""
    doublings, last, ends = math.ceil(math.log2(period)), -1, []
    for step in range(steps):
        part = step * (doublings + 1) // steps
        if step - last >= min(2**part, period):
            last = step
            ends.append(step)
    return tuple(ends)


# ---- published settings ---------------------------------------------------------------------------

_CHUNK: Final = 4096
_ENTRIES: Final = 64  # of a chunk; SparseLoCo: chunks of 64 x 64; 1.6 %, of its 1 to 3 %


def sparseloco() -> Algorithm:
    """SparseLoCo's exchange: chunk-wise top-k, quantised, collected by all ranks.

    Its quantiser takes 2 bits and is not random.  ``SparseQsgd`` at 2 bits is not contractive without
    shrinking values to 2 / 9, so this takes 4; with Elias-Fano indices an entry then has 12.5 bits,
    where 2 and a position in its chunk are 14.
    """
    codec = SparseQsgd(4, block=_ENTRIES, scale="max")
    return Algorithm(
        "sparseloco",
        lambda: Blockwise(block=_CHUNK),
        lambda: Allgather(codec),
        options=(("bits", 4),),
    )


OUTER_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # its block learning rate is 1; nesterov=True: NBM rather than CBM; the period is a choice
        "bmuf": {"algorithm": "dense", "density": 1.0, "period": 8, "momentum": None},
        # Algorithm 1 with Top_k; its experiments have H = 1, 4, 8; the density is a choice
        "qsparse-local": {"algorithm": "allgather", "density": 0.01, "period": 8},
        # section 3: H = 500, Nesterov with 0.7 and 0.9
        "diloco": {
            "algorithm": "dense",
            "density": 1.0,
            "period": 500,
            "outer_lr": 0.7,
            "momentum": 0.9,
            "nesterov": True,
        },
        # Algorithm 1; its experiments have H = 15 to 250; 0.95 is its beta, for an outer momentum
        "sparseloco": {
            "algorithm": sparseloco(),
            "density": _ENTRIES / _CHUNK,
            "period": 30,
            "residual_decay": 0.95,
        },
    }
)
"""Settings as published: ``OuterStep(model, **OUTER_SETTINGS["diloco"])``."""
