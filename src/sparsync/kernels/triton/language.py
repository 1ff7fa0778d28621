"""Triton's language, and how its kernels are launched.

Triton is optional: without it these modules can be imported, but no kernel can be launched.  Whether
kernels are compiled or interpreted is decided when Triton is imported: with ``TRITON_INTERPRET=1`` set by
then, they run on CPU tensors, slowly, in NumPy.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["BLOCK", "blocks_of", "cover", "installed", "jit", "launch", "tl"]

# elements of a program: four 16-byte loads of float32 in flight for each of its 128 threads
BLOCK: Final = 2048


def installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _untouched(function: Callable[..., Any]) -> Any:
    return function


jit: Any = _untouched
tl: Any = None
if installed():
    jit, tl = importlib.import_module("triton").jit, importlib.import_module("triton.language")


def blocks_of(n: int) -> int:
    """Return how many programs cover n elements; 0 programs launch nothing."""
    return -(-n // BLOCK)


def launch(kernel: Any, programs: int, first: Tensor, *arguments: object, **constants: int) -> None:
    """Run a kernel on the device of its first argument, behind what was launched there before."""
    with torch.cuda.device(first.device if first.is_cuda else -1):
        kernel[programs,](first, *arguments, **constants)


def cover(kernel: Any, n: int, first: Tensor, *arguments: object, **constants: int) -> None:
    """Launch as many programs as n elements take."""
    launch(kernel, blocks_of(n), first, *arguments, BLOCK=BLOCK, **constants)
