"""Exchange the optimizer's updates: ``sync = sparsync.attach(model, optimizer)``.

Gradients stay on their rank, and each rank's optimizer takes its own steps.  After each step, a hook on
the optimizer starts the exchanges that are due (``OuterEngine``) on the handle's thread
(``transports.driver.Engine``) and applies the finished ones.  By default there is no delay: the
``optimizer.step()`` that starts an exchange waits until its result is in the weights.  If DDP wraps the
model, DDP exchanges nothing.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsync.accepted_optimizers import check_stepped_here
from sparsync.console import say
from sparsync.errors import ConfigurationError, require
from sparsync.exclusive import (
    Guard,
    check_outside_ddp,
    exchanged_updates,
    refuse_inside_backward,
)
from sparsync.feedback.changes import Undone
from sparsync.feedback.reducer_state import ParsedState, agree_state, parse_state
from sparsync.fields import (
    Common,
    Each,
    Exactly,
    Fields,
    Kind,
    Number,
    check_saved,
    common_facts,
    opened,
    sealed,
)
from sparsync.gradients.sentinel import check_replicas
from sparsync.handle import CommHook, Handle, Hook, call_after_backward, weakly
from sparsync.options import Options
from sparsync.state import outside_inference
from sparsync.transports.agree import digest, on_all_or_none
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.ledger import Traffic
from sparsync.transports.process_group import Groups, collectives_of
from sparsync.units import check_same_parameters, kinds_of, local_of, substituted, training
from sparsync.updates.advice import Advice
from sparsync.updates.carrier import Carrier
from sparsync.updates.gradient_noise import TOGETHER, correct
from sparsync.updates.rank_state import (
    SCALER_KIND,
    is_broken,
    load_optimizers,
    load_weights,
    own_kinds,
    own_state,
)
from sparsync.updates.ranks import UpdateRanks
from sparsync.updates.start import Start
from sparsync.updates.step_length import lengthen, remember
from sparsync.updates.stepping import follow
from sparsync.updates.weights import OwnWeights

# This many steps or passes in a row without an exchange count as a mistake.  In a GAN, steps of the
# network that is not attached are intended and cause no exchange, but there are fewer of them in a row.
_IDLE = 100
_CURE = "load a state that this handle's state_dict() returned, into the same set-up"

__all__ = ["UpdateSync"]


@final
class UpdateSync(Handle):
    """The handle of a model whose optimizers take local steps between exchanges of updates.

    ``own`` holds this rank's weights and their outer engine, ``carrier`` runs exchanges, and ``ranks``
    stands for the ranks that take part.
    """

    def __init__(
        self,
        module: nn.Module,
        own: OwnWeights,
        carrier: Carrier,
        ranks: UpdateRanks,
        groups: Groups | ExitStack,
        options: Options,
        consensus: Any = None,
        pieces: Any = None,
        *,
        advises: bool = False,
        unweighed: str = "",
    ) -> None:
        reducer, engine = own.outer.reducer, carrier.engine
        membership = ranks.membership
        super().__init__(module, reducer, engine, groups, options, membership, consensus, pieces)
        # steps and bytes before the first step in this process
        self._before: tuple[int, Traffic] | None = None
        self._own, self._weights, self.outer = own, own.weights, own.outer
        self._carrier, self._ranks, self._changes = carrier, ranks, own.changes
        self._ddp: Callable[[], DistributedDataParallel | None] = lambda: None
        self._undone = None if own.outer.optimizers else Undone(own.changes)
        self._kinds = kinds_of(self._weights.trained)
        self._seen: list[Any] = []  # the parameters that trained when the model was last checked
        self._skipped = set[Tensor]()  # parameters whose current step a GradScaler skips
        # optimizers that have not stepped in the current iteration, so their gradients are old
        self._resting = set(own.outer.optimizers)
        self._start = Start(self.outer, self._weights, self._changes, ranks)
        self._differs = False  # whether a step was made since replicas were equal
        self._idle = 0  # steps of other optimizers, or forward passes, since the last local step
        self._groups: dict[torch.optim.Optimizer, int] = {}  # number of parameter groups of each
        self._short: dict[torch.optim.Optimizer, int] = {}  # number of steps not corrected yet
        tell = options.tell if advises else None
        self._advice = Advice(self.outer, carrier, self._weights.noise, tell)
        # Optimizers that have not stepped yet, and the number of collectives before a first step.  If a
        # replica is split over ranks, its optimizer may communicate with the other parts.
        whole = self._inner is None or self._weights.node is not None
        self._new = set(own.outer.optimizers) if whole else set()
        self._world, self._collectives = options.transport.world, 0
        self._unweighed = unweighed  # the error of ``contribute``, if ranks cannot be weighed

    @property
    def steps(self) -> int:
        """The number of finished local steps; a joining rank takes over the number of its peers."""
        return self.outer.steps

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """The parameters whose updates are exchanged, by name."""
        return self._weights.trained

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers after whose steps ranks exchange; if empty, the user calls ``step``."""
        return self.outer.optimizers

    def watch(self, ddp: DistributedDataParallel | None) -> None:
        """Stop DDP's own exchange and follow the optimizers' steps, until ``close``."""
        if ddp is not None:
            self._ddp = weakref.ref(ddp)
            # the hook replaces DDP's allreduce, which no setting turns off for a whole run
            hook = CommHook.taken(ddp, self, self.on_bucket)
            self.on_close.callback(hook.release)
            self.on_close.callback(_restore, weakref.ref(ddp), ddp.broadcast_buffers)
            ddp.broadcast_buffers = False  # buffers are averaged with the weights

        module = self._plain()
        assert module is not None
        # The reference is strong: through this hook the model keeps the handle alive, as a DDP
        # model does through its communication hook.  The hook is prepended, so that it sees the
        # weights before other hooks change them.
        before = Hook(self._forward)
        handles: list[Any] = [(ddp or module).register_forward_pre_hook(before, prepend=True)]
        self._weights.average_over(self.reducer.comm.world_size)
        for one in self.optimizers:
            handles += follow(one, weakly(self._before_step), weakly(self._after_step))
        handles += [Guard(self)] if self.optimizers else []
        for handle in handles:
            self.on_close.callback(handle.remove)
        if self.optimizers:
            self.on_close.callback(refuse_inside_backward(self))

    # ---- DDP, on autograd's thread -----------------------------------------------------------------

    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Return a bucket unchanged, or averaged over the node."""
        node, buffer = self._weights.node, bucket.buffer()
        if node is not None:
            # at the end of the backward pass, ``check`` raises if an average of the node has failed
            if bucket.is_last():
                call_after_backward(node.check)
            return node.average_(buffer)
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        run(self.outer.resume())
        self._check_model()  # needed here if the loop calls parts of the model, which have no hook
        self._look_outside(optimizer)
        self._ranks.before_step()
        self._check_start()
        require(
            not self._changes.replaced(),
            f"local step {self.outer.steps}: the weights were replaced since the last step, as by a "
            "checkpoint; load it by sparsync.load or sync.load_state_dict(), as all ranks do, or close() "
            "the handle on all ranks, load, and attach again",
        )
        # The weights are remembered after the checks, right before the optimizer writes, because
        # ``lengthen`` computes the step as their difference.
        if (noise := self._weights.noise) is not None:
            remember(optimizer, noise.steps)
            if self.outer.begins_last(self.outer.steps):
                noise.hold(optimizer)
        if optimizer in self._new:
            self._collectives = collectives_of(self._world)

    def _check_start(self) -> None:
        """Before the first step, let all ranks agree on the weights from which they begin."""
        if self._start.pending:
            self._start.agree(self.communicators)

    def _after_step(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self._differs = True
        self._resting.discard(optimizer)
        if optimizer in self._new and not skipped:
            self._new.discard(optimizer)
            if collectives_of(self._world) != self._collectives:
                check_stepped_here(optimizer, self._weights.trained.values())
        # the gradients of a skipped step are not worth measuring, but the step counts, because other
        # ranks may have made it
        if skipped:
            self._skipped.update(p for group in optimizer.param_groups for p in group["params"])
        elif (noise := self._weights.noise) is not None:
            # Adam counts the steps of each parameter, so several steps can be lengthened together, just
            # before the exchange.  Other optimizers keep no such count, so each of their steps is
            # lengthened immediately.
            shares, ranks = noise.shares, self._weights.ranks
            lengthen(optimizer, noise.steps, shares, ranks)
            short = self._short.get(optimizer, 0) + 1
            if self.outer.begins(self.outer.steps) or short >= TOGETHER:
                correct(optimizer, shares, ranks, noise.counts, short)
                short = 0
            self._short[optimizer] = short
        # ranks count iterations, not optimizer steps, and the last optimizer ends an iteration
        if optimizer is self.outer.optimizers[-1]:
            self.step()
        else:
            self._changes.remember()
            self._note_idle(
                f"a step of {type(optimizer).__name__}, and none of "
                f"{type(self.outer.optimizers[-1]).__name__}, the last optimizer that attach was "
                "given, after whose steps ranks exchange; give last the optimizer that always steps"
            )

    def _note_idle(self, what: str) -> None:
        """Warn once if training continues without local steps, so that nothing is exchanged."""
        self._idle += 1
        if self._idle == _IDLE and self.reducer.comm.rank == 0:
            say(f"replicas drift apart: {_IDLE} times in a row there was {what}")

    def _look_outside(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once of parameters that an optimizer steps, but that no handle exchanges.

        Such parameters are legal: DDP may exchange them, or each rank may have its own on purpose.
        """
        groups = optimizer.param_groups
        if self._groups.get(optimizer) == len(groups):  # the usual case: no group was added
            return
        self._groups[optimizer] = len(groups)
        module, known = self._plain(), exchanged_updates()
        assert module is not None
        known.update(map(id, module.parameters()))
        stepped = (p for group in groups for p in group["params"])
        outside = [p for p in stepped if p.requires_grad and id(p) not in known]
        if outside and self.reducer.comm.rank == 0:
            say(
                f"{type(optimizer).__name__} also steps {len(outside)} parameters that are not in the "
                f"model that was attached (the first: {list(outside[0].shape)}), so every rank trains "
                "its own copy: attach a module that contains both the model and these parameters, e.g. a "
                "ModuleList, unless something else exchanges them"
            )

    def _forward(self, *_given: Any) -> None:
        if torch.is_grad_enabled():
            self._before_forward()

    def _before_forward(self) -> None:
        ddp, module = self._ddp(), self._plain()
        if self._weights.node is not None:
            # A node that has lost a rank cannot average gradients.  Refuse before DDP prepares for the
            # backward pass.
            self.reducer.comm.check_whole()
        if ddp is not None:
            module = ddp.module
            if ddp._join_config.enable:
                raise ConfigurationError(
                    "join() works only if gradients are exchanged, but here updates are; instead, a rank "
                    "that is out of batches calls sync.step() whenever the other ranks' optimizers step"
                )
        assert module is not None
        if ddp is None:
            check_outside_ddp(module)
        if not torch.compiler.is_compiling():
            run(self.outer.resume())
        self._weights.reshard()
        if self.outer.optimizers:
            if not torch.compiler.is_compiling():  # otherwise the weights are checked at the step
                if self._ranks.asked:
                    self._start.note()
                else:  # a rank that joins with different weights must be refused now
                    self._check_start()
        elif self._start.pending:
            self._start.refuse_loaded()
        elif not torch.compiler.is_compiling() and self._changes.written():
            self._changes.remember()
            self._note_idle("a forward pass with new weights, and no sync.step(); call it")
        self._check_model()
        self._ranks.before_forward(self.step)

    def _check_model(self) -> None:
        """Refuse parameters that train now, but are not exchanged."""
        self._weights.reshard()  # FSDP2 then shows the parameters that are exchanged
        ddp = self._ddp()
        module = self._plain() if ddp is None else ddp.module  # the user may have replaced it
        assert module is not None
        if (seen := training(module)) != self._seen and not substituted(module):
            alone = () if ddp is None else ddp.parameters_to_ignore
            check_same_parameters(module, self._weights.trained, alone=alone, kinds=self._kinds)
            self._seen = seen

    # ---- a step ------------------------------------------------------------------------------------

    def contribute(
        self,
        seen: float | None = None,
        /,
        *,
        tokens: float | None = None,
        samples: float | None = None,
    ) -> None:
        """Weigh this rank's updates by the number of samples in its steps since the last exchange.

        Call it on all ranks before every ``optimizer.step()``, starting with the first, and pass one
        number >= 0: the tokens, samples or other units over which the loss is a mean.  A rank that has
        seen no data may skip the call.  If no rank ever calls it, all ranks have the same weight.

        Raises:
            ConfigurationError: the call does not pass exactly one valid number, the first call comes
                after an exchange, or this replica is split over ranks.

        Cost: one round of 16 bytes before every exchange.

        Example::

            loss = cross_entropy(model(tokens), targets)  # a mean over this rank's tokens
            loss.backward()
            sync.contribute(tokens=targets.numel())
            optimizer.step()
        """
        if self._unweighed:
            raise ConfigurationError(self._unweighed)
        self.outer.contributions.add(seen, tokens, samples)

    def _count_for_node(self) -> None:
        """Begin a step in the node's ledger; the node's ranks average gradients in every local step."""
        if (node := self._weights.node) is not None:
            node.comm.ledger.begin_step(self.outer.steps)

    def _count_ranks(self) -> None:
        """Set the number of ranks over which noise is averaged, for the correction of steps."""
        counted = self.outer.contributions
        if counted.weighs and counted.ranks:
            self._weights.average_over(counted.ranks)

    def step(self) -> None:
        """Count a local step; start and apply the exchanges that are due.

        The optimizer's hook calls this.  Call it yourself if ``attach`` was given no optimizer, and when
        this rank skips an iteration that other ranks run.

        Raises:
            NonFiniteGradientError: two exchanges in a row contained NaN or Inf from some rank.
            CommunicationError: a peer has died, or took longer than the timeout.
        """
        with self._ranks.step() as present:
            if present:
                self._step()

    def _step(self) -> None:
        outer = self.outer
        self.check_open("step()")
        self._own.check("an optimizer's step")
        self._idle, self._differs = 0, True
        if outer.optimizers:  # otherwise the user's step has already happened
            self._check_start()
        else:
            self._check_model()
        require(
            self._undone is None or not self._undone.before(),
            f"local step {outer.steps}: the last exchanges have no effect, because their changes are "
            "overwritten before the next step, e.g. by the program's own copies of the weights; attach "
            "the module or torch.nn.ParameterList that holds these copies, with their optimizer",
        )
        if self._before is None:
            self._before = outer.steps, self.reducer.comm.ledger.set_up()
            self._advice.begin()
        # The order matters: samples and buffers are part of the vector that ``advance`` reads, and
        # ``remember`` must see the weights that the exchange leaves.  The step counts even if this
        # raises, because the other ranks make the step.
        try:
            if self._weights.noise is not None and outer.begins_last(outer.steps):
                former = (p for o in self._resting for g in o.param_groups for p in g["params"])
                self._weights.noise.sample(outer.steps, self._skipped.union(former))
            self._weights.average_buffers()
            run(outer.advance(outer.steps))
        finally:
            outer.count()
            self._skipped.clear()
            self._resting.update(outer.optimizers)
            self._changes.remember()
            if self._undone is not None:
                self._undone.after()
            self._count_for_node()
        self._count_ranks()
        self._advice.on_agreement()
        self._advice.on_noise()
        if name := self._weights.strayed():
            say(
                f"rank {self.reducer.comm.rank}: buffer '{name}' held NaN or Inf when the model was "
                "attached, so it is not averaged, and it has become finite since: every rank has its "
                "own; make it finite before attach if ranks are to share it"
            )
        if self.reducer.monitor is not None:
            self.reducer.monitor.write()
        # The shared weights are compared, because the ranks' own weights differ by design. Inside a
        # node, the ranks' own weights must also be equal.
        sentinel = self._sentinel
        if sentinel is not None and sentinel.due(outer.steps - 1):
            run(outer.settle())
            tensors = {"the shared weights": outer.memory["shared"]}
            comm, place = self.reducer.channel("weights"), f"local step {outer.steps - 1}"
            with self.reducer.exchanging():
                run(check_replicas(sentinel, comm, tensors, place, self._inner))
                if self._weights.node is not None and self._inner is not None:
                    own = {name: local_of(p) for name, p in self._weights.trained.items()}
                    run(check_replicas(sentinel, self._inner, own, place))
        self._advice.on_dense()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return DDP's own context; gradients accumulate on this rank in any case."""
        ddp = self._ddp()
        return nullcontext() if ddp is None else ddp.no_sync()

    def shared(self) -> AbstractContextManager[None]:
        """Put the shared weights into the model in this context, to evaluate or save them.

        If weights were loaded after ``attach``, and no step was made yet, the model stays as it is: all
        ranks will begin with these weights.
        """
        run(self.outer.resume())
        if self._start.loaded() is not None:
            return nullcontext()
        return self._own.shared()

    @outside_inference
    def finish(self) -> None:
        """Exchange everything that is left and make replicas equal.

        All ranks must call this; they may continue training afterwards.
        """
        self.check_open("finish()")
        self._own.check("finish()")
        run(self.outer.resume())
        self._check_start()
        self._ranks.finish()
        self._changes.remember()
        self._differs = False

    def _before_close(self) -> None:
        """Warn if this rank's weights differ from the shared ones, as they do until ``finish``."""
        # If the program has written weights since the last step, e.g. loaded its best checkpoint, the
        # replicas may be equal, so there is nothing to warn of.
        if not self._differs or self.left or self.reducer.comm.rank or self._changes.written():
            return
        self._weights.reshard()
        if self.outer.differs():
            say(
                "closed without finish(), so replicas differ by the updates not exchanged yet; to "
                "make them equal, call finish() on all ranks before close()"
            )

    # ---- state -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: local steps, exchanges, bytes (in total and by phase), residual norms."""
        outer, node = self.outer, self._weights.node
        inner = [self._inner, node and node.comm]
        phases = [comm.ledger.by_phase() for comm in inner if comm is not None]
        return {
            **self._numbers(self._before),
            "inner": {phase: its.as_dict() for part in phases for phase, its in part.items()},
            "exchange": "updates",
            "exchange_seconds": self._carrier.busy,
            "waited_seconds": self._carrier.waited,
            **outer.described(),
            "drift": outer.drift,
            "agreement": None if self._weights.noise is None else self._weights.noise.agreement,
        }

    def holds(self, value: object) -> bool:
        """Return whether this rank's state already contains the state of a given model or optimizer."""
        ddp, module = self._ddp(), self._plain()
        return any(value is own for own in (ddp, module, *self.outer.optimizers) if own is not None)

    @outside_inference
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, including its own weights and its optimizers' moments."""
        self._own.check("saving of this rank's weights")
        run(self.outer.settle())
        module, noise = self._plain(), self._weights.noise
        assert module is not None
        own = own_state(module, self._weights.trained, self.outer.optimizers)
        exchanged = self.outer.state_dict()
        if (begins := self._start.loaded()) is not None:
            exchanged["memory"] = {"shared": begins}
            exchanged["reducer"] |= {"residual": {}}
        content = {
            **exchanged,
            **self.outer.layout.extents(),
            **own,
            # True if this rank's own steps have produced NaN, which the next exchange repairs.  Otherwise
            # ``validate`` treats NaN in a state as damage.
            "broken": is_broken(own, self._weights.exchanged()),
            "left_out": {name: name in self._weights.left_out for name in self._weights.buffers},
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "pieces": copy.deepcopy(self._pieces),
            "noise": None if noise is None else noise.state_dict(),
            "short": [self._short.get(one, 0) for one in self.outer.optimizers],
        }
        return sealed("updates", content)

    def kinds(self, content: Mapping[str, Any]) -> dict[str, Kind]:
        """Return the kind of every field of a state that this handle would save now."""
        outer, module, noise = self.outer, self._plain(), self._weights.noise
        assert module is not None
        saved, left_out = content.get("reducer"), _left_out(content)
        return {
            **outer.kinds(content),
            **{name: Exactly(value) for name, value in outer.layout.extents().items()},
            **own_kinds(
                module,
                self._weights.trained,
                outer.optimizers,
                exchanged=self._weights.exchanged(left_out),
                # a resharded state has None for thresholds and boundaries, which are then reset
                resharded=isinstance(saved, Mapping) and saved.get("selectors", ()) is None,
                finite=content.get("broken") is not True,
            ),
            "broken": bool,
            "left_out": Fields({name: Common(bool) for name in self._weights.buffers}),
            "scaler": SCALER_KIND,
            "pieces": Exactly(self._pieces),
            "noise": Exactly(None) if noise is None else noise.kind(),
            "short": Each((Number(0, whole=True),) * len(outer.optimizers)),
        }

    def validate(self, state: Mapping[str, Any]) -> ParsedState:
        """Check on this rank alone that a saved state fits; nothing is changed.

        Raises:
            ConfigurationError: the state does not fit; the message names the first field that is wrong.
        """
        content = opened(state, "updates")
        # Settings are checked first, so that a state saved with different settings is refused for that
        # reason, not because a field is missing.
        check_saved(content, Fields(self.outer.place(), more=object), "state", _CURE)
        kinds = self.kinds(content)
        # Optimizers come next, because another optimizer also changes the length of the vectors.
        check_saved(content, Fields({"groups": kinds["groups"]}, more=object), "state", _CURE)
        check_saved(content, Fields(kinds), "state", _CURE)
        return parse_state(self.reducer, content["reducer"])

    def common(self, content: Mapping[str, Any]) -> dict[str, str]:
        """Return the parts of a valid state that must be equal on all ranks, by name."""
        facts = common_facts(content, Fields(self.kinds(content)), digest)
        there = [content[key] is not None for key in ("parameters", "scaler")]
        return {**facts, "whether it has weights and a scaler": str(there)}

    @outside_inference
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, bit for bit, from a state that this rank has saved; all ranks must call this.

        Raises:
            ConfigurationError: see ``validate``; other ranks raise a ``CheckpointError`` that names this
                rank.
            PeerError: the ranks' states are from different saves.

        If this raises an error, nothing has changed on any rank.
        """
        self.check_open("load_state_dict()")
        self._own.check("load_state_dict()")
        run(self.outer.settle())
        comms = self.communicators
        parsed = run(on_all_or_none(comms, lambda: self.validate(state), "load its saved state"))
        content = state["content"]
        run(agree_state(self.reducer.comm, parsed, self.common(content), parts=self._inner))
        # Optimizers are loaded first: they may come from any library, so loading them may still fail.
        self._load_optimizers(comms, content)
        self._take(content, parsed)
        self.reducer.comm.ledger.begin_step(self.reducer.step)

    def _load_optimizers(self, comms: Sequence[Communicator], state: Mapping[str, Any]) -> None:
        """Load the states of optimizers and scaler; if a load fails on any rank, undo all of them."""
        module, scaler = self._plain(), self._scaler if state["scaler"] else None
        assert module is not None
        # a load replaces these objects, so references suffice to undo it; loading again might also fail
        former = [(one, one.state, one.param_groups) for one in self.outer.optimizers]
        scale = None if scaler is None else scaler.state_dict()

        def load() -> None:
            load_optimizers(module, self._weights.trained, self.outer.optimizers, state)
            if scaler is not None:
                scaler.load_state_dict(state["scaler"])

        try:
            run(on_all_or_none(comms, load, "load the saved states of its optimizers"))
        except Exception:
            for one, its, groups in former:
                one.state, one.param_groups = its, groups
            if scaler is not None:
                scaler.load_state_dict(scale)
            raise

    def _take(self, state: Mapping[str, Any], parsed: ParsedState) -> None:
        """Install a validated state on this rank."""
        module = self._plain()
        assert module is not None
        self.outer.restore(state, parsed)
        self._weights.leave_out(_left_out(state))
        if state["parameters"] is None:
            self.outer.restart()
        load_weights(module, self._weights.trained, state)
        if self._weights.noise is not None:
            self._weights.noise.load_state_dict(state["noise"])
        self._short = dict(zip(self.outer.optimizers, state["short"], strict=True))
        self._count_ranks()
        self._before = None
        self._count_for_node()
        self._start.resume()
        self._differs = False
        self._changes.remember()


def _left_out(state: Mapping[str, Any]) -> list[str]:
    """Return the buffers that were left out when a state was saved; none if the field is missing."""
    saved = state.get("left_out")
    return [n for n, out in saved.items() if out is True] if isinstance(saved, Mapping) else []


def _restore(ddp: weakref.ref[DistributedDataParallel], broadcasts: bool) -> None:
    """Let DDP broadcast buffers again, if it did before."""
    if (model := ddp()) is not None:
        model.broadcast_buffers = broadcasts
