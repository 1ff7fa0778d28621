"""Test that only holders of listed keys get in, as themselves, and eavesdroppers read nothing."""

import json
import os
import socket
import stat
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import zmq
from torch.distributed import HashStore

from sparsync import ConfigurationError, testing
from sparsync.errors import CommunicationError, PeerError
from sparsync.transports.driver import run
from sparsync.transports.rendezvous import network
from sparsync.transports.zmq import ZmqCommunicator, make_curve_keys
from sparsync.transports.zmq.curve import curve_user, load_curve_keys, plain_user, zap_reply
from sparsync.transports.zmq.mailbox import Header
from tests.tables import cases

from .zmq_group import RAW, meet, message, together


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    directory = tmp_path_factory.mktemp("keys")
    make_curve_keys(directory, 3)
    return directory


def test_the_contract_holds_with_encryption(keys):
    together(lambda comm: run(testing.exercise_communicator(comm)), 3, curve_keys=keys)


def forged(comm, source):
    header = Header(0, source, comm.mesh.job, 0, zlib.crc32(b"p"), 0, -1, 0, 1)
    return header.pack() + b"!"


@pytest.mark.parametrize("kind", ["no key", "unlisted key", "wrong server key"])
def test_a_stranger_is_refused_and_the_group_is_not_affected(keys, kind):
    """The stranger knows the port, the job's number and the protocol, but has no listed key."""

    def program(comm):
        if comm.rank == 0:
            context = zmq.Context()
            stranger = context.socket(zmq.PUSH)
            if kind != "no key":
                stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
                listed = load_curve_keys(keys, 0, 3).publics[0]
                wrong = zmq.curve_keypair()[0]
                stranger.curve_serverkey = listed if kind == "unlisted key" else wrong
            stranger.connect(comm.mesh.endpoints[0])
            stranger.send(forged(comm, 1))
            assert not comm.irecv(1, 1, "p", RAW).poll(0.5)
            reasons = {"unlisted key": "unlisted keys"}
            refused = reasons.get(kind, "connections of another protocol")
            assert comm.mesh.refusals().keys() == {refused}  # ZeroMQ tries again
            stranger.close(linger=0)
            context.term()
        meet(comm)
        if comm.rank == 1:
            comm.isend(message(1), 0, "p", RAW).wait()
        run(testing.exercise_communicator(comm.channel(4)))
        seen = dict(comm.lost), dict(comm.dropped)
        meet(comm)  # no rank closes before all have checked
        return seen

    assert together(program, 3, curve_keys=keys) == [({}, {})] * 3


def test_a_rank_cannot_pose_as_another(keys):
    def program(comm):
        if comm.rank == 0:
            run(testing.exercise_communicator(comm.channel(4)))
            waiting = comm.irecv(1, 1, "p", RAW)
            assert not waiting.poll(0.3)
            assert comm.dropped == {"from a rank that poses as another": 1}
        else:
            run(testing.exercise_communicator(comm.channel(4)))
            if comm.rank == 2:
                comm.mesh.links[0].socket.send(forged(comm, 1))
        meet(comm)

    together(program, 3, curve_keys=keys)


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_connection_that_broke_may_mean_that_bytes_were_changed_if_it_has_keys(keys, encrypted):
    """ZeroMQ may report only, or first, that the connection ended, as if the rank had ended."""

    def program(comm):
        run(comm.barrier())
        if comm.rank == 1:
            return comm.close()
        errors = []
        for wait in (
            lambda: comm.irecv(1, 1, "p", RAW).wait(),
            lambda: comm.isend(message(1), 1, "p", RAW).wait(),
        ):
            with pytest.raises(PeerError, match="its connection ended") as caught:
                while time.monotonic() < until:
                    wait()
            errors.append("or bytes were changed on the way" in str(caught.value))
        return errors

    until = time.monotonic() + 30
    found, _ = together(program, 2, curve_keys=keys if encrypted else None)
    assert found == [encrypted] * 2


def test_a_rank_with_a_key_that_others_do_not_list_gets_a_named_error(keys, tmp_path):
    """The rank takes the addresses of a running group and poses as rank 1, but with its own key."""
    make_curve_keys(tmp_path, 2)
    (tmp_path / "rank-0.key").write_text((keys / "rank-0.key").read_text())

    def program(comm):
        if comm.rank == 0:
            store = HashStore()
            card = {"endpoint": comm.mesh.endpoints[0], "world_size": 2, "job": comm.mesh.job}
            card |= {"keys": load_curve_keys(tmp_path, 1, 2).digest}
            card |= {"reach": [network(), "46", False]}
            store.set("sparsync/meetings/1/0", json.dumps(card))
            intruder = ZmqCommunicator(1, 2, store=store, timeout=1.5, curve_keys=tmp_path)
            sending = intruder.isend(message(9), 0, "p", RAW)
            receiving = intruder.irecv(0, 1, "p", RAW)
            with pytest.raises(CommunicationError, match="rank 1, step 0: message from rank 0"):
                receiving.wait()
            with pytest.raises(CommunicationError, match="refused this rank's key"):
                sending.wait()
                intruder.isend(message(9), 0, "p", RAW).wait()
            intruder.close()
            assert comm.mesh.refusals() == {"unlisted keys": 1}
        meet(comm)
        run(testing.exercise_communicator(comm))
        seen = dict(comm.lost), dict(comm.dropped)
        meet(comm)  # no rank closes before all have checked
        return seen

    assert together(program, 3, curve_keys=keys) == [({}, {})] * 3


