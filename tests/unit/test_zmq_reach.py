"""Test that unreachable ports are named in time, and strangers at a port cost the group nothing."""

import contextlib
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import zmq
from torch.distributed import HashStore

from sparsync import ConfigurationError
from sparsync.errors import CommunicationError, PeerError
from sparsync.transports.rendezvous import GlooPlace
from sparsync.transports.zmq import ZmqCommunicator, make_curve_keys, mesh
from sparsync.transports.zmq.mailbox import Header
from sparsync.transports.zmq.peers import host_and_port

from .zmq_group import RAW, exchange, forwarded, meet, message, together

PORT = 30_000 + os.getpid() % 2_000  # below those that the system gives out
ELSEWHERE = "127.0.0.9"


def errors_of(program, options_of, world_size=2, **options):
    """Run a program with options per rank; return the errors, and the seconds taken."""
    store, began = HashStore(), time.monotonic()

    def rank(number):
        its = {"store": store, "timeout": 60.0, **options, **options_of(number)}
        try:
            with ZmqCommunicator(number, world_size, **its) as comm:
                program(comm)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(rank, range(world_size)))
    return found, time.monotonic() - began


def advertised(number):
    place = {"interface": "127.0.0.1", "port_range": (PORT + number, PORT + number)}
    return {**place, "advertise": ELSEWHERE}


def test_a_port_that_refuses_is_named_with_its_address_and_why():
    found, seconds = errors_of(exchange, advertised)
    assert seconds < 20
    for rank, error in enumerate(found):
        there = f"rank {1 - rank} cannot be reached at tcp://{ELSEWHERE}:{PORT + 1 - rank}"
        assert isinstance(error, PeerError)
        assert f"{there} (connection refused" in str(error) and "firewall" in str(error)
        ended = "or that rank has ended, perhaps that of an earlier job with the same store"
        assert ended in str(error)


def test_a_port_that_does_not_answer_is_named_at_the_deadline_of_connecting():
    with contextlib.ExitStack() as stack:
        for port in (PORT, PORT + 1):  # the queue is full, so the kernel drops the next connection
            full = stack.enter_context(socket.create_server((ELSEWHERE, port), backlog=0))
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    waiting.connect(full.getsockname())
        found, seconds = errors_of(exchange, advertised, connect_timeout=1.0)
    assert seconds < 25
    for rank, error in enumerate(found):
        there = f"rank {1 - rank} cannot be reached at tcp://{ELSEWHERE}:{PORT + 1 - rank}"
        assert isinstance(error, PeerError) and f"{there} (no answer within 1 s)" in str(error)


def test_a_rank_that_is_reached_in_one_direction_alone_says_so():
    def one_way(number):
        return {} if number else advertised(number)

    def twice(comm):  # the first time, rank 1 does not need any message that rank 0 has sent
        exchange(comm)
        exchange(comm)

    found, seconds = errors_of(twice, one_way, interface="127.0.0.1")
    assert seconds < 20
    assert "rank 0 cannot be reached" in str(found[1]) and "refused" in str(found[1])
    assert isinstance(found[0], PeerError) and "rank 1" in str(found[0])


def test_a_name_that_nobody_resolves_is_called_that():
    found, seconds = errors_of(exchange, lambda number: {"advertise": f"rank-{number}.invalid"})
    assert seconds < 30
    for error in found:
        assert isinstance(error, ConfigurationError)
        assert "tcp://rank-0.invalid:" in str(error)
        assert "this machine cannot resolve that name" in str(error)


def test_a_rank_that_cannot_listen_tells_the_others():
    wrong = {"interface": "nope0"}
    found, seconds = errors_of(exchange, lambda number: wrong if number else {})
    assert seconds < 10, "waited for the timeout"
    assert isinstance(found[1], ConfigurationError) and "'nope0'" in str(found[1])
    assert isinstance(found[0], PeerError)
    assert "rank 1 cannot take part: cannot listen on interface 'nope0'" in str(found[0])


def test_an_interface_that_gloo_is_told_to_use_and_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(ConfigurationError, match="GLOO_SOCKET_IFNAME is 'nope0'"):
        GlooPlace.here()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert GlooPlace.here().at.startswith("lo of ") and GlooPlace.here().near


