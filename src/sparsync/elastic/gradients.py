"""``attach(model, optimizer, elastic=manager)``: gradients exchanged by the ranks that are there.

In every step torchft's manager is asked for a quorum while the forward pass runs.  If its members are not
those of the step before, or an exchange breaks off, they call the roll (``members``) before they go on.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsync.console import say
from sparsync.elastic.attendance import Attendance, check_options, summing
from sparsync.elastic.catch_up import Taken, keep_gradients, load_copy, make_copy, rates_of, repeat
from sparsync.elastic.group import group_of
from sparsync.elastic.membership import Membership
from sparsync.errors import (
    CommunicationError,
    ConfigurationError,
    NonFiniteGradientError,
    PeerError,
)
from sparsync.feedback.agreed_setup import weights_digest
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import rescale_
from sparsync.gradients.consensus import PartsConsensus
from sparsync.gradients.replicas import ReplicaStep, ReplicaSync
from sparsync.gradients.runs import Run
from sparsync.gradients.shards import Fsdp, Shard, shards_of
from sparsync.gradients.steps import Step
from sparsync.handle import Hook, weakly
from sparsync.monitoring import sink_of
from sparsync.options import Options
from sparsync.sparse import Vector
from sparsync.transports.driver import run, together
from sparsync.transports.groups import SoloCommunicator

__all__ = ["ElasticSync", "attach_elastic"]


def attach_elastic(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: Options, manager: Any
) -> ElasticSync:
    """Exchange gradients with the ranks of the present quorum; see ``attach``."""
    check_options(options, optimizers)
    given, watched = options.compression, options.monitoring
    group = group_of(manager)
    shards = shards_of(model, ())
    parted = next((shard.name for shard in shards if shard.piece is not None), None)
    if parted is not None or isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigurationError(
            "elastic= is for a plain module, whole on every rank: DDP and shards keep process groups "
            f"that cannot change ({parted or 'DistributedDataParallel'}); give the module itself"
        )
    elements = sum(shard.parameter.numel() for shard in shards)
    said = list[str]()
    options = options.for_size(elements, said.append)
    assert options.density is not None
    names = [shard.name for shard in shards]
    # no other rank holds a part of this replica: it agrees with itself, whatever the group
    consensus = PartsConsensus(SoloCommunicator(), {n: i for i, n in enumerate(sorted(names))})
    reducer = Reducer(
        group.comm,
        options.units([(shard.name, shard.parameter) for shard in shards], model),
        summing(run(options.algorithm.on(group.comm))),
        options.density,
        given.warmup(),
        None,
        watched.xi_period,
        consensus,
        None if watched.log is None else sink_of(watched.log, 0),
        changing=True,
    )
    return ElasticSync(
        model, reducer, shards, consensus, options, manager, optimizers, "".join(said)
    )


@final
class ElasticSync(ReplicaSync):
    """The handle of a model whose gradients are exchanged by ranks that come and go.

    ``said`` is a line for the user, once per job.  ``membership`` does what is elastic about it, and
    ``attendance`` is this rank's part in quorums.
    """

    def __init__(
        self,
        model: nn.Module,
        reducer: Reducer,
        shards: Sequence[Shard],
        consensus: PartsConsensus,
        options: Options,
        manager: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        said: str,
    ) -> None:
        super().__init__(model, reducer, shards, Fsdp(model), consensus, ExitStack(), options, None)
        self._optimizers, self._said = list(optimizers), said
        parameters, its = list(self._parameters.values()), self._optimizers
        self.attendance = Attendance(
            manager,
            reducer,
            lambda: weights_digest(parameters),
            lambda: rates_of(its),
            average=options.algorithm.average,
            nonfinite=self._nonfinite,
        )
        scaled = "its residual has the scale of a GradScaler, which goes on with its own steps"
        self.membership = Membership(
            self.attendance,
            self._engine,
            weakly(self._take_part),
            "" if self._scaler is None else scaled,
        )
        self.on_close.callback(self.membership.close)
        self._compared = True  # the roll compares the weights
        self._missed = self._exchanged = False
        self._taken: Taken = {}  # since a copy was offered
        # of autograd: the backward pass that found that this rank has left
        self._last_task: int | None = None
        self._follow(model)

    def _follow(self, model: nn.Module) -> None:
        """Watch forward passes and optimizers until ``close``."""
        # weakly: the model holds its hooks, and the handle goes with the model
        me = weakref.ref(self)

        def before_forward(_module: Any, _inputs: Any) -> None:
            if (sync := me()) is not None and torch.is_grad_enabled():
                sync.membership.watch()
                sync.membership.ask()

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (sync := me()) is not None:
                sync._before_step(optimizer)

        handles: list[Any] = [model.register_forward_pre_hook(Hook(before_forward))]
        handles += [one.register_step_pre_hook(Hook(before_step)) for one in self._optimizers]
        for handle in handles:
            self.on_close.callback(handle.remove)

    # ---- for the user ------------------------------------------------------------------------------

    @property
    def left(self) -> bool:
        """Whether this rank has left; its program is to end."""
        return self.membership.left

    @property
    def last_step(self) -> tuple[int, int, bool]:
        """The last step's group, its number of contributors, and whether this rank was one."""
        return self.attendance.last_step

    def carry(self, **named: Any) -> None:
        """Name further objects whose states a rank that joins takes over, as ``scheduler=scheduler``.

        They have ``state_dict()`` and ``load_state_dict()``; states are small (64 MiB in all), and of
        plain values and tensors.

        Raises:
            ConfigurationError: an object without one of these.
        """
        self.membership.carry(**named)

    def leave(self) -> None:
        """Leave with the next two steps, of which the first deals the residual to others.

        SIGTERM calls it, and ends the process when this rank has ``left``.
        """
        self.membership.leave()

    def stats(self) -> dict[str, Any]:
        """Return plain numbers; "elastic" has the present members, changes, and lost residuals."""
        return {**super().stats(), "elastic": self.attendance.members.state()}

    def finish(self) -> None:
        """Wait until all ranks have applied the last step; call it after the last one."""
        model = self._plain()
        assert model is not None

        def copy() -> memoryview:
            return make_copy(model, self._optimizers)

        # the waiting is the engine thread's, which owns the sockets; the weights are this one's to write
        with self.membership.turns.step(), self.reducer.comm.ledger.outside_steps():
            taken = self._engine.submit(lambda: self.attendance.end(copy)).result()
        if taken is not None:
            load_copy(taken, model, self._optimizers)

    # ---- a step ------------------------------------------------------------------------------------

    def on_gradient(self, parameter: Tensor) -> None:
        """Count a gradient; drop those of the backward pass that finds that this rank has left."""
        # one pass is dropped without an error, so that a program may read ``sync.left`` after its step;
        # another one is refused by ``Membership.check_here``
        if self._paused or self._open is not None or not self._is_late():
            super().on_gradient(parameter)
        else:
            parameter.grad = None  # every optimizer passes over it

    def _is_late(self) -> bool:
        """Wait while this rank leaves; tell whether it has, and the program does not know yet."""
        self.membership.turns.take()
        if not self.membership.gone:
            return False
        self.membership.turns.end()
        # the same private number by which ``ReplicaSync`` tells backward passes apart: PyTorch has no
        # other
        task = torch._C._current_graph_task_id()
        if self._last_task is None:
            self._last_task = task
        return task == self._last_task

    def _begin_step(self) -> None:
        """Wait for the quorum before the first gradient is accumulated."""
        # before: whether this rank's gradients count, and by which plan entries are collected, are the
        # group's to say
        self.membership.turns.take()
        try:
            self.membership.check_here()
            if self._before is None:
                self._before = self.reducer.step, self.reducer.comm.ledger.set_up()
            self._engine.submit(self.attendance.ready).result()
            if self._scaler is not None:
                rescale_(self.reducer, self._scaler.get_scale())
        except BaseException:
            self.membership.turns.end()
            raise

    def _discard(self) -> None:
        super()._discard()
        self.membership.turns.end()

    def _accumulate(self, run: Run, gradient: Tensor, parameters: Sequence[Tensor]) -> None:
        """Accumulate; zeros while this rank is behind, since gradients at old weights do not count."""
        if not self.attendance.members.counts:
            gradient.zero_()
        super()._accumulate(run, gradient, parameters)

    def _finish(self, this: Step) -> None:
        """Exchange and commit, then go on to the next step with the ranks that are there."""
        step, skipped = self.reducer.step, self.reducer.skipped
        self._exchanged = False
        try:
            super()._finish(this)
        finally:
            # not after a missed step: the roll has brought the reducer to the others' step already
            if self._exchanged:
                self.attendance.close(step, applied=self.reducer.skipped == skipped)

    def _averages(self, this: Step) -> list[Vector] | None:
        """Exchange until a group has all of the step, then commit; None: others did without this rank."""
        came = this.came if isinstance(this, ReplicaStep) else ()

        async def attempt() -> None:
            reducer = self.reducer
            # In the order in which ``ReplicaSync._close`` starts its jobs: a rank that has just joined
            # makes its first attempt by these, in the same group.
            units = [reducer.exchange(unit) for unit in range(len(reducer.units))]
            used = self._parts.share_used(reducer.channel("used"), came)
            await together([*units, used, reducer.share()])
            await self._agree()

        try:
            for job in this.jobs:
                job.result()
            # the jobs have exchanged all units but not voted; without jobs (``_take_part``) nothing is
            # done
            run(self._agree() if this.jobs else attempt())
        except CommunicationError as error:
            # missed: the roll has closed this step here, with its gradients in the residual, and there
            # are no further ones before the next backward pass
            if not self.attendance.persist(error, attempt, missed=lambda: False):
                self._missed = True
                return None
        self._exchanged = True
        # a rank without gradients, as one that leaves in the others' steps, is no contributor
        self.attendance.members.count_only(self._parts.came)
        return self.attendance.commit(propagate_nonfinite=self._nonfinite == "propagate")

    def _take_part(self) -> None:
        """Do the others' steps without training until this rank has left; on the engine's thread."""
        while not self.left:
            self.attendance.ready()
            # zeros: entries are selected from its residual as ever, until that is dealt
            for unit, its in enumerate(self.reducer.units):
                zeros = torch.zeros(its.size, dtype=its.dtype, device=its.device)
                self.reducer.accumulate(unit, 0, zeros)
            with suppress(NonFiniteGradientError):
                self._finish(_OthersStep(self.reducer.units))

    async def _agree(self) -> None:
        model = self._plain()
        assert model is not None
        # the training thread waits for this step, so nobody writes to the weights that are copied
        self.attendance.offer(lambda: make_copy(model, self._optimizers))
        await self.attendance.agree(self._told)

    def _told(self) -> dict[str, Any]:
        """Return the optimizers' steps since the copy was made, and the states to take over."""
        present = rates_of(self._optimizers)
        mine = {"taken": self._taken, "present": present, "weights": self._weights()}
        return {**self.membership.told(), **mine}

    def _settle(self, this: Step, finished: Future[None]) -> bool:
        """Wait for the averages; if this rank has caught up, bring its weights to where they apply."""
        try:
            return self._settle_here(super()._settle(this, finished))
        finally:
            self.membership.turns.end()

    def _settle_here(self, settled: bool) -> bool:
        if (arrival := self.attendance.arrival()) is not None:
            extras, catch_up = arrival
            # the step that has just been exchanged: its average is written to the gradients, and the
            # program's own ``optimizer.step()`` applies it
            model, step = self._plain(), self.reducer.step - 1
            assert model is not None
            repeat(catch_up, step, extras["taken"], model, self._optimizers)
            self._taken.clear()  # the optimizers' hooks have noted the repeated steps as well
            self.membership.take_over(extras, self._optimizers)
            if self._weights() != extras["weights"]:
                place = self.reducer.comm.ledger.place(step)
                raise PeerError(
                    f"{place}: this rank has repeated the others' steps, and its weights are not theirs; "
                    "between backward() and the optimizer's step, do the same on all ranks, and to "
                    "gradients alone"
                )
        self.membership.end_of_leaving()
        missed, self._missed = self._missed, False
        return settled and not missed and not self.left

    def _tell(self) -> None:
        """Pass on the notice of the lowest rank; one that joins has nothing to say that is new."""
        # every process comes by itself: the first step tells which rank is to say it
        said, self._said = self._said, ""
        if self.attendance.members.behind:
            self.reducer.take_notice()
        elif said and self.reducer.comm.rank == 0:
            say(said)
        super()._tell()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradients of this step if this rank catches up, or its rates for one that does."""
        number = next(i for i, one in enumerate(self._optimizers) if one is optimizer)
        # the commit has counted the step already that this optimizer applies
        step, attendance = self.reducer.step - 1, self.attendance
        if attendance.catch_up is not None and attendance.members.behind:
            keep_gradients(attendance.catch_up, step, number, optimizer)
        elif not attendance.offered:
            self._taken.clear()
        else:
            (groups,) = rates_of([optimizer])
            self._taken.setdefault(step, []).append((number, groups))

    def _weights(self) -> str:
        return weights_digest(self._parameters.values())


@final
class _OthersStep(Step):
    """A step in which this rank has no gradients, and applies no averages."""

    def write(self, averages: Sequence[Vector]) -> None:
        """Leave the gradients alone."""
