"""The library without a model: ``connect`` to the ranks, ``allreduce`` a vector."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from sparsync.algorithm import Algorithm
from sparsync.collectives.collective import Reduced
from sparsync.errors import ConfigurationError
from sparsync.presets import PRESETS, preset, resolve
from sparsync.reduction import SUM, Reduction, reduction
from sparsync.sparse import DenseVector, SparseVector, Vector, as_vector
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Engine, Operation, run
from sparsync.transports.groups import SoloCommunicator
from sparsync.transports.launchers import connect_mpi
from sparsync.transports.process_group import check_transport, connect_group

__all__ = ["allreduce", "connect", "iallreduce"]

_MOST_OUTSTANDING = 1024  # calls under way at once; each has a channel of its own
_Program = Callable[[Communicator], Coroutine[Operation, None, Reduced]]


def connect(
    timeout: float = 300.0,
    *,
    transport: str = "auto",
    curve_keys: Path | str | None = None,
    interface: str | None = None,
    port_range: tuple[int, int] | None = None,
    advertise: str | None = None,
    connect_timeout: float = 60.0,
) -> Communicator:
    """Return this process's communicator: torch.distributed's default group, or a world of one.

    With transport "mpi" and without ``torch.distributed``, its ranks are those that ``mpiexec`` started.

    Args:
        timeout: seconds that any wait may take before it fails with an error.
        transport: as for ``attach``: "auto" (zmq), "torch" (the group's own backend), "zmq" (sockets
            of its own: ``close`` it) or "mpi" (a communicator of its own: ``close`` it).
        curve_keys: folder with one certificate per rank, for an encrypted zmq.
        interface: the IP address or name of the interface that zmq binds; by default the one that leads
            to the other ranks.
        port_range: first and last port that zmq may bind; a rank takes one for each communicator.
        advertise: the address at which the other ranks find this one, if a static NAT forwards those
            ports to this machine.
        connect_timeout: seconds that opening the connections between ranks may take.

    Example:
        >>> comm = connect()
        >>> comm.rank, comm.world_size
        (0, 1)
    """
    sockets: dict[str, Any] = {
        "curve_keys": curve_keys,
        "interface": interface,
        "port_range": port_range,
        "advertise": advertise,
    }
    check_transport(transport, sockets)
    if not (dist.is_available() and dist.is_initialized()):
        return connect_mpi(timeout) if transport == "mpi" else SoloCommunicator()
    return connect_group(
        transport=transport, timeout=timeout, connect_timeout=connect_timeout, **sockets
    )


def allreduce(
    vector: Any,
    comm: Communicator,
    algorithm: str | Algorithm | None = None,
    *,
    k: int | None = None,
    op: str | Reduction = "sum",
    **options: Any,
) -> Reduced:
    """Reduce a vector over ranks, once; every rank calls it.

    Stateless: every call is an exact step, with new thresholds and boundaries.  Training keeps them
    from step to step: use ``attach``.

    Args:
        vector: a 1-D tensor or NumPy array, a ``scipy.sparse`` vector, a ``DenseVector`` or
            ``SparseVector``.  Size and dtype are equal on all ranks.
        comm: from ``connect``; a simulated communicator cannot block (see ``sparsync.simulate``).
        algorithm: a preset's name or an ``Algorithm``.  Default: with ``k`` "budgeted"; without,
            "sparcml-auto", which loses nothing and takes any dtype and operation.
        k: entries asked for, per rank and in the total; equal on all ranks.  None: all.
        op: "sum", "max", "min", "prod", "and", "or", "xor", "logical_and", "logical_or", or a
            ``Reduction`` of your own; elements that a vector does not store are its neutral element.
            Only SparCML's collectives take operations other than the sum.
        options: of the preset.

    Returns:
        ``total``, bit-identical on every rank, and ``delivered``, this rank's share of it.

    Raises:
        ConfigurationError: unknown algorithm, operation or option, a vector that is not 1-D, k < 0.
        PeerError: ranks disagree on size, dtype, operation, algorithm or k; a peer died.

    Cost: that of the algorithm, and one small allgather in which ranks compare the call.

    Example:
        >>> import torch
        >>> reduced = allreduce(torch.tensor([1.0, -5.0, 2.0]), connect(), k=1)
        >>> reduced.total.to_dense().tolist()
        [0.0, -5.0, 0.0]
    """
    # after the first ``iallreduce`` its thread owns the sockets: a blocking call goes through it as well
    engine = comm.companions.get("background")
    if isinstance(engine, _Background):
        return iallreduce(vector, comm, algorithm, k=k, op=op, **options).result()
    return run(_prepare(vector, algorithm, k, op, options)(comm))


def iallreduce(
    vector: Any,
    comm: Communicator,
    algorithm: str | Algorithm | None = None,
    *,
    k: int | None = None,
    op: str | Reduction = "sum",
    **options: Any,
) -> Future[Reduced]:
    """Start an ``allreduce`` and return its future at once; it goes on in the background.

    Several may be under way; all ranks start them in the same order.  The vector must not change
    until the future is done.

    Raises:
        ConfigurationError: as in ``allreduce``, or too many calls are under way.

    Cost: that of ``allreduce``; the first call starts a thread, which ``comm.close()`` ends.

    Example:
        >>> import torch
        >>> comm = connect()
        >>> futures = [iallreduce(torch.tensor([1.0, x]), comm, k=1) for x in (0.5, 2.0)]
        >>> [future.result().total.to_dense().tolist() for future in futures]
        [[1.0, 0.0], [0.0, 2.0]]
        >>> comm.close()
    """
    call = _prepare(vector, algorithm, k, op, options)
    if "background" not in comm.companions:
        comm.companions["background"] = _Background(comm)
    background = comm.companions["background"]
    assert isinstance(background, _Background)
    return background.start(call, comm)


@final
class _Background:
    """The thread of a communicator's non-blocking calls, and their channels."""

    def __init__(self, comm: Communicator) -> None:
        # apart: the companions hold this object and so its engine, which its own communicator must not
        # keep alive
        self._engine = Engine("iallreduce", [comm.channel(0).apart()])
        self._open: list[Future[Reduced]] = []
        self._calls = 0

    def start(self, program: _Program, comm: Communicator) -> Future[Reduced]:
        """Start a program on the next channel; the count of calls is equal on all ranks."""
        self._open = [future for future in self._open if not future.done()]
        if len(self._open) >= _MOST_OUTSTANDING:
            raise ConfigurationError(
                f"{len(self._open)} reductions are under way; wait for some of them first"
            )
        # twice as many channels as calls may be under way: another rank may be behind by as many calls,
        # and must not meet a new call's messages on the channel of an old one
        channel = comm.channel(1 + self._calls % (2 * _MOST_OUTSTANDING))
        self._calls += 1
        self._open.append(self._engine.submit(program(channel)))
        return self._open[-1]

    def close(self) -> None:
        """Finish the calls under way, then end the thread."""
        self._engine.close()


