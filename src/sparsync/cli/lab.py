"""A real, slow network on one machine: each rank has a namespace, and links are shaped both ways.

::

    rank 0: eth0 --(tbf)--> rank0 --+                  tbf shapes the packets that leave an interface:
            eth0 <--(tbf)-- rank0 --+-- bridge         at eth0, the packets that the rank sends; at
    rank 1: eth0 --(tbf)--> rank1 --+                  the bridge's end of the link, the packets
            eth0 <--(tbf)-- rank1 --+                  that the rank receives

Links with delay, jitter or loss use ``netem`` instead of ``tbf``.  If the kernel has no ``netem``, a
thread of this process carries the packets between the ranks (``forwarder.py``), and there is no bridge.

No part of a lab has a global name.  A namespace exists as long as the process that made it holds it open
or a rank runs in it.  When these processes have ended, nothing is left, even if they were killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

from sparsync.cli.forwarder import Forwarder, open_device
from sparsync.cli.lab_links import MOST_RANKS, Link, parse_links, parse_rate
from sparsync.errors import ConfigurationError, require

__all__ = [
    "Lab",
    "LabError",
    "Link",
    "LinkTraffic",
    "Seat",
    "default_burst",
    "ensure_privileges",
    "local_address",
    "local_traffic",
    "parse_rate",
]

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_BRIDGE = "bridge"
_INTERFACE = "eth0"  # the end of the link inside a rank's namespace
_ADDRESS = "SPARSYNC_LAB_ADDRESS"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_COUNTERS = Path("/proc/thread-self/net/dev")  # counters of the calling thread's namespace
_CARRIERS = ("tbf", "netem", "forwarder")
_BITS_PER_BYTE = 8
_ALSO_IN = "/usr/sbin:/sbin"  # folders with tools that Debian omits from a user's PATH
_COMMAND_SECONDS = 10.0  # time limit for each iproute2 command
# a send buffer holds the data that the wire carries in this many seconds; with Linux's default of 4 MB,
# acknowledgements would wait behind seconds of data
_SEND_BUFFER_SECONDS = 0.02
_LEAST_SEND_BUFFER = 65_536  # bytes; with less, TCP stalls
_MOST_SEND_BUFFER = 524_288  # bytes; the most that Linux grants a program that sets the size
_USUAL_SEND_BUFFER = 4_194_304  # bytes; the most that Linux chooses if a program does not set it
_LEAST_QUEUE_SECONDS = 0.1
_DEVICE_PACKETS = 10_000  # packets that a device's queue holds between two turns of the forwarder
_FRAME_BYTES = 1_514


class LabError(ConfigurationError):
    """The kernel or iproute2 refused to build a part of the lab; the message names the command."""


def default_burst(bits_per_second: int) -> int:
    """Return the size of the ``tbf`` bucket, i.e. the bytes that an idle link passes without delay.

    A smaller bucket distorts wire times less.  But the bucket must last until timers and processes wake
    up, or the link does not reach its rate.  At 1 Gbit/s, a single stream reached 72 % of the rate with
    16 KB, 92 % with 32 KB, and 99 % with 64 KB; dense allreduce on overloaded cores reached 80 % with
    64 KB, and 90 % with 128 KB.  So the bucket covers a millisecond, the typical delay with two busy
    cores.  It also holds at least the first window of a TCP connection.

    Example:
        >>> default_burst(1_000_000_000), default_burst(100_000_000)
        (125000, 16384)
    """
    return max(16_384, round(bits_per_second * 1e-3 / _BITS_PER_BYTE))


@final
class Lab:
    """A network of shaped links between local ranks, which exists during a ``with`` block.

    ::

        with Lab(4, "200mbit") as lab:
            launch(function, 4, lab=lab)
            lab.traffic()

    Args:
        ranks: number of ranks P, each with its own link to one bridge; at most 1,000.
        links: the links of the ranks, in rank order; or one text that describes all of them, e.g.
            "200mbit" (see ``parse_links``).
        carrier: "tbf" (rates only), "netem" or "forwarder"; "auto" is the first of them that supports
            the links.

    Attributes:
        bits_per_second: the lowest rate.
        burst_bytes: the size of the ``tbf`` bucket at that rate (see ``default_burst``); subtract these
            bytes when computing wire times, because an idle link passes them without delay.

    Raises:
        ConfigurationError: an argument is invalid, iproute2 is missing, or the kernel forbids
            network namespaces to this process.
        LabError: a command failed.

    Cost: about 7 commands of a few milliseconds per rank.
    State: the namespaces, held by open files of this process; no name, file or mount.

    Example:
        >>> lab = Lab(4, "1gbit")
        >>> lab.address(3), lab.segment_bytes
        ('10.77.0.4', 31250)
    """

    def __init__(self, ranks: int, links: str | Sequence[Link], carrier: str = "auto") -> None:
        good = isinstance(ranks, int) and 1 <= ranks <= MOST_RANKS
        require(good, f"lab: ranks is {ranks!r}; give a whole number from 1 to {MOST_RANKS}")
        self.ranks = ranks
        self.links = parse_links(links, ranks) if isinstance(links, str) else tuple(links)
        each = f"{len(self.links)} links for {ranks} ranks; give one for each"
        require(len(self.links) == ranks, f"lab: {each}")
        known = ", ".join(("auto", *_CARRIERS))
        require(
            carrier in ("auto", *_CARRIERS), f"lab: unknown carrier {carrier!r}; choose {known}"
        )
        far = any(link.is_far for link in self.links)
        no_tbf = "lab: tbf neither delays nor loses packets; choose netem, forwarder or auto"
        require(not far or carrier != "tbf", no_tbf)
        self.carrier = carrier if far or carrier != "auto" else "tbf"
        rates = [rate for link in self.links for rate in (link.up, link.down)]
        self.bits_per_second, self._fastest = min(rates), max(rates)
        self._rtt = max(link.rtt for link in self.links)
        self.burst_bytes = default_burst(self.bits_per_second)
        self._bridge: _Namespace | None = None
        self._ranks: list[_Namespace] = []
        self.forwarder: Forwarder | None = None

    def address(self, rank: int) -> str:
        """Return a rank's IPv4 address; rank 0 has 10.77.0.1."""
        return f"10.77.{(rank + 1) >> 8}.{(rank + 1) & 255}"

    @property
    def segment_bytes(self) -> int:
        """The largest packet handed to the link (GSO): a quarter of the bucket.

        A packet of 64 KB would empty the bucket and delay the acknowledgements behind it.  With such
        packets in both directions, each direction reached 61 to 81 % of 1 Gbit/s; with packets of 16 KB
        (burst 64 KB), it reached 99 %.  The forwarder gets packets that cross the link in half a
        millisecond.  ``netem`` gets single frames, because it drops a packet with all of its frames.
        """
        if self.carrier == "netem":
            return 1_514
        if self.carrier == "forwarder":
            return min(max(self.bits_per_second // 16_000, 1_514), 65_536)
        return min(max(self.burst_bytes // 4, 1_514), 65_536)

    @property
    def send_buffer_bytes(self) -> int:
        """The largest number of bytes in flight per TCP connection; queues grow to this size.

        On links with a delay, it is at least Linux's default, and at least twice the bytes that fill the
        longest and fastest path.  The factor of two is needed because the kernel counts 2.3 KB for a
        packet of 1.5 KB, and because acknowledgements may queue behind data in the other direction.
        """
        if self._rtt:
            return max(_USUAL_SEND_BUFFER, round(3 * self._fastest * self._rtt / _BITS_PER_BYTE))
        wire = self.bits_per_second * _SEND_BUFFER_SECONDS / _BITS_PER_BYTE
        return max(_LEAST_SEND_BUFFER, round(wire))

    @property
    def queue_bytes(self) -> int:
        """The size of a link's queue, which holds all bytes that P ranks may have in flight."""
        under_way = 2 * self.ranks * max(self.send_buffer_bytes, _MOST_SEND_BUFFER)
        return default_burst(self._fastest) + under_way

    @property
    def queue_seconds(self) -> float:
        """The seconds that a packet may wait for a ``netem`` or forwarder link before it is dropped.

        This is at least the longest RTT, so that Reno, which halves its window after a loss, keeps the
        link busy.  It is also at least as long as a home modem would queue packets.
        """
        return max(self._rtt, _LEAST_QUEUE_SECONDS)

    def seat(self, rank: int) -> Seat:
        """Return a rank's seat, which lets a process enter the rank's namespace."""
        self._open()
        return Seat(self._ranks[rank].path, self.address(rank))

    def traffic(self) -> list[LinkTraffic]:
        """Return the bytes on each rank's link since the lab was opened, as counted by the kernel."""
        self._open()
        return [namespace.run(_counters)[_INTERFACE] for namespace in self._ranks]

    def __enter__(self) -> Lab:
        _require_linux()
        if self._bridge is not None:
            raise ConfigurationError("lab: it is already open; make another")
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all namespaces; they disappear when the ranks in them have ended."""
        if self.forwarder is not None:
            self.forwarder.close()
            self.forwarder = None
        for namespace in (*self._ranks, self._bridge):
            if namespace is not None:
                namespace.close()
        self._bridge, self._ranks = None, []

    def _open(self) -> _Namespace:
        if self._bridge is None:
            raise ConfigurationError("lab: it is not open; use it inside `with Lab(...) as lab:`")
        return self._bridge

    def _build(self) -> None:
        try:
            self._bridge = _Namespace()
            for _ in range(self.ranks):
                self._ranks.append(_Namespace())
        except PermissionError as error:
            raise _refusal(str(error)) from None
        if self.carrier == "auto":
            self.carrier = "netem" if _has_netem() else "forwarder"
        if self.carrier == "forwarder":
            self._open_devices()
        else:
            self._connect()
        for rank, namespace in enumerate(self._ranks):
            address = f"ip address add {self.address(rank)}/16 dev {_INTERFACE}"
            self._run(namespace, "ip link set lo up", address)
            namespace.run(self._set_up_tcp)

    def _connect(self) -> None:
        """Connect the ranks with a bridge, whose links the kernel shapes."""
        assert self._bridge is not None
        self._run(
            self._bridge,
            # no IPv6, because its background traffic would be counted
            f"ip link add {_BRIDGE} type bridge mcast_snooping 0",
            f"ip link set {_BRIDGE} addrgenmode none up",
        )
        size = f"gso_max_size {self.segment_bytes}"
        for rank, (namespace, link) in enumerate(zip(self._ranks, self.links, strict=True)):
            end = f"rank{rank}"  # the other end appears in the rank's namespace
            pair = f"{end} {size} type veth peer name {_INTERFACE} {size}"
            self._run(
                self._bridge,
                f"ip link add {pair} netns {namespace.path}",
                f"ip link set {end} addrgenmode none master {_BRIDGE} up",
                self._shape(end, link, link.down),
            )
            up = f"ip link set {_INTERFACE} addrgenmode none up"
            self._run(namespace, up, self._shape(_INTERFACE, link, link.up))

    def _shape(self, interface: str, link: Link, rate: int) -> str:
        add = f"tc qdisc add dev {interface} root {self.carrier} rate {rate}bit"
        if self.carrier == "tbf":
            return f"{add} burst {default_burst(rate)} limit {self.queue_bytes}"
        delay, jitter, loss = link.one_wire
        most = (self.queue_seconds + delay + jitter) * rate / _BITS_PER_BYTE / _FRAME_BYTES
        vary = f"delay {delay * 1e6:.0f}us {jitter * 1e6:.0f}us loss {100 * loss:.6f}%"
        return f"{add} {vary} limit {max(1000, round(most))}"

    def _open_devices(self) -> None:
        """Give every rank a device that the forwarder serves."""
        devices = [namespace.run(lambda: open_device(_INTERFACE)) for namespace in self._ranks]
        self.forwarder = Forwarder(devices, self.links, "10.77.0.0", self.queue_seconds)
        # one hardware address for all, so that ranks need no ARP
        own = f"address 02:00:00:00:00:01 arp off txqueuelen {_DEVICE_PACKETS}"
        size = f"gso_max_size {self.segment_bytes}"
        for namespace in self._ranks:
            self._run(namespace, f"ip link set {_INTERFACE} {own} {size} addrgenmode none up")

    def _run(self, namespace: _Namespace, *commands: str) -> None:
        def run_all() -> None:
            for command in commands:
                _run_command(command)

        namespace.run(run_all)

    def _set_up_tcp(self) -> None:
        settings = Path("/proc/sys/net/ipv4")
        most = self.send_buffer_bytes
        (settings / "tcp_wmem").write_text(f"4096 {min(most, 16_384)} {most}")
        if self._rtt:  # the kernel charges the buffer more bytes than small packets carry
            (settings / "tcp_rmem").write_text(f"4096 131072 {max(6_291_456, 2 * most)}")
        # Reno is available in every namespace, whatever the host uses, and fills a lossless link.
        # Measurements should show the link's rate, not the effects of a congestion control algorithm.
        (settings / "tcp_congestion_control").write_text("reno")


# ---- ranks -----------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Seat:
    """The namespace and address with which a process becomes a rank of the lab; picklable."""

    namespace: str  # path of the namespace
    address: str  # address of the rank's end of its link

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for a process in the namespace: its address and its network interface."""
        return {
            **dict.fromkeys(_INTERFACE_VARIABLES, _INTERFACE),
            # the ranks share a machine, so NCCL would find paths that bypass the links
            **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"),
            _ADDRESS: self.address,
        }

    def enter(self) -> None:
        """Move the calling thread into the namespace, and make gloo use the interface there."""
        _enter(self.namespace)
        os.environ.update(self.variables)

    def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the namespace, on a new thread; child processes also run there."""

        def inside() -> T:
            _enter(self.namespace)
            return function()

        return _in_thread(inside)


class LinkTraffic(NamedTuple):
    """Bytes that a rank sent and received on its link, including Ethernet, IP and TCP headers."""

    sent: int
    received: int


def local_address() -> str | None:
    """Return this rank's address on its shaped link, or None outside of a lab."""
    return os.environ.get(_ADDRESS)


def local_traffic() -> LinkTraffic | None:
    """Return the bytes on this rank's link so far, counted by the kernel, or None outside of a lab."""
    return _counters()[_INTERFACE] if _ADDRESS in os.environ else None


def _counters() -> dict[str, LinkTraffic]:
    """Return the counters of every interface of the calling thread's namespace."""
    rows = (line.partition(":") for line in _COUNTERS.read_text().splitlines())
    cells = {name.strip(): numbers.split() for name, colon, numbers in rows if colon}
    return {name: LinkTraffic(int(c[8]), int(c[0])) for name, c in cells.items()}


# ---- Linux's part: unnamed network namespaces, iproute2, and the right to use both -----------------


class _Namespace:
    """A network namespace, which exists until this object is closed and no process is left in it.

    Any process of the same user can open it by its ``path``, as long as the creating process lives.
    """

    def __init__(self) -> None:
        def create() -> int:
            _call("unshare", _CLONE_NEWNET)
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        self._file = _in_thread(create)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the namespace, on a new thread; threads that it starts also run there."""

        def inside() -> T:
            _call("setns", self._file, _CLONE_NEWNET)
            return function()

        return _in_thread(inside)

    def close(self) -> None:
        """Release the namespace; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _enter(path: str) -> None:
    """Move the calling thread into a namespace; threads and processes that it starts later run there."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", file, _CLONE_NEWNET)
    finally:
        os.close(file)


def _may_create() -> bool:
    """Return whether the kernel lets this process make network namespaces."""
    try:
        _Namespace().close()
    except PermissionError:
        return False
    return True


def _has_netem() -> bool:
    """Return whether the kernel has ``netem``, which delays packets, or can load it."""
    try:
        _Namespace().run(lambda: _run_command("tc qdisc add dev lo root netem delay 1ms"))
    except LabError:
        return False
    return True


def _call(name: str, *args: int) -> None:
    """Call a function of libc; Python itself has ``os.setns`` and ``os.unshare`` only since 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_thread(function: Callable[[], T]) -> T:
    """Call a function on a new thread, so that the caller stays in its namespace."""
    with ThreadPoolExecutor(1, "sparsync-lab") as thread:
        return thread.submit(function).result()


def _find_tool(name: str, package: str = "iproute2") -> str:
    """Return a program's path; if the program is missing, refuse and name the package to install."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_ALSO_IN}")
    if path is None:
        raise ConfigurationError(
            f"lab: the command {name!r} was not found; install the package {package}"
        )
    return path


def _run_command(command: str) -> None:
    """Run an iproute2 command in this thread's namespace; its words are separated by single spaces."""
    name, *words = command.split(" ")
    argv = [_find_tool(name), *words]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        result = subprocess.run(argv, timeout=_COMMAND_SECONDS, check=False, **options)
    except subprocess.TimeoutExpired:
        late = f"did not end within {_COMMAND_SECONDS:g} s; killed"
        raise LabError(f"lab: {command!r} {late}") from None
    if result.returncode != 0:
        said = " ".join(result.stderr.split()) or "nothing on stderr"
        raise LabError(f"lab: {command!r} failed with exit code {result.returncode}: {said}")


def _require_linux() -> None:
    if sys.platform != "linux":
        raise ConfigurationError(
            f"lab: {sys.platform} has no network namespaces; run on Linux, or simulate the network"
        )


def ensure_privileges() -> None:
    """Do nothing if this process may make a lab; otherwise restart it in a user namespace.

    Root may make a lab.  Any other user becomes root of a new user namespace, if the kernel allows it.
    Only a single-threaded process can enter a user namespace, so this process is replaced (``exec``) by
    ``unshare``, which runs the same command line from the start, with the same open files.  Call this
    function first, because everything before it is repeated.

    Raises:
        ConfigurationError: this process may make neither a lab nor a user namespace, or iproute2 is
            missing.
    """
    _require_linux()
    ip = _find_tool("ip")
    _find_tool("tc")
    if _may_create():
        return
    become_root = [_find_tool("unshare", package="util-linux"), "--map-root-user"]
    try:  # try first, because a failure after the exec could not be reported clearly
        _run_command(f"{' '.join(become_root)} --net {ip} link add probe type veth peer name other")
    except LabError as error:
        raise _refusal(str(error).rpartition(": ")[2]) from None
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(become_root[0], [*become_root, sys.executable, *sys.orig_argv[1:]])


def _refusal(reason: str) -> ConfigurationError:
    """Return the error for a process that may not make a lab."""
    return ConfigurationError(
        f"lab: this process may not make network namespaces ({reason}); run as root (in a container: "
        "with CAP_SYS_ADMIN and CAP_NET_ADMIN), or allow unprivileged user namespaces "
        "(sysctl kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces > 0)"
    )
