"""What ``sparsync bench --selectors`` measures, checked before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from sparsync.errors import ConfigurationError
from sparsync.presets import check_density

__all__ = ["DEFAULT_SIZES", "SELECTOR_INPUTS", "SelectorSettings", "format_size", "parse_sizes"]

DEFAULT_SIZES: Final = "64KB,256KB,1MB,4MB,16MB,64MB,256MB,512MB"  # those of Figure 3
SELECTOR_INPUTS: Final = ("uniform", "normal", "residual")
_UNITS = MappingProxyType({"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30})


@dataclass(frozen=True)
class SelectorSettings:
    """What is measured: every selector at every size.

    Attributes:
        sizes: of the residual in bytes; float32.
        density: k / n (RedSync: 0.1 %).
        input: "uniform" on [0, 1) as in the figure; "normal"; or "residual": what some rounds of error
            feedback leave.
        device: "cpu" or "cuda".
        seed: of the residual and of the gradients.
        seconds: that a selector is repeated for, warm-up apart.
        repeats: at least so many, however long they take.
    """

    sizes: tuple[int, ...]
    density: float = 0.001
    input: str = "uniform"
    device: str = "cpu"
    seed: int = 0
    seconds: float = 0.3
    repeats: int = 3

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.input not in SELECTOR_INPUTS:
            raise ConfigurationError(
                f"unknown input {self.input!r}; choose one of {', '.join(SELECTOR_INPUTS)}"
            )
        there = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        if self.device not in there:
            raise ConfigurationError(
                f"--device is {self.device!r}; here it can be: {', '.join(there)}"
            )


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes in bytes, as "64KB,512MB"; 1 KB are 1,024 bytes.

    Example:
        >>> parse_sizes("64KB, 1MB")
        (65536, 1048576)
    """
    matches = [re.fullmatch(r"(\d+)\s*([KMG]B)", part.strip().upper()) for part in text.split(",")]
    sizes = tuple(int(match[1]) * _UNITS[match[2]] for match in matches if match)
    if len(sizes) < len(matches) or 0 in sizes:
        raise ConfigurationError(f"sizes is {text!r}; give bytes, with commas between, as 64KB,1MB")
    return sizes


def format_size(nbytes: int) -> str:
    """Write a size as ``parse_sizes`` reads it, in the largest unit that divides it.

    Example:
        >>> format_size(65536), format_size(1 << 29), format_size(1536 << 10)
        ('64 KB', '512 MB', '1536 KB')
    """
    unit = max((unit for unit in _UNITS if nbytes % _UNITS[unit] == 0), key=_UNITS.__getitem__)
    return f"{nbytes // _UNITS[unit]} {unit}"
