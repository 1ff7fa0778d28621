"""Decide by keys or a password which peers may connect, and as which rank (ZeroMQ's RFCs 24 to 27)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import zmq
import zmq.auth
from zmq.utils import z85

from sparsync.errors import ConfigurationError

__all__ = [
    "CurveKeys",
    "Doorkeeper",
    "Password",
    "curve_user",
    "load_curve_keys",
    "make_curve_keys",
    "own_curve_keys",
    "plain_user",
    "zap_reply",
]

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"  # fixed by RFC 27


@final
@dataclass(frozen=True)
class CurveKeys:
    """The keys that one rank holds: its own key pair, and the other ranks' public keys."""

    public: bytes
    secret: bytes = field(repr=False)
    publics: Sequence[bytes]  # public keys of the ranks of the group
    listed: Sequence[bytes]  # public keys of all peers that may connect

    @property
    def digest(self) -> str:
        """A short text that is equal for equal lists of keys."""
        return hashlib.blake2b(b"".join(sorted(self.listed)), digest_size=6).hexdigest()

    def guard(self, socket: zmq.Socket[Any]) -> Doorkeeper:
        """Let a socket accept only peers with listed keys; call this before it is bound."""
        socket.curve_server, socket.curve_secretkey = True, self.secret
        return Doorkeeper(socket.context, lambda request: curve_user(request, self.listed))

    def show(self, socket: zmq.Socket[Any], server: bytes) -> None:
        """Let a socket present this rank's key and accept only the server's; call before it connects."""
        socket.curve_serverkey, socket.curve_secretkey = server, self.secret
        socket.curve_publickey = self.public


@final
@dataclass(frozen=True)
class Password:
    """The guard used without keys: a rank's random word, sent to its group along with its address.

    The word keeps strangers out before ZeroMQ accepts a message from them.  This matters because ZeroMQ
    collects all frames of a message, however many there are, before this process sees the first one.
    The word is not encrypted, so it does not keep out anybody who listens on the network.
    """

    word: bytes = field(default_factory=lambda: secrets.token_hex(16).encode(), repr=False)

    def guard(self, socket: zmq.Socket[Any]) -> Doorkeeper:
        """Let a socket accept only peers that know the word; call this before it is bound."""
        socket.plain_server = True
        return Doorkeeper(socket.context, lambda request: plain_user(request, self.word))

    def show(self, socket: zmq.Socket[Any]) -> None:
        """Let a socket send the word to its peer; call this before it connects."""
        # an endpoint without a word would give an empty password, which ZeroMQ refuses
        socket.plain_username, socket.plain_password = b"rank", self.word or b"none"


def make_curve_keys(directory: Path | str, ranks: int) -> list[Path]:
    """Write one certificate per rank: ``rank-0.key`` (public) and ``rank-0.key_secret``, and so on.

    Give every rank all ``.key`` files and only its own ``.key_secret``, and keep that file private.

    Args:
        directory: created if missing, readable only by its owner; "." is the current folder.
        ranks: number of ranks of the job.

    Returns:
        The public files, in rank order.

    Raises:
        ConfigurationError: keys already exist, ``ranks`` is less than 1, or ``directory`` is the empty
            string or cannot be created.

    Example:
        >>> import tempfile
        >>> [path.name for path in make_curve_keys(tempfile.mkdtemp(), 2)]
        ['rank-0.key', 'rank-1.key']
    """
    if ranks < 1:
        raise ConfigurationError(f"ranks is {ranks}; give the number of ranks, at least 1")
    if directory == "":  # e.g. from an unset variable; the current folder is no place for secrets
        raise ConfigurationError("the folder for the keys has no name; name one, e.g. keys")
    directory = Path(directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"cannot make the folder {directory} for keys: {error.strerror}; name another directory"
        ) from error
    present = sorted(directory.glob("rank-*.key*"))
    if present:
        raise ConfigurationError(
            f"{present[0]} is there already; remove the old keys or name another directory"
        )
    made = []
    for rank in range(ranks):
        # Create the secret file first, because an existing file keeps its mode: pyzmq would create a
        # file with the umask's mode, which is often readable by all.
        (directory / f"rank-{rank}.key_secret").touch(0o600, exist_ok=False)
        public, _ = zmq.auth.create_certificates(directory, f"rank-{rank}")
        made.append(Path(public))
    return made


