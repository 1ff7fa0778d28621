"""The life of an update: the outer step, its settings, and the engine of ``attach`` for AdamW."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from sparsync.updates.family import OUTER_SETTINGS
from sparsync.updates.outer_averager import OuterAverager
from sparsync.updates.periods import AdaptivePeriod
from sparsync.updates.settings import OuterStep

__all__ = ["OUTER_SETTINGS", "ROWS", "AdaptivePeriod", "OuterAverager", "OuterStep"]

ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {"schemes": {name: partial(OuterAverager, **given) for name, given in OUTER_SETTINGS.items()}}
)
