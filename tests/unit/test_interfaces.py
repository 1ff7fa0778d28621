"""Test interfaces named by ``GLOO_SOCKET_IFNAME``, and hosts whose name maps to 127.0.1.1."""

import dataclasses
import json
import os
import socket

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore

from sparsync.errors import ConfigurationError
from sparsync.transports import rendezvous
from sparsync.transports.interfaces import (
    Interface,
    is_loopback,
    listening_on,
    own_interfaces,
    selected,
    usual_address,
)
from sparsync.transports.rendezvous import GlooPlace, check_places, choose_interface, way_to
from tests.tables import cases, refused

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", ("10.0.0.5", "fd00::5", "fe80::5%eth0"))
ETH10 = Interface("eth10", ("10.10.0.5",))
IB0 = Interface("ib0", ("fd01::7",))
DOCKER0 = Interface("docker0", ("172.17.0.1",))
DOWN = Interface("wlan0")
CARDS = [LO, ETH0, ETH10, IB0, DOCKER0, DOWN]


@cases(
    ("eth0", ["eth0"]),
    ("ib0,eth0", ["ib0", "eth0"]),
    (" eth0 , eth0 ,", ["eth0"]),
    ("eth", ["eth0", "eth10"]),
    ("=eth0", ["eth0"]),
    ("^lo,docker0", ["eth0", "eth10", "ib0"]),
    ("^docker", ["eth0", "eth10", "ib0"]),
    ("^=eth0,nothing", ["eth10", "ib0", "docker0"]),
    ("10.0.0.5", ["eth0"]),
    ("fd00:0::5", ["eth0"]),
    ("[fd01::7]", ["ib0"]),
    ("fe80::5%eth0", ["eth0"]),
    ("127.0.0.1", ["lo"]),
    ("lo", ["lo"]),
)
def test_every_form_of_the_variable_selects(value, names):
    assert [one.name for one in selected(value, CARDS)] == names


@cases(
    ("eth1", "'eth1' is not an interface of "),
    ("eth0,nope0", "'nope0' is not an interface of "),
    ("10.0.0.6", "'10.0.0.6' is not an interface of "),
    (",", "',' is not an interface of "),
    ("^eth,ib,docker,lo", "leaves no interface of "),
)
def test_what_selects_nothing_is_one_line_with_the_variable_and_all_interfaces(value, words):
    with pytest.raises(ConfigurationError) as caught:
        selected(value, CARDS)
    said = str(caught.value)
    assert said.startswith(f"GLOO_SOCKET_IFNAME is '{value}', and ") and words in said
    assert "give one of lo (127.0.0.1, ::1), eth0 (10.0.0.5, fd00::5, fe80::5%eth0), " in said
    assert "wlan0 (no address)" in said and "\n" not in said


def test_the_machines_own_interfaces_are_found():
    names = {name for _, name in socket.if_nameindex()}
    found = {one.name: one for one in own_interfaces()}
    assert set(found) <= names
    lo = next(one for one in found.values() if one.loopback)
    assert "127.0.0.1" in lo.addresses
    with socket.socket() as listener:  # an address found is one that can be bound
        listener.bind((lo.addresses[0], 0))


