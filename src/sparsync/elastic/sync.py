"""``attach(model, optimizer, elastic=manager)``: gradients exchanged by whoever is there.

In every step torchft's manager is asked for a quorum while the forward pass runs.  If it is another one
than before, or an exchange breaks off, its members call the roll (``members``) before they go on.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from sparsync.elastic.catch_up import CatchUp, Rates, make_copy, rates_of
from sparsync.elastic.group import Quorum, group_of
from sparsync.elastic.members import Members, Verdict
from sparsync.errors import (
    CommunicationError,
    ConfigurationError,
    DeadlineError,
    PeerError,
)
from sparsync.feedback.agreement import set_up_digest, weights_digest
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import AdaptiveDensity
from sparsync.feedback.state import rescale_
from sparsync.integrations.consensus import PartsConsensus
from sparsync.integrations.options import Options
from sparsync.integrations.replicas import ReplicaStep, ReplicaSync
from sparsync.integrations.runs import Run
from sparsync.integrations.shards import Fsdp, Shard, shards_of
from sparsync.integrations.sync import Hook, Step
from sparsync.monitoring import sink_of
from sparsync.sparse import Vector
from sparsync.state import packed, unpacked
from sparsync.transports.driver import run, together
from sparsync.transports.groups import SoloCommunicator
from sparsync.transports.ledger import Raw

__all__ = ["ElasticSync", "attach_elastic"]

_PATIENCE: Final = 600.0  # seconds without a quorum after which training ends
_PAUSE: Final = 0.2  # seconds between questions for one
_EXTRAS: Final = 2**26  # bytes of the schedulers and the like that a rank takes over


def attach_elastic(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: Options, manager: Any
) -> ElasticSync:
    """Exchange gradients with the ranks of the present quorum; see ``attach``."""
    given, carried, watched = options.compression, options.transport, options.monitoring
    for what, there in {
        "correction=": options.correction is not None,
        "AdaptiveDensity": isinstance(options.density, AdaptiveDensity),
        "Compression(schedule=...)": given.schedule is not None,
        "Transport(hierarchy=...)": carried.hierarchy is not None,
        "Transport(world=...)": carried.world is not None,
        f"Transport('{carried.name}')": carried.name not in ("auto", "zmq"),
        "Transport(curve_keys=...)": carried.curve_keys is not None,
        "Monitoring(sentinel=...)": watched.sentinel is not None,
    }.items():
        if there:
            raise ConfigurationError(f"{what} is not for elastic=; omit one of them")
    if not optimizers:
        raise ConfigurationError(
            "elastic= needs the optimizer, whose state a rank that joins takes over; give it, too"
        )
    group = group_of(manager)
    shards = shards_of(model, ())
    parted = next((shard.name for shard in shards if shard.piece is not None), None)
    if parted is not None or isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigurationError(
            "elastic= is for a plain module, whole on every rank: DDP and shards keep process groups "
            f"that cannot change ({parted or 'DistributedDataParallel'}); give the module itself"
        )
    names = [shard.name for shard in shards]
    consensus = PartsConsensus(SoloCommunicator(), {n: i for i, n in enumerate(sorted(names))})
    reducer = Reducer(
        group.comm,
        options.units([(shard.name, shard.parameter) for shard in shards], model),
        run(options.algorithm.on(group.comm)),
        options.density,
        given.warmup(),
        None,
        watched.xi_period,
        consensus,
        None if watched.log is None else sink_of(watched.log, 0),
    )
    return ElasticSync(model, reducer, shards, consensus, options, manager, optimizers)


@final
class ElasticSync(ReplicaSync):
    """The handle of a model whose ranks come and go."""

    def __init__(
        self,
        model: nn.Module,
        reducer: Reducer,
        shards: Sequence[Shard],
        consensus: PartsConsensus,
        options: Options,
        manager: Any,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__(model, reducer, shards, Fsdp(model), consensus, ExitStack(), options, None)
        self._manager, self._group, self._optimizers = manager, group_of(manager), list(optimizers)
        digest = hashlib.blake2b(self._weights().encode(), digest_size=8).digest()
        start = int.from_bytes(digest, "little") >> 1
        self.members = Members(reducer, start, set_up_digest(reducer, nonfinite=self._nonfinite))
        self._compared = True  # the roll does
        self._asked = self._met = self._missed = self._exchanged = self._sigterm = False
        self._last_step = (0, 0, False)
        self._carried: dict[str, Any] = {}
        self._catch_up: CatchUp | None = None
        self._rates: dict[int, Rates] = {}  # by step, since a copy was offered
        self._offered = False
        self._extras: dict[str, Any] | None = None  # of the donor, when this rank has caught up
        self._follow(model)
        self.on_close.callback(self._group.copies.close)

    def _follow(self, model: nn.Module) -> None:
        """Watch forward passes, optimizers and SIGTERM until ``close``."""
        me = weakref.ref(self)

        def before_forward(_module: Any, _inputs: Any) -> None:
            if (sync := me()) is not None and torch.is_grad_enabled():
                sync._ask()

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (sync := me()) is not None:
                sync._before_step(optimizer)

        handles: list[Any] = [model.register_forward_pre_hook(Hook(before_forward))]
        handles += [one.register_step_pre_hook(Hook(before_step)) for one in self._optimizers]
        for handle in handles:
            self.on_close.callback(handle.remove)
        if threading.current_thread() is threading.main_thread():

            def leave(*_: Any) -> None:
                if (sync := me()) is not None:
                    sync._sigterm = True
                    sync.leave()

            self._former = signal.signal(signal.SIGTERM, leave)
            self.on_close.callback(signal.signal, signal.SIGTERM, self._former)

    # ---- for the user ------------------------------------------------------------------------------

    @property
    def left(self) -> bool:
        """Whether this rank has left, and is to end."""
        return self.members.left

    @property
    def last_step(self) -> tuple[int, int, bool]:
        """The number of the group that exchanged the last step, its contributors, and if this is one."""
        return self._last_step

    def carry(self, **named: Any) -> None:
        """Name what a rank that joins takes over, too, as ``scheduler=scheduler``.

        Anything with ``state_dict()`` and ``load_state_dict()``, small, and of plain values and tensors.
        """
        for name, one in named.items():
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise ConfigurationError(
                    f"{name} is {type(one).__name__}; give what has state_dict() and load_state_dict()"
                )
        self._carried |= named

    def leave(self) -> None:
        """Leave after the next two steps, in which the residual is dealt to the others; see ``left``.

        SIGTERM calls it, and ends the process when it has left.
        """
        self.members.leaving = True

    def finish(self) -> None:
        """Wait until all ranks have applied the last step; call it after the last one."""

        def work() -> None:
            while not self.left:
                try:
                    run(self.members.end())
                    return
                except CommunicationError as error:
                    self._meet(self._again(error))
                    self._met = True

        self._engine.submit(work).result()

    def stats(self) -> dict[str, Any]:
        """Return plain numbers; "elastic" has the present members, changes, and what was lost."""
        return {**super().stats(), "elastic": self.members.state()}

    # ---- a quorum ----------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask for a quorum, and do not wait, unless this step has one."""
        if not self._asked and not self._met:
            with suppress(Exception):  # it is asked for again when it is needed
                self._manager.start_quorum(allow_heal=False)
                self._asked = True

    def _quorum(self) -> Quorum:
        """Wait for a quorum, on the engine's thread.

        Raises:
            DeadlineError: none for ten minutes.
        """
        until, said = time.monotonic() + _PATIENCE, False
        while True:
            try:
                if not self._asked:
                    self._manager.start_quorum(allow_heal=False)
                self._asked = False
                self._manager.wait_quorum()
                if self._group.quorum is not None and self._manager.errored() is None:
                    return self._group.quorum
                reason = str(self._manager.errored()).splitlines()[0]
            except Exception as error:  # whatever torchft and its server raise
                reason = (str(error) or type(error).__name__).splitlines()[0]
                self._manager._quorum_future = None  # else the error comes back for ever
            if time.monotonic() > until:
                raise DeadlineError(
                    f"step {self.reducer.step}: there was no quorum for {_PATIENCE:g} s ({reason}); is "
                    "the lighthouse there, and are as many ranks as it wants?"
                )
            if not said:
                said = True
                sys.stderr.write(
                    f"sparsync: step {self.reducer.step}: no quorum yet ({reason}); training waits, and "
                    "nothing is lost\n"
                )
            time.sleep(_PAUSE)

    def _again(self, error: CommunicationError) -> Quorum:
        """Give the exchange up, let the others do so, too, and return the next quorum."""
        self._group.comm.give_up()
        with suppress(
            Exception
        ):  # it only counts failures, for which the next quorum is another one
            self._manager.report_error(error)
            self._manager.should_commit()
        self._asked = False
        return self._quorum()

    def _meet(self, quorum: Quorum) -> Verdict:
        """Call the roll of a quorum, or of the next one that holds."""
        while True:
            self._group.comm.regroup(quorum.rank, quorum.number, quorum.endpoints)
            try:
                verdict = run(self.members.call_the_roll(quorum.number, quorum.names))
                break
            except CommunicationError as error:
                quorum = self._again(error)
        stale = quorum.rank in verdict.stale
        known = self._catch_up is not None and self._catch_up.donor in quorum.names
        if stale or (self.members.behind and not known):
            self._fetch(quorum, verdict.donor)
        if known and self._catch_up is not None:
            self.members.donor = quorum.names.index(self._catch_up.donor)
        return verdict

    def _fetch(self, quorum: Quorum, donor: int) -> None:
        """Begin to fetch a copy of the donor's state."""
        if self._catch_up is not None:
            self._catch_up.stop()
        endpoint, timeout = quorum.copies[donor], self._group.comm.timeout
        self._catch_up = CatchUp(quorum.names[donor], endpoint, timeout, self.reducer.step)
        self.members.donor, self.members.ready = donor, False

    # ---- a step ------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Wait for the quorum before the first gradient is accumulated."""
        if self.left:
            raise PeerError("this rank has left; end it, or start another one")
        if self._before is None:
            self._before = self.reducer.step, self.reducer.comm.ledger.total()
        self._engine.submit(self._ready).result()
        if self._scaler is not None:
            rescale_(self.reducer, self._scaler.get_scale())

    def _ready(self) -> None:
        if not self._met:
            quorum = self._quorum()
            if quorum.number != self.members.attempt:
                self._meet(quorum)
        self._met = False
        if self._catch_up is not None and self.members.behind:
            try:
                self.members.ready = self._catch_up.done
            except PeerError:
                assert self._group.quorum is not None
                self._fetch(self._group.quorum, self.members.first)

    def _accumulate(self, run: Run, gradient: Tensor, parameters: Sequence[Tensor]) -> None:
        """Accumulate, or nothing: of weights that are not the others', gradients do not count."""
        if not self.members.counts:
            gradient.zero_()
        super()._accumulate(run, gradient, parameters)

    def _finish(self, this: Step) -> None:
        """Exchange and commit, then go on to the next step with whoever is there."""
        members, step, skipped = self.members, self.reducer.step, self.reducer.skipped
        self._exchanged = False
        try:
            super()._finish(this)
        finally:
            if self._exchanged:
                applied = self.reducer.skipped == skipped
                self._last_step = members.attempt, members.contributors, members.counts
                if not members.committed(step, still=not self._met, applied=applied):
                    self._extras = None
                self._count()

    def _averages(self, this: Step) -> list[Vector] | None:
        """Exchange until a group has all of the step, then commit; None: others did without this rank."""
        assert isinstance(this, ReplicaStep)
        reducer, met, failure = self.reducer, False, None
        try:
            for job in this.jobs:
                job.result()
            run(self._agree())
        except CommunicationError as error:
            failure = error
        while failure is not None:
            verdict = self._meet(self._again(failure))
            failure = None
            if reducer.comm.rank in verdict.stale:
                self._met = self._missed = True
                return None
            if met := reducer.comm.rank in verdict.commits:
                break
            try:
                units = [reducer.exchange(unit) for unit in range(len(reducer.units))]
                used = self._parts.share_used(reducer.channel("used"), this.came)
                run(together([*units, used, reducer.share()]))
                run(self._agree())
            except CommunicationError as error:
                failure = error
        self._met, self._exchanged = met, True
        return reducer.commit(propagate_nonfinite=self._nonfinite == "propagate")

    async def _agree(self) -> None:
        """Vote, and hand over to those whose gradients count from the next step on."""
        members, comm = self.members, self.reducer.channel("roll")
        await members.deal()
        await members.vote()
        if not members.fetching and self._offered:
            self._group.copies.drop()
            self._rates, self._offered = {}, False
        if self._group.copies.wanted.is_set() and not members.behind:
            self._offered, model = True, self._plain()
            assert model is not None
            self._group.copies.offer(self.reducer.step, make_copy(model, self._optimizers))
        for rank, donor in members.newcomers.items():
            framing = Raw("control", variable=True)
            if donor == comm.rank:
                told = {
                    "rates": self._rates,
                    "present": rates_of(self._optimizers),
                    "weights": self._weights(),
                    **{f"carried {name}": one.state_dict() for name, one in self._carried.items()},
                }
                raw = torch.frombuffer(packed(told), dtype=torch.uint8)
                await comm.isend(raw, rank, "extras", framing)
            elif rank == comm.rank:
                raw = await comm.irecv(donor, _EXTRAS, "extras", framing)
                self._extras = unpacked(raw.numpy())

    def _count(self) -> None:
        """Let torchft's manager count the step."""
        with suppress(Exception):  # it only counts
            self._manager.should_commit()
            counted = {"step": self.reducer.step}
            batches = self._manager.batches_committed()
            self._manager.load_state_dict({**counted, "batches_committed": batches})

    def _settle(self, this: Step, finished: Future[None]) -> bool:
        """Wait for the averages; if this rank has caught up, bring its weights to where they apply."""
        settled = super()._settle(this, finished)
        if self._extras is not None and self._catch_up is not None:
            extras, catch_up, model = self._extras, self._catch_up, self._plain()
            self._extras = self._catch_up = None
            assert model is not None
            catch_up.arrive(self.reducer.step - 1, extras["rates"], model, self._optimizers)
            for one, groups in zip(self._optimizers, extras["present"], strict=True):
                for group, its in zip(one.param_groups, groups, strict=True):
                    group.update(its)
            for name, one in self._carried.items():
                if f"carried {name}" in extras:
                    one.load_state_dict(extras[f"carried {name}"])
            if self._weights() != extras["weights"]:
                raise PeerError(
                    f"step {self.reducer.step - 1}: the weights that this rank has caught up with are "
                    "not those of the others; is all that is done between backward() and the optimizer's "
                    "step equal on all ranks, and done to gradients alone?"
                )
        if self.left:
            self._end_of_leaving()
        missed, self._missed = self._missed, False
        return settled and not missed and not self.left

    def _end_of_leaving(self) -> None:
        """End the process if it was SIGTERM that asked for it."""
        if self._sigterm:
            signal.signal(signal.SIGTERM, self._former)
            os.kill(os.getpid(), signal.SIGTERM)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what repeats this step on a rank that catches up, or on this one."""
        number = next(i for i, one in enumerate(self._optimizers) if one is optimizer)
        step = self.reducer.step - 1
        if self._catch_up is not None and self.members.behind:
            self._catch_up.keep(step, number, optimizer)
        elif self._offered and number == len(self._optimizers) - 1:
            self._rates[step] = rates_of(self._optimizers)

    def _weights(self) -> str:
        return weights_digest(self._parameters.values())
