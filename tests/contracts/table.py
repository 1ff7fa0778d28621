"""The table of everything: a new algorithm adds one row, and every contract runs over it."""

from collections.abc import Collection
from functools import partial

import pytest

from sparsync import testing
from sparsync.averaging import (
    OUTER_SETTINGS,
    AdPsgd,
    AllreduceAverage,
    Dpsgd,
    EagerSgd,
    LocalSgd,
    OuterStep,
    Sgp,
    Wagma,
)
from sparsync.collectives import (
    Allgather,
    Budgeted,
    Dense,
    Dynamic,
    GTopk,
    Halving,
    OkTopk,
    QuantizedAllgather,
    RecursiveDoubling,
    Ring,
    SparcmlAuto,
    SplitAllgather,
)
from sparsync.planning.machine import Machine
from sparsync.presets import (
    Algorithm,
    allgather,
    auto,
    budgeted,
    dense,
    dynamic,
    gaussiank,
    gtopk,
    halving,
    oktopk,
    oktopk_paper,
    recursive_doubling,
    redsync,
    redsync_quantized,
    ring,
    ring_dense,
    signs,
    sparcml,
    sparcml_auto,
    split_allgather,
    topkdsa,
)
from sparsync.selection import (
    BinarySearch,
    Bins,
    Blockwise,
    BySize,
    Everything,
    Exact,
    GaussianK,
    Layered,
    OneSigned,
    Reused,
    Sampled,
    Trimmed,
)
from sparsync.transports.base import Communicator
from sparsync.wire import Coo, Packed, Qsgd, SignMean, Signs, SparseQsgd, StreamCodec

SELECTORS = {
    "everything": Everything,
    "exact": Exact,
    "reused": Reused,
    "reused, no cap": partial(Reused, cap=None),
    "blockwise": Blockwise,
    "trimmed": Trimmed,
    "by size, trimmed": partial(BySize, 0),
    "layered": partial(Layered, Exact),
}

# these do not promise exactly min(k, nnz) entries
INEXACT_SELECTORS = {
    "blockwise, blocks of 7": partial(Blockwise, block=7),
    "blockwise, 2 of 16": partial(Blockwise, 2, 16),
    "gaussian": GaussianK,
    "binary search": BinarySearch,
    "binary search, reused": partial(BinarySearch, reuse_period=5),
    "by size, searched": partial(BySize, 0, 0, 0),
    "sampled": Sampled,
    "sampled, a tenth": partial(Sampled, 0.1, least=1),
    "bins": Bins,
    "bins of 7": partial(Bins, 7, 1.2),
    "one-signed": lambda: OneSigned(Exact()),
    "layered, one-signed": lambda: Layered(lambda: OneSigned(Trimmed())),
}

CODECS = {
    "coo": Coo(),
    "packed": Packed(),
    "packed, int8": Packed("int8"),
    "packed, int8, blocks of 7": Packed("int8", block=7),
    "packed, fp32": Packed("fp32"),
    "qsgd, 8 bits": SparseQsgd(8),
    "qsgd, max": SparseQsgd(4, scale="max"),
    "qsgd, shrunk": SparseQsgd(4, shrink=True),
    "qsgd, 2 bits, shrunk": SparseQsgd(2, shrink=True),
}

# unbiased, but their error may exceed the vector: nobody may keep it
EXPANSIVE_CODECS = {"qsgd, 2 bits": SparseQsgd(2), "qsgd, 4 bits": SparseQsgd(4)}

# NaN and Inf spread over their layer
SPREADING_CODECS = {"sign-mean": SignMean(), "sign-mean, packed": SignMean("packed")}

