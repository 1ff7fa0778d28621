"""Where the numbers of a step go: a file of JSON lines, TensorBoard, or a function."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from sparsync.errors import ConfigurationError

__all__ = ["Calls", "JsonLines", "LogCall", "Scalars", "Sink", "Values", "sink_of"]

Values = Mapping[str, float]
LogCall = Callable[[int, dict[str, float]], object]


class Sink(ABC):
    """Takes the numbers of one step after the other."""

    @abstractmethod
    def write(self, step: int, values: Values) -> None:
        """Take the numbers of a step."""

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """Write what is still in memory."""


@final
class JsonLines(Sink):
    """One line of JSON per step, ``{"step": 0, "bytes_sent": ...}``, appended to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")  # a line is there when it ends

    def write(self, step: int, values: Values) -> None:
        """Append a line."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class Scalars(Sink):
    """TensorBoard's ``add_scalar(tag, value, step)``; tags are ``sparsync/threshold`` and the like.

    Args:
        writer: a ``SummaryWriter``, or what has that method.
        owned: close it at the end; else it is flushed, if it can be, and stays its owner's.
    """

    def __init__(self, writer: Any, *, owned: bool) -> None:
        self._writer, self._owned = writer, owned

    def write(self, step: int, values: Values) -> None:
        """Add every number."""
        for name, value in values.items():
            self._writer.add_scalar(f"sparsync/{name}", value, step)

    def close(self) -> None:
        """Close or flush the writer."""
        end = getattr(self._writer, "close" if self._owned else "flush", None)
        if end is not None:
            end()


@final
class Calls(Sink):
    """A function of the step and its numbers."""

    def __init__(self, call: LogCall) -> None:
        self._call = call

    def write(self, step: int, values: Values) -> None:
        """Call it."""
        self._call(step, dict(values))


def sink_of(log: Any, rank: int) -> Sink | None:
    """Return what writes to ``log``, as ``attach`` takes it; None for None.

    Every rank has a file, or run of TensorBoard, of its own: a rank that differs stands out as its own
    curve, ranks may log or not as they like, and nothing has to be told to anyone.  Lines are appended:
    a resumed run goes on in its file, and of a step that was repeated the last line counts.

    Args:
        log: a path that ends in ``.jsonl``: lines in ``name.rank0.jsonl``; any other path: a folder of
            TensorBoard's, with a run ``rank0``; what has ``add_scalar``; or a function.
        rank: of this process.

    Raises:
        ConfigurationError: nothing of it, or no TensorBoard.
    """
    if log is None:
        return None
    if isinstance(log, str | os.PathLike):
        path = Path(log)
        if path.suffix == ".jsonl":
            path.parent.mkdir(parents=True, exist_ok=True)
            return JsonLines(path.with_suffix(f".rank{rank}.jsonl"))
        return Scalars(_summary_writer(path / f"rank{rank}"), owned=True)
    if callable(getattr(log, "add_scalar", None)):
        return Scalars(log, owned=False)
    if callable(log):
        return Calls(log)
    raise ConfigurationError(
        f"log is {log!r}; give a path that ends in .jsonl, a folder for TensorBoard, an object with "
        "add_scalar(tag, value, step), or a function of (step, values)"
    )


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigurationError(
            f"log is a folder, {folder.parent}, which needs TensorBoard ({error}): pip install "
            "tensorboard, or give a path that ends in .jsonl"
        ) from error
    return SummaryWriter(str(folder))  # type: ignore[no-untyped-call, unused-ignore]