@pytest.fixture
def cards(monkeypatch):
    """Pretend that this machine has certain network cards, and a hosts file like Debian's."""
    monkeypatch.setattr(rendezvous, "own_interfaces", lambda: CARDS)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    real = socket.getaddrinfo

    def resolve(host, *args, **kwargs):
        return real({"node7": "127.0.1.1"}.get(host, host), *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_zmq_binds_an_address_of_what_the_variable_selects(cards):
    of_values = {"^lo,docker0": "10.0.0.5", "ib0": "fd01::7"}
    of_values |= {"docker0,eth0": "172.17.0.1", "lo,eth0": "127.0.0.1"}
    for value, address in of_values.items():
        cards.setenv("GLOO_SOCKET_IFNAME", value)
        assert choose_interface(None, HashStore()) == address
    assert choose_interface("eth9", HashStore()) == "eth9"  # an argument decides
    cards.setenv("GLOO_SOCKET_IFNAME", "wlan0")
    with refused("is 'wlan0', which has no address; give one of lo"):
        choose_interface(None, HashStore())


def test_of_several_cards_the_one_on_the_route_is_bound(cards):
    cards.setattr(rendezvous, "address_to", {"head": "10.10.0.5"}.get)
    cards.setenv("GLOO_SOCKET_IFNAME", "^docker0")
    cards.setenv("MASTER_ADDR", "head")
    assert choose_interface(None, "elsewhere") == "10.10.0.5"


def test_in_a_store_without_a_host_ranks_listen_at_their_own_names_address(cards, tmp_path):
    """A ``file://`` init_method makes such a store; ranks may be on several machines."""
    store = PrefixStore("attach", FileStore(str(tmp_path / "store"), 2))
    cards.setattr(rendezvous, "address_to", {"node7": "10.10.0.5"}.get)
    assert choose_interface(None, store) == "10.10.0.5"
    cards.setattr(rendezvous, "address_to", {"node7": "127.0.1.1"}.get)
    assert choose_interface(None, store) == "10.0.0.5"
    cards.setattr(rendezvous, "address_to", lambda _: None)
    assert choose_interface(None, store) == "10.0.0.5"
    cards.setattr(rendezvous, "own_interfaces", lambda: CARDS[:1])
    assert choose_interface(None, store) == "127.0.0.1"


def test_a_host_whose_own_name_is_loopback_is_found_by_others(cards):
    assert way_to("node7") == usual_address(CARDS) == "10.0.0.5"
    assert way_to("localhost") == way_to("127.0.0.1") == "127.0.0.1"
    cards.setenv("WORLD_SIZE", "4")
    # all ranks are on this machine, so no message needs to leave it
    cards.setenv("LOCAL_WORLD_SIZE", "4")
    assert way_to("node7") == "127.0.0.1"
    cards.setenv("LOCAL_WORLD_SIZE", "2")
    assert way_to("node7") == "10.0.0.5"
    with pytest.raises(ConfigurationError, match=r"GLOO_SOCKET_IFNAME to one of lo \(127.0.0.1"):
        way_to("no-such-host.invalid")


def test_gloo_is_told_names_and_kept_off_loopback(cards):
    place = GlooPlace.here()
    assert (place.at, place.near, place.names, place.far) == ("127.0.1.1", True, None, "eth0")
    assert place.addresses(several=True) == ("10.0.0.5",)
    assert place.addresses(several=False) == ("127.0.1.1",)
    for several, name in ((True, "eth0"), (False, None)):
        with place.listening(several=several):
            assert os.environ.get("GLOO_SOCKET_IFNAME") == name
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    cards.setenv("GLOO_SOCKET_IFNAME", "10.0.0.5")
    place = GlooPlace.here()
    assert (place.at, place.near, place.names) == ("eth0 of node7", False, "eth0")
    with place.listening(several=True):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "10.0.0.5"
    place.check_reachable(3)
    cards.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(ConfigurationError) as caught:
        GlooPlace.here().check_reachable(3)
    assert str(caught.value).startswith("rank 3 would listen at lo of node7, where ranks of other")
    assert "set GLOO_SOCKET_IFNAME there to one of lo (127.0.0.1, ::1), eth0 (" in str(caught.value)


@pytest.mark.parametrize("name", ["192.0.2.77", "no-such-host.invalid"])
def test_a_name_that_gloo_cannot_listen_at_counts_as_loopback(cards, name):
    cards.setattr(socket, "gethostname", lambda: name)  # gloo falls back to 127.0.0.1
    place = GlooPlace.here()
    assert (place.near, place.far, place.own) == (True, "eth0", ("127.0.0.1",))
    what = "unknown" if name.startswith("no") else f"{name}, which is not here"
    assert place.at == f"127.0.0.1 (the address of its name {name} is {what})"


def test_an_interface_without_an_address_is_refused_unless_it_is_one_of_many(cards):
    for value in ("wlan0", "eth0,wlan0"):
        cards.setenv("GLOO_SOCKET_IFNAME", value)
        with pytest.raises(ConfigurationError, match=f"is '{value}', and wlan0 has no address"):
            GlooPlace.here()
    cards.setattr(rendezvous, "own_interfaces", lambda: [*CARDS, Interface("eth1")])
    cards.setenv("GLOO_SOCKET_IFNAME", "eth")
    assert GlooPlace.here().names == "eth0,eth10"


def place(network, *own, near=False, far="", beyond=""):
    return GlooPlace("here", near, None, far, "the interfaces", network, own, beyond)


DEBIAN = place("a", "127.0.1.1", near=True, far="eth0", beyond="10.0.0.1")


@cases(
    (place("a", "fd00::1"), place("b", "10.0.0.2"), "gloo connects addresses of one family"),
    # even on one network, gloo uses one address family
    (place("a", "fd00::1"), place("a", "10.0.0.2"), "gloo connects addresses of one family"),
    (
        place("a", "10.0.0.1", "10.1.0.1"),
        place("b", "10.0.0.2"),
        "connects equal numbers of interf",
    ),
    (place("a", "172.17.0.1"), place("b", "172.17.0.1"), "would both listen at 172.17.0.1,"),
    (place("a", "10.0.0.1"), place("b", "127.0.0.1", near=True), "rank 3 would listen at here"),
    (DEBIAN, place("b", "fd00::1"), "would listen at 10.0.0.1 (IPv4), rank 3 at fd00::1 (IPv6)"),
)
def test_places_that_gloo_cannot_connect_are_one_line(first, second, words):
    with pytest.raises(ConfigurationError) as caught:
        check_places({1: first, 3: second})
    said = str(caught.value)
    assert words in said and "\n" not in said
    assert "set GLOO_SOCKET_IFNAME " in said and "the interfaces" in said


def test_places_that_gloo_connects():
    near = {"near": True, "far": "eth0"}
    loopback = [place("a", "127.0.0.1", near=True), place("a", "127.0.0.1", near=True)]
    assert not check_places(dict(enumerate(loopback)))
    debian = [place(f"n{i}", "127.0.1.1", beyond=f"10.0.0.{i}", **near) for i in range(3)]
    assert check_places(dict(enumerate(debian)))
    two_cards = [place(f"n{i}", f"10.0.0.{i}", f"fd00::{i}") for i in range(2)]
    assert check_places(dict(enumerate(two_cards)))
    shown = dataclasses.asdict(two_cards[0])
    assert GlooPlace.of(json.loads(json.dumps(shown))) == two_cards[0]


def test_the_variable_is_restored_after_an_error(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo")
    with pytest.raises(RuntimeError), listening_on("eth0"):
        raise RuntimeError
    assert os.environ["GLOO_SOCKET_IFNAME"] == "^lo"


def test_loopback_is_told_from_names():
    told = {text: is_loopback(text) for text in ("127.0.1.1", "[::1]", "10.0.0.1", "lo", "")}
    assert list(told.values()) == [True, True, False, False, False]
