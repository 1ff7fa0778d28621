"""Tell the user on standard error about choices and waits.

A message must never end a job, even if standard error is closed (``2>&-``) or its reader is gone.
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
        prefix: the speaker, before a colon.

    Example:
        >>> from contextlib import redirect_stderr
        >>> with redirect_stderr(io.StringIO()) as said: say("exchanges updates")
        >>> said.getvalue()
        'sparsync: exchanges updates\n'
    """
    line = f"{prefix}: {message}\n"
    # AttributeError: standard error was closed before Python started, so ``sys.stderr`` is None;
    # ValueError: it was closed later
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()
        try:
            file = sys.stderr.fileno()
        except io.UnsupportedOperation:  # replaced, e.g. by a test or a notebook
            sys.stderr.write(line)
            return
        # the line is written unbuffered: if the pipe breaks, text left in the buffer makes the
        # process exit with code 120
        os.write(file, line.encode(sys.stderr.encoding, "backslashreplace"))
