"""WAGMA-SGD: breaking (global) barriers by wait-avoiding group model averaging (Li et al., TPDS 2021)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from sparsync.published.wagma.scheme import Wagma

__all__ = ["ROWS", "Wagma"]

ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"schemes": {"wagma": Wagma}})
