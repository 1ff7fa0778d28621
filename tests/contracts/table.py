"""The table of all algorithms: the registries' rows, and variants of them. Every contract runs on it."""

from collections.abc import Collection
from functools import partial

import pytest

from sparsync import selection, testing
from sparsync.algorithm import Algorithm
from sparsync.averaging import LocalSgd
from sparsync.averaging.schemes import SCHEMES
from sparsync.collectives import Allgather, Budgeted, Halving, Quantised
from sparsync.cost.machine import Machine
from sparsync.presets import PRESETS, preset
from sparsync.published.baselines import Dpsgd, GTopk, Sgp
from sparsync.published.oktopk import OkTopk, Reused
from sparsync.published.redsync import BinarySearch, BySize, Layered, OneSigned, SignMean, Trimmed
from sparsync.published.sparcml import (
    Dynamic,
    RecursiveDoubling,
    Ring,
    SparcmlAuto,
    split_allgather,
)
from sparsync.published.wagma import Wagma
from sparsync.selection import Blockwise, Exact, Sampled
from sparsync.transports.communicator import Communicator
from sparsync.updates import OUTER_SETTINGS, AdaptivePeriod, OuterAverager
from sparsync.wire import CODECS as CODEC_ROWS
from sparsync.wire import Coo, Packed, Qsgd, SparseQsgd, StreamCodec

# selectors that do not guarantee exactly min(k, nnz) entries
_INEXACT = ("gaussian", "sampled", "binary search", "by size", "one-signed")

SELECTORS = {
    **{name: make for name, make in selection.SELECTORS.items() if name not in _INEXACT},
    "reused, no cap": partial(Reused, cap=None),
    "reused, auto": partial(Reused, "auto"),
    "reused, auto, no cap": partial(Reused, "auto", cap=None),
    "by size, trimmed": partial(BySize, 0),
    "by size, exact": partial(BySize, 0, 2**20),
}

INEXACT_SELECTORS = {
    **{name: selection.SELECTORS[name] for name in _INEXACT},
    "blockwise, blocks of 7": partial(Blockwise, block=7),
    "blockwise, 2 of 16": partial(Blockwise, 2, 16),
    "binary search, reused": partial(BinarySearch, reuse_period=5),
    "binary search, reused, no cap": partial(BinarySearch, reuse_period=5, cap=None),
    "by size, searched": partial(BySize, 0, 0, 0),
    "sampled, a tenth": partial(Sampled, 0.1, least=1),
    "layered, one-signed": lambda: Layered(lambda: OneSigned(Trimmed())),
}

# unbiased codecs, whose error may exceed the vector and must not be kept in a residual
EXPANSIVE_CODECS = {"qsgd": CODEC_ROWS["qsgd"], "qsgd, 2 bits": SparseQsgd(2)}

# codecs in which NaN and Inf spread to the whole layer
SPREADING_CODECS = {
    "sign-mean": CODEC_ROWS["sign-mean"],
    "sign-mean, packed": SignMean("packed"),
}

# every other row whose vectors are sparse
_ELSEWHERE = {*EXPANSIVE_CODECS, *SPREADING_CODECS, "streams"}
CODECS = {
    **{n: c for n, c in CODEC_ROWS.items() if not c.is_dense and n not in _ELSEWHERE},
    "packed, int8, blocks of 7": Packed("int8", block=7),
    "qsgd, 8 bits": SparseQsgd(8),
    "qsgd, max": SparseQsgd(4, scale="max"),
    "qsgd, shrunk": SparseQsgd(4, shrink=True),
    "qsgd, 2 bits, shrunk": SparseQsgd(2, shrink=True),
}

# their collectives are variants of other rows' collectives, so only whole algorithms are checked
_WHOLE_ONLY = ("auto", "gaussiank", "redsync", "redsync-quantized", "sparcml")
_ROUNDING = ("budgeted", "halving", "gtopk", "quantised")

