"""Exchange densely inside a node and sparsely between nodes, each rank with a part of every unit.

::

    gradient --reduce-scatter in the node--> this rank's part of the node's mean
    accumulate, select, exchange with the same part's ranks in other nodes, retain
    average <--allgather in the node-- this rank's part of the average

Every rank uses its own link to other nodes, a node sends no more than a single rank would, and the
residual of n elements is split over the node.  If updates are exchanged, gradients are averaged inside
the node on every step, and the ranks of a node split the outer step (``Node``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sparsync.errors import CommunicationError, ConfigurationError, first_line
from sparsync.gradients.consensus import PartsConsensus
from sparsync.gradients.sites import measured_sites
from sparsync.kernels import divide_
from sparsync.options import Options
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.driver import Operation
from sparsync.transports.ledger import Parts
from sparsync.transports.process_group import Groups, TorchCommunicator
from sparsync.units import Piece, Slot, Unit

__all__ = ["Node", "NodeReducer", "grid_of", "nodes_of"]

_AVERAGE: Final = "node allreduce"
_SCATTER: Final = "node reduce-scatter"
_GATHER: Final = "node allgather"


def grid_of(
    hierarchy: Any, ranks: Sequence[int], environ: Mapping[str, str] = os.environ
) -> list[list[int]]:
    """Return the global ranks of every node, ascending.

    With "node", a node consists of the ranks that the launcher started on a machine.  The launcher
    numbers these ranks consecutively, and states how many there are in LOCAL_WORLD_SIZE.  A mesh has two
    dimensions, (nodes, ranks of a node).

    Example:
        >>> grid_of("node", [0, 1, 2, 3], {"LOCAL_WORLD_SIZE": "2"})
        [[0, 1], [2, 3]]
        >>> grid_of("node", [0, 2], {"LOCAL_WORLD_SIZE": "2"})  # one rank of each machine
        [[0], [2]]
    """
    if isinstance(hierarchy, DeviceMesh):
        grid = hierarchy.mesh.tolist() if hierarchy.ndim == 2 else None
        if grid is None or sorted(r for node in grid for r in node) != sorted(ranks):
            raise ConfigurationError(
                f"hierarchy is {hierarchy}; give a mesh of two dimensions, (nodes, ranks of a node), "
                f"that holds the ranks of the model: {list(ranks)}"
            )
    elif hierarchy == "node":
        size = environ.get("LOCAL_WORLD_SIZE", "")
        if not size.isdigit() or int(size) == 0:
            raise ConfigurationError(
                f"hierarchy='node' needs LOCAL_WORLD_SIZE, the ranks per machine, as torchrun sets it; "
                f"it is {size!r}: set it, or give a mesh (nodes, ranks of a node) instead"
            )
        # global ranks determine the machine, because the model's group may leave out ranks of a machine
        machines: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            machines.setdefault(rank // int(size), []).append(rank)
        grid = list(machines.values())
        if len({len(node) for node in grid}) > 1:
            raise ConfigurationError(
                f"hierarchy='node' found nodes of unequal sizes, {grid}, with LOCAL_WORLD_SIZE={size!r}; "
                "use as many ranks of each machine, or give a mesh (nodes, ranks of a node) instead"
            )
    else:
        raise ConfigurationError(
            f"hierarchy is {hierarchy!r}; give 'node', 'links', or a mesh (nodes, ranks of a node)"
        )
    # A process group numbers its ranks in ascending order, and ``nodes_of`` uses the position in this
    # list as a rank's number in its node.  In any other order, peers would exchange different parts.
    return [sorted(node) for node in grid]


def nodes_of(options: Options, ranks: Sequence[int], groups: Groups) -> tuple[list[int], list[int]]:
    """Return the global ranks of this rank's node, and the ranks at its position in every node.

    This is collective, because "links" takes measurements.
    """
    given = options.transport.hierarchy
    grid = measured_sites(options, ranks, groups) if given == "links" else grid_of(given, ranks)
    me = dist.get_rank()
    (inner,) = [node for node in grid if me in node]
    return inner, [node[inner.index(me)] for node in grid]


@final
class NodeReducer:
    """Accepts whole gradients, like a ``Reducer``, but divides the exchange among the ranks of a node.

    All ranks of the model's process group must construct it together.

    Attributes:
        reducer: exchanges this rank's part of every unit between nodes.
        node: the communicator of this node's ranks; its ledger counts the bytes of a ring allreduce.
        consensus: the joint decision of this node's ranks on every step.
        pieces: the part of every parameter that this rank exchanges.

    Cost: n elements of memory, and (g - 1) / g n elements sent twice inside a node of g ranks.
    """

    def __init__(
        self, options: Options, ranks: Sequence[int], units: Sequence[Unit], groups: Groups
    ) -> None:
        inner, outer = nodes_of(options, ranks, groups)
        timeout, device = options.transport.timeout, units[0].device if units else None
        # The default backend, usually NCCL, is fast inside a node, but supports only native collectives.
        # Decisions inside a node, and sparse messages between nodes, need gloo or ZeroMQ
        group = groups.make(inner, backend=None)
        self.node = node = TorchCommunicator(group, timeout=timeout, device=device)
        control = TorchCommunicator(groups.make(inner), timeout=timeout, ledger=node.ledger)
        options.agree_with(control)
        self.units = list(units)
        runs, self.pieces = _divide(units, node.rank, node.world_size)
        self.consensus = PartsConsensus(control)
        self.reducer = options.reducer(
            groups.make(outer), runs, self.consensus, ranks_of_a_node=node.world_size
        )
        node.share_broken(self.reducer.comm)  # once the node has failed, no step may begin
        # units are padded, because a native reduce-scatter needs equal parts
        sizes = [-(-unit.size // node.world_size) * node.world_size for unit in units]
        self._flat = [
            torch.zeros(size, dtype=unit.dtype, device=unit.device)
            for unit, size in zip(units, sizes, strict=True)
        ]
        self._weights: dict[int, Tensor] = {}
        self._lost = False  # whether a rank of the node was lost in the open step

    def accumulate(
        self, unit: int, start: int, gradient: Tensor, weights: Tensor | None = None
    ) -> None:
        """Store a gradient for the node's reduce-scatter, and the weights if they decay."""
        with self.reducer.comm.stage("accumulate"):
            here = self._flat[unit][start : start + gradient.numel()]
            # The node's mean acts as the gradient of one larger batch.  Gradients are divided before the
            # sum, which could overflow in 16 bits
            divide_(here.copy_(gradient), self.node.world_size)
            # Weights are only copied, because they are equal on all ranks of a node; ``exchange`` cuts
            # out this rank's part
            correction = self.reducer.correction
            if correction and correction.weight_decay and weights is not None:
                if unit not in self._weights:
                    self._weights[unit] = torch.zeros_like(self._flat[unit])
                self._weights[unit][start : start + weights.numel()] = weights

    async def exchange(self, unit: int) -> None:
        """Sum over the node, then exchange this rank's part between nodes."""
        part = await self._scattered(unit)
        mine = self.reducer.units[unit].size  # the last part may be shorter
        weights = self._weights.get(unit)
        if weights is not None:
            first = self.node.rank * part.numel()
            weights = weights[first : first + mine]
        self.reducer.accumulate(unit, 0, part[:mine], weights)
        await self.reducer.exchange(unit)

    async def follow(self, unit: int) -> None:
        """Sum over the node only, because the step has failed on this rank.

        The other ranks of the node learn of the failure from the consensus.  Until then, all ranks of the
        node must start the same collectives.
        """
        if not self._lost:  # otherwise the collective has failed on all ranks of the node
            await self._scattered(unit)

    async def _scattered(self, unit: int) -> Tensor:
        flat = self._flat[unit]
        part = torch.empty_like(flat[: flat.numel() // self.node.world_size])
        self.node.ledger.begin_step(self.reducer.step)
        try:
            with self.reducer.comm.stage("communicate"), _noted(self.node):
                work = _reduce_scatter(part, flat, group=self.node.group, async_op=True)
                await self.node.under_way(_SCATTER, work)
        except CommunicationError:
            self._lost = True
            raise
        _book(self.node, _SCATTER, flat)
        return part

    def commit(self, *, propagate_nonfinite: bool = False) -> list[Vector]:
        """Commit the step on all ranks of the node or on none; return whole averages."""
        # Parts are gathered in ``prepare``, after the consensus and before any residual is written.  So
        # if gathering fails, the step can still be undone.
        averages: list[Vector] = []
        parts = self.reducer.commit(
            propagate_nonfinite=propagate_nonfinite,
            prepare=lambda: averages.extend(map(self._gathered, range(len(self.units)))),
        )
        if averages:
            return averages
        # the step was refused because of NaN or Inf, so nothing was gathered: fill whole units with NaN
        return [
            DenseVector(part.values.new_full((unit.size,), torch.nan))
            for unit, part in zip(self.units, parts, strict=True)
        ]

    def refuse(self) -> None:
        """Undo the open step, and forget that a rank of the node was lost."""
        self.reducer.refuse()
        self._lost = False

    def _gathered(self, unit: int) -> Vector:
        flat, total = self._flat[unit], self.reducer.reduced[unit].total
        length = flat.numel() // self.node.world_size
        # the dtype is taken from the residual, because the total may not be decoded yet
        # (``collectives/quantised.py``)
        dtype = self.reducer.residuals[unit].accumulated.dtype
        average = torch.zeros(length, dtype=dtype, device=flat.device)
        total.write_to_(average[: total.size])
        # The commit divides the total only after ``prepare``, so the copy is divided here.  It is divided
        # before the cast, because the sum could overflow in 16 bits.
        if self.reducer.algorithm.average:
            divide_(average, self.reducer.comm.world_size)
        # reuse the memory of this step's gradients, which the reduce-scatter has already read
        _gather(self.node, flat, average.to(flat.dtype))
        return DenseVector(flat[: self.units[unit].size])


@final
class Node:
    """The ranks of a node, which make equal steps; each exchanges a run of every tensor between nodes.

    All runs of a tensor have the same length; the last ones are padded with zeros.

    Attributes:
        comm: the ranks of this node, for native collectives; used only by the training thread and, with
            DDP, by autograd's thread.
        consensus: the joint decision of this node's ranks, on the engine's thread.
        peers: the ranks with the same runs, one in each node.
    """

    def __init__(
        self,
        options: Options,
        ranks: Sequence[int],
        groups: Groups,
        device: torch.device | None = None,
    ) -> None:
        inner, self.peers = nodes_of(options, ranks, groups)
        timeout = options.transport.timeout
        # The same ranks form two groups.  A group's collectives must start in the same order on all
        # ranks, which two threads that shared a group could not guarantee.  Also, NCCL, the usual default
        # backend, supports only native collectives.
        group = groups.make(inner, backend=None)
        self.comm = TorchCommunicator(group, timeout=timeout, device=device)
        self.consensus = PartsConsensus(TorchCommunicator(groups.make(inner), timeout=timeout))
        options.agree_with(self.consensus.parts)
        self._under_way: list[Operation] = []

    def run_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of this rank's run of a tensor."""
        length = -(-tensor.numel() // self.comm.world_size)
        run = tensor.reshape(-1)[self.comm.rank * length :][:length]
        return F.pad(run, (0, length - run.numel()))

    def gathered(self, runs: Tensor) -> Tensor:
        """Return the runs of all ranks, one per row."""
        whole = runs.new_empty(self.comm.world_size, runs.numel())
        _gather(self.comm, whole.view(-1), runs)
        return whole

    def average_(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Start to average a tensor over the node, in place; ``check`` raises the error if this fails."""
        # divide before the sum, which could overflow in 16 bits
        divide_(tensor, self.comm.world_size)
        work = dist.all_reduce(tensor, group=self.comm.group, async_op=True)
        self._under_way.append(self.comm.under_way(_AVERAGE, work))
        self.comm.ledger.reduced(_AVERAGE, tensor, self.comm.world_size)

        def averaged(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            # DDP waits for this future.  If it held torch's error, backward() would raise that error
            # before ``check`` could raise one that names rank and phase.
            try:
                return done.value()[0]
            except RuntimeError:
                return tensor

        future: torch.futures.Future[Tensor] = work.get_future().then(averaged)
        return future

    def check(self) -> None:
        """Wait for all averages.

        Raises:
            CommunicationError: a rank of the node has died, or took longer than the timeout.
        """
        under_way, self._under_way = self._under_way, []
        with _noted(self.comm):
            for one in under_way:
                one.wait()


@contextmanager
def _noted(comm: TorchCommunicator) -> Iterator[None]:
    """Record a failed call inside the node, so that no further exchange begins."""
    try:
        yield
    except CommunicationError as error:
        comm.broken.append(first_line(error))
        raise


def _book(comm: TorchCommunicator, phase: str, flat: Tensor) -> None:
    """Count the bytes that a ring would send, because torch does not report what its backend sends."""
    others = comm.world_size - 1
    nbytes = flat.numel() * flat.itemsize * others // comm.world_size
    comm.ledger.sent(phase, nbytes, Parts(value=nbytes), others)
    comm.ledger.received(phase, nbytes, others)


def _divide(units: Sequence[Unit], index: int, parts: int) -> tuple[list[Unit], dict[str, Piece]]:
    """Split every unit into equal runs of elements; the last runs may be shorter or empty.

    Returns:
        Units that hold only the runs at position ``index``, and the pieces of their parameters.

    Example:
        >>> from sparsync.units import Slot
        >>> slots = Slot("a", 0, 3), Slot("b", 3, 2)
        >>> whole = Unit(slots, torch.float32, torch.device("cpu"))
        >>> (unit,), pieces = _divide([whole], index=1, parts=2)
        >>> unit.slots, pieces["b"]
        ((Slot(name='b', start=0, size=2),), {'shape': [2], 'offset': [0], 'size': [2]})
    """
    runs, pieces = [], {}
    for unit in units:
        length = -(-unit.size // parts)
        start, slots = index * length, []
        for slot in unit.slots:
            first = max(slot.start, start)
            last = min(slot.start + slot.size, start + length)
            if first < last:
                slots.append(Slot(slot.name, first - start, last - first))
                offset, size = first - slot.start, last - first
                pieces[slot.name] = {"shape": [slot.size], "offset": [offset], "size": [size]}
        runs.append(replace(unit, slots=tuple(slots)))
    return runs, pieces


def _reduce_scatter(part: Tensor, whole: Tensor, **options: Any) -> Any:
    """Call reduce-scatter by its current name, or by its name in torch before 2.13."""
    present = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return present(part, whole, **options)


def _gather(comm: TorchCommunicator, whole: Tensor, part: Tensor) -> None:
    """Gather the parts of a node's ranks into ``whole``."""
    # the function was renamed in torch 2.13, like reduce-scatter
    present = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = present(whole, part, group=comm.group, async_op=True)
    with _noted(comm):
        comm.under_way(_GATHER, work).wait()
    _book(comm, _GATHER, whole)
