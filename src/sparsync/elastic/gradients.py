"""Exchange gradients among the ranks present, for ``attach(model, optimizer, elastic=manager)``.

In every step, the ranks ask torchft's manager for a quorum while the forward pass runs.  If its members
are not the members of the previous step's quorum, or if an exchange fails, the members call the roll
before they continue (see ``members``).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
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
from sparsync.gradients.consensus import PartsConsensus
from sparsync.gradients.replicas import ParameterSource, ReplicaStep
from sparsync.gradients.shards import Fsdp, shards_of
from sparsync.gradients.steps import GradientSteps, Ranks, Step
from sparsync.gradients.sync import GradientSync
from sparsync.handle import make_engine, weakly
from sparsync.monitoring import sink_of
from sparsync.options import Options
from sparsync.sparse import Vector
from sparsync.transports.driver import Engine, run, together
from sparsync.transports.groups import SoloCommunicator

__all__ = ["PresentRanks", "attach_elastic"]


def attach_elastic(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: Options, manager: Any
) -> GradientSync:
    """Exchange gradients with the ranks of the current quorum; see ``attach``."""
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
    # no other rank holds a part of this replica, so this rank decides alone, whatever the group
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
    engine = make_engine(reducer, ExitStack(), consensus)
    weights = [shard.parameter for shard in shards]
    ranks = PresentRanks(
        model, weights, reducer, engine, consensus, options, manager, optimizers, "".join(said)
    )
    steps = GradientSteps(model, reducer, engine, options, consensus=consensus, ranks=ranks)
    overlap = options.compression.overlap
    # the source does not compare the replicas' weights, because the roll does
    source = ParameterSource(
        model, steps, consensus, shards, Fsdp(model), overlap=overlap, compares=False
    )
    sync = GradientSync(model, steps, source, ExitStack(), options)
    sync.on_close.callback(ranks.membership.close)
    for handle in ranks.watch():
        sync.on_close.callback(handle.remove)
    return sync


@final
class PresentRanks(Ranks):
    """The ranks of the current quorum, which repeat a step's exchange until a whole group has the sum.

    Args:
        model: the plain module, whole on every rank.
        weights: the parameters that are exchanged.
        reducer: a ``changing`` reducer with a ``summing`` algorithm.
        engine: the handle's engine.
        parts: the consensus on used parameters, for a replica that is not split.
        options: the options of ``attach``.
        manager: torchft's manager.
        optimizers: the optimizers that apply the averages; a joining rank takes over their states.
        said: a line for the user, shown once per job.

    Attributes:
        attendance: represents this rank in quorums.
        membership: lets this rank leave.
    """

    membership: Membership

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[Tensor],
        reducer: Reducer,
        engine: Engine,
        parts: PartsConsensus,
        options: Options,
        manager: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        said: str,
    ) -> None:
        its, watched = list(optimizers), options.monitoring
        self._plain, self._weights, self._optimizers = weakref.ref(model), weights, its
        self._reducer, self._engine, self._parts = reducer, engine, parts
        self._policy, self._said = watched.policy, said
        self.attendance = Attendance(
            manager,
            reducer,
            lambda: weights_digest(weights),
            [parameter for parameter in model.parameters() if not parameter.requires_grad],
            lambda: rates_of(its),
            average=options.algorithm.average,
            nonfinite=watched.policy,
        )
        scaled = (
            "its residual has the scale of a GradScaler, which changes only with its rank's steps"
        )
        self.membership = Membership(
            self.attendance,
            engine,
            weakly(self._take_part),
            "" if watched.scaler is None else scaled,
        )
        self._missed = self._exchanged = False
        self._position = 0, 0  # number of steps made, and skipped, before the open step
        self._taken: Taken = {}  # optimizer steps since a copy was offered
        # autograd's number of the first backward pass after this rank has left
        self._last_task: int | None = None

    @property
    def counts(self) -> bool:
        """Whether this rank is up to date; gradients computed with outdated weights do not count."""
        return self.attendance.members.counts

    def watch(self) -> list[Any]:
        """Watch forward passes and optimizers; return hook handles, whose ``remove()`` ends this."""
        model = self._model()
        # weak references, because the model holds its hooks, and the handle must end with the model
        hooks: list[Any] = [model.register_forward_pre_hook(weakly(self._before_forward))]
        before = weakly(self._before_step)
        return hooks + [one.register_step_pre_hook(before) for one in self._optimizers]

    def _model(self) -> nn.Module:
        model = self._plain()
        assert model is not None
        return model

    def _before_forward(self, _module: Any, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            self.membership.watch()
            self.membership.ask()

    # ---- a step ------------------------------------------------------------------------------------

    def begin(self, *, again: bool) -> bool:
        """Wait for the quorum; return False in the first backward pass after this rank has left.

        ``again`` is ignored, because ranks that have abandoned a step call the roll again anyway.
        """
        # wait for the quorum before the first gradient is accumulated, because the group decides whether
        # this rank's gradients count, and which entries are collected while accumulating
        self.membership.turns.take()
        if self._is_late():
            self.membership.turns.end()
            return False
        self.membership.check_here()
        self._engine.submit(self.attendance.ready).result()
        return True

    def _is_late(self) -> bool:
        """Return whether this rank has left without the program's knowledge."""
        # Drop one backward pass silently, so that the program can read ``sync.left`` after this step.
        # ``Membership.check_here`` refuses the next step.
        if not self.membership.gone:
            return False
        # autograd's private number identifies the backward pass, as in ``ParameterSource``; PyTorch has
        # no public number
        task = torch._C._current_graph_task_id()
        if self._last_task is None:
            self._last_task = task
        return task == self._last_task

    def averages(self, this: Step) -> list[Vector] | None:
        """Exchange until a whole group has the sums, then commit; None if this rank was left out."""
        assert isinstance(this, ReplicaStep)
        return self._averages(this.jobs, this.came)

    def _averages(
        self, jobs: Sequence[Future[None]] = (), came: Collection[str] = ()
    ) -> list[Vector] | None:
        reducer, self._exchanged = self._reducer, False
        self._position = reducer.step, reducer.skipped

        async def attempt() -> None:
            # Keep the order in which ``ParameterSource`` starts its jobs: a rank that has just joined
            # makes its first attempt here, while other ranks of its group exchange through those jobs.
            units = [reducer.exchange(unit) for unit in range(len(reducer.units))]
            used = self._parts.share_used(reducer.channel("used"), came)
            await together([*units, used, reducer.share()])
            await self._agree()

        try:
            for job in jobs:
                job.result()
            # if there were jobs, they have exchanged all units, and only the vote is missing; without
            # jobs (``_take_part``), nothing has been exchanged yet
            run(self._agree() if jobs else attempt())
        except CommunicationError as error:
            # ``missed`` returns False, because this rank cannot take part in its peers' step: the roll
            # has closed this rank's own step and put its gradients into the residual, and new gradients
            # come only with the next backward pass
            if not self.attendance.persist(error, attempt, missed=lambda: False):
                self._missed = True
                return None
        self._exchanged = True
        # a rank without gradients, e.g. one that leaves between its own steps, does not contribute
        self.attendance.members.count_only(self._parts.came)
        return self.attendance.commit(propagate_nonfinite=self._policy == "propagate")

    def finished(self) -> None:
        """Continue with the next step and the current ranks."""
        # after a missed step there is nothing to close: the roll has brought the reducer to the step of
        # this rank's peers
        if self._exchanged:
            step, skipped = self._position
            self.attendance.close(step, applied=self._reducer.skipped == skipped)
        if self.attendance.members.behind:
            self._reducer.take_notice()  # a joining rank has nothing new to report

    def _take_part(self) -> None:
        """Take part in the other ranks' steps without training, until this rank has left.

        This runs on the engine's thread.
        """
        reducer = self._reducer
        while not self.membership.left:
            self.attendance.ready()
            # with zero gradients, this rank still sends entries of its residual, until the residual is
            # dealt to other ranks
            for unit, its in enumerate(reducer.units):
                zeros = torch.zeros(its.size, dtype=its.dtype, device=its.device)
                reducer.accumulate(unit, 0, zeros)
            try:
                self._averages()  # only the other ranks apply the averages
            except NonFiniteGradientError:
                reducer.skip()
            except BaseException:
                reducer.refuse()
                raise
            finally:
                self.finished()

    async def _agree(self) -> None:
        # the training thread waits for this step, so nothing writes to the weights while they are copied
        self.attendance.offer(self._copy)
        await self.attendance.agree(self._told)

    def _copy(self) -> memoryview:
        return make_copy(self._model(), self._optimizers)

    def _told(self) -> dict[str, Any]:
        """Return the states that a joining rank takes over, and the optimizers' steps since its copy."""
        present, weights = rates_of(self._optimizers), weights_digest(self._weights)
        mine = {"taken": self._taken, "present": present, "weights": weights}
        return {**self.membership.told(), **mine}

    def settled(self, applies: bool) -> bool:
        """If this rank has caught up, bring its weights to the state before this step's averages."""
        if applies:
            # The line is printed here, by rank 0, because processes start independently, and none knows
            # its rank before the first step.
            said, self._said = self._said, ""
            if said and not self.attendance.members.behind and self._reducer.comm.rank == 0:
                say(said)
        if (arrival := self.attendance.arrival()) is not None:
            extras, catch_up = arrival
            # ``step`` has just been exchanged: its average is already in the gradients, and the
            # program's own ``optimizer.step()`` applies it
            step = self._reducer.step - 1
            repeat(catch_up, step, extras["taken"], self._model(), self._optimizers)
            self._taken.clear()  # the optimizers' hooks have also recorded the repeated steps
            self.membership.take_over(extras, self._optimizers)
            if weights_digest(self._weights) != extras["weights"]:
                place = self._reducer.comm.ledger.place(step)
                raise PeerError(
                    f"{place}: this rank has repeated the other ranks' steps, but its weights differ "
                    "from theirs; between backward() and the optimizer's step, do the same on all ranks, "
                    "and change only gradients"
                )
        self.membership.end_of_leaving()
        missed, self._missed = self._missed, False
        return applies and not missed and not self.membership.left

    def end(self) -> None:
        """Let this rank leave between steps."""
        self.membership.turns.end()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the gradients if this rank is catching up; keep the rates if a peer is catching up."""
        number = next(i for i, one in enumerate(self._optimizers) if one is optimizer)
        # the commit has already counted the step that this optimizer applies
        step, attendance = self._reducer.step - 1, self.attendance
        if attendance.catch_up is not None and attendance.members.behind:
            keep_gradients(attendance.catch_up, step, number, optimizer)
        elif not attendance.offered:
            self._taken.clear()
        else:
            (groups,) = rates_of([optimizer])
            self._taken.setdefault(step, []).append((number, groups))

    def part(self) -> None:
        """Wait until all ranks have applied the last step; a rank that is behind gets new weights."""

        def take(copy: bytearray) -> None:
            load_copy(copy, self._model(), self._optimizers)

        with self.membership.turns.step(), self._reducer.comm.ledger.outside_steps():
            self._engine.submit(lambda: self.attendance.end(self._copy, take)).result()
