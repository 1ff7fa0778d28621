"""Test the rendezvous of the ZeroMQ transport, and its refusals."""

import errno
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from torch.distributed import HashStore

from sparsync import ConfigurationError
from sparsync.errors import CommunicationError, DeadlineError
from sparsync.transports.rendezvous import check_sockets, meet
from sparsync.transports.zmq import ZmqCommunicator, make_curve_keys
from sparsync.transports.zmq.communicator import _agreed
from sparsync.transports.zmq.mesh import bind
from tests.tables import cases, refused

from .zmq_group import exchange, forwarded, together

PORT = 20_000 + os.getpid() % 10_000  # below those that the system gives out


def test_a_store_serves_several_groups():
    store = HashStore()
    together(exchange, 2, store=store)
    together(exchange, 2, store=store)


def test_only_the_given_interface_is_bound():
    def program(comm):
        return comm.mesh.address

    for interface, bound in ((None, "127.0.0.1"), ("lo", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")):
        for endpoint in together(program, 2, interface=interface):
            assert endpoint.startswith(f"tcp://{bound}:")


def test_ports_are_of_the_range_and_each_is_taken_once():
    def program(comm):
        exchange(comm)
        return int(comm.mesh.address.rpartition(":")[2])

    taken = together(program, 2, port_range=(PORT, PORT + 20))
    assert len(set(taken)) == 2 and set(taken) <= set(range(PORT, PORT + 21))
    used = PORT + 30
    with (
        socket.create_server(("127.0.0.1", used)),
        refused(f"no port from {used} to {used} is free"),
    ):
        together(program, 1, port_range=(used, used))


class Unprivileged:
    """A socket of a process that may bind no port below 1024."""

    last_endpoint = ""

    def bind(self, address):
        if int(address.rpartition(":")[2]) < 1024:
            raise zmq.ZMQError(errno.EACCES)
        self.last_endpoint = address

    def get_string(self, option):
        return self.last_endpoint


def test_ports_that_need_permission_are_passed_over():
    assert bind(Unprivileged(), "127.0.0.1", (1020, 1030), None) == "tcp://127.0.0.1:1024"
    words = r"no port from 1000 to 1010 is free .*\(this process has no permission for some"
    with pytest.raises(ConfigurationError, match=words):
        bind(Unprivileged(), "127.0.0.1", (1000, 1010), None)


def test_ranks_meet_at_the_address_that_a_nat_forwards():
    def program(comm):
        exchange(comm)
        return sorted(endpoint.partition(" ")[0] for endpoint in comm.mesh.endpoints)

    ports = range(PORT + 40, PORT + 42)
    with forwarded("127.0.0.9", "127.0.0.1", ports):
        options = {"interface": "127.0.0.1", "port_range": (ports[0], ports[-1])}
        found = together(program, 2, advertise="127.0.0.9", **options)
    assert found == [[f"tcp://127.0.0.9:{port}" for port in ports]] * 2


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_names_and_addresses_may_be_advertised(host):
    for address in together(lambda comm: comm.mesh.address, 2, advertise=host):
        assert address.startswith(f"tcp://{host}:")
    for text in ("host-1.example", "10.0.0.7", "::1", "[::1]", "fe80::1%eth0"):
        check_sockets({"advertise": text})


def test_missing_ranks_are_named():
    with refused("no word from ranks 0, 2, 3 within 0.2 s", error=DeadlineError):
        ZmqCommunicator(1, 4, store=HashStore(), timeout=0.2)


def test_rank_0_names_the_ranks_that_have_not_read():
    store = HashStore()
    for peer in (1, 2):
        store.set(f"sparsync/meetings/1/{peer}", "card")
    store.set("sparsync/meetings/1/2 read", "1")
    with pytest.raises(DeadlineError, match=r"no word from rank 1 within 0\.2 s; are they alive"):
        meet(store, 0, 3, "card", 0.2)


def test_a_rank_of_a_larger_world_is_named_by_all():
    """Rank 1 waits for a rank that does not exist, so it never reads that the others have come."""
    store = HashStore()

    def program(rank):
        try:
            ZmqCommunicator(rank, 4 if rank == 1 else 3, store=store, timeout=0.5)
        except CommunicationError as error:
            return str(error).replace(", phase 'rendezvous'", "")
        except ConfigurationError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(program, range(3)))
    told = (
        "rank 0: no word from rank 1 within 0.5 s; rank 1 is one of 4 ranks, this rank one of 3:",
        "rank 1: no word from rank 3 within 0.5 s; rank 0 is one of 3 ranks, this rank one of 4:",
        "world_size differs: rank 0 has 3, ranks 1 have 4;",
    )
    assert texts == [f"{words} give all ranks the same world_size" for words in told]


EVERYWHERE = ("", "0.0.0.0", "0", "0x0", "*", "*%lo", "::", "0::0", "::ffff:0.0.0.0")
NO_HOSTS = ("", "a b", "[]", "host:99", "127.0.0.1:99", "[::1]:99", "tcp://host", "0.0.0.0")


@cases(
    *(({"interface": text}, f"'{text}', which means all of them") for text in EVERYWHERE),
    ({"interface": "nic7"}, "cannot listen on interface 'nic7'"),
    ({"interface": "192.0.2.1"}, "cannot listen"),
    ({"port_range": (9, 8)}, "port_range is (9, 8); give the first and"),
    ({"port_range": 29600}, "port_range is 29600; give"),
    *(({"advertise": text}, f"advertise is {text!r}; give the host name") for text in NO_HOSTS),
    ({"timeout": 0}, "timeout is 0"),
    ({"curve_keys": ""}, "curve_keys is ''; give the folder"),
    ({"curve_keys": "/nowhere"}, "/nowhere/rank-0.key is missing"),
    ({"rank": 1}, "rank is 1 of 1"),
)
def test_arguments_that_cannot_work_are_refused_in_one_line(options, words):
    with refused(words):
        ZmqCommunicator(**{"rank": 0, "world_size": 1, "store": HashStore(), **options})


@cases(
    (None, "encrypted differs: rank 0 has True, ranks 1 have False; .* the same curve_keys"),
    (
        "more",
        r"the digest of curve_keys differs: rank 0 has (\w{12}), ranks 1 have (?!\1)\w{12}; give "
        "all ranks the same .key files",
    ),
)
def test_keys_that_differ_between_ranks_are_refused_by_all(other, says, tmp_path):
    places = [tmp_path / "keys", other and tmp_path / other]
    for place in filter(None, places):
        make_curve_keys(place, 2)
    store = HashStore()

    def program(rank):
        try:
            ZmqCommunicator(rank, 2, store=store, timeout=5, curve_keys=places[rank])
        except ConfigurationError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        texts = set(pool.map(program, range(2)))
    assert len(texts) == 1 and re.fullmatch(says, texts.pop())


def card(address, families="46", network="a", advertised=False):
    facts = {"world_size": 2, "keys": "", "job": 7, "reach": [network, families, advertised]}
    return {"endpoint": f"tcp://{address} word", **facts}


@cases(
    ([card("[fd00::1]:1", "6"), card("10.0.0.2:1", network="b")], "1 it has no IPv4 0"),
    ([card("10.0.0.1:1", "4"), card("[fd00::2]:1", network="b")], "1 it has no IPv6 0"),
    ([card("172.17.0.1:1"), card("172.17.0.1:2", network="b")], "1 same 0"),
    ([card("127.0.0.1:1"), card("127.0.0.1:2", network="b")], "0 loopback 1"),
    # addresses that ranks can reach: on one network, of several families, behind a router
    ([card("127.0.0.1:1", ""), card("127.0.0.1:2", "")], ""),
    ([card("10.0.0.1:1", "4"), card("[fd00::2]:1", "4")], ""),
    ([card("10.0.0.1:1"), card("[fd00::2]:1", network="b")], ""),
    ([card("1.2.3.4:1", "6", "a", True), card("1.2.3.4:2", "6", "b", True)], ""),
    ([card("1.2.3.4:1", network="b", advertised=True), card("1.2.3.4:2")], ""),
)
def test_addresses_that_other_networks_cannot_reach_are_refused_by_all(cards, words):
    said = set()
    for rank in range(2):
        try:
            assert _agreed(rank, cards) == (7, [each["endpoint"] for each in cards])
        except ConfigurationError as error:
            said.add(str(error).partition("; rank ")[0])
            assert f"; rank {rank} has lo (127.0.0.1" in str(error)
    if not words:
        assert not said
        return
    (text,) = said
    peer, *why, other = words.split()
    address = cards[int(peer)]["endpoint"].partition(" ")[0]
    words = f"rank {peer} listens at {address}, where rank {other} on another network "
    assert text.startswith(words)
    assert " ".join(why) in text and "GLOO_SOCKET_IFNAME" in text and "\n" not in text
