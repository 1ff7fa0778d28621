"""Ok-Topk's schemes and models; effective costs of its machine, fitted to six statements at P = 32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from sparsync.errors import ConfigurationError
from sparsync.planning.cost import Cost
from sparsync.planning.costs import ENTRY_BYTES
from sparsync.planning.forms import COLLECTIVES, Job
from sparsync.presets import (
    Algorithm,
    allgather,
    budgeted,
    dense,
    gaussiank,
    gtopk,
    halving,
    oktopk,
    topkdsa,
)

__all__ = [
    "ARIES",
    "BERT",
    "DENSE_OVLP",
    "FITTED_RANKS",
    "GAUSSIAN_K",
    "GTOPK",
    "LSTM",
    "OKTOPK",
    "OURS",
    "SCHEMES",
    "VGG",
    "Effective",
    "Model",
    "Scheme",
    "Statement",
    "fit",
    "statements",
]

FITTED_RANKS = 32
_ALPHA = 50e-6  # s per message (ours: two copies between GPU and host, and a call from Python)
_THRESHOLD = 12 * 4 / 550e9  # s per element (ours: 12 passes at 3/4 of a P100's 732 GB/s)
_BUCKETS = 8  # of DenseOvlp (ours: the paper does not say)
_LEFT = 1 / 3 + 2 / 3 / _BUCKETS  # of the computation before DenseOvlp's first message
_WINDOW = 4  # messages of Ok-Topk's split in flight (published code)
_FOUND = 0.75  # of k: Gaussian-k's threshold is scaled until more are selected (section 5.4)
_HOURS, _STEPS = 3600.0, 400_000  # of Figure 13


@dataclass(frozen=True)
class Model:
    """A row of Table 2, with what section 5 says about its training.

    Attributes:
        name: of the model.
        size: parameters n.
        density: k / n (captions of Figures 8, 10, 12).
        threshold_period: tau' in steps (section 5.2).
        shared: part of the entries that all ranks select (ours: from the fill-in of section 5.2).
        ranks: of the figure.
    """

    name: str
    size: int
    density: float
    threshold_period: int
    shared: float
    ranks: tuple[int, ...]

    @property
    def k(self) -> int:
        """Entries that a rank selects."""
        return round(self.size * self.density)


VGG = Model("VGG-16", 14_728_266, 0.02, 32, 0.12, (16, 32))
LSTM = Model("LSTM", 27_569_568, 0.02, 32, 0.36, (32, 64))
BERT = Model("BERT", 133_547_324, 0.01, 128, 0.25, (32, 64, 128, 256))
_MODELS = (VGG, LSTM, BERT)


@dataclass(frozen=True)
class Scheme:
    """A bar of the figures.

    Attributes:
        name: the paper's.
        form: its row of ``COLLECTIVES``.
        make: the algorithm, from tau'.
        selects: nothing; by a threshold, sorting every tau' steps; by sorting on every step.
        overlap: in buckets, behind the backward pass.
        found: of k, what it selects.
    """

    name: str
    form: str
    make: Callable[[int], Algorithm]
    selects: Literal["nothing", "threshold", "reused", "sort"]
    overlap: bool = False
    found: float = 1.0

    def cost(self, model: Model, ranks: int) -> Cost:
        """Return messages and bytes of the closed form, mean of tau' steps."""
        job = Job(model.size, round(self.found * model.k), ranks)
        if self.name != OKTOPK.name:
            return COLLECTIVES[self.form].work(job).cost
        # two phases of k entries, P - 1 messages 4 at a time and two allgathers; on exact steps all sums
        messages = math.ceil((ranks - 1) / _WINDOW) + 2 * math.ceil(math.log2(ranks))
        entries = 2 * job.k + job.summed / model.threshold_period
        return Cost(messages, ENTRY_BYTES * entries * job.share)


def _as_published(period: int) -> Algorithm:
    """Ok-Topk's phases; exactly k entries, as its thresholds find (deviation on BERT: 1.4 %)."""
    return oktopk(
        threshold_period=period,
        boundaries="average",
        global_threshold="allgather",
        repartition_trigger=None,
    )


_DENSE = Scheme("Dense", "dense", lambda period: dense(), "nothing")
DENSE_OVLP = replace(_DENSE, name="DenseOvlp", overlap=True)
GTOPK = Scheme("gTopk", "gtopk", lambda period: gtopk(), "sort")
GAUSSIAN_K = Scheme(
    "Gaussiank", "allgather", lambda period: gaussiank(cap=_FOUND), "threshold", found=_FOUND
)
OKTOPK = Scheme("Ok-Topk", "oktopk", _as_published, "reused")
OURS = (
    Scheme("budgeted", "budgeted", lambda period: budgeted(), "reused"),
    Scheme("halving", "halving", lambda period: halving(), "reused"),
)
SCHEMES = (
    _DENSE,
    DENSE_OVLP,
    Scheme("TopkA", "allgather", lambda period: allgather(), "sort"),
    Scheme("TopkDSA", "topkdsa", lambda period: topkdsa(), "sort"),
    GTOPK,
    GAUSSIAN_K,
    OKTOPK,
    *OURS,
)


