"""Messages for people, on standard error: on choices that were made, and on waits.

No message is worth a job: standard error may be closed (``2>&-``), or its reader may be gone.
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
        message: the line, without its end.
        prefix: the speaker, before a colon.

    Example:
        >>> from contextlib import redirect_stderr
        >>> with redirect_stderr(io.StringIO()) as said: say("exchanges updates")
        >>> said.getvalue()
        'sparsync: exchanges updates\n'
    """
    line = f"{prefix}: {message}\n"
    # AttributeError: it was closed when Python started, and is None; ValueError: it has been closed since
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()
        try:
            file = sys.stderr.fileno()
        except io.UnsupportedOperation:  # replaced, as by a test or a notebook
            sys.stderr.write(line)
            return
        # past the buffer: if the pipe breaks, text that is left in it would end the process with code 120
        os.write(file, line.encode(sys.stderr.encoding, "backslashreplace"))
