"""The settings of an outer step; ``family`` lists those of the default and of published methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, final

from torch import Tensor

from sparsync.algorithm import LARGE, Algorithm, check_density, default_bits
from sparsync.collectives import Changing
from sparsync.errors import check_number_fields, require
from sparsync.feedback.schedule import Warmup
from sparsync.names import naming_options
from sparsync.presets import resolve
from sparsync.updates.fragments import Layout
from sparsync.updates.periods import AdaptivePeriod, warm_exchanges

__all__ = ["OuterStep"]

_PAIR_BITS = 64  # bits of an index and a value together
_PERIOD = 2  # the default's local steps between exchanges
_MOST_WARM = 10**6  # limit on warm-up steps, because ``warm`` lists those that exchange


def _in_bits(bits: int) -> Algorithm:
    return resolve("quantised", bits=bits, block=512)


@final
@naming_options
@dataclass(frozen=True, kw_only=True, eq=False)
class OuterStep:
    """The settings of an outer step, in which ranks exchange the updates of ``period`` local steps.

    Updates are compressed and exchanged, and an outer SGD applies their average to the shared weights::

        accumulated = decay * residual + (shared - weights)    every ``period`` steps
        delivered, total = exchange(accumulated)               select, encode, sum
        residual = accumulated - delivered
        shared = SGD(shared, gradient = total / P)             bit-identical on all ranks
        weights = shared                                       ``residual="apart"``
        weights = shared - residual                            ``residual="weights"``, attach's default

    An update, ``shared - weights``, has the sign of a gradient: it is positive where weights have
    decreased.  With ``residual="weights"``, the residual stays in the rank's own weights, where the next
    gradients see it, so undelivered mass is not stale on its own rank.  With Adam this setting keeps up
    with dense training (``benchmarks/adam.md``).

    Buffers in the vector, and moments with ``OuterAverager(moments="average")``, are averaged in full,
    without outer learning rate and momentum.

    If the sum contains NaN or Inf, no rank applies it.  All ranks return to the weights that they had
    after the last exchange, residuals keep their values, and optimizer states that contain NaN or Inf are
    dropped.  A second such exchange in a row raises ``NonFiniteGradientError``.

    With ``fragments``, a part of the model is exchanged every ``period / fragments`` steps.  With
    ``delay``, local steps continue during an exchange and are added to its result.

    Args:
        algorithm: a preset's name or an ``Algorithm``.  Its sums are divided by world_size, even
            if it has ``average=False``.  None means "quantised" in blocks of 512, with a number of bits
            that suits the size of the model (``default_bits``).
        density: fraction k / n of the entries that are sent in an exchange, as index-value pairs.
        period: local steps between exchanges, H.  None means 1 for sparse algorithms.  For algorithms
            that send every element, None means the period at which a step costs as many bytes as sending
            index-value pairs at this density on every step.  With ``algorithm=None``, it means 2, or 1
            for models below a million elements.  An ``AdaptivePeriod`` follows the measured drift.
        fragments: number of parts into which the model is divided.  They are about equally large,
            consist of whole parameters, and take turns within a period.
        delay: local steps from the start of an exchange until it is applied; less than the period.
        warmup_steps: length of the warm-up, which is divided into equal parts with the periods 1, 2, 4,
            ..., H.  Local steps without an exchange do most harm in the beginning, while weights change
            fast.
        residual: "apart" (all ranks continue from equal weights, as in the papers) or "weights" (see
            above).
        outer_lr: the outer learning rate, > 0; 1 means averaging.
        momentum: the outer momentum, in [0, 1); None means 1 - 1 / world_size, as in BMUF.
        nesterov: use Nesterov's outer momentum, as in ``torch.optim.SGD``.
        residual_decay: factor on the residual at every exchange, in [0, 1].
        noise_correction: lengthen the steps of Adam, as if they used the second moment of averaged
            gradients (``gradient_noise.correct``).  Also lengthen the steps of optimizers whose step
            length does not depend on the size of gradients, so that the average of all ranks' steps is as
            long as one rank's step (``step_length.lengthen``).  Only ``attach`` can do this, because it
            knows the optimizer.
        dct: exchange the updates, and keep the residual, as cosine coefficients of runs of this many
            elements (``rotate_``); None for no transform.  Ranks must compute bit-identical transforms.
        sign: step in the direction of the signs of the average, by ``outer_lr`` times the optimizer's
            learning rate, which all ranks and groups must share.  Without an optimizer, the rate is 1.

    Cost: one exchange of the algorithm every ``period`` steps.  Memory: 2 n elements for the residual and
    the shared weights, and n more with momentum.  An exchange by ``quantised`` works in runs of 1 MB (64
    MB on an accelerator).  It also keeps its messages in memory: 3 n elements at the width that is sent.
    Other algorithms and ``dct`` take n more elements, and ``delay`` takes three times the largest
    fragment.
    State: ``memory`` with the vectors ``shared`` and ``momentum``; ``OuterState``; the reducer's state.
    Differs from the paper: ``finish`` delivers all residuals and the updates of an unfinished period,
    dense and without momentum.  With ``sign``, this is one more step in their direction.

    Example:
        >>> OuterStep(algorithm="quantised", density=0.1).described()["period"]
        1

    References: Chen and Huo, blockwise model-update filtering (BMUF), ICASSP 2016; Basu et al.,
    Qsparse-local-SGD, NeurIPS 2019, Algorithm 1; Douillard et al., DiLoCo, 2023, Algorithm 1; Peng et
    al., `DeMo <https://arxiv.org/abs/2411.19870>`_, 2024; Sarfi et al.,
    `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025, Algorithm 1.
    """

    algorithm: str | Algorithm | None = "allgather"
    density: float = 0.01
    period: int | AdaptivePeriod | None = None
    fragments: int = 1
    delay: int = 0
    warmup_steps: int = 0
    residual: Literal["apart", "weights"] = "apart"
    outer_lr: float = 1.0
    momentum: float | None = 0.0
    nesterov: bool = False
    residual_decay: float = 1.0
    noise_correction: bool = False
    dct: int | None = None
    sign: bool = False

    def __post_init__(self) -> None:
        # each rank checks its own arguments before anything is sent
        check_number_fields(self)
        period, given = self.period, vars(self)
        first = period.least if isinstance(period, AdaptivePeriod) else period
        counted = first is None or (type(first) is int and first >= 1)
        momentum, dct = self.momentum, self.dct
        for name, fits, cure in (
            ("period", counted, "at least 1 step, an AdaptivePeriod, or None"),
            ("fragments", type(self.fragments) is int and self.fragments >= 1, "at least 1"),
            ("residual", self.residual in ("apart", "weights"), "'apart' or 'weights'"),
            ("outer_lr", 0 < self.outer_lr < math.inf, "a rate > 0"),
            ("momentum", momentum is None or 0 <= momentum < 1, "one in [0, 1), or None"),
            ("nesterov", not self.nesterov or momentum != 0, "a momentum > 0 as well, e.g. 0.9"),
            ("residual_decay", 0 <= self.residual_decay <= 1, "a factor in [0, 1]"),
            ("noise_correction", type(self.noise_correction) is bool, "True or False"),
            ("dct", dct is None or (type(dct) is int and dct > 1), "elements, >= 2, or None"),
            ("sign", type(self.sign) is bool, "True or False"),
        ):
            require(fits, f"OuterStep: {name} is {given[name]!r}; give {cure}")
        object.__setattr__(self, "density", check_density(self.density))  # converts an int to float
        steps = Warmup(self.warmup_steps).steps
        few = steps <= _MOST_WARM
        require(few, f"OuterStep: warmup_steps is {steps}; give at most {_MOST_WARM}")
        _ = self.chosen  # refuses an unknown algorithm
        require(
            self.rule is None or (self.fragments == 1 and not self.delay),
            f"OuterStep: fragments {self.fragments} and delay {self.delay!r} need a fixed period; "
            "give period= a number of steps, or omit fragments= and delay=",
        )
        require(
            type(self.delay) is int and 0 <= self.delay < self.first_period,
            f"OuterStep: delay is {self.delay!r}; give steps from 0 to {self.first_period - 1}: below "
            "the period",
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return only the settings, because cached values may hold functions that cannot be pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def chosen(self) -> Algorithm:
        """The algorithm of the exchange, with the options that an outer step needs."""
        algorithm = self.algorithm
        if algorithm is None:
            algorithm = _in_bits(default_bits(LARGE))  # ``for_size`` may replace it
        # average=True, because undivided sums, as in SparCML, would act as an outer_lr of world_size
        chosen = replace(resolve(algorithm), average=True, make_dense=Changing)
        # entries of different fragments are selected at different times, so units cannot share one k
        return chosen if self.fragments == 1 else replace(chosen, shared=False)

    @property
    def rule(self) -> AdaptivePeriod | None:
        """The rule that adapts the period, or None if it is fixed."""
        return self.period if isinstance(self.period, AdaptivePeriod) else None

    @cached_property
    def first_period(self) -> int:
        """The initial number of local steps between exchanges."""
        if isinstance(self.period, AdaptivePeriod):
            return self.period.least
        if self.period is not None:
            return self.period
        if self.algorithm is None:
            return _PERIOD  # ``for_size`` may replace it
        # With H = bits / (64 density), a step costs as many bytes as sending pairs at this density on
        # every step: at 1 %, 32 bits per element are exchanged every 50 steps. ``bits`` is 0 for
        # algorithms that select entries; they exchange on every step.
        return max(1, math.ceil((self.chosen.bits or 0) / (_PAIR_BITS * self.density)))

    @cached_property
    def warm(self) -> tuple[int, ...]:
        """The local steps of the warm-up that end with an exchange."""
        return warm_exchanges(self.warmup_steps, self.first_period)

    def for_size(self, elements: int) -> OuterStep:
        """If ``algorithm`` is None, choose it by the model's size; also choose the period if it is None.

        Example:
            >>> chosen = OuterStep(algorithm=None).for_size(200_000)
            >>> chosen.chosen.options, chosen.first_period
            ((('bits', 4), ('block', 512)), 1)
        """
        if self.algorithm is not None:
            return self
        period = self.period
        if period is None:
            # a delay needs local steps between exchanges; so do fragments, because they take turns
            every_step = elements < LARGE and self.fragments == 1 and not self.delay
            period = 1 if every_step else _PERIOD
        return replace(self, algorithm=_in_bits(default_bits(elements)), period=period)

    def adapted(
        self,
        compress: Callable[[str, Tensor], bool] | None = None,
        unit_bytes: int | None = None,
        warmup_steps: int = 0,
    ) -> OuterStep:
        """Return these settings, updated with settings from other arguments of ``attach``."""
        algorithm = replace(
            self.chosen,
            compress=compress or self.chosen.compress,
            unit_bytes=unit_bytes or self.chosen.unit_bytes,
        )
        steps = Warmup(warmup_steps).steps or self.warmup_steps
        return replace(
            self, algorithm=algorithm, period=self.rule or self.first_period, warmup_steps=steps
        )

    def plan(
        self,
        vector: Tensor,
        parameters: Mapping[str, Tensor],
        output: Collection[str] = (),
        kinds: Mapping[str, str] | None = None,
        rest: Mapping[str, int] | None = None,
    ) -> Layout:
        """Split a vector into fragments, and the fragments into units; see ``Layout``.

        The vector consists of these parameters and, after them, the ``rest``: further parts, given by
        name and size.
        """
        layout, chosen = Layout(parameters, rest or {}, self.fragments), self.chosen

        def compress(name: str, tensor: Tensor) -> bool:
            if name not in parameters:
                return False
            return chosen.compress is None or chosen.compress(name, tensor)

        layout.plan(vector, chosen.unit_bytes, compress, output, kinds or {})
        return layout

    def described(self) -> dict[str, Any]:
        """Return the settings that differ between published methods, as plain values."""
        names = ("fragments", "delay", "warmup_steps", "residual", "outer_lr", "momentum")
        more = ("nesterov", "residual_decay", "noise_correction", "dct", "sign")
        return {
            "period": self.first_period,
            **{name: getattr(self, name) for name in (*names, *more)},
            "period_rule": str(self.rule or "fixed"),
        }

    def place(self, period: int) -> dict[str, Any]:
        """Return the settings on which a saved residual depends, with the current period."""
        return {
            "scheme": "OuterStep",
            "algorithm": f"{self.chosen.name} {self.chosen.options}",
            "density": self.density,
            "period": period if self.rule is None else str(self.rule),
            "residual": self.residual,
            "dct": self.dct,
            "fragments": self.fragments,
            "delay": self.delay,
        }