PUBLISHED = {"boundaries": "average", "global_threshold": "allgather", "cap": None}
COLLECTIVES = {
    **{
        name: row.make().make_collective
        for name, row in PRESETS.items()
        if name not in (*_WHOLE_ONLY, *_ROUNDING)
    },
    "allgather, no cap": partial(Allgather, cap=None),
    "oktopk, cap 2": partial(OkTopk, cap=2.0),
    "oktopk, no cap": partial(OkTopk, cap=None),
    "oktopk, as published": partial(OkTopk, **PUBLISHED),
    "oktopk, allgathered threshold, cap": partial(OkTopk, global_threshold="allgather"),
    "oktopk, periods of 2": partial(OkTopk, repartition_period=2, threshold_period=2, **PUBLISHED),
    "oktopk, no rotation, a bucket per message": partial(OkTopk, rotate=False, buckets=99),
    "oktopk, one bucket": partial(OkTopk, buckets=1),
    "oktopk, even regions": partial(OkTopk, balanced_split=False),
    "oktopk, never balanced": partial(OkTopk, balance=False),
    "oktopk, always balanced": partial(OkTopk, balance_trigger=1.0),
    "split-allgather, no cap": partial(split_allgather, cap=None),
    "topkdsa, dense from delta / 4": partial(Dynamic, StreamCodec(factor=0.25)),
    "recursive-doubling, no cap": partial(RecursiveDoubling, cap=None),
    "recursive-doubling, always sparse": partial(RecursiveDoubling, StreamCodec(factor=None)),
    "ring, no cap": partial(Ring, cap=None),
    "sparcml-auto, no cap": partial(SparcmlAuto, cap=None),
}


def variant(name: str, **options: object) -> Algorithm:
    """Return a preset with options; unlike ``resolve``, do not record the options in it."""
    return preset(name).make(**options)


ALGORITHMS = {
    **{name: row.make() for name, row in PRESETS.items()},
    "auto": variant("auto", check_period=None),
    "auto, slow links": variant("auto", machine=Machine(beta=1e-6), check_period=None),
    "budgeted, coo": variant("budgeted", codec=Coo()),
    "budgeted, int8": variant("budgeted", codec=Packed("int8")),
    "halving, int8": variant("halving", codec=Packed("int8")),
    "sparcml, error kept": variant("sparcml", keep_error=True),
    **{
        f"sparcml, reduced, {bits} bits, buckets of {block}": variant(
            "sparcml", quantize="reduced", bits=bits, quantization_block=block
        )
        for bits in (2, 4)
        for block in (512, 1024)
    },
    "sparcml, reduced, error kept": variant("sparcml", quantize="reduced", keep_error=True),
    "sparcml, not quantised": variant("sparcml", bits=None),
    "redsync, search": variant("redsync", thsd2=0),
    "redsync-quantized, as published": variant(
        "redsync-quantized", thsd2=0, cap=None, keep_error=False
    ),
    "quantised, 4 bits": variant("quantised", bits=4, block=64),
    "oktopk, period 2": variant("oktopk", threshold_period=2, repartition_period=2),
    "oktopk, allgathered threshold, cap": variant(
        "oktopk", global_threshold="allgather", balanced_split=False, threshold_period=2
    ),
    "oktopk, bf16": variant("oktopk", codec=Packed()),
    "oktopk, int8": variant("oktopk", codec=Packed("int8")),
    "oktopk, qsgd": variant("oktopk", codec=SparseQsgd(4, scale="max"), keep_error=False),
    "oktopk, qsgd, 2 bits, shrunk": variant("oktopk", codec=SparseQsgd(2, shrink=True)),
    "oktopk-paper, int8": variant("oktopk-paper", codec=Packed("int8")),
    "oktopk, exact selection": Algorithm("oktopk-exact", Exact, OkTopk),
}

AVERAGERS = {
    **{name: make for name, make in SCHEMES.items() if name not in OUTER_SETTINGS},
    "local": partial(LocalSgd, period=4),
    "dpsgd, twice": partial(Dpsgd, mixing_steps=2),
    "sgp, 2 neighbours": partial(Sgp, neighbours=2),
    "wagma, synchronous": partial(Wagma, grouping="synchronous", sync_period=None),
    "wagma, fixed groups": partial(Wagma, dynamic=False),
    "outer step, dense": partial(OuterAverager, algorithm="allgather", density=1.0, period=3),
}

# schemes that move the mean, by an outer optimizer or by entries that compression retains
DRIFTING_AVERAGERS = {
    **{name: partial(SCHEMES[name], period=3) for name in OUTER_SETTINGS},
    "outer step, adaptive": partial(
        OuterAverager, algorithm="quantised", density=1.0, period=AdaptivePeriod(0.3)
    ),
    "wagma, int8": partial(Wagma, values="int8"),
    "wagma, synchronous, bf16": partial(Wagma, grouping="synchronous", values="bf16"),
}