def test_secret_keys_are_for_their_owner_alone(tmp_path):
    directory = tmp_path / "new"
    make_curve_keys(directory, 2)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    secrets = sorted(directory.glob("*.key_secret"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in secrets] == [0o600, 0o600]


def test_secret_keys_are_for_their_owner_alone_while_they_are_written(tmp_path, monkeypatch):
    """Even in a folder open to others, and with any umask."""
    modes, create = [], zmq.auth.create_certificates

    def watched(directory, name):
        made = create(directory, name)
        modes.append(stat.S_IMODE(Path(made[1]).stat().st_mode))
        return made

    monkeypatch.setattr(zmq.auth, "create_certificates", watched)
    former = os.umask(0)
    try:
        make_curve_keys(tmp_path, 2)
    finally:
        os.umask(former)
    assert modes == [0o600, 0o600]
    assert load_curve_keys(tmp_path, 1, 2).secret


def test_keys_are_not_overwritten(keys):
    with pytest.raises(ConfigurationError, match=r"rank-0.key is there already; remove"):
        make_curve_keys(keys, 2)


def test_no_keys_for_no_ranks(tmp_path):
    with pytest.raises(ConfigurationError, match="ranks is 0"):
        make_curve_keys(tmp_path, 0)


def test_keys_that_do_not_fit_are_refused(keys, tmp_path):
    make_curve_keys(tmp_path, 2)
    (tmp_path / "rank-1.key").write_text((keys / "rank-1.key").read_text())
    with pytest.raises(ConfigurationError, match="do not fit together"):
        load_curve_keys(tmp_path, 1, 2)
    (tmp_path / "rank-1.key").write_text("not a certificate")
    with pytest.raises(ConfigurationError, match="no certificate"):
        load_curve_keys(tmp_path, 0, 2)


@cases(
    [],
    [b"1.0"],
    [b"1.0", b"7", b"", b"10.0.0.1", b"", b"NULL"],
    [b"1.0", b"7", b"", b"10.0.0.1", b"", b"CURVE"],
    [b"1.0", b"7", b"", b"10.0.0.1", b"", b"CURVE", b"short"],
    [b"1.0", b"7", b"", b"10.0.0.1", b"", b"CURVE", bytes(32)],
    [b"1.0", b"7", b"", b"10.0.0.1", b"", b"PLAIN", b"user", b"password"],
)
def test_the_doorkeeper_lets_nobody_in_by_mistake(request_):
    assert curve_user(request_, [b"x" * 40]) is None
    assert plain_user(request_, b"the word") is None
    assert zap_reply(request_, None)[2] == b"400"


SO_RCVBUFFORCE = 33  # beyond the system's limit, because other programs use this interface as well
EVERY_PROTOCOL = 0x0003  # ETH_P_ALL
SECRET = b"gradients tell what a model was trained on. " * 4


class Listener:
    """A thread that records everything crossing the loopback interface, as root can."""

    def __init__(self):
        try:
            given = socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL)
            self.socket = socket.socket(*given)
        except (AttributeError, PermissionError) as error:
            pytest.skip(f"no packets can be recorded here: {error}")
        self.socket.bind(("lo", 0))
        self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
        self.socket.settimeout(0.1)
        self.heard, self.stopped = bytearray(), threading.Event()
        self.thread = threading.Thread(target=self._listen)
        self.thread.start()

    def _listen(self):
        while not self.stopped.is_set():
            try:
                self.heard += self.socket.recv(1 << 16)
            except TimeoutError:
                continue

    def stop(self):
        self.stopped.set()
        self.thread.join()
        self.socket.setblocking(False)
        with suppress(BlockingIOError):  # what came before
            for _ in range(100_000):
                self.heard += self.socket.recv(1 << 16)
        self.socket.close()
        return bytes(self.heard)


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_bytes_on_the_wire_are_readable_only_without_keys(encrypted, tmp_path):
    options = {}
    if encrypted:
        make_curve_keys(tmp_path, 2)
        options["curve_keys"] = tmp_path

    def program(comm):
        payload = torch.frombuffer(bytearray(SECRET), dtype=torch.uint8)
        if comm.rank == 0:
            comm.isend(payload, 1, "p", RAW).wait()
        else:
            receiving = comm.irecv(0, len(SECRET), "p", RAW)
            receiving.wait()
            assert bytes(receiving.result.tolist()) == SECRET
        meet(comm)

    listener = Listener()
    try:
        together(program, 2, **options)
    finally:
        heard = listener.stop()
    assert len(heard) > len(SECRET)  # it did listen
    assert (SECRET in heard) != encrypted
    assert (SECRET[:16] in heard) != encrypted


def test_keys_need_a_place_of_their_own(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, said = command("keys", "")
    assert code == 2 and "has no name" in said and not list(tmp_path.iterdir())

    assert command("keys", ".", "--ranks", 1)[0] == 0
