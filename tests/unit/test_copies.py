"""Test that copies of a rank's state arrive unchanged, in pieces, or are abandoned."""

import struct
import threading
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync.elastic import copies
from sparsync.elastic.catch_up import (
    CatchUp,
    keep_gradients,
    load_copy,
    make_copy,
    rates_of,
    repeat,
)
from sparsync.elastic.copies import CopyServer, fetch, pack, unpack
from sparsync.errors import DeadlineError, PeerError, WireFormatError
from tests.tables import refuses


@given(st.binary(max_size=300))
def test_packing_loses_nothing(raw):
    assert unpack(pack(raw), len(raw)) == raw


def test_packing_weights_saves_bytes():
    raw = torch.randn(50_000, generator=torch.Generator().manual_seed(1)).numpy().tobytes()
    assert unpack(pack(raw), len(raw)) == raw
    assert len(pack(raw)) < 0.92 * len(raw)


@pytest.fixture
def server():
    server = CopyServer("127.0.0.1", None, None)
    yield server
    server.close()


@refuses(("0.0.0.0", "which means all of them"), ("nic7", "cannot listen on interface 'nic7'"))
def test_a_server_binds_one_interface(interface):
    CopyServer(interface, None, None)


@pytest.mark.parametrize("size", [1, 1000, 70_001])
def test_a_copy_arrives_whole(server, monkeypatch, size):
    monkeypatch.setattr(copies, "PIECE", 4096)
    raw = bytes(torch.arange(size).to(torch.uint8).numpy())
    threading.Timer(0.2, lambda: server.wanted.wait(5) and server.offer(7, raw)).start()
    assert fetch(server.endpoint, 5.0, 3) == (7, raw)
    assert fetch(server.endpoint, 5.0, 7) == (7, raw)
    server.drop()
    with pytest.raises(DeadlineError, match="there was no copy of the weights"):
        fetch(server.endpoint, 0.05, 7)


def test_a_copy_of_an_earlier_step_does_not_do(server):
    server.offer(2, b"early")
    threading.Timer(0.2, lambda: server.wanted.wait(5) and server.offer(5, b"late")).start()
    assert fetch(server.endpoint, 5.0, 3) == (5, b"late")
    assert fetch(server.endpoint, 5.0, 2)[0] == 5  # the nearest to now


def test_copies_may_be_offered_while_the_thread_looks_through_them(server):
    """The thread continues to iterate over existing copies while another one is offered."""
    server.offer(1, b"first")
    present = iter(server._copies)
    server.offer(2, b"second")
    assert list(present) == [1] and fetch(server.endpoint, 5.0, 2) == (2, b"second")


def test_nothing_waits_for_ever(server):
    with pytest.raises(DeadlineError, match=r"did not go on within 0.2 s"):
        fetch("tcp://127.0.0.1:9", 0.2)
    with pytest.raises(PeerError, match="not needed any more"):
        fetch("tcp://127.0.0.1:9", 60.0, stop=lambda: True)


def net_of(seed):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 1)
    net = torch.nn.Sequential(*layers)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def gradients(net, step, sparse):
    torch.manual_seed(step)
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = torch.randn_like(parameter)
        if sparse:
            parameter.grad *= torch.rand_like(parameter) < 0.1
        if (step + number) % 5 == 0:
            parameter.grad = None


@pytest.mark.parametrize("sparse", [True, False])
def test_catching_up_repeats_steps_bit_for_bit(server, sparse):
    net, optimizer = net_of(1)
    late, its = net_of(2)
    catch_up, rates = CatchUp("donor", server.endpoint, 5.0, 3), {}
    for step in range(9):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        gradients(net, step, sparse)
        if step == 4:
            assert server.wanted.wait(5)
            server.offer(4, make_copy(net, [optimizer]))
        if step >= 3:
            gradients(late, step, sparse)
            keep_gradients(catch_up, step, 0, its)
            assert all(parameter.grad is None for parameter in late.parameters())
        if step == 8:
            break
        if step >= 4:
            rates[step] = [(0, one) for one in rates_of([optimizer])]
        optimizer.step()
    while not catch_up.done:
        pass
    repeat(catch_up, 8, rates, late, [its])
    for mine, theirs in zip(late.state_dict().values(), net.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert str(its.state_dict()["state"]) == str(optimizer.state_dict()["state"])


BOMB = struct.pack("<II", 40, 1 << 20) + zlib.compress(bytes(1 << 26))


@pytest.mark.parametrize(
    ("size", "piece", "words"),
    [
        (b"short", b"", "announced by 5 bytes"),
        (struct.pack("<qq", 4, 1 << 62), b"", "no memory here"),
        (struct.pack("<qq", 4, -1), b"", "no memory here"),
        (struct.pack("<qq", 4, 40), b"short", "a piece of a copy is corrupt"),
        (struct.pack("<qq", 4, 40), bytes(40), "does not hold 40 bytes"),
        (struct.pack("<qq", 4, 40), pack(bytes(41)), "does not hold 40 bytes"),
        (struct.pack("<qq", 4, 40), pack(bytes(40)) + b"more", "does not hold 40 bytes"),
        (struct.pack("<qq", 4, 40), BOMB, "does not hold 40 bytes"),
    ],
    ids=["size", "huge", "negative", "cut", "zeros", "longer", "more", "bomb"],
)
def test_a_corrupt_copy_is_an_error(server, monkeypatch, size, piece, words):
    """The rank that fetches it must be informed; otherwise it would wait for the copy for ever."""
    monkeypatch.setattr(server, "_answer", lambda what, *_: size if what == b"?" else piece)
    catch_up = CatchUp("donor", server.endpoint, 5.0, 3)
    catch_up._thread.join(10)
    with pytest.raises(PeerError, match=f"{words}.*another rank is asked"):
        assert not catch_up.done


def test_a_piece_that_was_not_asked_for_is_an_error(server):
    """The server answers every request of the second piece with the first one."""

    class Wrong:
        def send_multipart(self, frames):
            who, asked, answer = frames
            own.send_multipart([who, asked[:9] + bytes(8), answer])

        def __getattr__(self, name):
            return getattr(own, name)

    own, server._socket = server._socket, Wrong()
    server.offer(3, bytes(2 * copies.PIECE))
    with pytest.raises(WireFormatError, match="not asked for"):
        fetch(server.endpoint, 5.0, 3)


def test_any_failure_of_the_fetch_is_told():
    """The address cannot be parsed, which is an error of ZeroMQ and not of this library."""
    catch_up = CatchUp("donor", "nowhere", 5.0, 3)
    catch_up._thread.join(10)
    with pytest.raises(PeerError, match="another rank is asked"):
        assert not catch_up.done


def test_a_copy_that_does_not_come_is_told(server):
    catch_up = CatchUp("donor", "tcp://127.0.0.1:9", 0.1, 0)
    with pytest.raises(PeerError, match="another rank is asked"):
        while True:
            assert not catch_up.done
    catch_up.stop()


def test_a_copy_is_not_code(server):
    net, optimizer = net_of(1)
    load_copy(bytes(make_copy(net, [optimizer])), net, [optimizer])
    with pytest.raises(Exception, match=r"[Ww]eights.only|PytorchStreamReader|not a ZIP"):
        load_copy(b"cos\nsystem\n(S'true'\ntR." * 9, net, [optimizer])
