"""Stores a handle's state in checkpoints of ``torch.distributed.checkpoint`` (DCP).

Under the key ``rank-R-of-P``, every rank saves its residual, velocity and weights as tensors, and the
rest of its state as bytes.  The names and sizes of the tensors follow from the set-up.  Ranks use
different keys, because DCP would keep only one of several values under the same key.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from sparsync.checkpoint.files import Seat
from sparsync.checkpoint.save_load import (
    Saveable,
    Use,
    check_saveable,
    load_from,
    restore,
    seat_of,
)
from sparsync.errors import CheckpointError
from sparsync.state import packed, unpacked

__all__ = ["DistributedState"]

# DCP loads into tensors created by the loading program, so only values whose names and sizes are known in
# advance can be tensors.  The rest, such as thresholds, is stored as one string of bytes.
_REST: Final = "everything else"
_FIXED: Final = ("residual", "velocity", "parameters")
_KEY: Final = re.compile(
    rf"(?:.*\.)?rank-(\d+)-of-(\d+)(?:-part-(\d+)-of-(\d+))?\.{_REST}", re.DOTALL
)


@final
class DistributedState:
    """Wraps a handle returned by ``attach`` as a ``Stateful`` of DCP.

    ::

        weights, moments = get_state_dict(model, optimizer)  # torch.distributed.checkpoint.state_dict
        state = {"model": weights, "optimizer": moments, "sync": DistributedState(sync)}
        dcp.save(state, checkpoint_id=path)      # or async_save; all ranks
        dcp.load(state, checkpoint_id=path)      # as many ranks, the same shards; then set_state_dict
        state["sync"].read(path)                 # any number of ranks, any shards: left out of dcp.load

    Args:
        sync: the handle; do not pass it to DCP directly, because its keys are the same on all ranks.

    If the handle exchanges updates, its state includes every rank's weights and moments (``sync.holds``),
    so leave the optimizer out.  DCP reads its own metadata with pickle, which can run code: load only
    checkpoints that you trust.

    Cost: memory for n elements per rank, and for n more while they are copied.
    """

    def __init__(self, sync: Saveable) -> None:
        check_saveable(sync)
        self._sync = sync

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state, under a key that is unique to the rank."""
        state = self._sync.state_dict()
        self._fill(state["content"]["reducer"])
        tensors, rest = _apart(state)
        told = {"state": rest, "tensors": [list(path) for path in tensors]}
        named = {".".join(path): tensor.clone() for path, tensor in tensors.items()}
        return {seat_of(self._sync).text: {**named, _REST: bytes(packed(told))}}

    def _fill(self, state: dict[str, Any]) -> None:
        """Add zeros that a reducer's state omits before its first step, because DCP needs all tensors."""
        for what in ("residual", "velocity") if state["momentum"] else ("residual",):
            for unit in self._sync.reducer.units:
                wide = torch.promote_types(unit.dtype, torch.float32)
                for slot in unit.slots:
                    zeros = torch.zeros(slot.size, dtype=wide, device="cpu")
                    state[what].setdefault(slot.name, zeros)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that the same number of ranks saved; this is collective.

        Raises:
            ConfigurationError, CheckpointError: see ``sparsync.load``; nothing was changed.
        """
        items = state[seat_of(self._sync).text]
        restore(self._sync, lambda: _joined(items[_REST], items.__getitem__), "a DCP checkpoint")

    def read(self, source: str | os.PathLike[str] | StorageReader) -> None:
        """Resume from a checkpoint that any number of ranks saved, with any shards; this is collective.

        Residuals are distributed as ``sparsync.reshard`` does.

        Args:
            source: the ``checkpoint_id`` under which the checkpoint was saved, or a reader for it.

        Raises:
            ConfigurationError, CheckpointError: see ``sparsync.load``; nothing was changed.
        """
        load_from(self._sync, _Saved(source))


@final
class _Saved:
    """The states of all ranks in a checkpoint; see ``save_load.Source``."""

    def __init__(self, source: str | os.PathLike[str] | StorageReader) -> None:
        self._text = str(source) if isinstance(source, str | os.PathLike) else type(source).__name__
        self._reader = source if isinstance(source, StorageReader) else FileSystemReader(source)
        self._prefixes: dict[Seat, str] = {}
        self._metadata: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return self._text

    def seats(self) -> Collection[Seat]:
        """Return the seats of the saved states."""
        self._metadata = self._reader.read_metadata().state_dict_metadata
        found = {key: match for key in self._metadata if (match := _KEY.fullmatch(key))}
        self._prefixes = {Seat.of(match): key.removesuffix(_REST) for key, match in found.items()}
        if len(found) != len(self._prefixes):
            raise CheckpointError(f"{self} has states of several handles; save each on its own")
        return self._prefixes.keys()

    def check(self, seat: Seat) -> None:
        """Do nothing, because the files belong to ``torch.distributed.checkpoint``."""

    def read(self, seat: Seat, use: Use) -> dict[str, Any]:
        """Return a rank's state; if it is only checked, its tensors are zeros that take no memory."""
        # most residuals go to other ranks, so this rank checks their sizes but not their values
        prefix = self._prefixes[seat]

        def read(name: str) -> Any:
            saved = self._metadata[prefix + name]
            if name == _REST:
                return self._load(prefix + name, b"")
            if use == "check":
                return torch.zeros((), dtype=saved.properties.dtype, device="cpu").expand(
                    saved.size
                )
            return self._load(
                prefix + name, torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
            )

        return _joined(read(_REST), read)

    def _load(self, key: str, target: object) -> Any:
        items = {key: target}
        with warnings.catch_warnings():
            # DCP warns about no_dist, which is intended here: ranks read different keys independently
            warnings.simplefilter("ignore", UserWarning)
            load(items, storage_reader=self._reader, no_dist=True)
        return items[key]


def _apart(
    state: Mapping[str, Any], path: tuple[str, ...] = ()
) -> tuple[dict[tuple[str, ...], Tensor], dict[str, Any]]:
    """Return the tensors whose sizes the set-up determines, by path, and the state without them."""
    tensors, rest = {}, {}
    for key, value in state.items():
        here = (*path, key)
        if isinstance(value, Tensor) and path and path[-1] in _FIXED:
            tensors[here] = value
        elif isinstance(value, Mapping) and key in (*_FIXED, "content", "reducer"):
            deeper, rest[key] = _apart(value, here)
            tensors |= deeper
        else:
            rest[key] = value
    return tensors, rest


def _joined(raw: bytes, tensor: Callable[[str], Any]) -> dict[str, Any]:
    """Return the state that ``_apart`` has split, given the bytes and a lookup of tensors."""
    told = unpacked(raw)
    state: dict[str, Any] = told["state"]
    for path in told["tensors"]:
        inner = state
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = tensor(".".join(path))
    return state