def test_signs_of_life_may_be_missing_for_longer_than_a_wait_may_take():
    for timeout, seconds in [(1.0, 20), (60.0, 120), (1e6, 2_000_000)]:
        with ZmqCommunicator(0, 1, store=HashStore(), timeout=timeout) as comm:
            assert comm.mesh.incoming.heartbeat_timeout == 1000 * seconds


def test_too_few_descriptors_are_refused_before_a_socket_is_opened():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 50, limits[1]))
    try:
        with pytest.raises(ConfigurationError, match=rf"limit is {taken + 50}; .*ulimit -n \d+$"):
            ZmqCommunicator(0, 100, store=HashStore(), timeout=0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list(Path("/dev/fd").iterdir())) <= taken + 1


# ---- strangers ------------------------------------------------------------------------------------


def test_parts_of_a_stranger_are_not_taken_in():
    """By default, ZeroMQ would collect all parts of a message before it delivers the first."""

    def program(comm):
        exchange(comm)
        if comm.rank == 0:
            with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
                stranger.linger, stranger.sndhwm = 0, 0
                stranger.connect(comm.mesh.address)
                with contextlib.suppress(zmq.Again):  # refused already
                    for more in [zmq.SNDMORE] * 100_000 + [0]:
                        stranger.send(b"", more | zmq.NOBLOCK)
                until = time.monotonic() + 3
                while not comm.mesh.refusals() and time.monotonic() < until:
                    comm.mesh.advance(0.05)
            assert comm.mesh.refusals().keys() <= {"connections of another protocol"}
            assert not comm.mesh.incoming.poll(0)
        meet(comm)
        exchange(comm)

    together(program, 2)


def test_a_message_of_too_many_parts_ends_its_connection_alone(monkeypatch):
    monkeypatch.setattr(mesh, "MOST_FRAMES", 10)

    def program(comm):
        exchange(comm)
        if comm.rank == 0:
            with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
                address, _, word = comm.mesh.endpoint.partition(" ")
                stranger.plain_username, stranger.plain_password = b"rank", word.encode()
                stranger.linger, stranger.reconnect_ivl = 0, -1
                events = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                stranger.connect(address)
                stranger.send_multipart([b""] * 50)
                until = time.monotonic() + 10
                while not events.poll(0) and time.monotonic() < until:
                    comm.mesh.advance(0.05)
                assert events.poll(0), "its connection goes on"
                stranger.disable_monitor()
                events.close()
            assert dict(comm.dropped) == {"malformed": 1}
        meet(comm)
        exchange(comm)

    together(program, 2)


