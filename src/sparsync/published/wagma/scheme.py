"""WAGMA-SGD averages in changing groups without waiting for late ranks, and globally at intervals.

The first rank to arrive starts the average for all ranks.  A late rank contributes the last model that it
published, and gets the result when it arrives.

The ranks form a row, which is cut into groups of neighbours.  Before every step, the same permutation
shuffles the row: rank r is at position ``r * stride**-step mod modulus``.  If P and S are powers of
two, the stride is S and the modulus P - 1, so the multiplication rotates the bits of r.  This *is*
Algorithm 1: step t merges along the ``log2 S`` bits that start at ``(t * log2 S) mod log2 P``.  Unlike
bit rotation, multiplication works for any P.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import gcd, inf, sqrt
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor, nn

from sparsync.averaging.averager import Accompanied, Staleness, at_least_1
from sparsync.console import say
from sparsync.errors import check_numbers, require
from sparsync.kernels import divide_
from sparsync.published.wagma.agents import (
    Agent,
    Answer,
    Round,
    Rounds,
    finish_of,
    is_finish,
    round_of,
    step_of,
)
from sparsync.sparse import DenseVector
from sparsync.transports.communicator import Communicator, bytes_of
from sparsync.transports.groups import Subgroup
from sparsync.transports.ledger import Raw
from sparsync.wire import Codec, Qsgd, Whole
from sparsync.wire.codec import MessageFraming, check_dtype

__all__ = [
    "CODECS",
    "CodedSum",
    "Grouping",
    "ModelRounds",
    "Values",
    "Wagma",
    "coded_allreduce",
    "default_group_size",
    "group_allreduce",
    "group_of",
]

Grouping = Literal["wait-avoiding", "synchronous"]
Values = Literal["fp32", "bf16", "int8"]

_LOG = logging.getLogger("sparsync")
_ALPHA: Final = 50e-6  # seconds per message, as on the simulator's default links
_BETA: Final = 8e-9  # seconds per byte: 1 Gbit/s
CODECS: Final = MappingProxyType[str, Codec[DenseVector] | None](
    {
        "fp32": None,
        "bf16": Whole(torch.bfloat16),
        "int8": Qsgd(8, block=128, scale="max"),  # as in ``Packed``: 8.25 bits per element
    }
)


# the assumption that fails without global averages, by staleness
_GIVEN_UP: Final = MappingProxyType(
    {
        "unbounded": "a late rank's model may be arbitrarily old, so Assumption 1.3 (bounded staleness) "
        "of WAGMA-SGD's Theorem 4.1 does not hold, nor Lemma 4.5, on how far models drift apart",
        "none": "nothing bounds how far models drift apart, so Lemma 4.5 of WAGMA-SGD, on which "
        "Theorem 4.1 rests, does not hold",
    }
)


@final
class Wagma(Accompanied):
    """Averages models in groups of S ranks after every step, without waiting for late ranks.

    After local step t, with W' this rank's model (Algorithm 2)::

        (t + 1) % tau != 0:   W = sum / S               if W' is in the sum
                              W = (sum + W') / (S + 1)  if it contains an older model of this rank
        (t + 1) % tau == 0:   W = mean over all ranks, which wait for each other

    A rank that is late by several averages publishes its model once and uses only the newest result.  No
    model in an average is older than its rank's contribution to the last global average, so all models
    are less than tau steps old.

    A stale model undoes part of its group's progress.  If the steps of eight ranks vary by only 1 %, 35
    to 42 % of the updates are lost (``benchmarks/averaging-convergence.md``).  With
    ``grouping="synchronous"``, no updates are lost.

    Args:
        group_size: S; default: about sqrt(P) (``default_group_size``).  If S does not divide P, group
            sizes differ by one.  With 1 there are only global averages, which is local SGD.
        sync_period: tau, in steps; the paper uses 10 in section 5.2, and 8 in sections 5.3 and 5.4.  None
            stands for infinity: there is no global average before ``finish``, which violates an
            assumption of Theorem 4.1 (rank 0 reports which one).
        grouping: with "wait-avoiding", a group continues without a late rank; with "synchronous", it
            waits.
        dynamic: whether groups change from step to step (Algorithm 1).  False is an ablation in
            section 5.2.
        values: group averages are sent as "fp32" (the model's own dtype), "bf16" or "int8"; a rank adds
            its rounding error to its next contribution.  Global averages are never rounded.
        deadline: if others wait for a rank and it is silent for this many seconds, it is left out and
            reported.  When it sends a message again, it resumes with the last global average, at the
            other ranks' step (``resume_at``).  With None, the other ranks wait for it.

    Raises:
        DeadlineError: a rank is late for a global average by more than the communicator's timeout.

    Cost: per step, 2 n (S - 1) / S elements in 2 ceil(log2 S) messages, or log2 S messages of n if that
    is cheaper ("bf16" and "int8": S - 1 + ceil(log2 S) messages), and at most log2 P activations.
    Memory: the published model and the newest result; with "bf16" and "int8", also the last global
    average and the rounding error.
    State: the step; with "bf16" and "int8", also the rounding error and the last global average.  A
    resumed run continues as if it had just taken a global average.
    Differs from the paper: P and S may be any numbers; if there is no newer result, a late rank keeps its
    model; there may be a deadline.

    Example:
        >>> averager = Wagma(nn.Linear(2, 1), sync_period=4)
        >>> averager.step(); averager.finish(); averager.close(); averager.steps
        1

    References: Li et al., WAGMA-SGD, IEEE TPDS 2021, Algorithms 1 and 2.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        group_size: int | None = None,
        sync_period: int | None = 10,
        grouping: Grouping = "wait-avoiding",
        dynamic: bool = True,
        values: Values = "fp32",
        deadline: float | None = None,
        **binding: Any,
    ) -> None:
        for name, value in ("group_size", group_size), ("sync_period", sync_period):
            if value is not None:
                at_least_1("Wagma", **{name: value})
        require(isinstance(dynamic, bool), f"dynamic is {dynamic!r}; give True or False")
        known = grouping in get_args(Grouping)
        require(known, f"grouping is {grouping!r}; choose wait-avoiding or synchronous")
        require(values in CODECS, f"values is {values!r}; choose {', '.join(CODECS)}")
        check_numbers("Wagma", {"deadline": "float | None"}, {"deadline": deadline})
        positive = deadline is None or 0 < deadline < inf
        require(positive, f"deadline is {deadline}; give seconds > 0, or None")
        self.group_size, self.sync_period, self.grouping = group_size, sync_period, grouping
        self.dynamic, self.values, self.deadline = dynamic, values, deadline
        self.left_out: tuple[tuple[int, int, str], ...] = ()  # rank, step, reason
        self._codec = CODECS[values]
        self._present: list[int] = []
        self._finish = -1  # the version of the last ``finish``
        super().__init__(model, **binding)

    def _options(self) -> dict[str, Any]:
        """Return all options but the deadline, which determines only how long other ranks wait."""
        return {name: value for name, value in super()._options().items() if name != "deadline"}

    @property
    def staleness(self) -> Staleness:
        """One of "bounded" (by tau), "unbounded" (no global averages), "none" (synchronous groups)."""
        if self.grouping == "synchronous" or self.group_size == 1:
            return "none"
        return "unbounded" if self.sync_period is None else "bounded"

    @property
    def global_period(self) -> int | None:
        """Tau, the number of steps between global averages."""
        return self.sync_period

    def effective_group_size(self, world_size: int) -> int:
        """Return the size of the largest groups: S, unless S does not divide P."""
        return _sizes(world_size, self._asked(world_size))[1]

    def _asked(self, world_size: int) -> int:
        return self.group_size or default_group_size(world_size)

    def survivors(self, comm: Communicator) -> Communicator:
        """Return a communicator of the ranks that were never left out, or have rejoined."""
        everyone = len(self._present) in (0, comm.world_size)
        return comm if everyone else Subgroup(comm, self._present)

    async def begin(self, comm: Communicator, vector: Tensor, step: int) -> None:
        """Start the agent with the initial model."""
        size = self._asked(comm.world_size)
        require(
            size <= comm.world_size,
            f"group_size is {size} of {comm.world_size} ranks; give at most all of them",
        )
        speaks = self._binding is not None and comm.rank == 0
        least, most = _sizes(comm.world_size, size)
        if speaks and (least, most) != (size, size):
            sizes = f"{most} ranks"
            if least < most:
                sizes = (
                    f"{least} or {most} ranks, which end at different times and so use stale models"
                )
            say(f"group_size={size} does not divide {comm.world_size} ranks: groups of {sizes}")
        if speaks and self.sync_period is None:
            say(f"sync_period=None: {_GIVEN_UP[self.staleness]}")
        vector = vector.cpu()
        # A group of one waits for no other rank.  If an agent contributed for its late rank, the rank
        # would average its new model with its old one.
        grouping = "synchronous" if size == 1 else self.grouping
        # all ranks send differences from the same base, even if the models of resumed ranks differ
        base = self.memory.get("base", vector).cpu()
        self._rounds = ModelRounds(
            base, size, self.sync_period, grouping, dynamic=self.dynamic, codec=self._codec
        )
        error = self.memory.get("error")
        self._rounds.error = None if error is None else error.cpu()
        self._taken = round_of(step - 1)
        # reset them here too: a loaded state may be from an earlier step, with different ranks present
        self._finish, self.left_out, self._present = -1, (), []
        self._agent = Agent(self._rounds, comm.world_size, step, vector, self.deadline)
        self._run(comm, self._agent)

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Average with the group or with all ranks."""
        return await self._arrive(round_of(step), vector)

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the mean of all models; ranks wait for each other."""
        self._finish = finish_of(step, self._finish)
        return await self._arrive(self._finish, vector)

    async def _arrive(self, version: int, vector: Tensor) -> Tensor:
        """Arrive at a round; return the model that this rank continues with."""
        published = vector.cpu()
        answer: Answer = await self._ask(
            step_of(version), lambda reply: self._agent.arrive(version, published, reply)
        )
        for peer, step, reason in answer.left_out[len(self.left_out) :]:
            _LOG.warning("rank %d left out at step %d: %s", peer, step, reason)
        self.left_out, self._present = answer.left_out, answer.present
        result = answer.result
        self.memory = self._rounds.memory()
        total = result.total.to(vector.device, copy=True)
        if answer.resumes:
            self.resume_at = step_of(result.version + 1)
            return divide_(total, result.models)
        # lines 10 to 14 and 16 of Algorithm 2; each result is used only once
        if result.version <= self._taken:
            return vector
        self._taken = result.version
        if result.version == version == result.contributed:
            return divide_(total, result.models)
        return divide_(total.add_(vector), result.models + 1)


@final
class ModelRounds(Rounds):
    """WAGMA's rounds: group averages, and a global average when ``(step + 1) % sync_period == 0``.

    With a codec C, a rank contributes the difference between its model and the last global average,
    ``base``, which all ranks have.  It adds the rounding error to its next contribution::

        p = W' + error;   q = C(p - base);   error = p - base - q

    Rounding thus leaves the mean of W + error over the ranks unchanged, as long as no rank is late.

    Attributes:
        error: the rounding error that the next contribution includes, `[n]`; None if there is none.
    """

    def __init__(
        self,
        base: Tensor,
        group_size: int,
        sync_period: int | None,
        grouping: Grouping = "wait-avoiding",
        *,
        dynamic: bool = True,
        codec: Codec[DenseVector] | None = None,
    ) -> None:
        self.group_size, self.sync_period = group_size, sync_period
        self.grouping, self.dynamic, self.codec = grouping, dynamic, codec
        self.error: Tensor | None = None
        self._vector = self._base = base

    def _is_global(self, version: int) -> bool:
        closes = self.sync_period is not None and (step_of(version) + 1) % self.sync_period == 0
        return is_finish(version) or closes

    def synchronous(self, version: int) -> bool:
        """Return whether a rank joins the round only after it has arrived itself."""
        return self.grouping == "synchronous" or self._is_global(version)

    def members(self, version: int, present: Sequence[int], rank: int) -> Sequence[int]:
        """Return all present ranks for a global average; otherwise this rank's group among them."""
        if self._is_global(version):
            return present
        count, step = len(present), step_of(version) if self.dynamic else 0
        size = min(self.group_size, count)
        return [present[i] for i in group_of(present.index(rank), count, size, step)]

    def memory(self) -> dict[str, Tensor]:
        """Return the vectors that a saved state must contain: with a codec, the base and the error."""
        if self.codec is None:
            return {}
        return {"base": self._base} | ({} if self.error is None else {"error": self.error})

    def publish(self, vector: Tensor) -> None:
        """Contribute ``vector`` from now on; the caller must not change the vector."""
        self._vector = vector if self.error is None else vector + self.error

    def restart(self, model: Tensor) -> None:
        """Use this model as the new base; drop the error, which belonged to the discarded model."""
        self._vector, self._base, self.error = model, model, None

    def end(self, result: Round) -> None:
        """Use a global average as the new base, and clear the error."""
        if self._is_global(result.version):
            self._base, self.error = result.total / result.models, None

    async def reduce(self, comm: Communicator, version: int, contributed: int) -> Tensor:
        """Sum the contributions of the group's ranks."""
        if self.codec is None or self._is_global(version):
            return await group_allreduce(comm, self._vector)
        base = self._base
        coded = await coded_allreduce(comm, self._vector - base, self.codec, step_of(version))
        # A stale model is an extra term of the sum (Algorithm 2), so the error of rounding it again need
        # not be repaid.  The error from the round in which it was new must still be repaid.
        owed = self.error if contributed < version else coded.lost
        self.error = coded.lost_of_sum if owed is None else owed + coded.lost_of_sum
        return base * comm.world_size + coded.total


# ---- groups ---------------------------------------------------------------------------------------


def group_of(rank: int, world_size: int, group_size: int, step: int) -> tuple[int, ...]:
    """Return the members of a rank's group at a 0-based local step, in ascending order.

    If S divides P, all groups have S members.  Otherwise, group sizes differ by one and are as close to S
    as an even division allows; no rank is alone (unless S = 1).  If there are several groups of more than
    one rank, consecutive steps never have the same groups.  Fixed groups use ``step=0`` on all steps.

    Cost: the time to sort the group, which does not depend on P.

    Example:
        >>> group_of(5, 8, 4, step=0), group_of(5, 8, 4, step=1)
        ((4, 5, 6, 7), (0, 1, 4, 5))
        >>> group_of(0, 5, 2, step=0), group_of(0, 5, 2, step=1)
        ((0, 1, 2), (0, 2, 4))

    References: Li et al., WAGMA-SGD, IEEE TPDS 2021, Algorithm 1, with ``mask = 1 << shift`` (as
    printed, a mask that is already shifted is shifted again; the paper's examples need ``1 << shift``).
    """
    groups = _groups(world_size, group_size)
    # The next shuffle should spread a group's members over as many groups as possible, without gaps.  So
    # the stride is the size of the smallest group, or the next smaller number that has an inverse.  If S
    # divides P, S is invertible modulo P - 1; 2 is always invertible modulo P or P - 1.
    stride, modulus = next(
        (stride, modulus)
        for stride in range(world_size // groups, 0, -1)
        for modulus in (world_size, world_size - 1)
        if gcd(stride, modulus) == 1
    )

    def shuffled(number: int, exponent: int) -> int:
        moves = number < modulus  # with modulus P - 1, the last rank keeps its position
        return number * pow(stride, exponent, modulus) % modulus if moves else number

    index = shuffled(rank, -step) * groups // world_size
    # group i starts at position ceil(i P / groups)
    start, stop = (-(-world_size * i // groups) for i in (index, index + 1))
    return tuple(sorted(shuffled(place, step) for place in range(start, stop)))


def _groups(world_size: int, group_size: int) -> int:
    """Return P / S, rounded; halves go down, so that with S = 2 and odd P, no rank is alone."""
    return (2 * world_size + group_size - 1) // (2 * group_size)


def _sizes(world_size: int, group_size: int) -> tuple[int, int]:
    """Return the sizes of the smallest and the largest group.

    Example:
        >>> _sizes(8, 4), _sizes(4, 3), _sizes(7, 3)
        ((4, 4), (4, 4), (3, 4))
    """
    groups = max(_groups(world_size, group_size), 1)
    return world_size // groups, -(-world_size // groups)


def default_group_size(world_size: int) -> int:
    """Return the divisor of P, other than 1, nearest to the square root of P (section 5.2).

    If this divisor differs from the root by more than a factor of 1.5, return the integer nearest to the
    root, because any S is allowed.  Large primes and 62 are examples.

    Example:
        >>> [default_group_size(world_size) for world_size in (1, 2, 8, 12, 64, 13, 62)]
        [1, 2, 2, 3, 8, 4, 8]
    """
    if world_size <= 3:
        return world_size
    root = sqrt(world_size)
    divisors = [size for size in range(2, world_size + 1) if world_size % size == 0]
    nearest = min(divisors, key=lambda size: abs(size - root))
    return nearest if root / 1.5 <= nearest <= 1.5 * root else round(root)


# ---- sums of a group ------------------------------------------------------------------------------


async def group_allreduce(comm: Communicator, vector: Tensor) -> Tensor:
    """Return the sum over a group, by the cheaper of two algorithms; it is equal on all members.

    Cost: log2 S messages of n elements (recursive doubling), or the cost of ``comm.allreduce``.
    """
    size = comm.world_size
    hops = (size - 1).bit_length()
    more = vector.numel() * vector.element_size() * (hops - 2 * (size - 1) / size)
    if size & (size - 1) or more * _BETA > hops * _ALPHA:
        return await comm.allreduce(vector, "average")
    for hop in range(hops):
        partner = comm.rank ^ (1 << hop)
        payload = bytes_of(vector)
        receiving = comm.irecv(partner, payload.numel(), "average", Raw("value"))
        await comm.isend(payload, partner, "average", Raw("value"))
        theirs = (await receiving).clone().view(vector.dtype)  # ``clone`` aligns the bytes
        vector = vector + theirs if comm.rank < partner else theirs + vector
    return vector


class CodedSum(NamedTuple):
    """A sum of rounded vectors, `[n]`, equal on all members, and this rank's rounding errors."""

    total: Tensor
    lost: Tensor  # the error of rounding this rank's vector
    lost_of_sum: Tensor  # the error of rounding the sum, in this rank's block


async def coded_allreduce(
    comm: Communicator, vector: Tensor, codec: Codec[DenseVector], seed: int
) -> CodedSum:
    """Sum rounded vectors over a group: every member sums one block and sends the sum to all members.

    The codec's random numbers depend on ``seed`` and the rank.

    Cost: S - 1 + ceil(log2 S) messages; 2 n (S - 1) / S elements, rounded.
    """
    width = -(-vector.numel() // comm.world_size)
    starts = [min(r * width, vector.numel()) for r in range(comm.world_size)]
    blocks = [vector[start : start + width] for start in starts]
    mine = slice(starts[comm.rank], starts[comm.rank] + width)
    codec = codec.seeded(comm.rank, seed)
    framing = MessageFraming(codec)

    def decoded(payload: Tensor, size: int) -> Tensor:
        check_dtype(codec, payload, vector.dtype)
        return codec.decode(payload, size).values.to(vector.dtype)

    encoded = [codec.encode(DenseVector(block)) for block in blocks]
    lost = vector - torch.cat([one.decoded.values for one in encoded])
    lost[mine] = 0  # this rank sums its own block, so the block is not rounded
    capacities = [codec.nbytes(len(block), len(block), vector.dtype) for block in blocks]
    # for each rank, the size of the longest block that it sends; the last blocks are shorter
    most = [max(capacities[:r] + capacities[r + 1 :], default=0) for r in range(len(blocks))]
    received = await comm.alltoallv([one.payload for one in encoded], most, "average", framing)
    total = torch.zeros_like(blocks[comm.rank])
    for rank, raw in enumerate(received):
        total += blocks[rank] if rank == comm.rank else decoded(raw, len(total))
    rounded = codec.encode(DenseVector(total))
    lost_of_sum = torch.zeros_like(vector)
    lost_of_sum[mine] = total - rounded.decoded.values
    sums = await comm.allgatherv(rounded.payload, capacities, "average", framing)
    whole = [decoded(raw, len(block)) for raw, block in zip(sums, blocks, strict=True)]
    return CodedSum(torch.cat(whole), lost, lost_of_sum)
