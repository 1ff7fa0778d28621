"""Exchange what the optimizer has changed: ``sync = sparsync.attach(model, optimizer)``.

Gradients stay on their rank, and each rank's optimizer takes its own steps.  After each step a hook on
the optimizer starts the exchanges that are due (``sparsync.averaging.OuterStep``) on the engine's thread
and applies those that have finished.  DDP, if it wraps the model, exchanges nothing.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsync.averaging.fragments import Begin
from sparsync.averaging.moments import GradientNoise, correct, corrects
from sparsync.averaging.outer import OuterStep
from sparsync.averaging.published import OUTER_SETTINGS
from sparsync.errors import ConfigurationError, require
from sparsync.feedback.agreement import reducer_stats
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.step import Proposal
from sparsync.integrations.ddp import CommHook, check_ddp
from sparsync.integrations.hierarchy import Node
from sparsync.integrations.options import Compression, Options
from sparsync.integrations.own import load_own, own_state, validate_own
from sparsync.integrations.sentinel import check_replicas
from sparsync.integrations.sync import Sync, call_after_backward, weakly
from sparsync.integrations.weights import ModelWeights, trained_of
from sparsync.messages import say
from sparsync.presets import Algorithm
from sparsync.transports.agree import agree, check_equal_parameters
from sparsync.transports.driver import run
from sparsync.transports.ledger import Ledger
from sparsync.transports.process_group import Groups
from sparsync.units import (
    check_same_parameters,
    local_of,
    output_parameters,
    training,
)

_ADVISED = 30  # steps until it is known what they take
_NEGLIGIBLE = 0.1  # part of a step
_PROBE = 1 << 15  # elements of the allreduce that is timed: 0.1 s at 10 Mbit/s

__all__ = ["UpdateSync", "attach_updates", "make_outer"]


def make_outer(
    algorithm: str | Algorithm | OuterStep | None, density: Any, compression: Compression
) -> OuterStep:
    """Return the outer step that ``attach`` was asked for."""
    if isinstance(algorithm, OuterStep):
        outer = algorithm
        if outer.steps or outer.attached:
            raise ConfigurationError(
                "this OuterStep has a model already; make one for each attach, without a model"
            )
    elif algorithm is None or algorithm in OUTER_SETTINGS:
        outer = OuterStep(**OUTER_SETTINGS[str(algorithm or "updates")])
    else:
        outer = OuterStep(algorithm=algorithm, density=density, residual="weights")
    if compression.warmup_densities or not compression.overlap:
        raise ConfigurationError(
            "Compression(warmup_densities=..., overlap=False) are for gradients; for updates give "
            "warmup_steps, over which the period grows"
        )
    outer.adapt(compression.compress, compression.unit_bytes, compression.warmup_steps)
    return outer


def noise_of(
    outer: OuterStep,
    optimizers: Sequence[torch.optim.Optimizer],
    trained: Mapping[str, Tensor],
) -> GradientNoise | None:
    """Return what measures the noise of gradients, if an optimizer's steps are to be corrected for it."""
    memory = {
        parameter: group["betas"][1]
        for optimizer in filter(corrects, optimizers if outer.noise_correction else ())
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not group["amsgrad"]
    }
    # as the model orders them: optimizers may be given theirs in other orders
    found = {parameter: memory[parameter] for parameter in trained.values() if parameter in memory}
    return GradientNoise(found) if found else None


