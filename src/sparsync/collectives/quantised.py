"""Quantised: a dense allreduce with few bits per element, in two rounds with error feedback."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor

from sparsync.collectives.collective import Collective, Reduced
from sparsync.collectives.costs import WORD_BYTES, Cost, Job, Result
from sparsync.sparse import DenseVector, Vector, run_length, runs
from sparsync.transports.communicator import Communicator
from sparsync.wire.codec import MessageFraming, Opened, check_dtype, written
from sparsync.wire.coo import Whole
from sparsync.wire.levels import LloydMax, difference_to, sum_to

__all__ = ["Quantised"]


@final
class Quantised(Collective):
    """Sums whole vectors at 1, 2, 3, 4, 8 or 16 bits per element; a rank's traffic does not grow with P.

    Every rank owns a region, which starts and ends at block boundaries.

    1. Every rank sends each owner its quantised part of the owner's region; the owner adds these parts to
       its own, unrounded part.
    2. Every owner sends the quantised sum to all ranks; the decoded sums are the total.

    The rank that rounds keeps the error in its residual: the sender in the first round, the owner in the
    second.

    Args:
        bits: bits per element: 1, 2, 3, 4 or 8 (see ``LloydMax``), or 16 for bf16 without scales.
        block: consecutive elements that share a scale.

    Cost: 2 (P - 1) messages in 2 rounds; 2 n (P - 1) / P elements of ``bits + 16 / block`` bits.
    State: none.   Differs from the paper: 1-bit Adam's two stages, but with Lloyd-Max levels, a scale per
    block, and both errors in one residual.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = DenseVector(torch.tensor([1.0, -1.0, 3.0]) * (comm.rank + 1))
        ...     reduced = await Quantised(bits=8).reduce(comm, mine, k=3, step=0)
        ...     return reduced.total.to_dense().round().tolist()
        >>> simulate(program, world_size=2).results
        [[3.0, -3.0, 9.0], [3.0, -3.0, 9.0]]

    References: Tang et al., 1-bit Adam, ICML 2021, section 4; Wang et al., ZeRO++, 2023 (4 bits, in
    two rounds, without feedback).
    """

    result: Result = "whole"
    order = "tree"
    by_runs = True

    def __init__(self, bits: int = 2, block: int = 256) -> None:
        self.codec = Whole(torch.bfloat16) if bits == 16 else LloydMax(bits, block=block)
        self.block = block

    def cost(self, job: Job) -> Cost:
        """Return ``2 (P - 1)`` messages of one region each; if regions differ, of the widest.

        Quantising reads and writes every element; received regions are added in both rounds.

        Example:
            >>> Quantised(bits=2, block=256).cost(Job(10**6, k=10, world_size=4)).words
            96747.0
        """
        peers, widest = job.world_size - 1, max(self._widths(job.size, job.world_size))
        sent = 2 * peers * self.codec.nbytes(widest, widest)
        passed = 2 * job.size + 2 * peers * widest
        added, together = WORD_BYTES * passed, 2 * (peers - 1)
        return Cost(2 * peers, sent, dense_bytes=added, turns=2, together=together)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float:
        """Return the words of ``cost``."""
        return self.cost(job).words

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Send regions to their owners, sum them there, and send the sums to all ranks."""
        if not isinstance(selected, DenseVector):
            selected = DenseVector(selected.to_dense())
        if comm.world_size == 1:
            # copy the total: it is used after the step, but a vector that is read by runs changes at the
            # end of the step
            return Reduced(DenseVector(selected.values), selected)
        codec, framing, rank = self.codec, MessageFraming(self.codec), comm.rank
        widths = self._widths(selected.size, comm.world_size)
        starts = [0, *accumulate(widths)]
        like = selected.run(0, 0)
        # a run consists of whole blocks, and its length is limited so that memory does not grow with n
        most = max(run_length(like) // codec.step, 1) * codec.step
        lengths = [codec.nbytes(width, width, like.dtype) for width in widths]
        with comm.stage("pack"):
            payloads = [like.new_empty(0, dtype=torch.uint8)] * comm.world_size
            for owner in range(comm.world_size):
                if owner != rank:
                    payloads[owner] = codec.blank(widths[owner], like)
                    write = codec.writer(payloads[owner])
                    for start, stop in runs(widths[owner], like, most):
                        low, high = starts[owner] + start, starts[owner] + stop
                        write(start, *selected.terms(low, high))
        # ``capacities[r]`` is the length of the longest message that rank r sends.  In this round, that
        # is the message for the widest region; in the second round, it is the one for rank r's own
        # region.
        messages = await comm.alltoallv(payloads, [max(lengths)] * len(lengths), "split", framing)
        with comm.stage("unpack"):
            await comm.work(sum(message.numel() for message in messages))
            theirs = [message for r, message in enumerate(messages) if r != rank]
            arrived = [self._opened(message, widths[rank], like) for message in theirs]
            others = _Sum(arrived, like)
            payload = codec.blank(widths[rank], like)
            write = codec.writer(payload)
            for start, stop in runs(widths[rank], like, most):
                low, high = starts[rank] + start, starts[rank] + stop
                whole = others.run(start, stop, *selected.terms(low, high))
                write(start, whole.to(like.dtype))
        messages = await comm.alltoallv([payload] * comm.world_size, lengths, "allgather", framing)
        with comm.stage("unpack"):
            await comm.work(sum(message.numel() for message in messages))
            pairs = zip(messages, widths, strict=True)
            opened = [self._opened(message, width, like) for message, width in pairs]
            finite = all(message.is_finite() for message in opened)
            total = _Coded(codec, opened, widths, like, most, finite=finite)
            # In its own region, a rank delivers the decoded sum minus the other ranks' parts.  All ranks'
            # parts then add up to the total, and the sum's rounding error is in this rank's residual.
            # 1-bit Adam stores this error separately, at the server.
            payloads[rank] = payload
            sent = [codec.open(p, w) for p, w in zip(payloads, widths, strict=True)]
            delivered = _Coded(codec, sent, widths, like, most, less=(rank, others))
        return Reduced(total, delivered)

    def _opened(self, message: Tensor, size: int, like: Tensor) -> Opened:
        """Check a message from another rank."""
        check_dtype(self.codec, message, like.dtype)
        return self.codec.open(message, size)

    def _widths(self, size: int, world_size: int) -> list[int]:
        """Return the number of elements in each region: whole blocks, except in the last."""
        # the elements of a block share one scale, so no block may be cut in two
        blocks = -(-size // self.block)
        cuts = [min(blocks * r // world_size * self.block, size) for r in range(world_size + 1)]
        return [high - low for low, high in pairwise(cuts)]


@final
class _Sum:
    """The sum of several ranks' messages for one region; runs are decoded on every access."""

    def __init__(self, messages: Sequence[Opened], like: Tensor) -> None:
        self.messages = messages
        self._like = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))

    def run(self, start: int, stop: int, *own: Tensor) -> Tensor:
        """Return elements ``[start, stop)`` of the sum: the messages in rank order, then ``own``.

        ``own`` is at most two vectors; if there are two, the first may be overwritten.
        """
        made = self._like.new_empty(stop - start)
        sum_to(made, self.messages, start, *own)
        return made


@final
class _Coded(DenseVector):
    """A vector kept as encoded messages, one per region; runs are decoded on every access.

    It needs little memory, and can be written, divided or subtracted in one pass.  In the region given in
    ``less``, the vector is the message minus the sum of several other messages.  ``finite`` asserts that
    no message contains NaN or Inf.
    """

    # On the CPU, writing a vector to new memory takes as long as seven passes over it, because the
    # system clears the pages one by one.  2-bit messages need a sixteenth of the memory (measured in
    # docs/design-notes.md).

    def __init__(
        self,
        codec: LloydMax | Whole,
        messages: Sequence[Opened],
        widths: Sequence[int],
        like: Tensor,
        most: int,
        less: tuple[int, _Sum] | None = None,
        *,
        finite: bool = False,
    ) -> None:
        self._codec, self._messages, self._widths = codec, messages, list(widths)
        self._like, self._most, self._less, self._finite = like, most, less, finite
        self._divisor = 1

    @functools.cached_property
    def values(self) -> Tensor:
        """All elements, decoded once and cached."""
        return self.run(0, self.size)

    @property
    def size(self) -> int:
        """The number of elements n."""
        return sum(self._widths)

    nnz = size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self._like.dtype

    def run(self, start: int, stop: int) -> Tensor:
        """Decode elements ``[start, stop)``."""
        made = self._like.new_empty(stop - start)
        self.write_to_(made, start)
        return made

    def write_to_(self, dense: Tensor, start: int = 0) -> None:
        """``dense = self``, in place; ``dense`` may be a run of the elements, from ``start`` on."""
        self._decode(dense, start, self._divisor)

    def subtract_from_(self, dense: Tensor, start: int = 0, plus: Tensor | None = None) -> None:
        """``dense = dense + plus - self``, in place; ``dense`` may be a run from ``start`` on."""
        self._decode(dense, start, -self._divisor, add=True, plus=plus)

    def _decode(
        self,
        dense: Tensor,
        start: int,
        divisor: int,
        *,
        add: bool = False,
        plus: Tensor | None = None,
    ) -> None:
        low, stop = 0, start + dense.numel()
        for rank, width in enumerate(self._widths):
            first, last = max(low, start), min(low + width, stop)
            if first >= last:
                low += width
                continue
            step = self._codec.step
            whole = (first - low) % step == 0 and ((last - low) % step == 0 or last == low + width)
            in_place = whole and self.dtype == dense.dtype == torch.float32
            # a region that is not decoded in place needs a buffer, which is small if runs are short
            most = width if in_place and not self._others(rank) else self._most
            for begin, end in runs(last - first, self._like, most):
                part = slice(first - start + begin, first - start + end)
                more = None if plus is None else plus[part]
                self._decode_run(
                    rank, first - low + begin, dense[part], divisor, add=add, plus=more
                )
            low += width

    def _others(self, rank: int) -> Sequence[Opened]:
        """Return the messages that are subtracted in a rank's region."""
        return self._less[1].messages if self._less is not None and self._less[0] == rank else ()

    def _decode_run(
        self, rank: int, start: int, into: Tensor, divisor: int, *, add: bool, plus: Tensor | None
    ) -> None:
        """Decode elements of a rank's region, beginning at ``start``, into ``into``."""
        width, step, others = self._widths[rank], self._codec.step, self._others(rank)
        stop = start + into.numel()
        first, last = start // step * step, min(-(-stop // step) * step, width)
        if (first, last) == (start, stop) and self.dtype == into.dtype == torch.float32:
            message = self._messages[rank]
            difference_to(into, message, others, start, divisor, add=add, plus=plus)
            return
        if plus is not None:
            into.add_(plus)
        made = self._like.new_empty(last - first)
        difference_to(made, self._messages[rank], others, first, 1.0, add=False)
        written(made[start - first : stop - first], into, divisor, add=add)

    def divide_(self, divisor: int) -> None:
        """``self /= divisor``."""
        # decoding applies the divisor from now on, but cached ``values`` would not be divided
        self._divisor *= divisor
        self.__dict__.pop("values", None)

    def first_nonfinite(self, dtype: torch.dtype | None = None) -> int | None:
        """Return the index of the first element that is NaN or Inf (in ``dtype`` if given), or None."""
        # bfloat16 has the range of float32, so finite values stay finite; float16 overflows above 65504
        known = self._finite and dtype != torch.float16
        return None if known else super().first_nonfinite(dtype)