@dataclass(frozen=True)
class Effective:
    """Seconds that everything takes, host staging, packing and summing included.

    Attributes:
        alpha: per message.
        beta: per byte of sparse messages.
        beta_dense: per byte of dense ones: copies of all n elements to the host and back, and sums.
        threshold: per element, to select by a threshold.
        sort: per element, to select by PyTorch's ``topk``.
        computation: forward and backward pass with input, per model.
        buckets: of DenseOvlp.
    """

    alpha: float
    beta: float
    beta_dense: float
    threshold: float
    sort: float
    computation: tuple[float, float, float]
    buckets: int = _BUCKETS

    def compute(self, model: Model) -> float:
        """Return the computation's seconds."""
        return self.computation[_MODELS.index(model)]

    def select(self, scheme: Scheme, model: Model) -> float:
        """Return the selection's seconds per element, mean of tau' steps."""
        return {
            "nothing": 0.0,
            "threshold": self.threshold,
            "reused": self.threshold + self.sort / model.threshold_period,
            "sort": self.sort,
        }[scheme.selects]

    def price(self, scheme: Scheme, model: Model, ranks: int) -> float:
        """Return seconds per byte of a scheme's messages; TopkDSA's are dense when most is filled in."""
        job = Job(model.size, model.k, ranks)
        dense_sum = scheme.form == "topkdsa" and job.summed > job.size / 2
        return self.beta_dense if dense_sum or scheme.selects == "nothing" else self.beta

    def hierarchical(self, scheme: Scheme, model: Model, ranks: int) -> float:
        """Return what gTopk's selections in the levels of its tree take: each of n elements (ours)."""
        levels = math.ceil(math.log2(ranks)) if scheme.name == GTOPK.name else 0
        return levels * self.sort * model.size

    def seconds(self, scheme: Scheme, model: Model, ranks: int) -> float:
        """Return a step's seconds by the closed forms."""
        compute = self.compute(model)
        price = self.price(scheme, model, ranks)
        communication = scheme.cost(model, ranks).seconds(self.alpha, price)
        if scheme.overlap:  # the first bucket waits for its gradient, the last for its messages
            return max(compute + communication / self.buckets, compute * _LEFT + communication)
        selection = self.select(scheme, model) * model.size
        return compute + selection + communication + self.hierarchical(scheme, model, ranks)


# a supercomputer's MPI without host staging: bytes alone, selection and computation as fitted
ARIES = (1.5e-6, 1e-10)  # alpha, beta (ours, as for Figure 7: 10 GB/s)


@dataclass(frozen=True)
class Statement:
    """What the paper says at P = 32, and the fit uses: a scheme's step over another's, or in seconds.

    Attributes:
        says: the paper's words.
        where: section.
        model: of which model.
        scheme: whose step.
        over: divided by whose; None: seconds.
        value: of the ratio, or seconds.
    """

    says: str
    where: str
    model: Model
    scheme: Scheme
    over: Scheme | None
    value: float

    def found(self, seconds: Callable[[Scheme, Model], float]) -> float:
        """Return the same figure of other steps."""
        mine = seconds(self.scheme, self.model)
        return mine / seconds(self.over, self.model) if self.over else mine


def statements() -> tuple[Statement, ...]:
    """Return the six statements that determine six numbers."""
    step = _HOURS / _STEPS
    return (
        Statement("400,000 steps in 150 h", "section 5.4.3", BERT, DENSE_OVLP, None, 150 * step),
        Statement("400,000 steps in 47 h", "section 5.4.3", BERT, OKTOPK, None, 47 * step),
        Statement(
            "outperforms Gaussiank by 1.30 x", "section 5.4.3", BERT, GAUSSIAN_K, OKTOPK, 1.30
        ),
        Statement("1.51 x, over the best other", "section 5.4.1", VGG, GAUSSIAN_K, OKTOPK, 1.51),
        Statement("8.83 x, over the worst other", "section 5.4.1", VGG, GTOPK, OKTOPK, 8.83),
        Statement("1.39 x over DenseOvlp", "section 5.4.2", LSTM, DENSE_OVLP, OKTOPK, 1.39),
    )


def _effective(alpha: float, x: Sequence[float]) -> Effective:
    beta, beta_dense, sort, *computation = x
    vgg, lstm, bert = computation
    return Effective(alpha, beta, beta_dense, _THRESHOLD, sort, (vgg, lstm, bert))


def fit(alpha: float = _ALPHA) -> Effective:
    """Solve for both betas, the sort and three computations; alpha and threshold are stated.

    Closed forms are linear in the six, where DenseOvlp is bound by its messages.

    Args:
        alpha: seconds per message.

    Example:
        >>> fitted = fit()
        >>> [round(fitted.seconds(s, BERT, 32), 2) for s in (DENSE_OVLP, GAUSSIAN_K, OKTOPK)]
        [1.35, 0.55, 0.42]

    Raises:
        ConfigurationError: with this alpha something would take less than no time.
    """

    def off(x: Sequence[float]) -> list[float]:
        """How far each statement is from true."""
        costs = _effective(alpha, x)
        return [
            costs.seconds(s.scheme, s.model, FITTED_RANKS)
            - s.value * (costs.seconds(s.over, s.model, FITTED_RANKS) if s.over else 1.0)
            for s in statements()
        ]

    # DenseOvlp is bound by its messages where they take so long: one line through both points
    bound = torch.tensor([0.0, 1e-6, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    units = torch.tensor([1e-9, 1e-9, 1e-9, 1.0, 1.0, 1.0], dtype=torch.float64)
    start = torch.tensor(off(bound.tolist()), dtype=torch.float64)
    columns = [
        torch.tensor(off((bound + step).tolist()), dtype=torch.float64) - start
        for step in torch.diag(units)
    ]
    x = (bound + units * torch.linalg.solve(torch.stack(columns, 1), -start)).tolist()
    if min(x) < 0:
        raise ConfigurationError(f"alpha is {alpha:g} s: too much for what the paper states")
    return _effective(alpha, x)