# ---- one call --------------------------------------------------------------------------------------


def _prepare(
    vector: Any,
    algorithm: str | Algorithm | None,
    k: int | None,
    op: str | Reduction,
    options: dict[str, Any],
) -> _Program:
    """Check the arguments and select; return a program that checks agreement, then reduces."""
    given, operation = as_vector(vector), reduction(op)
    operation.check(given.values.dtype)
    if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 0):
        raise ConfigurationError(
            f"k is {k!r}; give the number of entries to take, a whole number >= 0"
        )
    if k is not None and operation is not SUM:
        raise ConfigurationError(
            f"k works with sums, not with '{operation.name}': the largest entries of a vector say "
            "nothing about it; omit k"
        )
    wanted = algorithm or ("sparcml-auto" if k is None else "budgeted")
    chosen = resolve(wanted, **_filled_in(wanted, k, operation, options))
    ready, most = _select(given, chosen, k, operation), given.size if k is None else k
    facts = {
        "size": given.size,
        "dtype": given.values.dtype,
        "operation": operation.name,
        "algorithm": chosen.name,
        "k": most,
        "options": sorted(options.items(), key=lambda item: item[0]),
    }

    async def reduce(comm: Communicator) -> Reduced:
        await agree(comm, facts)
        return await chosen.make_collective().reduce(comm, ready, most, step=0)

    return reduce


def _filled_in(
    algorithm: str | Algorithm, k: int | None, operation: Reduction, options: dict[str, Any]
) -> dict[str, Any]:
    """Add to a preset's options those that follow from the call: the operation, and no cap without k."""
    known = preset(algorithm).options if isinstance(algorithm, str) else {}
    filled = {"cap": None, **options} if k is None and "cap" in known else dict(options)
    if operation is not SUM:
        if "op" not in known:
            name = algorithm if isinstance(algorithm, str) else algorithm.name
            general = ", ".join(n for n, row in sorted(PRESETS.items()) if "op" in row.options)
            raise ConfigurationError(
                f"{name} sums, and knows no '{operation.name}'; choose one of {general}"
            )
        filled["op"] = operation
    return filled


def _select(given: Vector, algorithm: Algorithm, k: int | None, operation: Reduction) -> Vector:
    """Take the k largest entries of a dense vector, or all that are not neutral."""
    neutral = operation.neutral(given.values.dtype)
    if isinstance(given, SparseVector):
        says_nothing = given.values == neutral
        return given.keep(~says_nothing) if bool(says_nothing.any()) else given
    if k is None:
        if algorithm.name == "dense":
            return DenseVector(given.values)
        return SparseVector.from_dense(given.values, neutral)
    # step 0 opens every period, so the selection is exact
    return algorithm.make_selector().select(given.values, k, step=0)
