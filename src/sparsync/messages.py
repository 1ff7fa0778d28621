"""Messages for people, on standard error: what was chosen, what is waited for.

No message is worth a job: standard error may be closed (``2>&-``), or its reader gone.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

__all__ = ["say"]


def say(message: str, prefix: str = "sparsync") -> None:
    r"""Write a line to standard error, if anybody reads it.

    Args:
        message: what is said, without a line's end.
        prefix: who or what says so.

    Example:
        >>> from contextlib import redirect_stderr
        >>> with redirect_stderr(io.StringIO()) as said: say("exchanges updates")
        >>> said.getvalue()
        'sparsync: exchanges updates\n'
    """
    line = f"{prefix}: {message}\n"
    # AttributeError: it was closed when Python started, and is None; ValueError: it was closed since
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()
        try:
            file = sys.stderr.fileno()
        except io.UnsupportedOperation:  # replaced, as by a test or a notebook
            sys.stderr.write(line)
            return
        # past the buffer: what a broken pipe leaves there would end the process with 120
        os.write(file, line.encode(sys.stderr.encoding, "backslashreplace"))
