"""The command ``sparsync keys``: certificates for ranks that encrypt and authenticate each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sparsync.transports.zmq import make_curve_keys

__all__ = ["command"]

_Directory = Annotated[Path, typer.Argument(help="New folder for the keys.")]
_Ranks = Annotated[int, typer.Option(help="World size: one certificate per rank.")]


def command(directory: _Directory, ranks: _Ranks = 8) -> None:
    """Make one certificate per rank, for --curve-keys and curve_keys=.

    Every rank needs all public keys and its own secret one alone: copy the folder to each machine
    without the other ranks' secrets.
    """
    made = make_curve_keys(directory, ranks)
    Console().print(
        f"{len(made)} certificates in {directory}: rank R needs all .key files and rank-R.key_secret",
        highlight=False,
    )
