"""Collectives without a model: ``connect``, then ``allreduce`` or ``allgather`` a vector."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, final

import torch.distributed as dist

from sparsync.algorithm import Algorithm, settings_of
from sparsync.arrays import as_vector
from sparsync.collectives.collective import Reduced
from sparsync.errors import ConfigurationError, DisagreementError, require
from sparsync.presets import PRESETS, preset, resolve
from sparsync.reduction import SUM, Reduction, densify, entries_of, reduction
from sparsync.selection.selector import Selector
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator, check_timeout
from sparsync.transports.driver import Engine, Failure, Operation, run
from sparsync.transports.groups import SoloCommunicator
from sparsync.transports.launchers import connect_mpi, detect
from sparsync.transports.mpi import MpiCommunicator
from sparsync.transports.process_group import check_transport, connect_group
from sparsync.wire.codec import MessageFraming, decode_as
from sparsync.wire.coo import StreamCodec

__all__ = ["allgather", "allreduce", "connect", "iallreduce"]

_MOST_OUTSTANDING = 1024  # calls that may be in flight; each has its own channel
_MOST_KINDS = 256  # kinds of calls whose last total is remembered

T = TypeVar("T")
_Program = Callable[[Communicator], Coroutine[Operation, None, T]]


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

    Ranks that torchrun, mpiexec or srun has started first call ``init_process_group()`` from
    ``sparsync.transports.launchers``.  With transport "mpi" and without ``torch.distributed``, the ranks
    are those started by ``mpiexec``.

    Args:
        timeout: seconds that any wait may take before it fails with an error.
        transport: as for ``attach``: "auto" (zmq), "torch" (the group's own backend), "zmq" (opens its
            own sockets) or "mpi" (duplicates the communicator).  With zmq and MPI, ``close`` the
            communicator at the end.
        curve_keys: folder with one certificate per rank, to encrypt zmq.
        interface: the IP address or name of the interface that zmq binds; by default the interface that
            leads to the other ranks.
        port_range: first and last port that zmq may bind; a rank needs one port per communicator.
        advertise: the address at which the other ranks reach this one, if a static NAT forwards these
            ports to this machine.
        connect_timeout: seconds that opening the connections between ranks may take.

    Raises:
        ConfigurationError: an argument is invalid, or a launcher started several ranks that have not
            initialised ``torch.distributed``.

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
    # check this even for a single process, so that arguments that work there also work in a group
    check_transport(transport, sockets)
    check_timeout(timeout)
    check_timeout(connect_timeout, "connect_timeout")
    if not (dist.is_available() and dist.is_initialized()):
        return connect_mpi(timeout) if transport == "mpi" else _alone()
    return connect_group(
        transport=transport, timeout=timeout, connect_timeout=connect_timeout, **sockets
    )


def allreduce(
    vector: Any,
    comm: Any,
    algorithm: str | Algorithm | None = None,
    *,
    k: int | None = None,
    op: str | Reduction | None = None,
    **options: Any,
) -> Reduced:
    """Reduce a vector over all ranks once; every rank must call this.

    Every call computes exact thresholds and boundaries.  For training, use ``attach``, which reuses
    them from step to step.  Between calls, the communicator remembers only the number of entries in the
    last total, which "sparcml-auto" uses to choose a collective.

    Args:
        vector: a 1-D tensor or NumPy array; ``(indices, values, size)`` of NumPy arrays or tensors, with
            distinct indices of any integer type in any order; a sparse tensor or a ``scipy.sparse`` array
            or matrix of one row or column; a ``DenseVector`` or ``SparseVector``.  Size and dtype must
            be equal on all ranks.
        comm: from ``connect``, or an ``mpi4py.MPI.Intracomm``, which is duplicated on the first call.  A
            simulated communicator cannot block (see ``sparsync.simulate``).
        algorithm: a preset's name or an ``Algorithm``.  Default with ``k``: "budgeted", whose codec
            ``sparsync.wire.Packed("bf16")`` rounds values (``codec=Packed("fp32")`` does not); it takes
            float32, float64, float16 and bfloat16.  Default without ``k``: the lossless "sparcml-auto" in
            COO, which takes these dtypes, int32 and int64, and any operation.
        k: number of entries that each rank sends; equal on all ranks, None for all.  "budgeted",
            "halving", "gtopk" and "oktopk" also return only the k largest entries of the sum; with the
            others, the total has up to P k entries.  Algorithms that sum whole vectors ("dense",
            "quantised" and "ring-dense") take no k.
        op: "sum", "max", "min", "prod", "and", "or", "xor", "logical_and", "logical_or", or your own
            ``Reduction``.  Elements that a vector does not store count as the operation's neutral
            element.  Only SparCML's collectives take operations other than the sum.  Default: the
            operation of the ``Algorithm``, if you give one, otherwise "sum".
        options: options of the preset.

    Returns:
        ``total``, bit-identical on every rank, and ``delivered``, this rank's share of it: vectors with
        ``to_dense()``, ``to_torch()``, ``to_numpy()`` and ``to_scipy()``.  Their ``absent`` is the
        operation's neutral element.

    Raises:
        ConfigurationError: the algorithm, operation or option is unknown, the vector is not 1-D, k < 0,
            an earlier call on this communicator was interrupted, or the algorithm cannot select or send
            values of this dtype.
        PeerError: ranks disagree on size, dtype, operation, algorithm, its options or k; or a peer died.

    Cost: the cost of the algorithm, plus one small allgather, by which ranks check that they made the
    same call.

    Example:
        >>> import torch
        >>> reduced = allreduce(torch.tensor([1.0, -5.0, 2.0]), connect(), k=1)
        >>> reduced.total.to_dense().tolist()
        [0.0, -5.0, 0.0]
    """
    return _run(_prepare(vector, algorithm, k, op, options), comm)


def iallreduce(
    vector: Any,
    comm: Any,
    algorithm: str | Algorithm | None = None,
    *,
    k: int | None = None,
    op: str | Reduction | None = None,
    **options: Any,
) -> Future[Reduced]:
    """Start an ``allreduce`` in the background and return its future immediately.

    Several calls may be in flight; all ranks must start them in the same order.  The vector must
    not change until the future is done.  A call cannot be cancelled, because the other ranks take part
    in it.

    If ranks disagree about a call, only its future fails.  Any other error, e.g. a dead peer, ends all
    calls in flight, and the communicator refuses later ones.

    Raises:
        ConfigurationError: as in ``allreduce``, or too many calls are in flight.

    Cost: as for ``allreduce``; the first call starts a thread, which ``comm.close()`` ends.

    Example:
        >>> import torch
        >>> comm = connect()
        >>> futures = [iallreduce(torch.tensor([1.0, x]), comm, k=1) for x in (0.5, 2.0)]
        >>> [future.result().total.to_dense().tolist() for future in futures]
        [[1.0, 0.0], [0.0, 2.0]]
        >>> comm.close()
    """
    program, comm = _prepare(vector, algorithm, k, op, options), _communicator(comm)
    if "background" not in comm.companions:
        comm.companions["background"] = _Background(comm)
    background = comm.companions["background"]
    assert isinstance(background, _Background)
    return background.start(program, comm)


def allgather(vector: Any, comm: Any) -> list[Vector]:
    """Collect every rank's vector, in rank order; every rank must call this.

    Nothing is summed.  To assemble a vector from parts that do not overlap, use
    ``sparsync.reduction.fold``, or ``SparseVector.join`` if the parts ascend from rank to rank.

    Args:
        vector: as for ``allreduce``; the zeros of a dense vector need not be sent.
        comm: as for ``allreduce``.

    Returns:
        P exact vectors, each sparse or dense, whichever takes fewer bytes.

    Raises:
        ConfigurationError: the vector is not 1-D, its dtype has no wire format, or an earlier call on
            this communicator was interrupted.
        PeerError: ranks disagree on size or dtype, or a peer died.

    Cost: ceil(log2 P) messages; every rank receives the bytes of all others.  In addition, ranks compare
    the call and exchange lengths in one small allgather.

    References: Renggli et al., SparCML, SC 2019, section 5.2.

    Example:
        >>> import torch
        >>> [part.to_dense().tolist() for part in allgather(torch.tensor([0.0, 3.0]), connect())]
        [[0.0, 3.0]]
    """
    return _run(_prepare_gather(vector), comm)


def _alone() -> Communicator:
    """Return the communicator of a process that has no peers.

    Raises:
        ConfigurationError: a launcher started several ranks, and each of them would be alone.
    """
    here = detect()
    if here is not None and here.world_size > 1:
        mpi = ', or give transport="mpi"' if here.launcher == "mpi" else ""
        raise ConfigurationError(
            f"{here.world_size} ranks were launched, but torch.distributed is not initialised; first "
            f"call init_process_group() from sparsync.transports.launchers{mpi}"
        )
    return SoloCommunicator()


def _run(program: _Program[T], comm: Any) -> T:
    """Run a program to its end on this process's rank."""
    comm = _communicator(comm)
    # the first ``iallreduce`` hands the sockets to its thread, so later blocking calls must also use
    # this thread
    engine = comm.companions.get("background")
    if isinstance(engine, _Background):
        return engine.start(program, comm).result()
    with comm.exchange():
        return run(program(comm))