# collectives that subtract rounding errors or dropped sums from the delivered entries
ROUNDING_COLLECTIVES = {
    **{name: PRESETS[name].make().make_collective for name in _ROUNDING},
    "budgeted, coo": partial(Budgeted, Coo()),
    "budgeted, fp32": partial(Budgeted, Packed("fp32")),
    "budgeted, int8": partial(Budgeted, Packed("int8")),
    "halving, coo": partial(Halving, Coo()),
    "halving, int8": partial(Halving, Packed("int8")),
    "allgather, sign-mean": partial(Allgather, SignMean()),
    "allgather, sign-mean, error lost": partial(Allgather, SignMean("packed"), keep_error=False),
    "allgather, qsgd": partial(Allgather, SparseQsgd(4, shrink=True)),
    "quantised, 1 bit": partial(Quantised, 1),
    "quantised, 3 bits, blocks of 7": partial(Quantised, 3, 7),
    "quantised, 8 bits, blocks of 8": partial(Quantised, 8, 8),
    "quantised, 16 bits": partial(Quantised, 16, 64),
    "oktopk, bf16": partial(OkTopk, Packed()),
    "oktopk, int8": partial(OkTopk, Packed("int8")),
    "oktopk, int8, error lost": partial(OkTopk, Packed("int8"), keep_error=False),
    "oktopk, int8, always balanced": partial(OkTopk, Packed("int8"), balance_trigger=1.0),
    "oktopk, int8, as published": partial(OkTopk, Packed("int8"), **PUBLISHED),
    "oktopk, qsgd": partial(OkTopk, SparseQsgd(4, scale="max"), keep_error=False),
    "oktopk, qsgd, always balanced": partial(
        OkTopk, SparseQsgd(4), keep_error=False, balance_trigger=1.0
    ),
    "oktopk, qsgd, shrunk": partial(OkTopk, SparseQsgd(2, shrink=True)),
    "gtopk, qsgd": partial(GTopk, SparseQsgd(4, shrink=True)),
    "recursive-doubling, bf16": partial(RecursiveDoubling, StreamCodec(Packed())),
    "split-allgather, bf16": partial(split_allgather, StreamCodec(Packed())),
    "topkdsa, bf16": partial(Dynamic, StreamCodec(Packed())),
    "dynamic, qsgd": partial(Dynamic, StreamCodec(dense=Qsgd(8)), always_dense=True),
    "ring, bf16": partial(Ring, StreamCodec(Packed())),
    "dynamic, local qsgd": partial(Dynamic, cap=None, local=SparseQsgd(4), keep_error=False),
    "dynamic, qsgd, error lost": partial(
        Dynamic, StreamCodec(dense=Qsgd(2)), always_dense=True, keep_error=False
    ),
    "dynamic, local and reduced qsgd": partial(
        Dynamic, StreamCodec(dense=Qsgd(4)), local=SparseQsgd(4), cap=None, keep_error=False
    ),
}

ROWS = {
    **{name: (make, {}) for name, make in COLLECTIVES.items()},
    **{name: (make, {"rounding": True}) for name, make in ROUNDING_COLLECTIVES.items()},
}

# These rows also run on real ranks, one for each of a transport's calls (allgatherv, alltoallv,
# isend and irecv).  Other algorithms run on real ranks only in slow tests; the simulator runs all
# rows.
CALLS = ["allgather", "split-allgather", "gtopk"]
OTHERS = [
    "oktopk",
    "oktopk, always balanced",
    "quantised",
    "topkdsa",
    "recursive-doubling",
    "ring",
    "ring-dense",
    "sparcml-auto, no cap",
    "dynamic, local qsgd",
]


async def exercise(comm: Communicator, name: str) -> list[str]:
    """Run one row's contract on this rank; return its digests."""
    make, options = ROWS[name]
    return await testing.exercise_collective(comm, make, **options)


def rows(table: Collection[str]) -> list:
    """Return a table's names; "NAME, VARIANT" is marked slow if the table also has "NAME"."""
    return [
        pytest.param(name, marks=pytest.mark.slow)
        if "," in name and name.partition(",")[0] in table
        else name
        for name in table
    ]
