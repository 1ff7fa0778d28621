"""A process group for torchft's ``Manager``, whose members talk over ZeroMQ and stay connected."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from datetime import timedelta
from typing import Any, NamedTuple, final

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from sparsync.elastic.copies import CopyServer
from sparsync.errors import ConfigurationError
from sparsync.transports.rendezvous import choose_interface, way_to
from sparsync.transports.zmq import ZmqCommunicator

try:
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroup
    from torchft.work import _DummyWork as Done
except ImportError as error:
    raise ConfigurationError(
        "elastic training is built on torchft; pip install 'sparsync[elastic]'"
    ) from error

__all__ = ["ElasticGroup", "Quorum", "group_of", "make_manager"]

_BEAT = timedelta(milliseconds=50)  # between heartbeats


class Quorum(NamedTuple):
    """The members of a quorum as this rank sees them."""

    number: int  # > 0, another one for every change
    rank: int
    names: tuple[str, ...]
    endpoints: list[str]  # of their exchanges
    copies: list[str]  # where their weights can be fetched


@final
class ElasticGroup(ProcessGroup):
    """The ``pg`` of a ``torchft.Manager``, for ``attach(elastic=manager)``.

    A member's handle has its addresses.  A change of the quorum is noted here, and made when the exchange
    of a step begins, on the thread that owns the sockets.  It is for sparsync's exchanges: torchft's
    ``manager.allreduce`` is refused.

    Args:
        timeout: seconds that a message of an exchange may take; a rank that stands still is left behind
            after that.
        interface: name or address of the interface to bind.  Default: ``GLOO_SOCKET_IFNAME``, or the one
            that leads to the lighthouse (``TORCHFT_LIGHTHOUSE``), or to ``MASTER_ADDR``.
        port_range: first and last port that may be bound; a rank takes two of them.
        advertise: the address at which others find this rank, if that is not the interface's.

    Example:
        >>> manager = make_manager(min_replicas=2)  # doctest: +SKIP
        >>> sync = sparsync.attach(model, optimizer, elastic=manager)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        interface: str | None = None,
        port_range: tuple[int, int] | None = None,
        advertise: str | None = None,
    ) -> None:
        super().__init__(0, 1)
        lighthouse = os.environ.get("TORCHFT_LIGHTHOUSE", "").rpartition(":")[0]
        lighthouse = lighthouse.rpartition("/")[2].strip("[]")
        if interface is None and lighthouse and not os.environ.get("GLOO_SOCKET_IFNAME"):
            interface = way_to(lighthouse)
        interface = choose_interface(interface, HashStore())
        self.name = uuid.uuid4().hex  # nobody else can know it before the quorum
        self.comm = ZmqCommunicator(
            0,
            1,
            store=HashStore(),
            interface=interface,
            port_range=port_range,
            advertise=advertise,
            timeout=timeout,
            changing=True,
        )
        self.copies = CopyServer(interface, port_range, advertise)
        self.quorum: Quorum | None = None
        self.store: Any = None  # of its manager, for as long as that lives

    def get_reconfigure_handle(self) -> str:
        """Return this member's addresses."""
        mine = {
            "name": self.name,
            "exchange": self.comm.mesh.endpoint,
            "copies": self.copies.endpoint,
        }
        return json.dumps(mine)

    def reconfigure(self, opts: Any) -> Any:
        """Note the members of a new quorum; torchft's manager calls it on a thread of its own."""
        try:
            peers = [json.loads(handle) for handle in opts.handles]
            names = tuple(str(peer["name"]) for peer in peers)
            ends = [[str(peer[key]) for peer in peers] for key in ("exchange", "copies")]
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(
                "a member of the quorum has another kind of process group; give all managers an "
                "ElasticGroup of the same version"
            ) from error
        told = json.dumps([opts.uuid, *opts.handles]).encode()
        number = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little") >> 1
        self.quorum = Quorum(number or 1, names.index(self.name), names, *ends)
        return Done(None)

    def size(self) -> int:
        """Return the number of members."""
        return 1 if self.quorum is None else len(self.quorum.names)

    def getBackendName(self) -> str:
        """Return what it is."""
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
    **sockets: Any,
) -> Any:
    """Return a ``torchft.Manager`` of a rank of its own; make it last, after model and data.

    From its first heartbeat on, the others' next quorum waits for this rank.

    Args:
        min_replicas: ranks below which training waits.
        lighthouse: its address, as http://HOST:29510; None: that in ``TORCHFT_LIGHTHOUSE``.
        name: of this rank in torchft's logs.
        timeout: seconds that a message of an exchange may take.
        **sockets: ``interface``, ``port_range`` and ``advertise`` of ``ElasticGroup``.
    """
    if lighthouse is not None:
        os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    if not os.environ.get("TORCHFT_LIGHTHOUSE"):
        raise ConfigurationError(
            "there is no lighthouse; give lighthouse=, or set TORCHFT_LIGHTHOUSE to its address, as in "
            "http://HOST:29510"
        )
    group = ElasticGroup(timeout=timeout, **sockets)
    own = "127.0.0.1"  # a replica of one process has nobody to meet in its store
    group.store = store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
    seconds = timedelta(seconds=timeout)
    return Manager(
        pg=group,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=min_replicas,
        timeout=seconds,
        connect_timeout=seconds,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        replica_id=name,
        hostname=group.comm.mesh.endpoint.partition("://")[2].rpartition(":")[0],
        heartbeat_interval=_BEAT,
        init_sync=False,  # the roll compares the weights
    )


def group_of(manager: Any) -> ElasticGroup:
    """Return the group of a manager, or refuse it."""
    group = getattr(manager, "_pg", None)
    if not isinstance(group, ElasticGroup) or not hasattr(manager, "start_quorum"):
        raise ConfigurationError(
            f"elastic is {type(manager).__name__}; give a torchft.Manager whose pg is a "
            "sparsync.elastic.ElasticGroup()"
        )
    return group
