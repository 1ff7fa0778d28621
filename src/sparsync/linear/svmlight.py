"""Lines of an svmlight / libsvm file: ``label [qid:q] index:value index:value ... [# comment]``.

scikit-learn's compiled loader parses; where it refuses a block, or lets through what is not finite,
the lines are read again one by one, to say which of them is wrong and why.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sparsync.errors import ConfigurationError
from sparsync.linear.rows import Rows, narrowed, optional

__all__ = ["INDEX_BASE", "parse_block", "parse_line", "parse_lines"]

INDEX_BASE = 1  # subtracted from what the file says; most files count from 1
_SHOWN = 40  # characters of a bad token that a message quotes


def parse_block(text: bytes, *, place: Callable[[int], str]) -> Rows:
    r"""Parse whole lines; indices come back less ``INDEX_BASE``, so an index 0 comes back as -1.

    Args:
        text: lines, each with its end.
        place: says where a line of this text is (``file:line``), from its 0-based number in it.

    Raises:
        ConfigurationError: a line is malformed; named by ``place``.

    Cost: about 40 MB of text, or 3 million pairs, per second of one core (measured).

    Example:
        >>> rows = parse_block(b"+1 3:0.5 7:1 # first\n-1 1:2\n", place=str)
        >>> rows.labels, rows.indices, rows.values
        (array([ 1., -1.]), array([2, 6, 0], dtype=int32), array([0.5, 1. , 2. ], dtype=float32))
    """
    load = optional("sklearn.datasets").load_svmlight_file
    try:
        matrix, labels = load(io.BytesIO(text), dtype=np.float32, zero_based=True)
    except (ValueError, OverflowError):  # malformed, or an index that it holds in 32 bits
        return parse_lines(text, place=place)
    if not (np.isfinite(matrix.data).all() and np.isfinite(labels).all()):
        return parse_lines(text, place=place)
    pointers = matrix.indptr.astype(np.int64)
    return Rows(labels, pointers, narrowed(matrix.indices - INDEX_BASE), matrix.data)


def parse_lines(
    text: bytes, *, place: Callable[[int], str], lowest: int = 0, highest: float = math.inf
) -> Rows:
    """Parse as ``parse_block`` does, slowly, and hold every index to a range.

    Args:
        text: lines, each with its end.
        place: see ``parse_block``.
        lowest: smallest index that may be written in the file.
        highest: largest.

    Raises:
        ConfigurationError: a line is malformed or has an index out of range.
    """
    rows = []
    for number, line in enumerate(text.split(b"\n")):
        try:
            row = parse_line(line, lowest=lowest, highest=highest)
        except ConfigurationError as error:
            raise ConfigurationError(f"{place(number)}: {error}") from None
        if row:
            rows.append(row)
    indices = [[index - INDEX_BASE for index in row[1]] for row in rows]
    return Rows.of_lists([row[0] for row in rows], indices, [row[2] for row in rows])


def parse_line(
    line: bytes, *, lowest: int = 0, highest: float = math.inf
) -> tuple[float, list[int], list[float]] | None:
    """Parse one line into label, indices (as written) and values; None if it holds no sample.

    Raises:
        ConfigurationError: what came and what was expected; does not say where.

    Example:
        >>> parse_line(b"-1 qid:4 2:0.5 9:1e-3 # comment")
        (-1.0, [2, 9], [0.5, 0.001])
        >>> parse_line(b"-1 2:0.5 2:1")
        Traceback (most recent call last):
        ...
        sparsync.errors.ConfigurationError: index 2 follows 2; expected ascending indices, each once
    """
    tokens = line.split(b"#", 1)[0].split()
    if not tokens:
        return None
    label = _number(tokens[0], float)
    if label is None or not math.isfinite(label):
        raise ConfigurationError(f"label {_quoted(tokens[0])}; expected a finite number")
    pairs = tokens[1:]
    if pairs and pairs[0].startswith(b"qid") and b":" in pairs[0]:
        del pairs[0]
    indices: list[int] = []
    values: list[float] = []
    for pair in pairs:
        index, value = _parse_pair(pair)
        if not lowest <= index <= highest:
            raise ConfigurationError(
                f"index {index} in {_quoted(pair)}; expected an index "
                + (f"from {lowest} to {highest}" if highest < math.inf else f">= {lowest}")
            )
        if indices and index <= indices[-1]:
            raise ConfigurationError(
                f"index {index} follows {indices[-1]}; expected ascending indices, each once"
            )
        indices.append(index)
        values.append(value)
    return label, indices, values


def _parse_pair(pair: bytes) -> tuple[int, float]:
    left, colon, right = pair.partition(b":")
    index, value = _number(left, int), _number(right, float)
    if not colon or index is None or value is None:
        raise ConfigurationError(f"pair {_quoted(pair)}; expected index:value, such as 17:0.5")
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(value)):
            raise ConfigurationError(
                f"value {_quoted(right)} of index {index}; expected a finite float32"
            )
    return index, value


def _number(token: bytes, kind: Any) -> Any:
    try:
        return kind(token)
    except ValueError:
        return None


def _quoted(token: bytes) -> str:
    text = token.decode(errors="replace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
