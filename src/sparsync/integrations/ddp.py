"""DistributedDataParallel: ``sync = sparsync.attach(ddp_model, density=0.01)``.

The hook adds each gradient of a bucket to its unit (``accumulated = residual + gradient``).  When a
unit is complete its exchange goes to the engine thread, while the backward pass goes on; behind the
last one goes the commit, which writes the averages into the buckets and completes their futures.  So
all residuals are written together, after every total of the step is known to be finite.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparsync.errors import NonFiniteGradientError
from sparsync.integrations.backward import (
    Round,
    call_after_backward,
    check_complete,
    check_join,
    deliver_to_unused_,
    find,
    write_,
)
from sparsync.integrations.checks import check_model
from sparsync.integrations.guard import Guard
from sparsync.integrations.hierarchy import NodeReducer, node_reducer, nodes_of
from sparsync.integrations.settings import Nonfinite, Settings
from sparsync.integrations.sync import Sync
from sparsync.integrations.wires import OwnGroups
from sparsync.reducer import Reducer
from sparsync.units import Slot

__all__ = ["DdpSync", "attach_ddp"]


def attach_ddp(model: Any, settings: Settings, hierarchy: Any = None) -> "DdpSync":
    """Exchange the gradients of a DDP model; see ``attach``."""
    check_model(model)
    trained = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
    trained = [(n, p) for n, p in trained if n not in model.parameters_to_ignore]
    units = settings.units(trained, model.module)
    ranks = dist.get_process_group_ranks(model.process_group)
    groups = OwnGroups(model.process_group, settings.wires.timeout)
    nodes: NodeReducer | None = None
    try:
        if hierarchy is not None:
            nodes = node_reducer(settings, nodes_of(hierarchy, ranks), units, groups)
            reducer = nodes.reducer
        else:
            reducer = settings.reducer(groups.make(ranks), units)
    except BaseException:
        groups.close()
        raise
    return DdpSync(model, reducer, dict(trained), settings.nonfinite, groups, nodes)


@final
class DdpSync(Sync):
    """The state of one DDP model's sparse synchronisation on this rank."""

    def __init__(
        self,
        model: DistributedDataParallel,
        reducer: Reducer,
        trained: Mapping[str, Tensor],
        nonfinite: Nonfinite,
        groups: OwnGroups,
        nodes: NodeReducer | None = None,
    ) -> None:
        if nodes is None:
            super().__init__(reducer, groups)
        else:
            super().__init__(reducer, groups, nodes.node, nodes.pieces)
            nodes.gather_behind(reducer.verdict)
        self._nodes = nodes
        self._whole = nodes or reducer  # takes gradients of whole units
        self._model, self._nonfinite = weakref.ref(model), nonfinite
        self._place: dict[Tensor, tuple[int, Slot]] = {
            trained[slot.name]: (i, slot)
            for i, unit in enumerate(self._whole.units)
            for slot in unit.slots
        }
        self._round = Round(len(self._whole.units))
        self._guard = Guard(model, trained, reducer.correction)
        model.register_comm_hook(self, _hook)

    def _unhook(self) -> None:
        """Do nothing: DDP keeps its hook for ever."""

    # ---- the hook, on autograd's thread --------------------------------------------------------

    def on_bucket(self, bucket: Any) -> "torch.futures.Future[Tensor]":
        """Accumulate a bucket; submit the units that it completes."""
        if bucket.index() == 0:
            self._round = Round(len(self._whole.units))
            self.upkeep.before(self.reducer)
            if (model := self._model()) is not None:
                check_join(model, self.reducer.correction)
        this, buffer = self._round, bucket.buffer()
        future, pieces = this.take(bucket)
        for parameter, gradient in pieces:
            unit, slot = find(self._place, parameter)
            this.gradients[unit][slot] = (parameter, gradient)
        clipper = self.reducer.clipper
        if clipper.waits:  # for the norm of all gradients: nothing overlaps with the backward pass
            this.waiting += pieces
            pieces = this.waiting if bucket.is_last() else []
            if pieces:
                clipper.measure(gradient for _, gradient in pieces)
        complete = self._accumulate(this, pieces)
        if buffer.is_cuda:  # the engine's thread has streams of its own
            torch.cuda.current_stream(buffer.device).synchronize()
        for unit in complete:
            this.jobs.append(self._engine.submit(self._exchange(this, unit)))
        if bucket.is_last():
            check_complete(self._whole.units, this)
            this.jobs.append(self._engine.submit(self._share(this)))
            in_backward = call_after_backward(lambda: self._after(this))
            this.finished = self._engine.submit(lambda: self._finish(this))
            if not in_backward:  # a rank that is done, under join(): its residual is delivered on
                self._after(this)
        return future

    def _accumulate(self, this: "Round", pieces: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Accumulate gradients; return the units that they complete."""
        complete = []
        for parameter, gradient in pieces:
            unit, slot = find(self._place, parameter)
            weights = parameter.detach().reshape(-1)
            self._whole.accumulate(unit, slot.start, gradient.detach().reshape(-1), weights)
            this.accumulated[unit] += 1
            if this.accumulated[unit] == len(self._whole.units[unit].slots):
                complete.append(unit)
        return complete

    # ---- on the engine's thread ------------------------------------------------------------------

    async def _exchange(self, this: "Round", unit: int) -> None:
        if this.failed:  # the group is broken: do not wait for every unit's deadline
            if self._nodes is not None:
                await self._nodes.follow(unit)
            return
        try:
            await self._whole.exchange(unit)
        except BaseException:
            this.failed = True
            raise

    async def _share(self, this: "Round") -> None:
        if not this.failed:
            await self._whole.share()

    def _finish(self, this: "Round") -> None:
        try:
            self._land(this.jobs)
            averages = self._whole.commit(propagate_nonfinite=self._nonfinite == "propagate")
            for unit, average in enumerate(averages):
                write_(average, self._whole.units[unit], this.gradients[unit])
        except NonFiniteGradientError:
            self._whole.skip()
            this.zero_()
            raise
        except BaseException:
            self._whole.refuse()
            this.zero_()
            raise
        finally:
            this.complete()

    # ---- after DDP has copied the buckets back, on autograd's thread ------------------------------

    def _after(self, this: "Round") -> None:
        try:
            assert this.finished is not None
            this.finished.result()
        except NonFiniteGradientError:
            if self._nonfinite != "skip":
                raise
            for parameter in self._place:
                parameter.grad = None  # every optimizer passes over it, momentum included
            return
        finally:
            self._guard.exchanged()
            self.reducer.monitor.log.write()  # here, what it raises spoils no gradient
        model = self._model()
        if model is not None and (model.find_unused_parameters or model.static_graph):
            deliver_to_unused_(this)
        self.upkeep.after(self.reducer, self._engine, self._inner, alike=True)
        this.release()  # DDP may rebuild its buckets: the old ones must not live on


def _hook(sync, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
    return sync.on_bucket(bucket)
