"""DistributedDataParallel: ``sync = sparsync.attach(ddp_model, density=0.01)``.

The hook adds each gradient of a bucket to its unit (``accumulated = residual + gradient``).  When a
unit is complete its exchange goes to the engine thread, while the backward pass goes on; behind the
last one goes the commit, which writes the averages into the buckets and completes their futures.  So
all residuals are written together, after every total of the step is known to be finite.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparsync.correction import Correction
from sparsync.errors import ConfigurationError, NonFiniteGradientError
from sparsync.integrations.backward import (
    Round,
    call_after_backward,
    check_complete,
    deliver_to_unused_,
    find,
    write_,
)
from sparsync.integrations.base import agree_on_reducer, reducer_stats
from sparsync.integrations.checks import check_model, check_optimizer, check_output_layer
from sparsync.integrations.wires import Wires, own_group
from sparsync.monitoring import Log, sink_of
from sparsync.presets import Algorithm, resolve
from sparsync.reducer import Reducer
from sparsync.reducer_state import reducer_state, restore_reducer
from sparsync.transports.base import Communicator, check_timeout, run
from sparsync.transports.connect import check_transport
from sparsync.transports.engine import Engine
from sparsync.units import Slot, plan_units
from sparsync.warmup import AdaptiveDensity, Warmup, as_density

__all__ = ["DdpSync", "attach"]

Nonfinite = Literal["raise", "skip", "propagate"]
Compress = Callable[[str, Tensor], bool]


def attach(
    model: DistributedDataParallel,
    algorithm: str | Algorithm = "budgeted",
    *,
    density: float | AdaptiveDensity = 0.01,
    unit_bytes: int | None = None,
    compress: Compress | None = None,
    warmup_steps: int = 0,
    warmup_densities: Sequence[float] = (),
    correction: Correction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    output_layer: Collection[str] | None = None,
    nonfinite: Nonfinite = "raise",
    timeout: float = 300.0,
    transport: str = "auto",
    curve_keys: Path | str | None = None,
    log: Any = None,
    xi_period: int | None = None,
    **options: Any,
) -> "DdpSync":
    """Exchange a DDP model's gradients sparsely; the training loop stays as it is.

    Args:
        model: a ``DistributedDataParallel`` module without a communication hook.
        algorithm: a preset's name ("budgeted", "auto", "oktopk", ...), or an ``Algorithm``.
        density: fraction k / n of every unit that is exchanged, in (0, 1]; an ``AdaptiveDensity``
            changes it as training goes on.
        unit_bytes: what is selected together: runs of parameters of at least this many bytes, or
            the whole model (None: as the algorithm's paper has it: the whole; "sparcml": single
            parameters).  Several units are exchanged while the backward pass goes on, each with its
            share of the global k.
        compress: ``compress(name, parameter)`` tells whether a parameter is exchanged sparsely;
            others are exchanged whole.  Equal on all ranks.  None: as the algorithm has it: all;
            "redsync": what is worth it.
        warmup_steps: the first steps run dense, or
        warmup_densities: at these densities, each for an equal part of them (``DGC_RAMP``).
        correction: momentum, decay and clipping, done to local gradients before they are accumulated.
        optimizer: the one that will be used, to be checked: it must not do again what the correction
            does.
        output_layer: names of its parameters, which some algorithms treat apart (default: those of
            the module that was registered last).
        nonfinite: what all ranks do when NaN or Inf is in the sum: "raise" from ``backward()``,
            "skip" (gradients become None: the optimizer passes), or "propagate" (every gradient of
            every rank becomes NaN, so that a GradScaler skips on all).  Residuals stay as they were.
        timeout: seconds that any wait may take before ``backward()`` raises.
        transport: "zmq", "torch" (gloo), or "auto": the faster one (zmq).
        curve_keys: folder with one certificate per rank: zmq encrypts and authenticates.
        log: takes the numbers of every step (``sparsync.monitoring.Log``) on this rank: a path ending in
            ``.jsonl``, a folder for TensorBoard, an object with ``add_scalar(tag, value, step)``, or
            a function of (step, values).
        xi_period: steps between estimates of Assumption 1's xi (``XiProbe``).  None: it is not measured.
        options: of the preset, e.g. ``cap=None``, ``threshold_period=128``.

    Returns:
        A handle with ``stats()``, ``state_dict()``, ``load_state_dict()``, ``close()``.

    Raises:
        ConfigurationError: not DDP, a second attach, unknown algorithm or option, bad density.
        PeerError: ranks disagree on any of it.

    Cost: one thread and one gloo process group, and with zmq its sockets; memory n elements
    (the residual) and O(k + n / P), see ``benchmarks/memory.md``; dense steps take 2 n more.
    """
    check_model(model)
    if nonfinite not in ("raise", "skip", "propagate"):
        raise ConfigurationError(
            f"nonfinite is {nonfinite!r}; choose one of raise, skip, propagate"
        )
    chosen, density = resolve(algorithm, **options), as_density(density)
    warmup, correction = Warmup(warmup_steps, tuple(warmup_densities)), correction or Correction()
    check_optimizer(optimizer, correction, sparse="dense" not in chosen.name and density != 1)
    check_transport(transport, curve_keys)
    wires = Wires(transport, check_timeout(timeout), curve_keys)
    unit_bytes = chosen.unit_bytes if unit_bytes is None else unit_bytes
    trained = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
    trained = [(n, p) for n, p in trained if n not in model.parameters_to_ignore]
    apart = check_output_layer(output_layer, model.module)
    output = apart if chosen.output else ()
    units = plan_units(trained, unit_bytes, compress or chosen.compress, output)
    group = own_group(model, wires.timeout)
    comm: Communicator | None = None
    try:
        comm = wires.connect(group)
        chosen = run(chosen.on(comm))
        reducer = Reducer(comm, units, chosen, density, warmup, correction, xi_period)
        agree_on_reducer(reducer, nonfinite=nonfinite, unit_bytes=unit_bytes)
        reducer.monitor.log = Log(sink_of(log, comm.rank))
    except BaseException:  # a refused attach leaves neither sockets nor a group behind
        if comm is not None:
            comm.close()
        dist.destroy_process_group(group)
        raise
    return DdpSync(model, reducer, dict(trained), nonfinite, group)


class DdpSync:
    """What ``attach`` returns: the state of one model's sparse synchronisation on this rank."""

    def __init__(
        self,
        model: DistributedDataParallel,
        reducer: Reducer,
        trained: Mapping[str, Tensor],
        nonfinite: Nonfinite,
        group: dist.ProcessGroup,
    ) -> None:
        self._model = weakref.ref(model)
        self.reducer, self._nonfinite = reducer, nonfinite
        self._place: dict[Tensor, tuple[int, Slot]] = {
            trained[slot.name]: (i, slot)
            for i, unit in enumerate(reducer.units)
            for slot in unit.slots
        }
        self._group: dist.ProcessGroup | None = group
        self._engine = Engine(reducer.algorithm.name)
        # a forgotten handle keeps neither its thread nor its sockets
        weakref.finalize(self, _release, self._engine, reducer.comm)
        self._round = Round(len(reducer.units))
        model.register_comm_hook(self, _hook)

    # ---- for the user --------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: steps, skipped steps, bytes per step and phase, residual norms."""
        return reducer_stats(self.reducer)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to be saved per rank; see ``load_state_dict``.

        After a ``backward()`` that broke off it is the state of before that step.
        """
        if self._engine.running:
            self._engine.submit(self.reducer.refuse).result()
        return reducer_state(self.reducer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where this rank's ``state_dict`` was taken, bit for bit; all ranks call it."""
        run(restore_reducer(self.reducer, state))

    def close(self) -> None:
        """End the engine thread and its process group.  The hook stays: use the model no more."""
        self._engine.close()
        self.reducer.comm.close()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        self.reducer.monitor.log.close()

    # ---- the hook, on autograd's thread --------------------------------------------------------

    def on_bucket(self, bucket: Any) -> "torch.futures.Future[Tensor]":
        """Accumulate a bucket; submit the units that it completes."""
        if bucket.index() == 0:
            self._round = Round(len(self.reducer.units))
        this, buffer = self._round, bucket.buffer()
        devices = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        this.buckets.append((future, buffer))
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            unit, slot = find(self._place, parameter)
            this.gradients[unit][slot] = (parameter, gradient)
        pieces = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
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
            check_complete(self.reducer.units, this)
            this.jobs.append(self._engine.submit(self.reducer.share()))
            call_after_backward(lambda: self._after(this))
            this.finished = self._engine.submit(lambda: self._finish(this))
        return future

    def _accumulate(self, this: "Round", pieces: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Accumulate gradients; return the units that they complete."""
        complete = []
        for parameter, gradient in pieces:
            unit, slot = find(self._place, parameter)
            weights = parameter.detach().reshape(-1)
            self.reducer.accumulate(unit, slot.start, gradient.detach().reshape(-1), weights)
            this.accumulated[unit] += 1
            if this.accumulated[unit] == len(self.reducer.units[unit].slots):
                complete.append(unit)
        return complete

    # ---- on the engine's thread ------------------------------------------------------------------

    async def _exchange(self, this: "Round", unit: int) -> None:
        if this.failed:  # the group is broken: do not wait for every unit's deadline
            return
        try:
            await self.reducer.exchange(unit)
        except BaseException:
            this.failed = True
            raise

    def _finish(self, this: "Round") -> None:
        try:
            for job in this.jobs:
                job.result()
            averages = self.reducer.commit(propagate_nonfinite=self._nonfinite == "propagate")
            for unit, average in enumerate(averages):
                write_(average, self.reducer.units[unit], this.gradients[unit])
        except NonFiniteGradientError:
            self.reducer.skip()
            this.zero_()
            raise
        except BaseException:
            self.reducer.refuse()
            this.zero_()
            raise
        finally:
            for future, buffer in this.buckets:
                future.set_result(buffer)

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
            self.reducer.monitor.log.write()  # here, what it raises spoils no gradient
        model = self._model()
        if model is not None and model.find_unused_parameters:
            deliver_to_unused_(this)
        this.release()  # DDP may rebuild its buckets: the old ones must not live on


def _hook(sync, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
    return sync.on_bucket(bucket)


def _release(engine: Engine, comm: Communicator) -> None:
    """Let the thread end, then close the sockets that it used."""
    engine.submit(comm.close) if engine.running else comm.close()
    engine.stop()
