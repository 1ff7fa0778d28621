"""Send joining ranks a copy of a rank's state, in pieces and losslessly, while training continues.

Only the byte of a float32 that holds most of the exponent is compressed; the other three look random.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import numpy as np
import zmq

from sparsync.errors import DeadlineError, PeerError, WireFormatError
from sparsync.transports.driver import close_at_exit
from sparsync.transports.zmq.curve import CurveKeys, Password
from sparsync.transports.zmq.mesh import bind

__all__ = ["CopyServer", "Source", "fetch", "pack", "unpack"]

PIECE: Final = 2**18  # bytes; small, because exchanges use the same links
# pieces requested before the first of them has arrived, to hide the link's latency
AHEAD: Final = 4
_LOOK: Final = 0.05  # seconds between requests that ask whether a copy exists
_ANSWER: Final = struct.Struct("<qq")  # step and number of bytes; 0 bytes if there is no copy yet
# "?" (is there a copy?) or "!" (a piece, please), step, first byte
_ASK: Final = struct.Struct("<cqq")
_LONGEST: Final = 2**10  # longest request frame in bytes, including encryption


def pack(raw: bytes | memoryview) -> bytes:
    """Return bytes that ``unpack`` restores; float32 weights shrink by about a tenth.

    Example:
        >>> unpack(pack(b"0123456789"), 10) == b"0123456789"
        True
    """
    # Arrange the bytes in four columns, so that exponents are next to each other for the compressor.  The
    # last column holds the highest bytes, because numbers are little-endian.
    words = np.frombuffer(raw, np.uint8, count=len(raw) // 4 * 4).reshape(-1, 4)
    high, low = zlib.compress(words[:, 3].tobytes(), 1), words[:, :3].tobytes()
    return struct.pack("<II", len(raw), len(high)) + high + low + bytes(raw[words.size :])


def unpack(packed: bytes, size: int) -> bytes:
    """Return the ``size`` bytes that were given to ``pack``.

    Raises:
        WireFormatError: these are not ``size`` packed bytes.
    """
    count, rest = divmod(size, 4)
    try:
        claimed, compressed = struct.unpack_from("<II", packed)
        start = 8 + compressed
        # the limit is one byte more than expected: a few kilobytes could decompress to gigabytes
        high = zlib.decompressobj().decompress(packed[8:start], count + 1)
    except (struct.error, zlib.error) as error:
        raise WireFormatError(f"a piece of a copy is corrupt: {error}") from error
    if (claimed, len(high), len(packed)) != (size, count, start + 3 * count + rest):
        raise WireFormatError(f"a piece of a copy does not hold {size} bytes; it is corrupt")
    words = np.empty((count, 4), np.uint8)
    words[:, 3] = np.frombuffer(high, np.uint8)
    words[:, :3] = np.frombuffer(packed, np.uint8, 3 * count, start).reshape(-1, 3)
    return words.tobytes() + packed[start + 3 * count :]


class Source(NamedTuple):
    """The address from which a copy can be fetched."""

    endpoint: str  # the address, followed by a blank and the password if there are no keys
    key: bytes = b""  # the only acceptable public key of the server
    keys: CurveKeys | None = None  # the keys of this rank


@final
class CopyServer:
    """Serves a copy of this rank's state on a separate thread; with keys, only to listed peers.

    Attributes:
        endpoint: the server's address, followed by a blank and the password if there are no keys.
        wanted: set if a rank has asked for a copy and there was none; the owner should then ``offer`` a
            copy.
    """

    def __init__(
        self,
        interface: str,
        port_range: tuple[int, int] | None,
        advertise: str | None,
        keys: CurveKeys | None = None,
    ) -> None:
        # a separate context has its own I/O thread, so that pieces and the messages of exchanges do not
        # share a queue
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.ipv6 = ":" in interface
        guard: CurveKeys | Password = Password() if keys is None else keys
        # set the guard and the size limit before ``bind``, after which strangers can connect
        guard.guard(self._socket)
        self._socket.maxmsgsize = _LONGEST
        try:
            self.endpoint = bind(self._socket, interface, port_range, advertise)
        except BaseException:
            self._socket.close()
            self._context.term()
            raise
        if isinstance(guard, Password):
            self.endpoint += f" {guard.word.decode()}"
        self.wanted = threading.Event()
        self._copies: dict[int, bytes | memoryview] = {}  # by step
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="sparsync-copies", daemon=True)
        self._thread.start()
        close_at_exit(self)

    def offer(self, step: int, raw: bytes | memoryview) -> None:
        """Serve a copy of the state before the optimizer's step ``step``."""
        # Keep older copies, which a rank may be in the middle of fetching.  Make a new dictionary: the
        # thread may be iterating over the current one, and would fail if it changed size.
        self._copies = {**self._copies, step: raw}
        self.wanted.clear()

    def drop(self) -> None:
        """Drop all copies."""
        self._copies = {}

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._ended.is_set():
            if not self._socket.poll(100):
                continue
            who, *frames = self._socket.recv_multipart()
            if len(frames) != 1 or len(frames[0]) != _ASK.size:
                continue  # not a request of this library
            answer = self._answer(*_ASK.unpack(frames[0]))
            if answer is not None:
                # echo the request, so that its sender can tell pieces apart
                self._socket.send_multipart([who, frames[0], answer])
        self._socket.close(linger=0)
        self._context.term()

    def _answer(self, what: bytes, step: int, first: int) -> bytes | None:
        # read the attribute only once, because ``drop`` may replace the dictionary at any time
        copies = self._copies
        if what == b"?":
            found = max((since for since in copies if since >= step), default=None)
            if found is None:
                self.wanted.set()
            return _ANSWER.pack(*((0, 0) if found is None else (found, len(copies[found]))))
        if what == b"!" and step in copies and first >= 0 and first % PIECE == 0:
            return pack(memoryview(copies[step])[first : first + PIECE])
        return None


