"""Predict how long training methods take to reach a loss, find the fastest, and explain the choice.

    seconds to the loss = steps of dense x ratio x seconds per step, and dense steps at the start
    seconds per step    = computation + work + (exchange - hidden) / period

``steps_to_loss.steps_ratio`` gives the ratio. The time of an exchange follows from its messages:

- PyTorch's allreduce (for dense, its hooks and DiLoCo) is gloo's ring. It sends segments of at most
  1 MiB, and at least two per rank and direction. Each segment costs an additional latency, because
  the receiver has to request it.
- Averages with few bits per element take two rounds. In each round, a rank sends to all other ranks
  concurrently.
- Sparse gradients use the fastest collective that ``planner.plan`` finds.

Each time that a connection has been silent for 0.2 s plus a round trip, TCP halves its window, down to
10 packets; afterwards, the window doubles with every round trip. Packets that do not fit into a link's
queue are lost, and are sent again in windows that grow by a packet per round trip. DDP sums its
buckets of 25 MiB two at a time, so the latencies of one of them are hidden. For dense, the rest of the
backward pass hides all buckets but the last. Delayed averages are hidden by the computation during the
delay.

The prediction computes a ``LossPlan`` from a ``Machine`` and sizes by pure arithmetic, so it is the
same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from sparsync.algorithm import Algorithm
from sparsync.collectives.costs import WORD_BYTES, Job
from sparsync.collectives.quantised import Quantised
from sparsync.cost.machine import Machine
from sparsync.cost.planner import BACKWARD, BUCKET_BYTES, EXCHANGE_PASSES, STEP_PASSES, plan
from sparsync.errors import require
from sparsync_papers.time_to_loss.steps_to_loss import Optimizer, Ratio, Recipe, steps_ratio

__all__ = [
    "METHODS",
    "LossPlan",
    "Method",
    "Outlook",
    "Way",
    "allreduced",
    "plan_loss",
    "rounds",
    "step_seconds",
]

Way = Literal["dense", "low-rank gradients", "averages", "local steps", "sparse gradients"]

_SEGMENT, _LEAST_SEGMENTS = 2**20, 2  # gloo's ring: bytes of a segment, and least number per rank
_PACKET = 1_448  # bytes of payload of a packet
_WINDOW = 14_600  # bytes that TCP sends before the first acknowledgement
# seconds that a packet may wait for a link, as in a modem's queue; or a round trip, if that is longer
_QUEUE = 0.1
# Round trips until the connections on a shared link have recovered, per square root of the lost
# packets.  A window grows by a packet per round trip, so n packets take about sqrt(2 n) round trips.
# Set by hand to match nine exchanges in the lab: 4 ranks, 0.4 to 1.8 MB, 10 and 30 Mbit/s, 20 to
# 80 ms.
_REGROWTH = 0.25
_PAUSE = 0.2  # after this many seconds of silence, plus a round trip, Linux halves a window
_BUCKETS_AT_ONCE = 2  # buckets that gloo sums concurrently
# low-rank gradients have this many elements per matrix rank and square root of n, as measured on two
# byte-level GPTs of 4 layers
_LOW_RANK = 10.6
# work, counted in passes over the model that each take as long as a dense sum: for PowerSGD's products,
# and for sparse gradients without the selection (set by hand to match the lab)
_LOW_RANK_PASSES, _SPARSE_PASSES = 30, 6
_ALIKE = 1.1  # ratio of times below which the simpler method is chosen
_SPARSELOCO = 12.5 / 8 / 64  # bytes per element: one element in 64 is sent, in 12.5 bits


@dataclass(frozen=True)
class Method:
    """A training method that the study compares.

    Attributes:
        name: the name in ``benchmarks/frontier.md``.
        recipe: the recipe that determines the number of steps.
        optimizers: the optimizers that the method was measured with.
        use: the code or option that selects the method.
        bits: bits per exchanged element; 32 means gloo's allreduce.
        block: number of elements that share a scale, if values have few bits.
        fragments: number of parts of the model, which are exchanged one after another in a period.
        delay: steps after which an exchange must have ended.
        start: number of dense steps before gradients are compressed.
    """

    name: str
    recipe: Recipe
    optimizers: tuple[Optimizer, ...]
    use: str
    bits: int = 32
    block: int = 256
    fragments: int = 1
    delay: int = 0
    start: int = 0

    @property
    def way(self) -> Way:
        """The kind of exchange."""
        if self.recipe.family == "dense":
            return "dense"
        if self.recipe.family == "low-rank":
            return "low-rank gradients"
        if self.recipe.family == "sparse gradients":
            return "sparse gradients"
        return "averages" if self.recipe.period <= 2 else "local steps"


def _updates(
    name: str, period: int, use: str, fragments: int = 1, delay: int = 0, bits: int = 1
) -> Method:
    recipe = Recipe("updates", period, delayed=delay > 0)
    return Method(name, recipe, ("adamw", "muon"), use, bits, 512, fragments, delay)


_ALL: Final[tuple[Optimizer, ...]] = ("sgd", "adamw", "muon")
_OWN: Final[tuple[Optimizer, ...]] = ("adamw", "muon")

METHODS: Final = (
    Method("dense", Recipe("dense"), _ALL, "DistributedDataParallel"),
    Method("fp16", Recipe("dense"), _ALL, "DDP with PyTorch's fp16_compress_hook", 16),
    Method(
        "powersgd-r4",
        Recipe("low-rank"),
        _ALL,
        "DDP with PyTorch's powerSGD_hook, rank 4",
        start=10,
    ),
    _updates("updates", 2, "attach(model, optimizer)", bits=2),
    # The predicted number of steps does not depend on the bits, although they matter a little: on a
    # model of 1.3 M elements, one bit instead of two raises the loss by 0.9 % after 1,000 steps
    # (docs/optimizers.md).
    _updates("updates-1bit", 2, 'OuterStep of "updates": 1 bit'),
    _updates("updates-overlap", 2, "OuterStep: 1 bit, fragments=2, delay=1", 2, 1),
    _updates("updates-h4-overlap1", 4, "OuterStep: 1 bit, period=4, fragments=4, delay=1", 4, 1),
    _updates(
        "updates-h10-overlap2", 10, "OuterStep: 1 bit, period=10, fragments=10, delay=2", 10, 2
    ),
    Method("diloco-h30", Recipe("outer momentum", 30), _OWN, 'OuterStep of "diloco": period=30'),
    Method("diloco-h100", Recipe("outer momentum", 100), _OWN, 'OuterStep of "diloco": period=100'),
    Method(
        "streaming-diloco",
        Recipe("outer momentum", 100, delayed=True),
        ("adamw",),
        'attach(model, optimizer, "streaming-diloco")',
        4,
        fragments=10,
        delay=1,
    ),
    Method(
        "muloco",
        Recipe("outer momentum", 30),
        ("muon",),
        'attach(model, optimizer, "muloco")',
        2,
    ),
    Method(
        "sparseloco",
        Recipe("local", 30, selects=True),
        ("adamw",),
        'attach(model, optimizer, "sparseloco")',
    ),
    Method("sparse", Recipe("sparse gradients"), _ALL, "attach(model, algorithm=...)"),
)
"""All methods, the simplest first.  "sparse" stands for sparse gradients with the fastest collective."""


@dataclass(frozen=True)
class Outlook:
    """The predicted cost of one method."""

    method: str
    way: Way
    period: int  # steps between exchanges
    use: str
    steps: Ratio  # number of steps / dense's number of steps
    seconds_step: float  # seconds per step, including computation
    bytes_step: float  # bytes per step of the rank that sends or receives most
    seconds: Ratio  # seconds until the loss is reached

    @property
    def named(self) -> str:
        """The method's kind, with its period."""
        return f"local steps every {self.period}" if self.way == "local steps" else self.way


