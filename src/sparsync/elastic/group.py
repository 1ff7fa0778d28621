"""A process group for torchft's ``Manager``, whose members communicate over ZeroMQ or gloo."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, final

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from sparsync.console import say
from sparsync.elastic.copies import CopyServer, Source
from sparsync.errors import ConfigurationError
from sparsync.feedback.agreed_setup import number_of
from sparsync.transports.gloo import GlooCommunicator
from sparsync.transports.process_group import check_transport
from sparsync.transports.rendezvous import choose_interface, way_to
from sparsync.transports.zmq import ZmqCommunicator
from sparsync.transports.zmq.curve import CurveKeys

try:
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroup
    from torchft.work import _DummyWork as Done
except ImportError as error:
    raise ConfigurationError(
        "elastic training is built on torchft; pip install 'sparsync[elastic]'"
    ) from error

# Releases up to 0.2.0 call ``configure`` with the address of a store instead, and their lighthouse does
# not pass on the members' own addresses.  Every quorum would fail, and ranks would wait for the next one
# forever.
if not hasattr(Manager, "_reconfigure_pg"):
    raise ConfigurationError(
        "this torchft passes no reconfigure handles between ranks, like all releases up to 0.2.0; "
        "pip uninstall torchft, then pip install 'sparsync[elastic]'"
    )

__all__ = ["ElasticGroup", "Quorum", "group_of", "make_manager"]

# The interval of heartbeats.  It is a tenth of 500 ms, the time after which a lighthouse started as in
# docs/elastic.md considers a silent rank dead.
_BEAT = timedelta(milliseconds=50)
# time without an answer after which the quorum is requested again; a restarted lighthouse has lost the
# first request
_ASK_AGAIN = timedelta(seconds=20)
# time limit for connecting to the lighthouse, which may start later than this rank, and to this rank's
# own manager
_CONNECTS = timedelta(seconds=60)
_LOOPBACK = "127.0.0.1"


class Quorum(NamedTuple):
    """The members of a quorum as seen by this rank."""

    number: int  # > 0, different for every change, even after a restart of the lighthouse
    serial: int  # grows with every change seen by the lighthouse
    rank: int
    names: tuple[str, ...]
    exchanges: list[str]
    copies: list[Source]  # the addresses from which the members' weights can be fetched
    misfit: str = ""  # the reason why this rank cannot be a member

    @property
    def endpoints(self) -> list[str]:
        """The endpoints of the members' exchanges.

        Raises:
            ConfigurationError: this rank cannot be a member.
        """
        if self.misfit:
            raise ConfigurationError(self.misfit)
        return self.exchanges


@final
class ElasticGroup(ProcessGroup):
    """The ``pg`` of a ``torchft.Manager``, for ``attach(elastic=manager)``.

    Each member sends its addresses and its public key to the lighthouse.  A change of the quorum is only
    recorded at first.  It takes effect when the exchange of a step begins, on the thread that owns the
    sockets.  The group supports only sparsync's exchanges, and refuses torchft's ``manager.allreduce``.

    Args:
        transport: "zmq", or "torch" (gloo); copies of the weights use ZeroMQ in any case.
        curve_keys: for "zmq": the directory with the public keys of all possible members and this rank's
            secret key, or the file of the secret key.  All messages between members are encrypted, and
            members whose key is not in the directory are left out.
        timeout: seconds that a message of an exchange may take; the group continues without a rank that
            stalls for longer.
        interface: name or address of the interface to bind.  Default: ``GLOO_SOCKET_IFNAME``; if that is
            not set, the interface that leads to the lighthouse (``TORCHFT_LIGHTHOUSE``) or to
            ``MASTER_ADDR``.
        port_range: for "zmq": first and last port that may be bound; a rank needs two of them.
        advertise: for "zmq": the address at which other ranks reach this one, if it differs from the
            interface's address.

    Example:
        >>> manager = make_manager(min_replicas=2)  # doctest: +SKIP
        >>> sync = sparsync.attach(model, optimizer, elastic=manager)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        transport: str = "zmq",
        curve_keys: Path | str | None = None,
        timeout: float = 10.0,
        interface: str | None = None,
        port_range: tuple[int, int] | None = None,
        advertise: str | None = None,
    ) -> None:
        super().__init__(0, 1)
        if transport not in ("zmq", "torch"):
            raise ConfigurationError(f"transport is {transport!r}; give 'zmq', or 'torch' (gloo)")
        its = {"curve_keys": curve_keys, "port_range": port_range, "advertise": advertise}
        check_transport(transport, its)
        lighthouse = os.environ.get("TORCHFT_LIGHTHOUSE", "").rpartition(":")[0]
        lighthouse = lighthouse.rpartition("/")[2].strip("[]")
        if interface is None and lighthouse and not os.environ.get("GLOO_SOCKET_IFNAME"):
            interface = way_to(lighthouse)
        interface = choose_interface(interface, HashStore())
        # the name identifies a process, not a rank number, because a restarted rank has lost its state
        self.name = uuid.uuid4().hex
        self.quorum: Quorum | None = None
        # the manager's store; with gloo, ranks rendezvous in the store of the first of them
        self.store: Any = None
        self._keys: CurveKeys | None = None
        self._said = ""
        # Until the first quorum, this is a group of one.  Its sockets are bound already, because the
        # manager sends their addresses to the lighthouse.
        self.comm: ZmqCommunicator | GlooCommunicator
        if transport == "torch":
            self.copies = CopyServer(interface, None, None)
            self.store = _store(timedelta(seconds=timeout))
            self.comm = GlooCommunicator(_host(self.copies.endpoint), self.store, timeout)
            exchange = self.comm.endpoint
        else:
            self.comm = ZmqCommunicator(
                0,
                1,
                store=HashStore(),
                interface=interface,
                port_range=port_range,
                advertise=advertise,
                timeout=timeout,
                connect_timeout=timeout,
                curve_keys=curve_keys,
                changing=True,
            )
            self._keys, exchange = self.comm.mesh.keys, self.comm.mesh.endpoint
            self.copies = CopyServer(interface, port_range, advertise, self._keys)
        self._card = {"transport": transport, "key": ""}
        if self._keys is not None:
            # The list of keys is part of the transport's name: ranks with different lists would refuse
            # each other's connections, and wait for each other in every step.
            self._card["transport"] = f"{transport} with the keys {self._keys.digest}"
            self._card["key"] = self._keys.public.decode()
        self._card |= {"name": self.name, "exchange": exchange, "copies": self.copies.endpoint}

    def get_reconfigure_handle(self) -> str:
        """Return this member's addresses and public key, which the lighthouse distributes."""
        return json.dumps(self._card)

    def reconfigure(self, opts: Any) -> Any:
        """Record the compatible members of a new quorum; torchft's manager calls this on its own thread.

        Incompatible members are left out.  If a rank is compatible with no other rank, and has never
        trained with one, it raises an error later.  Then this rank ends, and the ranks that train do not.
        """
        # The quorum is only recorded here: sockets belong to the exchanging thread, which may be in
        # a step.
        try:
            peers = [
                {"transport": "zmq", "key": "", **json.loads(handle)} for handle in opts.handles
            ]
            reasons = [self._misfit(peer) for peer in peers]
            fitting = [peer for peer, reason in zip(peers, reasons, strict=True) if not reason]
            names = tuple(str(peer["name"]) for peer in fitting)
            rank = names.index(self.name)
            exchanges = [f"{peer['exchange']} {peer['key']}".rstrip() for peer in fitting]
            copies = [
                Source(str(peer["copies"]), str(peer["key"]).encode(), self._keys)
                for peer in fitting
            ]
        except (AttributeError, ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(
                "a member of the quorum has another kind of process group; give all managers an "
                "ElasticGroup of the same version"
            ) from error
        # do not raise an error here: torchft would only record it as a failure of this quorum, and ask
        # for quorums forever
        misfit = ""
        if any(reasons):
            why = "; ".join(sorted({*reasons} - {""}))
            misfit = (
                f"{len(peers) - len(fitting)} of {len(peers)} members of the quorum do not fit this rank "
                f"({why}); give all the same transport=, and curve_keys= with the same .key files"
            )
            if len(fitting) > 1 or (self.quorum is not None and not self.quorum.misfit):
                # print a reason only once, because every change of the quorum comes here
                if misfit != self._said:
                    say(f"{misfit}; they are left out")
                self._said, misfit = misfit, ""
        # The number identifies the group in messages.  It is a digest of the lighthouse's number and the
        # members, so it differs even if another lighthouse happens to use the same number, and whenever
        # different members are chosen.
        told = json.dumps([opts.uuid, *fitting])
        self.quorum = Quorum(
            number_of(told) or 1, opts.uuid, rank, names, exchanges, copies, misfit
        )
        return Done(None)

    def _misfit(self, peer: Mapping[str, Any]) -> str:
        """Return the reason why this rank cannot exchange with a member; empty if it can."""
        theirs, mine = peer["transport"], self._card["transport"]
        if theirs != mine:
            return f"the others use transport {theirs}, this rank uses {mine}"
        if self._keys is not None and str(peer["key"]).encode() not in self._keys.listed:
            return "a key is not listed here"
        return ""

    def size(self) -> int:
        """Return the number of members."""
        return 1 if self.quorum is None else len(self.quorum.names)

    def getBackendName(self) -> str:
        """Return the name that torchft displays."""
        return "sparsync-elastic"

    def allreduce(self, *_: Any) -> Any:
        """Refuse torchft's own exchange."""
        raise ConfigurationError(
            "an ElasticGroup carries sparsync's exchanges alone; attach(model, optimizer, "
            "elastic=manager), and omit manager.allreduce and torchft's wrappers"
        )

    def shutdown(self) -> None:
        """Close the sockets."""
        self.copies.close()
        self.comm.close()


def make_manager(
    min_replicas: int,
    *,
    lighthouse: str | None = None,
    name: str = "",
    timeout: float = 10.0,
    **options: Any,
) -> Any:
    """Return a ``torchft.Manager`` for this rank alone; create it last, after model and data.

    From the manager's first heartbeat on, the other ranks' next quorum waits for this rank.  If the
    lighthouse is not running yet, the call waits for it for up to 60 s.

    Args:
        min_replicas: the minimum number of ranks that train; with fewer, training waits.
        lighthouse: the lighthouse's address, e.g. http://HOST:29510; by default, the value of
            ``TORCHFT_LIGHTHOUSE``.
        name: this rank's name in torchft's logs.
        timeout: seconds that a message of an exchange may take.
        **options: the arguments ``transport``, ``curve_keys``, ``interface``, ``port_range`` and
            ``advertise`` of ``ElasticGroup``.
    """
    if lighthouse is not None:
        os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    if not os.environ.get("TORCHFT_LIGHTHOUSE"):
        raise ConfigurationError(
            "there is no lighthouse; give lighthouse=, or set TORCHFT_LIGHTHOUSE to its address, as in "
            "http://HOST:29510"
        )
    group, seconds = ElasticGroup(timeout=timeout, **options), timedelta(seconds=timeout)
    # torchft's managers find the other ranks of their replica in a store; here every replica is one rank
    group.store = group.store or _store(seconds)
    return Manager(
        pg=group,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=min_replicas,
        timeout=seconds,
        quorum_timeout=_ASK_AGAIN,
        connect_timeout=_CONNECTS,
        rank=0,
        world_size=1,
        store_addr=_LOOPBACK,
        store_port=group.store.port,
        replica_id=name,
        hostname=_host(group.copies.endpoint),
        heartbeat_interval=_BEAT,
        init_sync=False,  # the roll compares the weights
    )


def _store(seconds: timedelta) -> TCPStore:
    return TCPStore(_LOOPBACK, 0, None, True, seconds, False)


def _host(endpoint: str) -> str:
    return endpoint.partition("://")[2].rpartition(":")[0]


def group_of(manager: Any) -> ElasticGroup:
    """Return the manager's ``ElasticGroup``; refuse a manager that has none."""
    group = getattr(manager, "_pg", None)
    if not isinstance(group, ElasticGroup) or not hasattr(manager, "start_quorum"):
        raise ConfigurationError(
            f"elastic is {type(manager).__name__}; give a torchft.Manager whose pg is a "
            "sparsync.elastic.ElasticGroup()"
        )
    return group