def load_curve_keys(directory: Path | str, rank: int, world_size: int) -> CurveKeys:
    """Read the public keys of all ranks and the secret key of this rank.

    Raises:
        ConfigurationError: a file is missing or not a certificate, or two ranks share a key.
    """
    # each rank needs its own key, because a key identifies the sender: two ranks with the same key could
    # impersonate each other
    publics = [_load(Path(directory) / f"rank-{r}.key")[0] for r in range(world_size)]
    public, secret = _load(Path(directory) / f"rank-{rank}.key_secret")
    if secret is None or public != publics[rank] or len(set(publics)) != world_size:
        raise ConfigurationError(
            f"the keys in {directory} do not fit together (rank {rank}'s secret to its public key, "
            "one key per rank); make new keys"
        )
    return CurveKeys(public, secret, publics, publics)


def own_curve_keys(place: Path | str) -> CurveKeys:
    """Read the keys of a rank whose number may change: its own pair, and all members' public keys.

    Args:
        place: a folder with the public keys and one secret key, or the file of a secret key in such a
            folder.

    Raises:
        ConfigurationError: there are several secret keys or none, or no public key fits the secret key.
    """
    place = Path(place)
    secrets = sorted(place.glob("*.key_secret")) if place.is_dir() else [place]
    if len(secrets) != 1:
        raise ConfigurationError(
            f"{place} has {len(secrets)} secret keys; give this rank's own, as in "
            f"curve_keys='{place / 'rank-0.key_secret'}', next to all .key files"
        )
    public, secret = _load(secrets[0])
    listed = [_load(path)[0] for path in sorted(secrets[0].parent.glob("*.key"))]
    if secret is None or public not in listed:
        raise ConfigurationError(
            f"{secrets[0]} fits none of the .key files next to it; give all of them, and a .key_secret"
        )
    return CurveKeys(public, secret, [public], listed)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    """Read a certificate; return its public key, and its secret key or None."""
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is {'no certificate' if path.exists() else 'missing'}; make keys for all "
            "ranks with 'sparsync keys DIR --ranks P' and copy them to every host"
        ) from error


@final
class Doorkeeper:
    """Tells ZeroMQ which peers may connect; ``user`` returns a peer's name, or None to refuse the peer.

    It runs on a separate thread, because peers may connect while the rank computes.  The thread ends
    with the context.
    """

    def __init__(
        self, context: zmq.Context[Any], user: Callable[[list[bytes]], bytes | None]
    ) -> None:
        # bind this socket before the one that it guards: while nothing answers at this endpoint, CURVE
        # accepts every key
        socket = context.socket(zmq.REP)
        socket.bind(ZAP_ENDPOINT)
        self.refused = 0
        self.thread = threading.Thread(
            target=self._work, args=(socket, user), name="sparsync-zap", daemon=True
        )
        self.thread.start()

    def _work(self, socket: zmq.Socket[Any], user: Callable[[list[bytes]], bytes | None]) -> None:
        try:
            while True:
                request = socket.recv_multipart()
                name = user(request)
                self.refused += name is None
                socket.send_multipart(zap_reply(request, name))
        except zmq.ContextTerminated:
            pass
        finally:
            socket.close()  # on the thread that uses it, while ``Context.term`` waits for it


def zap_reply(request: list[bytes], user: bytes | None) -> list[bytes]:
    """Answer one ZAP request: version, id, status, text, user id, metadata."""
    version, number = [*request, b"", b""][:2]
    if user is None:
        return [version, number, b"400", b"key not listed", b"", b""]
    return [version, number, b"200", b"OK", user, b""]


def curve_user(request: list[bytes], listed: Sequence[bytes]) -> bytes | None:
    """Return the key proven by a ZAP request, as the user's name; None if the key is not listed."""
    if len(request) == 7 and request[5] == b"CURVE" and len(request[6]) == 32:
        key = z85.encode(request[6])
        return key if key in listed else None
    return None


def plain_user(request: list[bytes], word: bytes) -> bytes | None:
    """Return the name in a ZAP request; None if the password is wrong."""
    # compare in constant time: otherwise, the response time would reveal how much of a guessed password
    # is correct
    if len(request) == 8 and request[5] == b"PLAIN" and hmac.compare_digest(request[7], word):
        return request[6]
    return None
