"""Digest tensors, numbers and mappings of them, independently of the order of keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["sha"]

_DIGITS = 12


def sha(value: Any) -> str:
    """Return a digest that differs if any bit, key or number differs."""
    digest = hashlib.sha256()
    for piece in _walk(value):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()[:_DIGITS]


def _walk(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {list(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _walk(value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield f"sequence {len(value)}".encode()
        for item in value:
            yield from _walk(item)
    elif value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype):
        yield repr(value).encode()
    else:
        raise TypeError(f"no digest of {type(value).__name__}: give tensors, numbers and names")