def attach_updates(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    outer: OuterStep,
    options: Options,
    replicate: Any = None,
    *,
    advises: bool = False,
) -> UpdateSync:
    """Exchange updates; see ``attach``.  With ``advises``, say so where plain DDP is faster."""
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if ddp is not None:
        check_ddp(ddp)
    if options.transport.hierarchy is not None and (ddp is None or replicate is not None):
        raise ConfigurationError(
            "Transport(hierarchy=...) is for DDP, whose gradients it averages inside a node; wrap the "
            "module in DistributedDataParallel and omit replicate=, or omit hierarchy="
        )
    module: nn.Module = model if ddp is None else ddp.module
    ignored = set() if ddp is None else ddp.parameters_to_ignore
    trained = trained_of(module, ignored)
    group = None if ddp is None else ddp.process_group
    groups = Groups(options.transport.world or group, options.transport.timeout)
    try:
        pieces, consensus, node, kinds = {}, None, None, dict[str, str]()
        if replicate is None:
            ranks = dist.get_process_group_ranks(groups.world)
            if options.transport.hierarchy is not None:
                node = Node(options, ranks, groups)
                ranks, consensus = node.peers, node.consensus
        else:
            pieces, kinds, ranks, consensus = _parts(module, replicate, groups, options)
        noise = noise_of(outer, optimizers, trained)
        weights = ModelWeights(module, trained, ddp is None or ddp.broadcast_buffers, node, noise)
        output = output_parameters(module) if outer.chosen.output else ()
        parameters: Mapping[str, Tensor] = trained
        if node is not None:
            parameters = {name: node.run_of(local_of(p)) for name, p in trained.items()}
            if (compress := outer.chosen.compress) is not None:
                outer.adapt(lambda name, _run: compress(name, trained[name]))
        units = outer.plan(weights.read(slice(0, None)), parameters, output, kinds)
        if consensus is not None and consensus.parts.world_size > 1:
            facts = {**outer.settings(), "fragments of each part": len(outer.layout.fragments)}
            run(agree(consensus.parts, facts))
            outer.on_any_part = consensus.on_any
        reducer = options.reducer(
            groups.make(ranks),
            units,
            consensus or Proposal.broken,
            outer=outer.settings(),
            advises=advises,
            rates=[[group.get("lr") for group in one.param_groups] for one in optimizers],
            ranks_of_a_node=1 if node is None else node.comm.world_size,
        )
    except BaseException:
        groups.close()
        raise
    sync = UpdateSync(module, weights, outer, reducer, groups, options, consensus, pieces)
    sync.advises = advises
    try:
        named = [(name, local_of(parameter)) for name, parameter in trained.items()]
        for comm in sync.communicators if node is not None else [reducer.comm]:
            run(check_equal_parameters(comm, named))
        run(outer.start(reducer, weights.read(slice(0, None))))
        sync.watch(ddp, optimizers)
    except BaseException:
        sync.close()
        raise
    return sync


def _parts(module: nn.Module, replicate: Any, groups: Groups, options: Options) -> Any:
    """Return how this replica is divided: pieces and kinds by name, replicas, and who decides with it."""
    from sparsync.integrations.consensus import PartsConsensus  # DTensor takes 0.4 s to import
    from sparsync.integrations.shards import Fsdp, ranks_of, shards_of

    ranks = ranks_of(replicate)
    shards = shards_of(module, ranks)
    Fsdp(module).check_covers(shards)
    pieces = {p.name: p.piece for p in shards if p.piece is not None}
    kinds = {p.name: p.kind for p in shards}
    return pieces, kinds, ranks, PartsConsensus(options.parts(ranks, groups))