@dataclass(frozen=True)
class LossPlan:
    """The method that first reaches dense's loss after a number of steps, and the reason.

    Among methods that would take at most 1.1 times as long as the fastest, it is the simplest.
    """

    choice: str
    way: str  # "dense", "averages", "local steps every H", "sparse gradients", "low-rank gradients"
    why: str  # one sentence
    steps: float  # steps that dense needs
    # first the choice, then the others by time, and last the methods that do not reach the loss
    table: tuple[Outlook, ...]

    @property
    def dense(self) -> Outlook:
        """The dense method, to which all others are compared."""
        return next(entry for entry in self.table if entry.method == "dense")


def plan_loss(
    size: int,
    world_size: int,
    machine: Machine,
    candidates: Sequence[Algorithm],
    *,
    optimizer: Optimizer,
    steps: float = 1000,
    compute: float = 0.0,
    density: float | None = None,
    methods: Sequence[str] | None = None,
) -> LossPlan:
    """Choose the simplest method that takes at most 10 % longer to reach a loss than the fastest method.

    A method can be chosen only if it reaches the loss even with the most steps that it is likely to
    need.

    Args:
        size: trained elements, n.
        world_size: ranks, P.
        machine: the speeds of links and ranks.
        candidates: collectives for sparse gradients.
        optimizer: the optimizer of the training.
        steps: steps that dense needs to reach the loss, in a run planned for it.
        compute: seconds that a step takes without its exchange.
        density: k / n of sparse gradients; by default 0.01, as in the measured curves.
        methods: names of the methods to compare; None for all.

    Raises:
        ConfigurationError: a number is out of range, or the optimizer is unknown.
    """
    known = sorted({name for method in METHODS for name in method.optimizers})
    for name, value, good, expected in (
        ("size", size, size >= 0, "at least 0 elements"),
        ("world_size", world_size, world_size >= 1, "at least 1 rank"),
        ("optimizer", optimizer, optimizer in known, f"one of {', '.join(known)}"),
        ("steps", steps, 1 <= steps < math.inf, "the steps that dense takes, >= 1"),
        ("compute", compute, 0 <= compute < math.inf, "seconds >= 0"),
    ):
        require(good, f"time to a loss: {name} is {value}; give {expected}")
    found, dense = [], step_seconds(METHODS[0], size, world_size, machine, compute)[0]
    for method in METHODS:
        asked = methods is None or method.name in methods or method.name == "dense"
        if not asked or optimizer not in method.optimizers:
            continue
        name, use = method.name, method.use
        seconds, nbytes = step_seconds(method, size, world_size, machine, compute)
        if method.way == "sparse gradients":
            made = plan(size, world_size, machine, candidates, density=density, compute=compute)
            sparse = [entry for entry in made.table if entry.collective != "dense"]
            if not sparse:
                continue
            name, nbytes = sparse[0].collective, sparse[0].bytes_sent
            use = f'attach(model, algorithm="{name}")'
            late = _slow_start(nbytes / 2, world_size - 1, machine, compute)
            late += 2 * _losses(nbytes / 2, world_size - 1, machine)
            passes = _SPARSE_PASSES * machine.gamma * WORD_BYTES * size
            seconds = compute + sparse[0].seconds + passes + late
        ratio = steps_ratio(method.recipe, optimizer, world_size, steps)
        before = method.start * (dense - seconds)
        until = Ratio(
            *(
                # the training may be shorter than its dense start
                max(before + steps * seconds * more, 0.0)
                for more in (ratio.mean, ratio.low, ratio.high)
            )
        )
        period = method.recipe.period
        found.append(Outlook(name, method.way, period, use, ratio, seconds, nbytes, until))
    by_time = sorted(found, key=lambda one: (not one.steps.reached, one.seconds.mean))
    sure = [one for one in found if one.steps.surely_reached]  # dense is always among them
    near = _ALIKE * min(one.seconds.mean for one in sure)
    simplest = next(one for one in sure if one.seconds.mean <= near)
    table = (simplest, *(one for one in by_time if one is not simplest))
    return LossPlan(table[0].method, table[0].named, _why(table, world_size, size), steps, table)


