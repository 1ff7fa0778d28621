"""SparCML's collectives: recursive doubling, split and allgather, ring, and the choice among them.

References: Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning",
SC 2019, section 5.3 and appendices A and B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from typing import final

import torch
from torch import Tensor

from sparsync.collectives.collective import Collective, Reduced
from sparsync.collectives.costs import ENTRY_BYTES, WORD_BYTES, Cost, Job, Result
from sparsync.errors import require
from sparsync.published.sparcml.streams import Call, StreamCollective, relayed, stream_bytes
from sparsync.reduction import SUM, Reduction, entries_of
from sparsync.sparse import DenseVector, SparseVector, Vector, even_boundaries
from sparsync.transports.communicator import Communicator
from sparsync.wire.codec import HEADER_BYTES, Codec, MessageFraming
from sparsync.wire.coo import StreamCodec
from sparsync.wire.messages import encode_regions

__all__ = [
    "Dynamic",
    "RecursiveDoubling",
    "Ring",
    "SparcmlAuto",
    "SparcmlAutoState",
    "split_allgather",
]

_ALPHA, _BETA = 50e-6, 8e-9  # seconds per message and per byte that SparcmlAuto assumes: 1 Gbit/s


# ---- recursive doubling -----------------------------------------------------------------------------


@final
class RecursiveDoubling(StreamCollective):
    """SSAR_Recursive_double, which has the fewest rounds and suits small results.

    In round t, ranks 2^(t-1) apart exchange everything that they have reduced.  If P is not a power of
    two, ``P - 2^m`` ranks first send their vectors to the rank below, and get the result at the end.  So
    the ranks with the same partial result are always consecutive, and each merge is (lower ranks) op
    (higher ranks).  Partners thus compute the same bits, and operations need not commute.  A partial
    result that may exceed the codec's limit becomes dense in flight.

    Args:
        codec: wire format (default: coo, or dense where that is shorter).  Of the ranks with the same
            partial result, only the lowest one keeps the rounding error.
        op: as for ``StreamCollective``.
        cap: as for ``StreamCollective``.

    Cost: log2 P messages, and two more if P is not a power of two.  The time T satisfies
    ``L1 + log2(P) k beta_s <= T <= L1 + (P - 1) k beta_s`` with ``L1 = log2(P) alpha``.  The lower bound
    is reached if all supports are equal, the upper one if all are disjoint.   State: none.
    Differs from the paper: results are reproducible, because merges follow rank order; P may be any
    number, as sketched in its appendix A; partial results may become dense (in the paper, only in DSAR).

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = DenseVector(torch.eye(4)[comm.rank])
        ...     reduced = await RecursiveDoubling().reduce(comm, mine, k=1, step=0)
        ...     return reduced.total.to_dense().tolist()
        >>> simulate(program, world_size=3).results[2]
        [1.0, 1.0, 1.0, 0.0]

    References: Renggli et al., SparCML, SC 2019, section 5.3.1 and appendix A.
    """

    order = "tree"

    def cost(self, job: Job) -> Cost:
        """Return ``log2 P`` messages: k entries, then up to twice as many in each round (5.3.1).

        If P is not a power of two, one more message carries the whole result.  Messages are dense if that
        is shorter.

        Example:
            >>> doubling = RecursiveDoubling()
            >>> doubling.cost(Job(10**6, 1000, 8, result=1000)).words  # 3 rounds of 1000 entries
            6006.0
            >>> doubling.cost(Job(10**6, 1000, 8, result=8000)).words  # 1000, 2000, 4000
            14006.0
        """
        doublings = job.world_size.bit_length() - 1
        folded = job.world_size != 1 << doublings
        held = [min(2**i * (1 + folded), job.world_size) for i in range(doublings)]
        held += [job.world_size] * folded
        return relayed(
            doublings + folded, sum(stream_bytes(job.union(ranks), job.size) for ranks in held)
        )

    def promised_words(self, job: Job, *, exchangeable: bool) -> float | None:
        """Return the words for disjoint supports, the worst case."""
        disjoint = job._replace(result=job.k * job.world_size)
        return self.cost(disjoint).words if self.cap == 1 else None

    async def total(self, call: Call) -> Vector:
        """Fold the extra ranks (1, 3, 5, ...) into their hosts, double, and send the result back.

        ``core = 2^m`` positions take part in the doubling.  Position p stands for the ranks
        ``[first_rank(p), first_rank(p + 1))``: a single rank, or a host and its extra rank.
        """
        # Pairs of neighbours are folded, not the last P - 2^m ranks into the first ones.  A group's ranks
        # are then always consecutive, so "lower op higher" is the same order for all partners.
        comm = call.comm
        core = 1 << comm.world_size.bit_length() - 1
        extra = comm.world_size - core
        mine = call.settle(call.mine)

        def first_rank(position: int) -> int:
            return position + min(position, extra)

        paired = comm.rank < 2 * extra
        if paired and comm.rank % 2:
            host = comm.rank - 1
            await comm.isend(call.encode(mine, 0).payload, host, "fold", call.framing)
            whole = call.capacity(comm.world_size, call.size)
            return await call.receive(host, whole, call.size, "hand back")
        if paired:
            folded = call.capacity(1, call.size)
            mine = call.combine(mine, await call.receive(comm.rank + 1, folded, call.size, "fold"))
        position = comm.rank // 2 if paired else comm.rank - extra
        span = 1
        while span < core:
            first = position // span * span  # the first position of this rank's group
            partner_first = first ^ span
            partner, lowest = first_rank(position ^ span), first_rank(first)
            # All ranks in the group encode the same partial result with the same random numbers, so all
            # continue with the same decoded bits.  Only one of them keeps the rounding error; otherwise
            # it would be counted once per rank.
            encoded = call.encode(mine, span, source=lowest, keep=comm.rank == lowest)
            ranks = first_rank(partner_first + span) - first_rank(partner_first)
            capacity = call.capacity(ranks, call.size)
            theirs = await call.swap(
                encoded.payload, partner, partner, capacity, call.size, "double"
            )
            if first < partner_first:
                mine = call.combine(encoded.decoded, theirs)
            else:
                mine = call.combine(theirs, encoded.decoded)
            span *= 2
        # Extra ranks get the result through the codec.  With a lossy codec, all ranks must continue with
        # the rounded result, or replicas would differ.
        if extra and (paired or not call.exact):
            encoded = call.encode(mine, comm.world_size, source=0, keep=comm.rank == 0)
            mine = encoded.decoded
            if paired:
                await comm.isend(encoded.payload, comm.rank + 1, "hand back", call.framing)
        return mine


# ---- split and allgather ----------------------------------------------------------------------------


@final
class Dynamic(StreamCollective):
    """DSAR_Split_allgather: half the volume of a dense allreduce, for results that may become dense.

    The vector is cut into P even regions.  Every rank sends each region's entries to the region's owner,
    which folds them; an allgather follows.  A region is sent sparse if its reduced entries are within the
    codec's limit, and otherwise dense; the message's header states the form.  The total is dense if any
    region was sent dense.

    Args:
        codec: wire format; its dense part may quantise (``StreamCodec(dense=...)``).  Default: coo, or
            dense where that is shorter.
        op: as for ``StreamCollective``.
        cap: as for ``StreamCollective``.
        always_dense: whether regions are sent dense however few entries they have (as published).
        local: codec for the messages to owners, which also rounds the rank's own share (Q in SparCML's
            Algorithm 1).  Default: ``codec``.
        keep_error: whether the sender keeps the rounding errors of its entries, and a region's owner the
            errors of its sums.  If not, both are lost, as published.

    Cost: P - 1 + ceil(log2 P) messages.  If regions are sent dense, the time T satisfies
    ``L2 + (P - 1) / P N beta_d <= T <= L2 + k beta_s + (P - 1) / P N beta_d`` with
    ``L2 = (P - 1) alpha + log2(P) alpha``.  If they are sent sparse, the bounds for receiving are
    ``L2 + 2 (P - 1) / P k beta_s <= T <= L2 + P k beta_s``.  The lower bound is reached if supports are
    equal and evenly spread, the upper one if they are disjoint and each is within one region (section
    5.3.2).  The allgather uses dissemination, which sends a region that is much larger than the others up
    to ceil(log2 P) times.
    State: none.
    Differs from the paper: regions stay sparse where that is shorter (as in Ok-Topk's TopkDSA); sums are
    left folds in rank order, not in the order of arrival; P may be any number.  A single rank sends
    nothing, and its total stays sparse.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = DenseVector(torch.eye(4)[comm.rank])
        ...     return (await Dynamic(always_dense=True).reduce(comm, mine, k=1, step=0)).total
        >>> simulate(program, world_size=3).results[2]
        DenseVector(values=tensor([1., 1., 1., 0.]))

    References: Renggli et al., SparCML, SC 2019, section 5.3.3 ("DSAR_Split_allgather"); Li &
    Hoefler, Ok-Topk, PPoPP 2022, Table 1 ("TopkDSA").
    """

    def __init__(
        self,
        codec: StreamCodec | None = None,
        *,
        op: str | Reduction = "sum",
        cap: float | None = 1.0,
        always_dense: bool = False,
        local: Codec[SparseVector] | None = None,
        keep_error: bool = True,
    ) -> None:
        super().__init__(codec, op=op, cap=cap)
        require(
            local is None or self.operation.name == "sum",
            f"Dynamic: local={local!r} rounds, but only sums may be rounded, not "
            f"'{self.operation.name}'; omit local=",
        )
        self.always_dense, self.keep_error = always_dense, keep_error
        self.local = None if local is None else StreamCodec(local, factor=None)

    def cost(self, job: Job) -> Cost:
        """Return the cost with two sparse halves (section 5.3.2) or a dense second half (5.3.3).

        Entries are assumed to be spread evenly over the regions.  With a dense half, the cost is
        ``n (P - 1) / P`` to ``2 k + n (P - 1) / P`` words.

        Example:
            >>> cost = Dynamic().cost(Job(10**6, 100_000, 8, result=800_000))
            >>> cost.words < 2 * 100_000 + 10**6 * 7 / 8
            True
            >>> split_allgather().cost(Job(10**6, 1000, 8, result=1000)).words  # 4 k (P - 1) / P
            3528.0
        """
        # T_split and T_sparse_ag of section 5.3.2, or the dense allgather of 5.3.3
        peers, ranks = job.world_size - 1, job.world_size
        piece = HEADER_BYTES + ENTRY_BYTES * job.k / ranks
        if self.local is not None:
            piece = self.local.sparse.nbytes(round(job.k / ranks), -(-job.size // ranks))
        limit = self.codec.limit(job.size, torch.float32)
        entries, body, placed = job.summed, ENTRY_BYTES * job.summed, 0.0
        if self.always_dense or (limit is not None and job.summed > limit):
            entries, placed = 0.0, WORD_BYTES * job.size * job.share
            body = self.codec.dense.nbytes(job.size, job.size) - HEADER_BYTES
        return Cost(
            peers + job.rounds,
            peers * (piece + HEADER_BYTES + body / ranks),
            encoded=job.k * job.share + entries / ranks,
            decoded=(job.k + entries) * job.share,
            dense_bytes=placed,
            turns=1 + job.rounds,
            together=peers - 1,
        )

    async def total(self, call: Call) -> Vector:
        """Split, fold, choose the sparse or dense form, and allgather."""
        boundaries = even_boundaries(call.size, call.comm.world_size)
        region = await self._split_and_fold(call, boundaries)
        region = call.densify(region) if self.always_dense else call.settle(region)
        return await call.allgather(region, boundaries, dense=self.always_dense)

    async def _split_and_fold(self, call: Call, boundaries: Sequence[int]) -> Vector:
        """Return the left fold of this rank's region in rank order, as a sparse vector.

        Messages are sent point to point if a native call would pad each to the largest possible length.
        """
        comm, mine, codec = call.comm, call.mine, self.local or call.codec
        assert isinstance(mine, SparseVector)
        if call.operation is SUM and call.exact and self.local is None:
            with comm.stage("pack"):
                payloads, own = encode_regions(codec.sparse, mine, boundaries, comm.rank)
        else:
            payloads, own = self._rounded(call, mine.split(boundaries), boundaries)
        # over all regions, including this rank's own, so that the width is equal on all ranks
        width = max(map(sub, boundaries[1:], boundaries))
        most = codec.sparse.nbytes(min(call.most, width), width, call.dtype)
        capacities, framing = [most] * comm.world_size, MessageFraming(codec)
        # The number of entries per region is unknown, so the capacity assumes that all k are in one
        # region.  If every message were padded to this capacity, P times as many bytes would be sent.
        if comm.pads:
            messages = await Communicator.alltoallv(comm, payloads, capacities, "split", framing)
        else:
            messages = await comm.alltoallv(payloads, capacities, "split", framing)
        others = (message.numel() for rank, message in enumerate(messages) if rank != comm.rank)
        await comm.work(sum(others))
        shares = [own if rank == comm.rank else message for rank, message in enumerate(messages)]
        return call.fold(shares, own, codec)

    def _rounded(
        self, call: Call, pieces: Sequence[SparseVector], boundaries: Sequence[int]
    ) -> tuple[list[Tensor], SparseVector]:
        """Return a message per region, and this rank's own piece, rounded only if ``local`` is given."""
        codec = self.local or call.codec
        payloads, own = [], pieces[call.comm.rank]
        for dest, (piece, start) in enumerate(zip(pieces, boundaries, strict=False)):
            if dest == call.comm.rank and self.local is None:
                # this rank's share is not sent and needs no rounding, except in Algorithm 1
                payloads.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
                continue
            encoded = call.encode(piece, dest, start=start, codec=codec)
            payloads.append(encoded.payload)
            if dest == call.comm.rank and isinstance(encoded.decoded, SparseVector):
                own = encoded.decoded
        return payloads, own


def split_allgather(
    codec: StreamCodec | None = None, *, op: str | Reduction = "sum", cap: float | None = 1.0
) -> Dynamic:
    """SSAR_Split_allgather, for large results; regions stay sparse, however many entries they have.

    Args:
        codec: wire format; only its sparse part is used.
        op: as for ``Dynamic``.
        cap: as for ``Dynamic``.

    References: SparCML, section 5.3.2.
    """
    return Dynamic(StreamCodec(codec.sparse if codec else None, factor=None), op=op, cap=cap)


# ---- ring -------------------------------------------------------------------------------------------


@final
class Ring(StreamCollective):
    """Sends P even regions' partial sums around a ring, then the sums (SparCML's ring baselines).

    Region r starts at rank r + 1 and ends, after P - 1 hops, at its owner r.  So the order of its
    operands depends only on P.

    Args:
        codec: wire format (default: coo, or dense where that is shorter); the rank that rounds a value
            keeps the error.
        op: as for ``StreamCollective``; it must commute.
        cap: a rank sends at most ``cap * k`` entries; the dense ring ignores the cap and sends all.
        dense: whether regions are dense from the start (the dense baseline).

    Cost: 2 (P - 1) messages.  The dense ring takes ``2 (P - 1) / P N beta_d``, the sparse one
    ``[2 (P - 1) / P k, (P - 1) k + k (P - 1) / 2] beta_s`` for evenly spread supports that are all equal
    (lower bound) or all disjoint (upper bound).   State: none.
    Differs from the paper: partial sums may become dense in flight; the paper gives no details of its
    ring baselines.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = DenseVector(torch.full((3,), comm.rank + 1.0))
        ...     return (await Ring(dense=True).reduce(comm, mine, k=3, step=0)).total
        >>> simulate(program, world_size=4).results[0]
        DenseVector(values=tensor([10., 10., 10.]))

    References: Renggli et al., SparCML, SC 2019, section 8.1; Patarasuk & Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009.
    """

    order = "tree"

    def __init__(
        self,
        codec: StreamCodec | None = None,
        *,
        op: str | Reduction = "sum",
        cap: float | None = 1.0,
        dense: bool = False,
    ) -> None:
        super().__init__(codec, op=op, cap=None if dense else cap)
        self.dense = dense
        self.result: Result = "whole" if dense else "sum"
        require(
            self.operation.commutative,
            f"Ring: operation '{self.operation.name}' does not commute, but a ring reduces "
            "in rotated order; use RecursiveDoubling or Dynamic",
        )

    def cost(self, job: Job) -> Cost:
        """Return ``2 (P - 1)`` messages to the next rank: partial sums of regions, then sums.

        The dense ring takes ``2 n (P - 1) / P`` words (section 8.1).  In the sparse ring, a block is sent
        dense if that is shorter.

        Example:
            >>> Ring(dense=True).cost(Job(8_000, 8_000, 8)).words  # 14 blocks of 1000 words, headers
            14028.0
        """
        peers, blocks = job.world_size - 1, 2 * (job.world_size - 1)
        if self.dense:
            block = HEADER_BYTES + WORD_BYTES * (-(-job.size // job.world_size))
            added = WORD_BYTES * job.size * job.share
            return Cost(blocks, blocks * block, dense_bytes=added, turns=blocks)
        summed = [job.union(ranks) for ranks in range(1, job.world_size)] + [job.summed] * peers
        bodies = sum(stream_bytes(entries, job.size) - HEADER_BYTES for entries in summed)
        return relayed(blocks, blocks * HEADER_BYTES + bodies / job.world_size)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float | None:
        """Return the words of the dense ring's cost; None for the sparse ring, which has no bound."""
        return self.cost(job).words if self.dense else None

    async def total(self, call: Call) -> Vector:
        """Reduce-scatter, with the arriving partial sum as the left operand, then allgather."""
        comm = call.comm
        boundaries = even_boundaries(call.size, comm.world_size)
        pieces: list[Vector]
        if self.dense:
            values = call.densify(call.mine).values
            pieces = [DenseVector(values[start:stop]) for start, stop in pairwise(boundaries)]
        else:
            assert isinstance(call.mine, SparseVector)
            pieces = [call.settle(piece) for piece in call.mine.split(boundaries)]
        last, following = (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
        partial = pieces[last]
        for hop in range(comm.world_size - 1):
            passing, coming = last - hop, last - hop - 1  # regions, modulo P
            start = boundaries[passing % comm.world_size]
            payload = call.encode(partial, hop, start=start).payload
            width = pieces[coming].size
            capacity = call.capacity(hop + 1, width, dense=self.dense)
            theirs = await call.swap(payload, following, last, capacity, width, "reduce-scatter")
            partial = call.combine(theirs, pieces[coming])
        return await call.allgather(partial, boundaries, dense=self.dense, ring=True)


# ---- the choice among them --------------------------------------------------------------------------


@dataclass(frozen=True)
class SparcmlAutoState:
    """The last total's number of entries, and the first call's maximum per rank; initially None."""

    entries: int | None = None
    most: float | None = None


@final
class SparcmlAuto(Collective):
    """Chooses recursive doubling for small results, split-allgather for large ones, dynamic for dense.

    SparCML needs "some rough idea" of the result's size K from the user (section 5.3).  This collective
    learns K from the last total, whose number of entries all ranks know.  For the first call, it uses
    appendix B's expectation for uniformly random supports.  It weighs rounds against bytes with the
    constants of gigabit Ethernet.

    Args:
        codec: wire format of all three collectives; its limit decides when a result counts as dense.
        op: the operation, as for ``StreamCollective``.
        cap: a rank sends at most ``cap * k`` entries; with None, it sends all.

    Cost: the lowest estimate of the three.  With ``cap=None``, the first call needs an additional
    allreduce of one integer, unless ``expect`` was called before (``sparsync.allreduce`` calls it).
    State: the last total's number of entries, and the maximum per rank.
    Differs from the paper: the paper leaves the choice to the user.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = SparseVector.from_dense(torch.eye(4)[comm.rank])
        ...     return (await SparcmlAuto().reduce(comm, mine, k=1, step=0)).total.to_dense().tolist()
        >>> simulate(program, world_size=3).results[2]
        [1.0, 1.0, 1.0, 0.0]

    References: SparCML, sections 5.3 and 8.1, appendix B.
    """

    order = "tree"

    def __init__(
        self,
        codec: StreamCodec | None = None,
        *,
        op: str | Reduction = "sum",
        cap: float | None = 1.0,
    ) -> None:
        self.codec, self.cap = codec or StreamCodec(), cap
        self.state = SparcmlAutoState()
        self._doubling = RecursiveDoubling(self.codec, op=op, cap=cap)
        self.operation = self._doubling.operation
        self._split = split_allgather(self.codec, op=op, cap=cap)
        self._dynamic = Dynamic(self.codec, op=op, cap=cap)

    def expect(self, entries: int, total: int | None) -> None:
        """Use the number of entries in an earlier total for the first choice."""
        self.state = SparcmlAutoState(total, entries)

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Choose a collective, and reduce with it."""
        # If ranks chose differently, they would deadlock.  So the choice depends only on numbers that
        # are equal on all ranks: n, P, the largest number of entries per rank, and the last total's.
        size, dtype, most = selected.size, selected.values.dtype, self.state.most
        if self.cap is not None:
            most = min(self.cap * k, size)
        elif most is None:
            most = float(
                await comm.allreduce(torch.tensor([selected.nnz], device="cpu"), "entries", "max")
            )
        chosen = self.choose(Job(size, most, comm.world_size, result=self.state.entries), dtype)
        reduced = await chosen.reduce(comm, selected, k, step)
        # count only the nonzero entries of a dense total; otherwise all later totals would be dense
        entries = entries_of(reduced.total, self.operation)
        self.state = SparcmlAutoState(entries, most)
        return reduced

    def choose(self, job: Job, dtype: torch.dtype = torch.float32) -> RecursiveDoubling | Dynamic:
        """Return the collective with the shortest expected time.

        Example:
            >>> auto, n = SparcmlAuto(), 10**6
            >>> type(auto.choose(Job(n, 50, 8, result=60))).__name__
            'RecursiveDoubling'
            >>> auto.choose(Job(n, 20_000, 8, result=30_000)).codec.factor  # always sparse
        """
        limit = self.codec.limit(job.size, dtype)
        if limit is not None and job.summed > limit:
            return self._dynamic
        # There is no fixed threshold.  Doubling wins if messages are few and short, but also if supports
        # hardly overlap, because it then transfers (P - 1) k entries, whereas splitting transfers P k.
        doubling, split = self._doubling, self._split
        seconds = [one.cost(job).seconds(_ALPHA, _BETA) for one in (doubling, split)]
        return doubling if seconds[0] <= seconds[1] else split

    def cost(self, job: Job) -> Cost:
        """Return the cost of the chosen collective (section 5.3)."""
        return self.choose(job).cost(job)
