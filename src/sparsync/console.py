"""Tell the user on standard error about choices and waits.

A message must never end a job, even if standard error is closed (``2>&-``) or its reader has exited.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

__all__ = ["say"]


def say(message: str, prefix: str = "sparsync") -> None:
    r"""Write a line to standard error, and ignore errors.

    Args:
        message: the line, without the line break.
        prefix: the name before the colon.

    Example:
        >>> from contextlib import redirect_stderr
        >>> with redirect_stderr(io.StringIO()) as said: say("exchanges updates")
        >>> said.getvalue()
        'sparsync: exchanges updates\n'
    """
    line = f"{prefix}: {message}\n"
    # AttributeError is raised if standard error was closed before Python started, because ``sys.stderr``
    # is then None; ValueError is raised if it was closed later.
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()
        try:
            file = sys.stderr.fileno()
        except io.UnsupportedOperation:  # replaced, e.g. by a test or a notebook
            sys.stderr.write(line)
            return
        # The line is written without a buffer: if the pipe was broken, text left in a buffer would make
        # the process exit with code 120.
        os.write(file, line.encode(sys.stderr.encoding, "backslashreplace"))