def _communicator(comm: Any) -> Communicator:
    """Return a communicator; wrap it first if it comes from mpi4py."""
    if isinstance(comm, Communicator):
        return comm
    if type(comm).__module__.partition(".")[0] == "mpi4py":
        return MpiCommunicator.of(comm)
    raise ConfigurationError(
        f"comm is of type {type(comm).__name__}; give the communicator of sparsync.connect(), or an "
        "mpi4py.MPI.Intracomm"
    )


@final
class _Background:
    """A thread that runs a communicator's non-blocking calls, each on its own channel."""

    def __init__(self, comm: Communicator) -> None:
        # This object is one of the communicator's companions, and it owns the engine.  A channel that
        # shared these companions would let the engine keep them alive, so ``apart`` leaves them out.
        self._engine = Engine("iallreduce", [comm.channel(0).apart()])
        self._open: list[Future[Any]] = []
        self._calls = 0

    def start(self, program: _Program[T], comm: Communicator) -> Future[T]:
        """Start a program on the next channel; all ranks give a call the same channel."""
        self._open = [future for future in self._open if not future.done()]
        if len(self._open) >= _MOST_OUTSTANDING:
            raise ConfigurationError(
                f"{len(self._open)} reductions are under way; wait for some of them first"
            )
        # There are twice as many channels as there may be calls in flight.  A peer may lag behind by all
        # calls in flight, and must not receive messages of a new call on the channel of an old one.
        channel = comm.channel(1 + self._calls % (2 * _MOST_OUTSTANDING))
        self._calls += 1
        future = self._engine.submit(_attempt(program, channel))
        self._open.append(future)
        return future

    def close(self) -> None:
        """Finish the calls in flight, then end the thread."""
        self._engine.close()


