"""Programs of the ranks and the parents in the lab's tests."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import sparsync
from sparsync.cli.lab import (
    Lab,
    _enter,
    _run_command,
    ensure_privileges,
    local_address,
    local_traffic,
)
from sparsync.cli.launch import launch
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.process_group import Groups, TorchCommunicator
from sparsync.transports.zmq import peers
from tests.unit.zmq_group import forwarded

PORT = 5000


def seen_by_every_rank(elements: int) -> list[tuple[str, int, int, int]]:
    """Reduce once; return each rank's address, its namespace, and the bytes on its link meanwhile."""
    vector = torch.ones(elements)
    before = local_traffic()  # before the barrier, because after it others may already be sending
    dist.barrier()
    dist.all_reduce(vector)
    for _ in range(2):  # messages leave in order: once the second is done, the first has left
        dist.barrier()
    after = local_traffic()
    assert vector[0] == dist.get_world_size()
    mine = (
        local_address(),
        namespace_of("thread-self"),
        after.sent - before.sent,
        after.received - before.received,
    )
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def meet_behind_a_router() -> list[str]:
    """Listen on a port of a range; the other ranks connect to an address that forwards to this port."""
    own = local_address()
    outside = f"{own.rpartition('.')[0]}.{100 + dist.get_rank()}"
    (link,) = {name for _, name in socket.if_nameindex()} - {"lo"}
    _run_command(f"ip address add {outside}/24 dev {link}")
    settings = {"interface": own, "port_range": (PORT, PORT), "advertise": outside}
    with forwarded(outside, own, [PORT]), sparsync.connect(20, transport="zmq", **settings) as comm:
        total = run(comm.allreduce(torch.ones(3), "sum"))
        addresses = [endpoint.partition(" ")[0] for endpoint in comm.mesh.endpoints]
        return [*addresses, f"{total.tolist()}"]


def meet_on_interfaces(forms: list[str]) -> list[list[str]]:
    """Connect gloo and zmq once per form of the interface's variable; return the addresses of zmq."""
    rank, found = dist.get_rank(), []
    (link,) = {name for _, name in socket.if_nameindex()} - {"lo"}
    _run_command("ip link add docker0 type veth peer name docker1")
    _run_command("ip address add 172.17.0.1/16 dev docker0")
    _run_command("ip link set docker0 up")
    _run_command(f"ip -6 address add fd77::{rank + 1}/64 dev {link} nodad")
    for form in forms:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(
                "GLOO_SOCKET_IFNAME", form.format(v4=f"10.77.0.{rank + 1}", v6=f"fd77::{rank + 1}")
            )
            groups = Groups(None, 20, 20)
            comm = TorchCommunicator(groups.make([0, 1]), timeout=20)
            assert run(comm.allreduce(torch.ones(3), "sum")).tolist() == [2.0, 2.0, 2.0]
            with sparsync.connect(20, transport="zmq") as other:
                assert run(other.allreduce(torch.ones(3), "sum")).tolist() == [2.0, 2.0, 2.0]
                found.append(
                    [one.partition(" ")[0].rpartition(":")[0] for one in other.mesh.endpoints]
                )
            comm.close()
            groups.close()
    return found


def meet_where_hosts_names_are_loopback() -> str:
    """Connect gloo as on two Debian machines, whose own names map to 127.0.1.1."""
    real = socket.getaddrinfo
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("GLOO_SOCKET_IFNAME")
        own = socket.gethostname()
        patched.setattr(
            socket,
            "getaddrinfo",
            lambda host, *a, **k: real("127.0.1.1" if host == own else host, *a, **k),
        )
        groups, before = Groups(None, 20, 20), local_traffic()
        comm = TorchCommunicator(groups.make([0, 1]), timeout=20)
        assert run(comm.allreduce(torch.ones(100_000), "sum"))[0] == 2.0
        crossed = local_traffic().sent - before.sent
        comm.close()
        groups.close()
    assert crossed > 200_000, crossed
    return "met"


def pass_a_long_message(nbytes: int, heartbeat: float, piece: int) -> bool:
    """Send a message that takes longer than many heartbeats; return whether it arrives unchanged."""
    with pytest.MonkeyPatch.context() as patched:
        named = {"HEARTBEAT": heartbeat, "PATIENCE": 0.0, "BEAT": heartbeat / 4, "PIECE": piece}
        for name, value in named.items():
            patched.setattr(peers, name, value)
        whole = torch.arange(nbytes).to(torch.uint8)
        with sparsync.connect(0.5, transport="zmq", interface=local_address()) as comm:
            if comm.rank:
                receiving = comm.irecv(0, nbytes, "long", Raw("value"))
                receiving.wait()
                assert torch.equal(receiving.result, whole)
            else:
                comm.isend(whole, 1, "long", Raw("value")).wait()
            # otherwise a rank that has sent everything would end while the other rank waits
            dist.barrier()
    return True


def new_groups_work() -> float:
    """Check that groups made later meet through the store, which is outside the lab."""
    vector = torch.ones(3)
    dist.all_reduce(vector, group=dist.new_group())
    return vector[0].item()


def fail() -> None:
    raise ValueError("a rank failed")


def namespace_of(process: str) -> int:
    return Path(f"/proc/{process}/ns/net").stat().st_ino


