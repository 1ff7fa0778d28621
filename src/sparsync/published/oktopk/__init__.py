"""Ok-Topk: near-optimal sparse allreduce for distributed deep learning (Li & Hoefler, PPoPP 2022)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from sparsync.algorithm import Preset
from sparsync.published.oktopk.allreduce import OkTopk, OkTopkState
from sparsync.published.oktopk.presets import oktopk, oktopk_paper
from sparsync.published.oktopk.reuse import Reused, ReusedState

__all__ = ["ROWS", "OkTopk", "OkTopkState", "Reused", "ReusedState", "oktopk", "oktopk_paper"]

_VOLUME = "Ok-Topk, Equations 1 and 2"
_PAPER = "Ok-Topk, Equation 3, if thresholds find k"

ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "algorithms": {
            "oktopk": Preset(oktopk, _VOLUME, planned=True, passes_on=OkTopk),
            "oktopk-paper": Preset(oktopk_paper, _PAPER, passes_on=OkTopk),
        },
        "selectors": {"reused": Reused},
    }
)