class UpdateSync(Sync):
    """The handle of a model whose optimizers take local steps between exchanges of updates."""

    def __init__(
        self,
        module: nn.Module,
        weights: ModelWeights,
        outer: OuterStep,
        reducer: Reducer,
        groups: Groups | ExitStack,
        options: Options,
        consensus: Any,
        pieces: Any,
    ) -> None:
        super().__init__(module, reducer, groups, options.monitoring, (), consensus, pieces)
        self.outer, self._weights = outer, weights
        self._ddp: Callable[[], DistributedDataParallel | None] = lambda: None
        frozen = set(module.parameters()) - set(weights.trained.values())
        self._alone = {one for one in frozen if one.requires_grad}  # those that DDP ignores
        self._seen: list[int] = []  # what trained when the model was looked at
        self._shows = False  # the model has the shared weights
        self._owed = False  # a backward pass of DDP has ended, and no optimizer step has come since
        self._busy = self._waited = 0.0  # seconds of exchanges, and of the training thread for them
        self.advises, self._started = False, time.perf_counter()
        weights.carrier = weakref.WeakMethod(self._carry)

    def _carry(self, exchange: Begin) -> Awaitable[None]:
        """Queue an exchange on the engine's thread.

        On a GPU it uses this thread's stream, which has read the weights and will write them.
        """
        device = self.outer.memory["shared"].device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def job() -> float:
            begin = time.perf_counter()
            with torch.cuda.stream(stream):  # None: nothing happens
                run(exchange())
            return time.perf_counter() - begin

        future = self._engine.submit(job)

        async def ended() -> None:
            begin = time.perf_counter()
            self._busy += future.result()
            self._waited += time.perf_counter() - begin

        return ended()

    def watch(
        self, ddp: DistributedDataParallel | None, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Let DDP exchange nothing, and follow the optimizers' steps, until ``close``."""
        self.outer.optimizers = list(optimizers)
        if ddp is not None:
            self._ddp = weakref.ref(ddp)
            hook = CommHook.taken(ddp, self)
            self.on_close.callback(hook.release)
            self.on_close.callback(setattr, ddp, "broadcast_buffers", ddp.broadcast_buffers)
            ddp.broadcast_buffers = False  # they are averaged with the weights

        module = self._plain()
        assert module is not None
        before = weakly(self._forward)
        handles: list[Any] = [(ddp or module).register_forward_pre_hook(before, prepend=True)]
        self._weights.ranks = self.reducer.comm.world_size
        handles += [one.register_step_post_hook(weakly(self._after_step)) for one in optimizers]
        for handle in handles:
            self.on_close.callback(handle.remove)
        if self._scaler is not None:
            self._count_skipped(self._scaler)

    def _count_skipped(self, scaler: Any) -> None:
        """Count the steps that this rank's GradScaler skips: other ranks may not skip them."""
        me, update = weakref.ref(self), scaler.update

        def counted(*args: Any, **kwargs: Any) -> Any:
            result, sync = update(*args, **kwargs), me()
            if sync is not None and sync._unscaled == sync.outer.steps:
                sync.step()
            if sync is not None:
                sync._unscaled = sync.outer.steps
            return result

        self._unscaled = self.outer.steps
        scaler.update = counted
        self.on_close.callback(delattr, scaler, "update")

    # ---- DDP, on autograd's thread -----------------------------------------------------------------

    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Hand a bucket back as it is, or averaged over the node."""
        node, buffer = self._weights.node, bucket.buffer()
        if bucket.is_last():
            self._owed = True
            if node is not None:
                call_after_backward(node.check)
        if node is not None:
            return node.average_(buffer)
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future

    def _after_step(self, optimizer: torch.optim.Optimizer, *_step: Any) -> None:
        if (noise := self._weights.noise) is not None:
            correct(optimizer, noise.shares, self._weights.ranks)
        self._owed = False
        # the last of several ends an iteration: ranks count these, not optimizers' steps
        if optimizer is self.outer.optimizers[-1]:
            self.step()

    def _forward(self, *_given: Any) -> None:
        if torch.is_grad_enabled():
            self._before_forward()

    def _before_forward(self) -> None:
        ddp, module = self._ddp(), self._plain()
        if ddp is not None:
            module = ddp.module
            if ddp._join_config.enable:
                raise ConfigurationError(
                    "join() is for gradients, and updates are exchanged; without it, call sync.step() on "
                    "a rank that is out of batches, as often as the others' optimizers step"
                )
        assert module is not None
        self._weights.reshard()
        trained = self._weights.trained.values()
        if (seen := training(module)) != self._seen:
            check_same_parameters(module, trained, self._alone)
            self._seen = seen
        if not self._owed or self._shows or self._scaler is not None or not self.outer.optimizers:
            return
        if not any(p.grad is not None and bool(p.grad.norm()) for p in trained):  # else they add up
            # the optimizer was not called, as by a GradScaler on overflow: other ranks' may have been
            self._owed = False
            self.step()

    # ---- a step ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count a local step; begin and end exchanges.  The optimizer's hook calls it, if one was given.

        Raises:
            NonFiniteGradientError: NaN or Inf on some rank, twice in a row.
            CommunicationError: a peer is gone, or took longer than the timeout.
        """
        outer = self.outer
        self._check_own("an optimizer's step")
        if self._before is None:
            self._before = outer.steps, self.reducer.comm.ledger.total()
            self._started = time.perf_counter()
        try:
            if self._weights.noise is not None and outer.begins_last(outer.steps):
                self._weights.noise.sample(outer.steps)
            self._weights.average_buffers()
            run(outer.advance(self._weights, outer.steps))
        finally:
            outer.steps += 1
        if self.reducer.monitor is not None:
            self.reducer.monitor.write()
        sentinel = self._sentinel
        if sentinel is not None and sentinel.due(outer.steps - 1):
            run(outer.settle())
            tensors = {"the shared weights": outer.memory["shared"]}
            comm = self.reducer.channel("weights")
            run(check_replicas(sentinel, comm, tensors, outer.steps - 1, self._inner))
            if self._weights.node is not None and self._inner is not None:
                own = {name: local_of(p) for name, p in self._weights.trained.items()}
                run(check_replicas(sentinel, self._inner, own, outer.steps - 1))
        if self.advises and outer.steps - self._before[0] == _ADVISED:
            self._advise()

    def _advise(self) -> None:
        """Say so where plain DDP would wait no longer, or hardly longer: it loses no accuracy."""
        seconds = (time.perf_counter() - self._started) / _ADVISED
        waited, dense = self._waited / _ADVISED, self._dense_seconds()
        if dense < max(_NEGLIGIBLE * seconds, waited) and dist.get_rank() == 0:
            say(
                f"dense wins here: a step takes {1e3 * seconds:.1f} ms, {1e3 * waited:.1f} of "
                f"which it waits for updates; an allreduce of all gradients would take about "
                f"{1e3 * dense:.1f} ms, and plain DDP loses nothing"
            )

    def _dense_seconds(self) -> float:
        """Estimate the seconds of an allreduce of all gradients from two small ones."""
        run(self.outer.settle())
        size, channel = self.outer.layout.end, self.reducer.channel("weights")
        channel.ledger = Ledger()  # of no step
        best = []
        for count in (1, min(size, _PROBE)):
            spent = []
            for _ in range(3):
                run(channel.barrier())
                began = time.perf_counter()
                run(channel.allreduce(torch.zeros(count), "probe"))
                spent.append(time.perf_counter() - began)
            best.append(min(spent))
        return best[0] + max(best[1] - best[0], 0.0) * size / min(size, _PROBE)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return DDP's own context; gradients add up on this rank in any case."""
        ddp = self._ddp()
        return nullcontext() if ddp is None else ddp.no_sync()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Put the shared weights into the model, to evaluate or save them; restore this rank's after."""
        everything, shows = slice(0, None), self._shows
        own = self._weights.read(everything)
        self._weights.write(everything, self.outer.memory["shared"])
        self._shows = True
        try:
            yield
        finally:
            self._weights.write(everything, own)
            self._shows = shows

    def _check_own(self, what: str) -> None:
        """Refuse what needs this rank's own weights while the shared ones are in the model."""
        require(
            not self._shows,
            f"{what} within shared(), which hides this rank's own weights; leave that block first",
        )

    def finish(self) -> None:
        """Exchange all that is left and make replicas equal.  All ranks call it; training may go on."""
        self._check_own("finish()")
        run(self.outer.deliver(self._weights))

    # ---- state -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: exchanges (as steps), local steps, bytes, residual norms."""
        outer, node = self.outer, self._weights.node
        inner = [self._inner, node and node.comm]
        phases = [comm.ledger.by_phase() for comm in inner if comm is not None]
        return {
            **reducer_stats(self.reducer, outer.steps, self._before),
            "inner": {phase: its.as_dict() for part in phases for phase, its in part.items()},
            **({"choices": [self.decided]} if self.decided else {}),
            "exchange": "updates",
            "local_steps": outer.steps,
            "exchange_seconds": self._busy,
            "waited_seconds": self._waited,
            **outer.settings(),
            "drift": outer.drift,
        }

    def holds(self, value: object) -> bool:
        """Tell whether this rank's state has that of a model or optimizer in it."""
        ddp, module = self._ddp(), self._plain()
        return any(value is own for own in (ddp, module, *self.outer.optimizers) if own is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with its own weights, and its optimizers' moments."""
        self._check_own("saving of this rank's weights")
        run(self.outer.settle())
        module, noise = self._plain(), self._weights.noise
        assert module is not None
        return {
            **self.outer.state_dict(),
            **self.outer.layout.extents(),
            "averaged": list(self._weights.buffers),
            **own_state(module, self._weights.trained, self.outer.optimizers),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "pieces": copy.deepcopy(self._pieces),
            "noise": None if noise is None else noise.state_dict(),
        }

    def validate(self, state: Mapping[str, Any]) -> Any:
        """Check on this rank alone that a saved state fits; nothing is changed."""
        parsed, module = self.outer.validate(state), self._plain()
        assert module is not None
        require(
            {"parameters", "moments", "groups", "scaler", "noise"} <= set(state)
            and (state["noise"] is None) == (self._weights.noise is None)
            and state.get("pieces") == self._pieces,
            "the saved state is not of these shards of the model; load what this handle's "
            "state_dict() returned",
        )
        validate_own(module, self._weights.trained, self.outer.optimizers, state)
        return parsed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where this rank's ``state_dict`` was taken, bit for bit; all ranks call it."""
        self.validate(state)
        run(self.outer.settle())
        run(agree(self.reducer.comm, {"the local step of the saved state": int(state["steps"])}))
        self.outer.load_state_dict(state)
        run(self.outer.start(self.reducer, self.outer.memory["shared"]))
        module = self._plain()
        assert module is not None
        if state["parameters"] is None:
            self.outer.restart(self._weights)
        load_own(module, self._weights.trained, self.outer.optimizers, state)
        if self._weights.noise is not None:
            self._weights.noise.load_state_dict(state["noise"])
        self._owed, self._before = False, None
        if self._scaler is not None:
            if state["scaler"]:
                self._scaler.load_state_dict(state["scaler"])
            self._unscaled = self.outer.steps