def holders(namespace: int) -> list[str]:
    """Return every thread in a namespace, and every open file that keeps it alive."""
    found = []
    for entry in (*Path("/proc").glob("[0-9]*/task/*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")):
        try:
            if entry.stat().st_ino == namespace and "net:" in str(entry.readlink()):
                found.append(str(entry))
        except OSError:
            continue  # it ended meanwhile
    return found


def runs(process: str) -> bool:
    """Return whether a process runs; a zombie that only waits for its parent does not count."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- streams between ranks, without torch ---------------------------------------------------------


def in_rank(lab: Lab, rank: int, function: Callable) -> threading.Thread:
    """Start a thread inside a rank's namespace."""

    def inside() -> None:
        _enter(lab.seat(rank).namespace)
        function()

    thread = threading.Thread(target=inside, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def connect(lab: Lab, source: int, dest: int, port: int = PORT) -> Iterator[list[socket.socket]]:
    """Yield both ends of a TCP connection from one rank to another."""
    ends: list[socket.socket] = []
    listening = threading.Event()

    def accept() -> None:
        with socket.create_server((lab.address(dest), port)) as server:
            listening.set()
            ends.append(server.accept()[0])

    accepting = in_rank(lab, dest, accept)
    assert listening.wait(5)
    address = (lab.address(dest), port)
    in_rank(lab, source, lambda: ends.insert(0, socket.create_connection(address, 5))).join()
    accepting.join(5)
    with ends[0], ends[1]:
        yield ends


def stream(source: socket.socket, dest: socket.socket, nbytes: int) -> None:
    """Move bytes from one end to the other."""
    sender = threading.Thread(target=source.sendall, args=(bytes(nbytes),), daemon=True)
    sender.start()
    left = nbytes
    while left:
        left -= len(dest.recv(min(left, 1 << 20)))
    sender.join()


def achieved(streams: list[tuple[socket.socket, socket.socket]], nbytes: int) -> float:
    """Return the bits per second of several streams at once, including Ethernet, IP and TCP headers."""
    threads = [threading.Thread(target=stream, args=(*ends, nbytes)) for ends in streams]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # a packet of 1514 bytes carries 1448 of payload; Ethernet takes 14, IP 20, TCP with its
    # timestamp 32
    return nbytes * 8 * 1514 / 1448 / (time.perf_counter() - started)


def best(streams: list[tuple[socket.socket, socket.socket]], nbytes: int, enough: float) -> float:
    """Return the best of up to 12 attempts, because other programs may delay any of them."""
    found = 0.0
    for _ in range(12):
        found = max(found, achieved(streams, nbytes))
        if found > enough:
            break
    return found


def round_trips(source: socket.socket, dest: socket.socket, count: int) -> list[float]:
    """Return the round-trip seconds of one-byte messages."""

    def echo() -> None:
        for _ in range(count):
            dest.sendall(dest.recv(1))

    threading.Thread(target=echo, daemon=True).start()
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        source.sendall(b"x")
        source.recv(1)
        seconds.append(time.perf_counter() - started)
    return seconds


def datagrams(lab: Lab, source: int, dest: int, count: int, nbytes: int, pause: float) -> list[int]:
    """Send datagrams, 20 at a time with pauses; return the numbers of those that arrive, in order."""
    arrived: list[int] = []
    listening = threading.Event()

    def receive() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE
            server.bind((lab.address(dest), PORT))
            server.settimeout(1.0)
            listening.set()
            with contextlib.suppress(TimeoutError):
                while len(arrived) < count:
                    arrived.append(int.from_bytes(server.recv(65_536)[:8], "big"))

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.setsockopt(socket.SOL_SOCKET, 32, 1 << 24)  # SO_SNDBUFFORCE
            for number in range(count):
                message = number.to_bytes(8, "big") + bytes(nbytes - 8)
                client.sendto(message, (lab.address(dest), PORT))
                if number % 20 == 19:
                    time.sleep(pause)

    receiving = in_rank(lab, dest, receive)
    assert listening.wait(5)
    in_rank(lab, source, send).join()
    receiving.join()
    return arrived


# ---- parents --------------------------------------------------------------------------------------


def sleep_in_the_lab(directory: str) -> None:
    Path(directory, f"rank{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(60)


def parent(directory: str, *links: str) -> None:
    """Open labs, the last one with two ranks, record their namespaces, and wait to be killed."""
    with contextlib.ExitStack() as stack:
        inodes = []
        for each in links:
            lab = stack.enter_context(Lab(2, each))
            inodes += [Path(lab.seat(rank).namespace).stat().st_ino for rank in range(2)]
            inodes.append(lab._open().run(lambda: namespace_of("thread-self")))
        Path(directory, "namespaces").write_text(" ".join(map(str, inodes)))
        launch(sleep_in_the_lab, 2, directory, lab=lab, timeout=60.0)


def unprivileged() -> None:
    """Do the same as a command with ``--lab``."""
    ensure_privileges()
    with Lab(2, "100mbit") as lab:
        rows = launch(seen_by_every_rank, 2, 100_000, lab=lab, timeout=60.0)
        sent = [link.sent for link in lab.traffic()]
    user = Path("/proc/self/ns/user").stat().st_ino
    sys.stdout.write(f"{os.getpid()} {user} {min(sent)} {rows[0][0]} {rows[1][0]}\n")


if __name__ == "__main__":
    {"parent": parent, "unprivileged": unprivileged}[sys.argv[1]](*sys.argv[2:])
