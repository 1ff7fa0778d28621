"""Split and allgather: half of the volume, for large data (SparCML's SSAR and DSAR_Split_allgather)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from sparsync.collectives.costs import ENTRY_BYTES, WORD_BYTES, Cost, Job
from sparsync.collectives.oktopk.regions import even_boundaries
from sparsync.collectives.sparcml.exchange import Call, StreamCollective, allgather_regions
from sparsync.errors import ConfigurationError
from sparsync.reduction import Reduction
from sparsync.sparse import SparseVector, Vector, fold
from sparsync.transports.communicator import Communicator
from sparsync.wire.base import HEADER_BYTES, Codec, MessageFraming
from sparsync.wire.streams import StreamCodec

__all__ = ["Dynamic", "split_allgather"]


@final
class Dynamic(StreamCollective):
    """Send each even region's entries to its owner, who folds them; allgather what that gives.

    A region travels sparse as long as its reduced entries are within the codec's limit, dense from
    then on; its header says which.  The total is dense if any region was.

    Args:
        codec: wire format; its dense part may quantise (``StreamCodec(dense=...)``).  What it rounds
            off an entry is kept by the sender, what it rounds off a reduced one by the owner.
            Default: coo, dense from where that is shorter.
        op: as for ``StreamCollective``.
        cap: likewise.
        always_dense: regions travel dense, however few their entries (as published).
        local: codec of what ranks send to owners, which rounds the own share as well (SparCML's
            Algorithm 1, Q).  Default: that of the rest.
        keep_error: what ``local`` rounds away is kept by the sender; False: it is lost, as published.

    Cost: P - 1 + ceil(log2 P) messages.  Dense:
    ``L2 + (P - 1) / P N beta_d <= T <= L2 + k beta_s + (P - 1) / P N beta_d`` with
    ``L2 = (P - 1) alpha + log2(P) alpha``; sparse, received:
    ``L2 + 2 (P - 1) / P k beta_s <= T <= L2 + P k beta_s``, from supports equal and spread evenly to
    disjoint ones, each in one region (section 5.3.2).  The dissemination sends a region that is much
    larger than the others up to ceil(log2 P) times.
    State: none.
    Differs from the paper: regions stay sparse where that is shorter; left folds in rank order; any
    P.  With one rank nothing travels, and the total stays sparse.

    Example:
        >>> import torch; from sparsync import DenseVector; from sparsync.transports.sim import simulate
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
        super().__init__(codec, op, cap)
        if local is not None and self.operation.name != "sum":
            raise ConfigurationError(
                f"Dynamic: local={local!r} rounds, as only sums may be, not '{self.operation.name}'; "
                "omit it"
            )
        self.always_dense, self.keep_error = always_dense, keep_error
        self.local = None if local is None else StreamCodec(local, factor=None)

    def cost(self, job: Job) -> Cost:
        """Return the cost of two sparse halves (section 5.3.2), or of a dense second one (5.3.3).

        Dense: ``n (P - 1) / P`` to ``2 k + n (P - 1) / P`` words.

        Example:
            >>> cost = Dynamic().cost(Job(10**6, 100_000, 8, result=800_000))
            >>> cost.words < 2 * 100_000 + 10**6 * 7 / 8
            True
            >>> split_allgather().cost(Job(10**6, 1000, 8, result=1000)).words  # 4 k (P - 1) / P
            3528.0
        """
        local = None if self.local is None else self.local.sparse
        limit = self.codec.limit(job.size, torch.float32)
        if not self.always_dense and (limit is None or job.summed <= limit):
            return _cost(job, local)
        whole = self.codec.dense.nbytes(job.size, job.size) - HEADER_BYTES
        placed = WORD_BYTES * job.size * job.share
        return _cost(job, local, dense=whole) + Cost(0, 0, dense_bytes=placed)

    async def total(self, call: Call) -> Vector:
        """Split, fold, choose the form, allgather."""
        boundaries = even_boundaries(call.size, call.comm.world_size)
        region = await _split_and_fold(call, boundaries, self.local, keep_error=self.keep_error)
        region = call.densify(region) if self.always_dense else call.settle(region)
        return await allgather_regions(call, region, boundaries, dense=self.always_dense)


def split_allgather(
    codec: StreamCodec | None = None, *, op: str | Reduction = "sum", cap: float | None = 1.0
) -> Dynamic:
    """Return SSAR_Split_allgather (section 5.3.2): regions stay sparse, however many their entries.

    Args:
        codec: wire format; only its sparse part is used.
        op: as for ``Dynamic``.
        cap: likewise.
    """
    return Dynamic(StreamCodec(codec.sparse if codec else None, factor=None), op=op, cap=cap)


async def _split_and_fold(
    call: Call,
    boundaries: Sequence[int],
    local: StreamCodec | None,
    *,
    keep_error: bool,
) -> Vector:
    """Return the left fold, in rank order, of this rank's region; sparse.

    Where a native call would pad each message to the longest possible, they go from point to point.

    Args:
        call: with a sparse contribution.
        boundaries: P + 1 ascending cuts of ``[0, size)``; rank r owns ``[b[r], b[r + 1])``.
        local: another codec than the call's; it rounds this rank's own region as well.
        keep_error: this rank keeps what that rounds away; False: it is lost.

    Cost: P - 1 messages; the entries outside this rank's region are sent, those inside received.
    """
    comm, mine, codec = call.comm, call.mine, local or call.codec
    assert isinstance(mine, SparseVector)
    pieces: list[Vector] = [*mine.split(boundaries)]
    payloads = []
    for dest, (piece, start) in enumerate(zip(pieces, boundaries, strict=False)):
        if dest == comm.rank and local is None:
            payloads.append(mine.values.new_empty(0, dtype=torch.uint8))  # it stays, as it is
            continue
        encoded = call.encode(piece, dest, start=start, codec=codec, lose=not keep_error)
        pieces[dest] = encoded.decoded
        payloads.append(encoded.payload)
    width = pieces[comm.rank].size
    most = codec.sparse.nbytes(min(call.most, width), width, call.dtype)
    capacities, framing = [most] * comm.world_size, MessageFraming(codec)
    if comm.pads:
        messages = await Communicator.alltoallv(comm, payloads, capacities, "split", framing)
    else:
        messages = await comm.alltoallv(payloads, capacities, "split", framing)
    others = (message.numel() for rank, message in enumerate(messages) if rank != comm.rank)
    await comm.work(sum(others))
    shares = [
        pieces[rank] if rank == comm.rank else call.decode(message, width, codec)
        for rank, message in enumerate(messages)
    ]
    with comm.stage("unpack"):
        return fold(shares, call.operation)


def _cost(job: Job, local: Codec[SparseVector] | None, dense: float | None = None) -> Cost:
    """Return the cost of splitting k entries, folding, and gathering the regions of the result.

    Args:
        job: the exchange; entries are spread evenly over the regions.
        local: wire format of the first half; None: coo.
        dense: bytes of the result, where it is dense.
    """
    peers, ranks = job.world_size - 1, job.world_size
    piece = HEADER_BYTES + ENTRY_BYTES * job.k / ranks
    if local is not None:
        piece = local.nbytes(round(job.k / ranks), -(-job.size // ranks))
    entries = job.summed if dense is None else 0.0
    body = ENTRY_BYTES * entries if dense is None else dense
    nbytes = peers * piece + peers * (HEADER_BYTES + body / ranks)
    split, turns = job.k * job.share, 1 + job.rounds
    encoded, decoded = split + entries / ranks, split + entries * job.share
    return Cost(peers + job.rounds, nbytes, encoded=encoded, decoded=decoded, turns=turns)