@contextlib.contextmanager
def no_descriptor_left():
    """Let this process open nothing more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/dev/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


@pytest.mark.parametrize("exhausted", [False, True])
def test_connections_that_say_nothing_are_closed_when_they_are_many(exhausted, monkeypatch):
    """Even if they hold all descriptors that this process may open."""
    monkeypatch.setattr(mesh, "STRANGERS", 4)

    def open_ones(held):
        for one in held:
            one.setblocking(False)
            try:
                if one.recv(100) == b"":
                    continue
            except BlockingIOError:
                pass
            except OSError:
                continue
            yield one

    def program(comm):
        exchange(comm)
        if comm.rank == 0:
            with contextlib.ExitStack() as stack:
                place = host_and_port(comm.mesh.address)
                held = [stack.enter_context(socket.create_connection(place)) for _ in range(30)]
                comm.mesh.advance(0.05)  # until ZeroMQ has accepted them
                if exhausted:
                    stack.enter_context(no_descriptor_left())
                until = time.monotonic() + 6  # before ZeroMQ's own patience with a handshake ends
                while len(held) > 4 and time.monotonic() < until:
                    comm.mesh.advance(0.05)
                    held = list(open_ones(held))
                assert len(held) == 4
        meet(comm)
        lost = dict(comm.lost)
        exchange(comm)
        return lost

    assert together(program, 2) == [{}, {}]


def test_early_messages_are_counted_once_and_bounded(monkeypatch):
    monkeypatch.setattr(mesh, "MAX_EARLY", 100_000)
    with ZmqCommunicator(0, 1, store=HashStore(), timeout=5.0, changing=True) as comm:
        # they came over no connection
        monkeypatch.setattr(comm.mesh, "_spoken", lambda frame: None)
        most = 100_000 // (mesh.PER_MESSAGE + 56)
        for job in range(1, 2000):
            header = Header(0, 1, comm.mesh.job ^ job, 0, 0, 0, -1, 0, 0).pack()
            comm.mesh._take([zmq.Frame(header)])
        assert len(comm.mesh._early) == most
        assert comm.mesh._early_bytes == sum(size for size, _ in comm.mesh._early) <= 100_000
        assert comm.dropped["of a group that did not come"] == 1999 - most


@pytest.mark.parametrize("reads", ["at once", "late"])
def test_bytes_that_were_changed_on_the_way_end_the_wait(tmp_path, reads):
    """CURVE refuses such bytes; ZeroMQ reports no sender, and may close the connection first.

    A rank that reads late learns of a connection, its first message and its failure all at once.
    """
    make_curve_keys(tmp_path, 2)
    change, changed = threading.Event(), threading.Event()

    def tampered(data):
        if change.is_set() and len(data) > 1000 and not changed.is_set():
            changed.set()
            data = bytearray(data)
            # Change the payload, because the end of the read may be a heartbeat.  A changed length
            # would be noticed only when more bytes arrive.
            data[len(data) // 2] ^= 1
        return data

    def program(comm):
        if reads == "at once" or comm.rank == 1:
            well = comm.isend(message(comm.rank), 1 - comm.rank, "well", RAW)
            well.wait()
        if reads == "at once":
            comm.irecv(1 - comm.rank, 1, "well", RAW).wait()
        if comm.rank == 1:
            change.set()
            comm.isend(torch.ones(2000, dtype=torch.uint8), 0, "p", RAW).wait()
            changed.wait(10)
            return meet_all.wait(30)
        change.wait(10)
        if reads == "late":
            changed.wait(10)
            time.sleep(0.2)  # until ZeroMQ's thread has refused it
            comm.irecv(1, 1, "well", RAW).wait()
        began = time.monotonic()
        with pytest.raises(CommunicationError, match=r"message from rank 1 .* were changed"):
            comm.irecv(1, 2000, "p", RAW).wait()
        assert time.monotonic() - began < 10
        return meet_all.wait(30)

    meet_all = threading.Barrier(2)
    options = {"interface": "127.0.0.1", "advertise": ELSEWHERE, "curve_keys": tmp_path}
    first = PORT + 10 + 2 * (reads == "late")  # a port that was just closed cannot be bound again
    with forwarded(ELSEWHERE, "127.0.0.1", (first, first + 1), tampered):
        together(program, 2, port_range=(first, first + 1), timeout=60.0, **options)


ACCEPTED, ENDED = zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED
FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@pytest.mark.parametrize("kind", ["a stranger's", "one whose number was a rank's", "a rank's"])
def test_a_failed_connection_is_a_ranks_only_if_it_stays_open(monkeypatch, kind):
    """ZeroMQ does not say which connection has failed; a stranger's must not end a job."""

    def program(comm):
        exchange(comm)
        if comm.rank == 0:
            own, (rank,) = comm.mesh, comm.mesh._ranks
            given = {
                "a stranger's": [[(FAILED, 0)], [(ENDED, 9999)]],
                "one whose number was a rank's": [[(ACCEPTED, rank), (FAILED, 0)], []],
                "a rank's": [[(FAILED, 0)], []],
            }[kind]
            real = mesh.happened
            monkeypatch.setattr(
                mesh,
                "happened",
                lambda events: given.pop(0) if events is own._events and given else real(events),
            )
            own._look_at_incoming()
            own._look_at_incoming()
            assert own.refusals() == (
                {} if kind == "a rank's" else {"connections of another protocol": 1}
            )
            if kind == "a rank's":
                with pytest.raises(CommunicationError, match="were changed"):
                    comm.irecv(1, 1, "p", RAW).wait()
            else:
                assert not comm.irecv(1, 1, "p", RAW).poll(0.2)
        meet(comm)

    together(program, 2, timeout=10.0)
