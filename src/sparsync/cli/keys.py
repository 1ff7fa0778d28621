"""The command ``sparsync keys``: certificates for encryption and authentication between ranks."""

from __future__ import annotations

from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from sparsync.cli.values import Ranks
from sparsync.transports.zmq import make_curve_keys

__all__ = ["command"]


def command(
    directory: Annotated[str, Argument(help="New folder for the keys.", metavar="DIRECTORY")],
    ranks: Annotated[Ranks, Option(help="World size: one certificate per rank.")] = 8,
) -> None:
    """Make one certificate per rank, for encrypted exchanges: --curve-keys and curve_keys=.

    A rank needs all public keys, but only its own secret key.  When you copy the folder to a machine,
    leave out the secret keys of ranks that run elsewhere.
    """
    made = make_curve_keys(directory, ranks)
    Console().print(
        f"{len(made)} certificates in {directory}: rank R needs all .key files and rank-R.key_secret",
        highlight=False,
    )