def fetch(
    source: Source | str, timeout: float, since: int = 0, stop: Callable[[], bool] = lambda: False
) -> tuple[int, bytearray]:
    """Fetch a rank's copy of step ``since`` or later; return its step and its bytes.

    Raises:
        DeadlineError: nothing arrived for ``timeout`` seconds, or there was no copy within six
            times ``timeout``.
        PeerError: ``stop`` returned True.
        WireFormatError: an answer is not one of a ``CopyServer``.
    """
    place, key, keys = Source(source) if isinstance(source, str) else source
    endpoint, _, word = place.partition(" ")
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.ipv6 = "[" in endpoint
    if keys is None:
        Password(word.encode()).show(socket)
    else:
        keys.show(socket, key)
    heard = time.monotonic()

    def ask(what: bytes, step: int, first: int = 0) -> None:
        socket.send(_ASK.pack(what, step, first))

    def answer() -> tuple[bytes, int, int, bytes]:
        nonlocal heard
        while not socket.poll(100):
            # check ``stop`` ten times a second, so that closing a handle does not wait for a silent
            # donor
            if stop():
                raise PeerError(f"the copy at {endpoint} is not needed any more")
            if time.monotonic() > heard + timeout:
                raise DeadlineError(
                    f"the copy of the weights at {endpoint} did not go on within {timeout:g} s"
                )
        heard = time.monotonic()
        frames = socket.recv_multipart()
        if len(frames) != 2 or len(frames[0]) != _ASK.size:
            raise WireFormatError(
                f"the server at {endpoint} does not answer like a server of copies"
            )
        return (*_ASK.unpack(frames[0]), frames[1])

    try:
        socket.connect(endpoint)
        began, size = time.monotonic(), 0
        while not size:
            ask(b"?", since)
            told = answer()[3]
            if len(told) != _ANSWER.size:
                raise WireFormatError(
                    f"the copy at {endpoint} is announced by {len(told)} bytes; it is corrupt"
                )
            step, size = _ANSWER.unpack(told)
            if not size:
                time.sleep(_LOOK)
            # the copy may take longer than ``timeout``, because the donor makes it only at its next
            # exchange
            if time.monotonic() > began + 6 * timeout:
                raise DeadlineError(f"there was no copy of the weights at {endpoint}")
        try:
            whole = bytearray(size)
        except (MemoryError, OverflowError, ValueError) as error:
            raise WireFormatError(
                f"the copy at {endpoint} claims to have {size} bytes, for which there is no memory here"
            ) from error
        firsts, pending = iter(range(0, size, PIECE)), set[int]()
        while True:
            # limit the number of open requests: queued pieces would delay exchanges on the same link
            for first in itertools.islice(firsts, AHEAD - len(pending)):
                ask(b"!", step, first)
                pending.add(first)
            if not pending:
                return step, whole
            _, _, first, packed = answer()
            if first not in pending:
                raise WireFormatError(f"the copy at {endpoint} has a piece that was not asked for")
            piece = unpack(packed, min(PIECE, size - first))
            whole[first : first + len(piece)] = piece
            pending.remove(first)
    finally:
        socket.close(linger=0)
        context.term()
