"""What the busiest rank does in a step, by collective: a table of closed forms, a row for each.

Supports are taken to be random and independent: they overlap least of all that are not arranged to,
so sums fill in most.  Everything is the mean of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch

from sparsync.collectives.sparcml_auto import SparcmlAuto
from sparsync.planning import costs, packed_costs, sparcml_costs
from sparsync.planning.cost import WORD_BYTES, Cost, lower_bound_words
from sparsync.planning.redsync_costs import SelectionTimes
from sparsync.wire import Coo, Packed, SignMean, Signs, SparseQsgd
from sparsync.wire.base import Codec

__all__ = ["COLLECTIVES", "UNPREDICTABLE", "Form", "Job", "Work"]

_FUSED = 4 * 2**20  # bytes of gradient per message: the preset "redsync"'s
_SEARCHED = 4 * 2**20  # bytes of a layer from which it is searched (RedSync, section 5.4)
_BLOCK = 512  # elements of which "sparcml" selects some (SparCML, section 8.3)
_HOP_PASSES = (
    12  # halving, per entry received: merge, select again, note what is dropped; see below
)
_CHOICE_PASSES = 4  # oktopk, per entry of k: sort, histogram, and find what was delivered
# both ours: so many times as long as decoding takes, beside budgeted's work, at P = 4 and 8
_BUDGET_PASSES = 2  # budgeted, likewise
_PAIR_TURN = 2 / 3  # of a turn: a round in which a rank waits for one other (ours, likewise)
_COUNTS_TURN = 1 / 3  # of a turn: a round of counts, with next to no work (ours, likewise)
_GAUSSIAN_FOUND = 1.5  # entries over k under error feedback (ours, measured: 0.8 to 1.6)


class Job(NamedTuple):
    """What is exchanged: k entries of n elements by each of P ranks."""

    size: int
    k: int
    world_size: int

    @property
    def share(self) -> float:
        """(P - 1) / P: what of a vector is another rank's."""
        return (self.world_size - 1) / self.world_size

    @property
    def rounds(self) -> int:
        """``ceil(log2 P)``."""
        return (self.world_size - 1).bit_length()

    @property
    def summed(self) -> float:
        """Expected entries of the sum of P random supports (SparCML, appendix B)."""
        return sparcml_costs.union(self.k, self.size, self.world_size, "uniform")


class Work(NamedTuple):
    """What the busiest rank does.

    Attributes:
        cost: messages and bytes, one after the other.
        encoded: entries that it packs.
        decoded: entries that it unpacks and merges.
        dense_bytes: of dense vectors that it adds, or puts in their place.
        volume: the most that a rank sends or receives, where that is less than what goes one after
            the other.
        turns: how often it works, then waits for entries of others.
    """

    cost: Cost
    encoded: float = 0.0
    decoded: float = 0.0
    dense_bytes: float = 0.0
    volume: float | None = None
    turns: float = 0.0


class Form(NamedTuple):
    """A row of the table.

    Attributes:
        work: by the job.
        bound: words that no algorithm for the same result goes below: values alone in "Lemma 5.1" and
            "5.2" of SparCML, indices and values in Ok-Topk's "Theorem 3.1".
        equation: where the form comes from.
        whole: every element travels, whatever k is: nothing is selected.
    """

    work: Callable[[Job], Work]
    bound: Callable[[Job], float]
    equation: str
    whole: bool = False

    def result(self, job: Job) -> float:
        """Return the expected entries of the total: the k largest of the sum, or all of it."""
        return min(job.k, job.summed) if self.bound is _top_k else job.summed


# ---- lower bounds -----------------------------------------------------------------------------------


def _top_k(job: Job) -> float:
    """Theorem 3.1."""
    return lower_bound_words(job.k, job.world_size)


def _sum(job: Job) -> float:
    """Lemmas 5.1 and 5.2."""
    return sparcml_costs.sum_bound_words(job.k, job.size, job.world_size)


def _whole(job: Job) -> float:
    """Lemma 5.1 where k = n."""
    return sparcml_costs.lemma_5_1_words(job.size, job.world_size, disjoint=False)


# ---- work -------------------------------------------------------------------------------------------


def _dense(job: Job) -> Work:
    added = WORD_BYTES * job.size * job.share
    return Work(costs.dense(job.size, job.world_size), dense_bytes=added, turns=2)