# this is not a method, because a method's coroutine would keep the engine alive
async def _attempt(program: _Program[T], channel: Communicator) -> T | Failure:
    """Run a call; an error ends all calls in flight, unless ranks merely disagree about this call."""
    try:
        with channel.exchange():
            return await program(channel)
    except DisagreementError as error:  # raised on all ranks, when no message is in flight any more
        return Failure(error)


# ---- one call --------------------------------------------------------------------------------------


@final
class _Totals:
    """Remembers the number of entries in the last total, for each kind of call on a communicator."""

    def __init__(self) -> None:
        self._entries: dict[str, int] = {}

    def last(self, kind: str) -> int:
        """Return the number of entries of the last total, or -1 if there was none."""
        return self._entries.get(kind, -1)

    def note(self, kind: str, entries: int) -> None:
        """Remember a total; forget the oldest kind of call if there are too many."""
        self._entries[kind] = entries
        if len(self._entries) > _MOST_KINDS:
            del self._entries[next(iter(self._entries))]

    def close(self) -> None:
        """Do nothing; a communicator calls ``close`` on each of its companions."""


def _prepare(
    vector: Any,
    algorithm: str | Algorithm | None,
    k: int | None,
    op: str | Reduction | None,
    options: dict[str, Any],
) -> _Program[Reduced]:
    """Check the arguments and select entries.

    Return a program that first compares the call between ranks, then reduces.
    """
    given, operation = as_vector(vector), _operation(algorithm, op)
    operation.check(given.values.dtype)
    if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 0):
        raise ConfigurationError(
            f"k is {k!r}; give the number of entries to take, a whole number >= 0"
        )
    if k is not None and operation is not SUM:
        raise ConfigurationError(
            f"k works with sums, not with '{operation.name}', which the largest entries of a "
            "vector do not determine; omit k"
        )
    wanted = algorithm or ("sparcml-auto" if k is None else "budgeted")
    chosen = resolve(wanted, **_filled_in(wanted, k, operation, options))
    selector, collective = chosen.make_selector(), chosen.make_collective()
    own = collective.operation
    require(
        own == operation,
        f"op is '{operation.name}', but the Algorithm {chosen.name} reduces with '{own.name}'; omit "
        "op, or give the name of an algorithm",
    )
    whole = collective.result == "whole"
    require(
        k is None or not whole,
        f"k is {k}, but {chosen.name} sums whole vectors; omit k, or choose another algorithm",
    )
    ready = _select(given, selector, k, operation, whole=whole)
    most = given.size if k is None else k
    facts = {
        "size": given.size,
        "dtype": given.values.dtype,
        "operation": operation.name,
        "algorithm": chosen.name,
        "k": k,
        # These settings are read from the objects: an ``Algorithm`` does not list its options, and one
        # rank may pass a default that another omits.
        "options": f"{settings_of(selector)}, {settings_of(collective)}",
    }
    kind = str(facts)

    async def reduce(comm: Communicator) -> Reduced:
        totals = comm.companions.setdefault("totals", _Totals())
        # Ranks exchange the totals that they remember and use the largest. With several calls in flight,
        # a call may have ended on this rank but not yet on another, and ranks that expected different
        # totals would choose different collectives.
        told = await agree(comm, facts, [ready.nnz, totals.last(kind)])
        entries, total = (max(column) for column in zip(*told, strict=True))
        collective.expect(entries, None if total < 0 else total)
        reduced = await collective.reduce(comm, ready, most, step=0)
        totals.note(kind, entries_of(reduced.total, operation))
        return reduced

    return reduce