PUBLISHED = {"boundaries": "average", "global_threshold": "allgather", "cap": None}
COLLECTIVES = {
    "allgather": Allgather,
    "allgather, no cap": partial(Allgather, cap=None),
    "oktopk": OkTopk,
    "oktopk, cap 2": partial(OkTopk, cap=2.0),
    "oktopk, no cap": partial(OkTopk, cap=None),
    "oktopk, as published": partial(OkTopk, **PUBLISHED),
    "oktopk, allgathered threshold, cap": partial(OkTopk, global_threshold="allgather"),
    "oktopk, periods of 2": partial(OkTopk, repartition_period=2, threshold_period=2, **PUBLISHED),
    "oktopk, no rotation, one at a time": partial(OkTopk, rotate=False, window=1),
    "oktopk, all at once": partial(OkTopk, window=None),
    "oktopk, even regions": partial(OkTopk, balanced_split=False),
    "oktopk, never balanced": partial(OkTopk, balance=False),
    "oktopk, always balanced": partial(OkTopk, balance_trigger=1.0),
    "split-allgather": SplitAllgather,
    "split-allgather, no cap": partial(SplitAllgather, cap=None),
    "topkdsa": Dynamic,
    "topkdsa, dense from delta / 4": partial(Dynamic, StreamCodec(factor=0.25)),
    "dynamic": partial(Dynamic, always_dense=True),
    "quantized-allgather": QuantizedAllgather,
    "quantized-allgather, blocks of 7": partial(QuantizedAllgather, Signs(7)),
}

# sums of these are trees that P fixes, not left folds
TREE_COLLECTIVES = {
    "recursive-doubling": RecursiveDoubling,
    "recursive-doubling, no cap": partial(RecursiveDoubling, cap=None),
    "recursive-doubling, always sparse": partial(RecursiveDoubling, StreamCodec(factor=None)),
    "ring": Ring,
    "ring, no cap": partial(Ring, cap=None),
    "sparcml-auto": SparcmlAuto,
    "sparcml-auto, no cap": partial(SparcmlAuto, cap=None),
}

ALGORITHMS = {
    "budgeted": budgeted(),
    "budgeted, coo": budgeted(codec=Coo()),
    "budgeted, int8": budgeted(codec=Packed("int8")),
    "halving": halving(),
    "halving, int8": halving(codec=Packed("int8")),
    "dense": dense(),
    "auto": auto(check_period=None),
    "auto, slow links": auto(machine=Machine(beta=1e-6), check_period=None),
    "allgather": allgather(),
    "recursive-doubling": recursive_doubling(),
    "split-allgather": split_allgather(),
    "dynamic": dynamic(),
    "topkdsa": topkdsa(),
    "ring": ring(),
    "ring-dense": ring_dense(),
    "gtopk": gtopk(),
    "gaussiank": gaussiank(),
    "signs": signs(),
    "sparcml-auto": sparcml_auto(),
    "sparcml": sparcml(),
    "sparcml, error kept": sparcml(keep_error=True),
    "sparcml, reduced": sparcml(quantize="reduced"),
    "sparcml, not quantised": sparcml(bits=None),
    "redsync": redsync(),
    "redsync, search": redsync(thsd2=0),
    "redsync-quantized": redsync_quantized(),
    "redsync-quantized, as published": redsync_quantized(thsd2=0, cap=None, keep_error=False),
    "oktopk": oktopk(),
    "oktopk, period 2": oktopk(threshold_period=2, repartition_period=2),
    "oktopk-paper": oktopk_paper(),
    "oktopk, allgathered threshold, cap": oktopk(
        global_threshold="allgather", balanced_split=False, threshold_period=2
    ),
    "oktopk, exact selection": Algorithm("oktopk-exact", Exact, OkTopk),
}

AVERAGERS = {
    "allreduce": AllreduceAverage,
    "local": partial(LocalSgd, period=4),
    "dpsgd": Dpsgd,
    "dpsgd, twice": partial(Dpsgd, mixing_steps=2),
    "sgp": Sgp,
    "sgp, 2 neighbours": partial(Sgp, neighbours=2),
    "wagma": Wagma,
    "adpsgd": AdPsgd,
    "eager, solo": partial(EagerSgd, quorum="solo"),
    "eager, majority": EagerSgd,
    "wagma, synchronous": partial(Wagma, grouping="synchronous", sync_period=None),
    "wagma, fixed groups": partial(Wagma, dynamic=False),
    "outer step, dense": partial(OuterStep, algorithm="allgather", density=1.0, period=3),
}