def _ring_dense(job: Job) -> Work:
    cost = sparcml_costs.ring(job.k, job.size, job.world_size, dense=True)
    return _dense(job)._replace(cost=cost, turns=cost.messages)


def _allgather(job: Job, codec: Codec, *, found: float = 1.0, group_bytes: int = 0) -> Work:
    """Count ``found`` times k entries, in messages for ``group_bytes`` of gradient each; 0: in one."""
    groups = -(-WORD_BYTES * job.size // group_bytes) if group_bytes else 1
    entries = min(found * job.k, job.size)
    message = codec.nbytes(round(entries / groups), -(-job.size // groups))
    one = costs.allgatherv(message, job.world_size)
    peers = job.world_size - 1
    cost = Cost(groups * one.messages, groups * one.nbytes)
    return Work(cost, entries, peers * entries, turns=cost.messages)


def _doubling(job: Job) -> Work:
    cost = sparcml_costs.recursive_doubling(job.k, job.size, job.world_size)
    return _streams(cost)


def _ring(job: Job) -> Work:
    return _streams(sparcml_costs.ring(job.k, job.size, job.world_size))


def _streams(cost: Cost) -> Work:
    """Count what is sent as encoded once and decoded once."""
    entries = cost.nbytes / costs.ENTRY_BYTES
    return Work(cost, entries, entries, turns=cost.messages)


def _split_allgather(job: Job) -> Work:
    cost = sparcml_costs.split_allgather(job.k, job.size, job.world_size)
    return Work(cost, *_split_and_gathered(job, job.summed), turns=1 + job.rounds)


def _dynamic(job: Job, *, always_dense: bool = False, local: Codec | None = None) -> Work:
    cost = sparcml_costs.dynamic(
        job.k, job.size, job.world_size, always_dense=always_dense, local=local
    )
    if always_dense or costs.ENTRY_BYTES * job.summed > WORD_BYTES * job.size:
        placed = WORD_BYTES * job.size * job.share
        sums = _split_and_gathered(job, 0)
        return Work(cost, *sums, dense_bytes=placed, turns=1 + job.rounds)
    return Work(cost, *_split_and_gathered(job, job.summed), turns=1 + job.rounds)


def _sparcml_auto(job: Job) -> Work:
    auto = SparcmlAuto()
    name = auto.choose(job.k, job.summed, job.size, torch.float32, job.world_size)
    form = {
        "recursive-doubling": _doubling, "split-allgather": _split_allgather, "dynamic": _dynamic
    }[name]  # fmt: skip
    return form(job)


def _gtopk(job: Job) -> Work:
    """Both trees, in sequence: in each round of the first, one rank encodes and another decodes."""
    cost = sparcml_costs.gtopk(job.k, job.world_size)
    entries = (cost.messages / 2 + 1) * job.k
    return Work(cost, entries, entries, volume=cost.nbytes / 2, turns=cost.messages)


def _oktopk(job: Job, *, repartition_period: int = 64) -> Work:
    """Take the mean of a period's steps, of which one cuts regions anew (section 3.1.1: 64)."""
    usual = costs.oktopk(job.k, job.world_size)
    cuts = costs.histogram(job.k, job.world_size)
    encoded, decoded = _split_and_gathered(job, job.k)
    cost = _mean(usual, cuts, repartition_period)
    turns = 1 + job.rounds + _COUNTS_TURN * 3 * job.rounds  # of the histogram, and of counts
    return Work(cost, encoded, decoded + _CHOICE_PASSES * job.k, turns=turns)


def _oktopk_paper(job: Job, *, threshold_period: int = 32, repartition_period: int = 64) -> Work:
    """Take the mean of the steps, the exact ones among them; thresholds that are reused select k."""
    usual = costs.oktopk_paper(job.k, job.k, job.world_size)
    exact = costs.allgatherv(
        Coo().nbytes(round(job.summed / job.world_size), job.size), job.world_size
    )
    cuts = costs.allreduce(job.world_size - 1, job.world_size, costs.COUNT_BYTES)
    cost = _mean(_mean(usual, exact, threshold_period), cuts, repartition_period)
    encoded, decoded = _split_and_gathered(job, job.k)
    decoded += _CHOICE_PASSES * job.k + job.summed * job.share / threshold_period
    return Work(cost, encoded, decoded, turns=1 + (1 + _COUNTS_TURN) * job.rounds)


def _mean(usual: Cost, more: Cost, period: int) -> Cost:
    """Return the mean of steps of which one in ``period`` costs more."""
    return usual + Cost(more.messages / period, more.nbytes / period)


def _budgeted(job: Job) -> Work:
    cost = packed_costs.budgeted(job.k, job.size, job.world_size, codec=Packed())
    encoded, decoded = _split_and_gathered(job, job.k)
    return Work(cost, encoded, decoded + _BUDGET_PASSES * job.k, turns=2)


def _halving(job: Job) -> Work:
    cost = packed_costs.halving(job.k, job.size, job.world_size)
    return Work(
        cost, job.k, (_HOP_PASSES + 1) * job.k * job.share, turns=_PAIR_TURN * cost.messages
    )


def _signs(job: Job) -> Work:
    cost = packed_costs.quantized_allgather(job.size, job.world_size, codec=Signs())
    return Work(cost, job.size, (job.world_size - 1) * job.size, turns=cost.messages)


def _split_and_gathered(job: Job, result: float) -> tuple[float, float]:
    """Return the entries encoded and decoded to split k of them, and to gather the result's."""
    split = job.k * job.share
    return split + result / job.world_size, split + result * job.share


def _redsync(job: Job, codec: Codec) -> Work:
    """Take all for one large layer: a search finds more than k."""
    searched = WORD_BYTES * job.size >= _SEARCHED
    found = SelectionTimes().found if searched else 1.0
    return _allgather(job, codec, found=found, group_bytes=_FUSED)


def _sparcml(job: Job) -> Work:
    """Take all for one layer, of which every block gives equally many entries."""
    per_block = min(-(-job.k * _BLOCK // job.size), _BLOCK)
    rounded_up = job._replace(k=max(job.k, per_block * job.size // _BLOCK))
    return _dynamic(rounded_up, local=SparseQsgd(bits=4, scale="max"))


# ---- the table --------------------------------------------------------------------------------------


COLLECTIVES: MappingProxyType[str, Form] = MappingProxyType(
    {
        "dense": Form(_dense, _whole, "Ok-Topk, Table 1, Dense", whole=True),
        "ring-dense": Form(_ring_dense, _whole, "SparCML, section 8.1", whole=True),
        "allgather": Form(lambda job: _allgather(job, Coo()), _sum, "Ok-Topk, Table 1, TopkA"),
        "gaussiank": Form(
            lambda job: _allgather(job, Coo(), found=_GAUSSIAN_FOUND),
            _sum,
            "Ok-Topk, Table 1, Gaussiank",
        ),
        "recursive-doubling": Form(_doubling, _sum, "SparCML, section 5.3.1"),
        "split-allgather": Form(_split_allgather, _sum, "SparCML, section 5.3.2"),
        "dynamic": Form(
            lambda job: _dynamic(job, always_dense=True), _sum, "SparCML, section 5.3.3"
        ),
        "topkdsa": Form(_dynamic, _sum, "Ok-Topk, Table 1, TopkDSA"),
        "ring": Form(_ring, _sum, "ours"),
        "sparcml-auto": Form(_sparcml_auto, _sum, "SparCML, section 5.3"),
        "gtopk": Form(_gtopk, _top_k, "Ok-Topk, Table 1, gTopk"),
        "oktopk": Form(_oktopk, _top_k, "Ok-Topk, Equations 1 and 2"),
        "oktopk-paper": Form(_oktopk_paper, _top_k, "Ok-Topk, Equation 3, if thresholds find k"),
        "budgeted": Form(_budgeted, _top_k, "ours"),
        "halving": Form(_halving, _top_k, "ours"),
        "redsync": Form(lambda job: _redsync(job, Coo()), _sum, "RedSync, Equation 1"),
        "redsync-quantized": Form(
            lambda job: _redsync(job, SignMean()), _sum, "RedSync, Equation 1"
        ),
        "sparcml": Form(_sparcml, _sum, "SparCML, section 5.3.3"),
        "signs": Form(_signs, _whole, "ours", whole=True),
    }
)

UNPREDICTABLE: MappingProxyType[str, str] = MappingProxyType(
    {"auto": "it is whichever of the others a plan chooses"}
)
"""Presets without a row, and why."""
