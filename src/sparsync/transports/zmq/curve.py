"""Check keys: who may connect, and as which rank (CURVE, ZeroMQ's RFC 26, and ZAP, RFC 27)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import zmq
import zmq.auth
from zmq.utils import z85

from sparsync.errors import ConfigurationError

__all__ = ["CurveKeys", "Doorkeeper", "load_curve_keys", "make_curve_keys", "zap_reply"]

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"  # fixed by RFC 27


@final
@dataclass(frozen=True)
class CurveKeys:
    """The keys that one rank holds: its own secret one, and the public key of every rank."""

    rank: int
    secret: bytes
    publics: Sequence[bytes]


def make_curve_keys(directory: Path | str, ranks: int) -> list[Path]:
    """Write one certificate per rank: ``rank-0.key`` (public) and ``rank-0.key_secret``, and so on.

    Give every rank all ``.key`` files and its own ``.key_secret``; nobody else may read that.

    Args:
        directory: made if missing, readable by its owner only.
        ranks: number of ranks of the job.

    Returns:
        The public files, in rank order.

    Raises:
        ConfigurationError: keys are there already, or ``ranks`` is less than 1.

    Example:
        >>> import tempfile
        >>> [path.name for path in make_curve_keys(tempfile.mkdtemp(), 2)]
        ['rank-0.key', 'rank-1.key']
    """
    if ranks < 1:
        raise ConfigurationError(f"ranks is {ranks}; give the number of ranks, at least 1")
    directory = Path(directory)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    present = sorted(directory.glob("rank-*.key*"))
    if present:
        raise ConfigurationError(
            f"{present[0]} is there already; remove the old keys or name another directory"
        )
    made = []
    for rank in range(ranks):
        public, secret = zmq.auth.create_certificates(directory, f"rank-{rank}")
        Path(secret).chmod(0o600)
        made.append(Path(public))
    return made


def load_curve_keys(directory: Path | str, rank: int, world_size: int) -> CurveKeys:
    """Read the public keys of all ranks and the secret one of this rank.

    Raises:
        ConfigurationError: a file is missing or no certificate, or two ranks share a key.
    """

    def load(name: str) -> tuple[bytes, bytes | None]:
        path = Path(directory) / name
        try:
            return zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path} is {'no certificate' if path.exists() else 'missing'}; make keys for all "
                "ranks with 'sparsync keys DIR --ranks P' and copy them to every host"
            ) from error

    publics = [load(f"rank-{r}.key")[0] for r in range(world_size)]
    public, secret = load(f"rank-{rank}.key_secret")
    if secret is None or public != publics[rank] or len(set(publics)) != world_size:
        raise ConfigurationError(
            f"the keys in {directory} do not fit together (rank {rank}'s secret to its public key, "
            "one key per rank); make new keys"
        )
    return CurveKeys(rank, secret, publics)


@final
class Doorkeeper:
    """Answers ZeroMQ's question "may this key in, and as whom?" on a thread of its own.

    A thread, because connections are made while the rank computes.  It ends when the context ends.
    """

    def __init__(self, context: zmq.Context[Any], publics: Sequence[bytes]) -> None:
        socket = context.socket(zmq.REP)
        socket.bind(ZAP_ENDPOINT)
        self.refused = 0
        self.thread = threading.Thread(
            target=self._work, args=(socket, publics), name="sparsync-zap", daemon=True
        )
        self.thread.start()

    def _work(self, socket: zmq.Socket[Any], publics: Sequence[bytes]) -> None:
        try:
            while True:
                reply = zap_reply(socket.recv_multipart(), publics)
                self.refused += reply[2] != b"200"
                socket.send_multipart(reply)
        except zmq.ContextTerminated:
            pass
        finally:
            socket.close()


def zap_reply(request: list[bytes], publics: Sequence[bytes]) -> list[bytes]:
    """Answer one ZAP request: version, id, status, text, user id (the rank), metadata."""
    version, number = [*request, b"", b""][:2]
    if len(request) == 7 and request[5] == b"CURVE" and len(request[6]) == 32:
        key = z85.encode(request[6])
        if key in publics:
            return [version, number, b"200", b"OK", str(publics.index(key)).encode(), b""]
    return [version, number, b"400", b"no listed key", b"", b""]