# ---- a step ------------------------------------------------------------------------------------------


class _Exchange(NamedTuple):
    """The seconds that an exchange takes on the links, a rank's seconds of work, and its bytes."""

    wire: float
    work: float
    nbytes: float


def step_seconds(
    method: Method, size: int, world_size: int, machine: Machine, compute: float
) -> tuple[float, float]:
    """Return the seconds and the bytes of a step, for all methods except sparse gradients."""
    if world_size == 1 or size == 0:
        return compute, 0.0
    period, parts = method.recipe.period, method.fragments
    idle = compute * period / parts  # seconds between exchanges
    each = _exchange(method, -(-size // parts), world_size, machine, idle)
    averages = method.way in ("averages", "local steps")
    whole = machine.gamma * WORD_BYTES * size  # seconds that a pass over the model takes
    hidden = method.delay * compute
    if method.way == "dense":
        first = min(BUCKET_BYTES / (WORD_BYTES * size), 1.0)  # the first bucket's share
        buckets = math.ceil(1 / first)
        hidden = min(each.wire * (1 - 1 / buckets), BACKWARD * compute * (1 - first))
    wait = max(each.wire - hidden, 0.0) + each.work
    often = parts / period
    per_step = STEP_PASSES * whole if averages else 0.0
    return compute + per_step + often * wait, often * each.nbytes


def _exchange(
    method: Method, size: int, world_size: int, machine: Machine, idle: float
) -> _Exchange:
    """Return the cost of an exchange of ``size`` elements."""
    share, whole = (world_size - 1) / world_size, machine.gamma * WORD_BYTES * size
    family = method.recipe.family
    if family == "low-rank":
        sent = WORD_BYTES * min(_LOW_RANK * method.recipe.matrix_rank * math.sqrt(size), size)
        # three parts: left factors, right factors, and parameters that are not matrices
        wire = 3 * allreduced(sent / 3, world_size, machine, idle)
        return _Exchange(wire, _LOW_RANK_PASSES * whole, 2 * share * sent)
    if method.recipe.selects:
        sent = _SPARSELOCO * size
        wire = rounds(1, sent, world_size, machine, idle)
        select = machine.select * size + machine.decode * world_size * size / 64
        return _Exchange(wire, select + EXCHANGE_PASSES * whole, (world_size - 1) * sent)
    if family == "dense" or method.bits == 32:
        nbytes = size * method.bits / 8
        passes = share + (EXCHANGE_PASSES if family != "dense" else 2 * (method.bits < 32))
        bucket = BUCKET_BYTES * method.bits / 32 if family == "dense" else math.inf
        wire = allreduced(nbytes, world_size, machine, idle, bucket)
        return _Exchange(wire, passes * whole, 2 * share * nbytes)
    cost = Quantised(method.bits, method.block).cost(Job(size, size, world_size))
    wire = rounds(2, cost.nbytes / 2 / (world_size - 1), world_size, machine, idle)
    work = cost.dense_bytes * machine.gamma + cost.turns * machine.turn
    return _Exchange(wire, work + EXCHANGE_PASSES * whole, cost.nbytes)


def rounds(
    count: int, nbytes: float, world_size: int, machine: Machine, idle: float = 0.0
) -> float:
    """Return the seconds for ``count`` rounds.

    In each round, a rank sends ``nbytes`` to all other ranks concurrently.  The first round follows a
    pause of ``idle`` seconds.

    Example:
        >>> round(rounds(2, 1e5, 4, Machine(alpha=0.01, beta=8e-8)), 9)
        0.068
    """
    peers = world_size - 1
    wire = machine.alpha + peers * nbytes * machine.beta + _losses(peers * nbytes, peers, machine)
    return count * wire + _slow_start(peers * nbytes, peers, machine, idle)


def allreduced(
    nbytes: float, world_size: int, machine: Machine, idle: float = 0.0, bucket: float = math.inf
) -> float:
    """Return the seconds that gloo's ring takes for ``nbytes``, after a pause of ``idle`` seconds.

    The vectors are summed in buckets of ``bucket`` bytes, two at a time.

    Example:
        >>> round(allreduced(1e6, 4, Machine(alpha=0.0, beta=8e-8)), 9)
        0.12
    """
    part = nbytes / world_size
    segments = max(math.ceil(part / _SEGMENT), _LEAST_SEGMENTS)
    start = _slow_start(part / segments, 1, machine, idle)
    if bucket < nbytes:
        of_bucket = max(math.ceil(bucket / world_size / _SEGMENT), _LEAST_SEGMENTS)
        segments = max(of_bucket, math.ceil(segments / _BUCKETS_AT_ONCE))
    steps = 2 * (world_size - 1)
    return steps * (part * machine.beta + segments * machine.alpha) + start


def _slow_start(nbytes: float, connections: int, machine: Machine, idle: float) -> float:
    """Return the seconds lost because TCP's windows are small after a pause.

    A connection is silent during the pause and the round trip before it.
    """
    trip, seconds, sent = 2 * machine.alpha, 0.0, 0.0
    # after 64 halvings, any window has reached its smallest size
    halved = 2.0 ** min(int((idle + trip) / (_PAUSE + trip)), 64)
    # bytes in flight with a full window
    full = min(nbytes, trip / machine.beta) if machine.beta else nbytes
    window = max(full / halved, connections * _WINDOW)
    while sent + window < nbytes and window < full:
        seconds += trip - window * machine.beta
        sent, window = sent + window, 2 * window
    return seconds


def _losses(nbytes: float, connections: int, machine: Machine) -> float:
    """Return the seconds lost to dropped packets if connections share a link.

    The link drops packets that do not fit into its queue.  The connection with the most losses
    finishes last, so it determines the time.
    """
    trip = 2 * machine.alpha
    fits = max(trip, _QUEUE) / machine.beta if machine.beta else math.inf
    if connections < 2 or nbytes <= fits:
        return 0.0
    return min(nbytes / fits - 1, 1.0) * _REGROWTH * math.sqrt(nbytes / _PACKET) * trip


# ---- the sentence ------------------------------------------------------------------------------------


def _why(table: Sequence[Outlook], world_size: int, size: int) -> str:
    """Return a sentence that recommends a method and gives the reason."""
    best = table[0]
    if world_size == 1 or size == 0:
        alone = "one rank has nobody to exchange with"
        return f"dense: {alone if world_size == 1 else 'there is nothing to exchange'}"
    dense = next(entry for entry in table if entry.method == "dense")
    if best.method == "dense":
        others = [entry for entry in table[1:] if entry.steps.surely_reached]
        if not others:
            return "dense: no other method is sure to reach its loss"
        rival = others[0]
        over = rival.seconds.mean / dense.seconds.mean
        longer = "as long" if over < _ALIKE else f"{over:.2g} times as long"
        return f"dense: the next best, {rival.method}, would take {longer}"
    step = best.seconds_step / dense.seconds_step
    ends = [value / dense.seconds.mean for value in (best.seconds.low, best.seconds.high)]
    said = "the steps of dense"
    if best.steps.low < best.steps.high:
        said = f"({best.steps.low:.2g} to {best.steps.high:.2g}) {said}"
    why = (
        f"{best.named}: {best.method} takes {best.steps.mean:.2g} times {said} at {step:.2g} of its "
        f"seconds per step"
    )
    return why + ("; dense may be as fast" if ends[1] >= 1 else "")
