"""Ok-Topk's settings by name: bounded on every step, and as published."""

from __future__ import annotations

from typing import Any, Literal

from sparsync.algorithm import Algorithm
from sparsync.errors import ConfigurationError
from sparsync.published.oktopk.allreduce import OkTopk
from sparsync.published.oktopk.reuse import Reused

__all__ = ["oktopk", "oktopk_paper"]


def oktopk(
    *,
    threshold_period: int | Literal["auto"] = 32,
    cap: float | None = 1.0,
    floor: float | None = 2 / 3,
    **options: Any,
) -> Algorithm:
    """Ok-Topk with a volume that histograms and a cap bound on every step.

    The regions and the global threshold come from histograms.  The bound assumes that the ranks' supports
    do not change from one step to the next (the paper: within 64 steps), and that k / P >= 256.

    Args:
        threshold_period: tau', steps between exact local thresholds (paper, section 5.2: 32).  With
            "auto", each rank renews its threshold when its count leaves a band of 11 % around k.
        cap: at most ``cap * k`` entries are sent, locally and globally.
        floor: if fewer than ``floor * k`` local entries reach a step's threshold, the selection becomes
            exact.  None switches this off, as published.  Early in training, only 0.03 to 0.1 k entries
            reach a threshold that is reused for 32 steps (benchmarks/threshold-period.md).
        options: see ``sparsync.published.oktopk.OkTopk``.
    """
    if cap is not None and floor is not None:
        # with a cap below the floor, every step would be exact, so ``Reused`` refuses such a floor
        floor = min(floor, cap)
    if threshold_period != "auto":
        # Algorithm 1 uses one tau' for both the local (line 2) and the global threshold (line 9)
        options["threshold_period"] = threshold_period
    elif options.get("global_threshold", "histogram") != "histogram":
        raise ConfigurationError(
            "oktopk: threshold_period='auto' needs global_threshold='histogram', which is exact on "
            "every step; give a number of steps, or omit global_threshold"
        )
    return Algorithm(
        "oktopk",
        lambda: Reused(threshold_period, cap, floor),
        lambda: OkTopk(cap=cap, **options),
    )


def oktopk_paper(*, threshold_period: int = 32, **options: Any) -> Algorithm:
    """Ok-Topk as published: averaged boundaries, an allgathered threshold, and no cap.

    Args:
        threshold_period: tau' (paper, section 5.2: 32 for VGG and LSTM, 128 for BERT).
        options: see ``sparsync.published.oktopk.OkTopk``.  By default, tau is 64 (section 3.1.1) and the
            balance trigger is 4 (section 5.3).
    """
    published = {
        "boundaries": "average",
        "global_threshold": "allgather",
        "cap": None,
        "repartition_trigger": None,
    }
    return Algorithm(
        "oktopk-paper",
        lambda: Reused(threshold_period, cap=None),
        lambda: OkTopk(threshold_period=threshold_period, **{**published, **options}),
    )