# their mean moves: an outer optimizer, or what compression keeps back
DRIFTING_AVERAGERS = {
    "bmuf": partial(OuterStep, **{**OUTER_SETTINGS["bmuf"], "period": 4}),
    "wagma, int8": partial(Wagma, values="int8"),
    "wagma, synchronous, bf16": partial(Wagma, grouping="synchronous", values="bf16"),
    "qsparse-local": partial(OuterStep, **{**OUTER_SETTINGS["qsparse-local"], "period": 3}),
    "diloco": partial(OuterStep, **{**OUTER_SETTINGS["diloco"], "period": 3}),
}

# sums of these are left folds, too, but rounding errors are subtracted from them
ROUNDING_COLLECTIVES = {
    "budgeted": Budgeted,
    "budgeted, coo": partial(Budgeted, Coo()),
    "budgeted, fp32": partial(Budgeted, Packed("fp32")),
    "budgeted, int8": partial(Budgeted, Packed("int8")),
    "halving": Halving,
    "halving, coo": partial(Halving, Coo()),
    "halving, int8": partial(Halving, Packed("int8")),
    "allgather, sign-mean": partial(Allgather, SignMean()),
    "allgather, sign-mean, error lost": partial(Allgather, SignMean("packed"), keep_error=False),
    "allgather, qsgd": partial(Allgather, SparseQsgd(4, shrink=True)),
    "gtopk": GTopk,
    "gtopk, qsgd": partial(GTopk, SparseQsgd(4, shrink=True)),
    "recursive-doubling, bf16": partial(RecursiveDoubling, StreamCodec(Packed())),
    "split-allgather, bf16": partial(SplitAllgather, StreamCodec(Packed())),
    "topkdsa, bf16": partial(Dynamic, StreamCodec(Packed())),
    "dynamic, qsgd": partial(Dynamic, StreamCodec(dense=Qsgd(8)), always_dense=True),
    "ring, bf16": partial(Ring, StreamCodec(Packed())),
    "dynamic, local qsgd": partial(Dynamic, cap=None, local=SparseQsgd(4), keep_error=False),
}

# Dense takes dense vectors, and its sums are trees of the circulant graph, not left folds
DENSE_COLLECTIVES = {"dense": Dense, "ring-dense": partial(Ring, cap=None, dense=True)}

ROWS = {
    **{name: (make, {}) for name, make in COLLECTIVES.items()},
    **{name: (make, {"rank_ordered": False}) for name, make in TREE_COLLECTIVES.items()},
    **{name: (make, {"rounding": True}) for name, make in ROUNDING_COLLECTIVES.items()},
    **{
        name: (make, {"dense": True, "rank_ordered": False})
        for name, make in DENSE_COLLECTIVES.items()
    },
}

# what runs on real ranks as well: one row per way to communicate
ON_REAL_RANKS = [
    "allgather",
    "oktopk",
    "quantized-allgather",
    "split-allgather",
    "topkdsa",
    "recursive-doubling",
    "ring",
    "ring-dense",
    "gtopk",
    "sparcml-auto, no cap",
    "dynamic, local qsgd",
]


async def exercise(comm: Communicator, name: str) -> list[str]:
    """Run one row's contract on this rank; return its digests."""
    make, options = ROWS[name]
    return await testing.exercise_collective(comm, make, **options)


def rows(table: Collection[str], beside: Collection[str] = ()) -> list:
    """Return a table's names; "NAME, VARIANT" is slow where a "NAME" is there, or in ``beside``."""
    known = {*table, *beside}
    return [
        pytest.param(name, marks=pytest.mark.slow)
        if "," in name and name.partition(",")[0] in known
        else name
        for name in table
    ]