def _prepare_gather(vector: Any) -> _Program[list[Vector]]:
    """Check the vector; return a program that compares the call between ranks, then collects."""
    given, codec = as_vector(vector), StreamCodec()
    size, dtype = given.size, given.values.dtype
    if isinstance(given, SparseVector):
        _check_absent(given, 0, "of allgather")
    few = SparseVector.from_dense(given.values) if isinstance(given, DenseVector) else given
    limit = codec.limit(size, dtype)
    mine = few if limit is None or few.nnz <= limit else densify(given)
    facts = {"size": size, "dtype": dtype, "operation": "allgather"}

    async def gather(comm: Communicator) -> list[Vector]:
        with comm.stage("pack"):
            payload = codec.encode(mine).payload
        lengths = [length for [length] in await agree(comm, facts, [payload.numel()])]
        messages = await comm.allgatherv(payload, lengths, "allgather", MessageFraming(codec))
        with comm.stage("unpack"):
            return [
                mine
                if rank == comm.rank
                else decode_as(codec, message, size, dtype).to(given.values.device)
                for rank, message in enumerate(messages)
            ]

    return gather


def _operation(algorithm: str | Algorithm | None, op: str | Reduction | None) -> Reduction:
    """Return the operation of a call: ``op`` if given, otherwise the one inside an ``Algorithm``."""
    if op is not None:
        return reduction(op)
    return algorithm.make_collective().operation if isinstance(algorithm, Algorithm) else SUM


def _filled_in(
    algorithm: str | Algorithm, k: int | None, operation: Reduction, options: dict[str, Any]
) -> dict[str, Any]:
    """Add the options that the call implies: its operation, and no cap if there is no k."""
    known = preset(algorithm).options if isinstance(algorithm, str) else {}
    filled = {"cap": None, **options} if k is None and "cap" in known else dict(options)
    if operation is not SUM and isinstance(algorithm, str):
        if "op" not in known:
            general = ", ".join(n for n, row in sorted(PRESETS.items()) if "op" in row.options)
            raise ConfigurationError(
                f"{algorithm} only sums, and does not support '{operation.name}'; choose one of "
                f"{general}"
            )
        filled["op"] = operation
    return filled


def _check_absent(given: SparseVector, neutral: int | float, of: str) -> None:
    """Refuse the total of a different operation, because its absent elements would change their value."""
    require(
        given.absent in (0, neutral),  # 0 unless the vector is the total of a reduction
        f"the elements that the vector does not store are {given.absent}, but those {of} are {neutral}; "
        "give its to_dense()",
    )


def _select(
    given: Vector, selector: Selector, k: int | None, operation: Reduction, *, whole: bool
) -> Vector:
    """Take the k largest entries of a dense vector; without k, drop only neutral elements."""
    neutral = operation.neutral(given.values.dtype)
    if isinstance(given, SparseVector):
        _check_absent(given, neutral, f"of '{operation.name}'")
        says_nothing = given.values == neutral
        return given.keep(~says_nothing) if bool(says_nothing.any()) else given
    if k is None:
        return given if whole else SparseVector.from_dense(given.values, neutral)
    # every period begins at step 0, so the selection is exact
    return selector.select(given.values, k, step=0)
