"""The table of everything: a new algorithm adds one row, and every contract runs over it."""

from functools import partial

from sparsync.averaging import AllreduceAverage, LocalSgd
from sparsync.collectives import Allgather, Budgeted, Dense, Halving, OkTopk
from sparsync.presets import (
    Algorithm,
    allgather,
    budgeted,
    dense,
    halving,
    oktopk,
    oktopk_paper,
)
from sparsync.selection import Everything, Exact, Reused
from sparsync.wire import Coo, Packed

SELECTORS = {
    "everything": Everything,
    "exact": Exact,
    "reused": Reused,
    "reused, no cap": partial(Reused, cap=None),
}

CODECS = {
    "coo": Coo(),
    "packed": Packed(),
    "packed, int8": Packed("int8"),
    "packed, int8, blocks of 7": Packed("int8", block=7),
    "packed, fp32": Packed("fp32"),
}

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
}

ALGORITHMS = {
    "budgeted": budgeted(),
    "budgeted, coo": budgeted(codec=Coo()),
    "budgeted, int8": budgeted(codec=Packed("int8")),
    "halving": halving(),
    "halving, int8": halving(codec=Packed("int8")),
    "dense": dense(),
    "allgather": allgather(),
    "oktopk": oktopk(),
    "oktopk, period 2": oktopk(threshold_period=2, repartition_period=2),
    "oktopk-paper": oktopk_paper(),
    "oktopk, allgathered threshold, cap": oktopk(
        global_threshold="allgather", balanced_split=False, threshold_period=2
    ),
    "oktopk, exact selection": Algorithm("oktopk-exact", Exact, OkTopk),
}

AVERAGERS = {"allreduce": AllreduceAverage, "local": partial(LocalSgd, period=4)}

# sums of these are left folds, too, but rounding errors are subtracted from them
ROUNDING_COLLECTIVES = {
    "budgeted": Budgeted,
    "budgeted, coo": partial(Budgeted, Coo()),
    "budgeted, fp32": partial(Budgeted, Packed("fp32")),
    "budgeted, int8": partial(Budgeted, Packed("int8")),
    "halving": Halving,
    "halving, coo": partial(Halving, Coo()),
    "halving, int8": partial(Halving, Packed("int8")),
}

# Dense takes dense vectors, and its sums are trees of the circulant graph, not left folds
DENSE_COLLECTIVES = {"dense": Dense}
