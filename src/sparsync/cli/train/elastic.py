"""``sparsync train --elastic``: train while ranks are killed at random and restarted.

The command trains twice, once without faults and once with them.  This process starts torchft's
lighthouse and the ranks, and kills some ranks with SIGKILL.  No rank takes its first step before all are
ready.  Each rank reports the steps that it has applied, and their times.
"""

from __future__ import annotations

import logging
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean, median
from threading import Event
from typing import Any, NamedTuple

import torch

from sparsync.algorithm import Algorithm
from sparsync.cli.lab import Lab, Seat, local_address
from sparsync.cli.launch import check_local_ranks, ending_with_parent, fork_server
from sparsync.cli.output import Columns, drawing, progress
from sparsync.cli.train.exchanges import attach_elastic, attached_as
from sparsync.cli.train.settings import TrainSettings
from sparsync.cli.workloads.delays import parse_delay
from sparsync.cli.workloads.workload import Draw, Evaluation, outputs_of
from sparsync.errors import ConfigurationError, PeerError, SparsyncError
from sparsync.feedback.agreed_setup import weights_digest

__all__ = [
    "Applied",
    "Change",
    "ElasticResult",
    "Ended",
    "Ready",
    "be_lighthouse",
    "check_kill",
    "table",
    "train_elastic",
    "write_elastic_plot",
]

_LOOPBACK = "127.0.0.1"
_SILENT = 120.0  # seconds without a report from any rank after which a run is aborted
# milliseconds of silence after which the lighthouse declares a rank dead; the longer time is for a run
# in which no rank is killed: there, silence only means that the machine is busy
_HEARTBEAT, _PATIENT = 400, 5_000


class Change(NamedTuple):
    """A change of the group's members; all members of the old group report the same change."""

    step: int
    ranks: int
    died: int
    lost_norm: float


class Ready(NamedTuple):
    """A rank has sent the lighthouse a heartbeat, and waits at the start line."""


class Applied(NamedTuple):
    """A step applied by one rank."""

    when: float
    step: int
    attempt: int  # number of the group that exchanged the step's gradients
    contributors: int
    counts: bool  # whether the step contains this rank's gradient
    loss: float
    changes: tuple[Change, ...] = ()  # changes of the group since this rank's last step


class Ended(NamedTuple):
    """A rank's final report."""

    evaluation: Evaluation
    weights: str


@dataclass(frozen=True)
class ElasticResult:
    """A run with faults, compared with a run without; some seconds are None if no rank was killed."""

    algorithm: str
    ranks: int
    steps: int
    kills: int
    # kills after which the other ranks continued and the killed rank contributed again
    recovered: int
    survivor_seconds_median: float | None  # from a kill until the survivors applied a step
    survivor_seconds_max: float | None
    return_seconds_median: float | None  # from a rank's start until its first contribution
    return_seconds_max: float | None
    throughput_of_fault_free: float  # contributions per second, relative to the run without faults
    throughput_of_present: float  # the same, divided by the mean fraction of present ranks
    participation_mean: float  # contributions per step and rank
    lost_norm: float  # norm of the residuals lost with the killed ranks
    replicas_equal: bool
    eval_loss: float
    eval_loss_fault_free: float
    seconds: float  # from the common start to the last step
    seconds_fault_free: float
    loss: list[float]  # loss of each step, mean over contributing ranks
    present: list[int]  # number of contributing ranks per step
    present_fault_free: list[int]


def check_kill(text: str) -> float:
    """Parse "random:SECONDS" or "none"; return the mean seconds between kills, or 0 for no kills.

    Example:
        >>> check_kill("random:30")
        30.0
    """
    kind, _, seconds = text.partition(":")
    with suppress(ValueError):
        if text == "none" or (kind == "random" and float(seconds) > 0):
            return 0.0 if text == "none" else float(seconds)
    raise ConfigurationError(f"kill is {text!r}; give none, or random:SECONDS, as random:30")


def train_elastic(settings: TrainSettings, algorithm: str, kill: str) -> ElasticResult:
    """Train once without and once with faults, in parallel if ranks mostly wait (``--delay``).

    Raises:
        PeerError: no rank reported for two minutes, a rank failed or died, or a rank was missing in a
            step of the run without faults.
    """
    mean = check_kill(kill)

    stopped = Event()
    with progress(keep=True) as row:

        def play(text: str, mean: float) -> _Run:
            with row(text) as bar:
                return _Run(settings, algorithm, mean, stopped).play(bar)

        waits = parse_delay(settings.delay).kind != "none" and not settings.lab
        with ThreadPoolExecutor(max_workers=1 + waits) as pool:
            try:
                free, faulty = pool.map(play, ("without faults", f"kill {kill}"), (0.0, mean))
            except BaseException:  # a run failed, or Ctrl-C, which interrupts only this thread
                stopped.set()
                raise
    return faulty.over(free)


def write_elastic_plot(result: ElasticResult, path: Path) -> None:
    """Plot the loss and the number of contributing ranks against the step."""
    title = f"{result.ranks} ranks, {result.kills} killed: held-out loss {result.eval_loss:.3f}"
    title += f", without faults {result.eval_loss_fault_free:.3f}"
    with drawing(path, (8.0, 4.2), title) as axis:
        steps = range(1, 1 + len(result.loss))
        axis.plot(steps, result.loss, color="#1b6ca8", linewidth=0.8)
        axis.set_ylabel("training loss", color="#1b6ca8")
        axis.set_xlabel("step")
        other = axis.twinx()
        other.step(steps, result.present, color="black", where="post")
        other.set_ylim(0, result.ranks + 0.5)
        other.set_ylabel("ranks that contribute")


def table(result: ElasticResult) -> Columns:
    """Return the figures as a table, one row per figure."""
    shown = {k: v for k, v in asdict(result).items() if not isinstance(v, list)}
    rows = [
        {"": k.replace("_", " "), "value": f"{v:.4g}" if isinstance(v, float) else str(v)}
        for k, v in shown.items()
    ]
    return Columns.of(rows)


# ---- the parent ------------------------------------------------------------------------------------


class _Run:
    """A training run and the reports of its ranks."""

    def __init__(
        self, settings: TrainSettings, algorithm: str, mean: float, stopped: Event
    ) -> None:
        self.settings, self.algorithm, self.mean = settings, algorithm, mean
        self.stopped = stopped  # set by Ctrl-C, or when the other run fails
        check_local_ranks()
        self.context = fork_server("sparsync.cli.forked")
        self.random = random.Random(settings.seed)
        self.pipes: dict[int, Connection] = {}
        self.processes: dict[int, Any] = {}
        self.applied: dict[int, dict[int, Applied]] = {}  # step -> rank -> report
        self.starts: list[tuple[float, int]] = []
        self.ready: set[int] = set()  # ranks that wait at the start line
        self.began = 0.0  # the time when the first ranks were released together; 0 before that
        self.kills: list[tuple[float, int]] = []
        self.ended: dict[int, Ended] = {}
        self.late: set[int] = set()  # ranks that had not returned when all other ranks ended
        self.seconds = 0.0

    def play(self, bar: Any) -> _Run:
        """Start the ranks, and run the training to its end."""
        lab = self.settings.lab
        ranks = self.settings.ranks
        with (
            Lab(ranks + 1, lab) if lab else nullcontext() as network,
            self._lighthouse(network) as address,
        ):
            try:
                self._play(network, address, bar)
                if not self.mean:
                    self._check_whole()
            finally:
                for process in self.processes.values():
                    process.kill()
                for process in self.processes.values():
                    process.join()
        return self

    @contextmanager
    def _lighthouse(self, lab: Lab | None) -> Iterator[str]:
        """Run torchft's lighthouse; in a lab, it gets a separate link."""
        mine, theirs = self.context.Pipe()
        seat = None if lab is None else lab.seat(self.settings.ranks)
        silence = _HEARTBEAT if self.mean else _PATIENT
        call = theirs, seat, 0, silence
        process = self.context.Process(target=be_lighthouse, args=call, daemon=True)
        process.start()
        theirs.close()
        try:
            try:
                address = mine.recv()
            except EOFError:
                raise PeerError("torchft's lighthouse did not start; its output is above") from None
            yield address
        finally:
            process.kill()
            process.join()

    def _start(self, rank: int, lab: Lab | None, address: str) -> None:
        self.pipes[rank], theirs = self.context.Pipe()
        seat = None if lab is None else lab.seat(rank)
        call = theirs, seat, rank, self.settings, self.algorithm, address
        self.starts.append((time.time(), rank))
        self.processes[rank] = self.context.Process(target=_be_rank, args=call, daemon=True)
        self.processes[rank].start()
        theirs.close()

    def _play(self, lab: Lab | None, address: str, bar: Any) -> None:
        for rank in range(self.settings.ranks):
            self._start(rank, lab, address)
        heard, furthest, due = time.monotonic(), 0, float("inf")
        while len(self.ended) + len(self.late) < self.settings.ranks:
            if self.stopped.is_set():
                raise PeerError("stopped")  # this run's result is no longer needed
            ready = wait(list(self.pipes.values()), timeout=0.1)
            for rank, pipe in list(self.pipes.items()):
                if pipe not in ready:
                    continue
                if self._hear(rank, pipe):
                    heard = time.monotonic()
                elif rank not in self.ended:
                    self.processes[rank].join()
                    code = self.processes[rank].exitcode
                    raise PeerError(f"rank {rank}: died with exit code {code}; its output is above")
            now = max(self.applied, default=0)
            for _ in range(furthest, now):
                bar(self.settings.steps, f"loss {self._loss(now):.3f}, {len(self.kills)} killed")
            if furthest == 0 < now and self.mean:
                due = time.monotonic() + self._pause()
            furthest = now
            if time.monotonic() > heard + _SILENT:
                raise PeerError(
                    f"step {furthest}: no rank has reported anything for {_SILENT:g} s; the output of "
                    "ranks and torchft's servers is above"
                )
            if time.monotonic() > due:
                due = float("inf")
                if self._time_left(furthest) > 1.5 * self._longest_return():
                    self._kill(lab, address)
                    due = time.monotonic() + self._pause()
            if self.ended:
                self._give_up()
        self.seconds = max(one.when for one, _ in self._every()) - self.began

    def _release(self) -> None:
        """Release waiting ranks; the first time, wait until all are ready, or one would train alone."""
        if not self.began and len(self.ready) < self.settings.ranks:
            return
        self.began = self.began or time.time()
        for rank in self.ready:
            with suppress(OSError):  # it has died, which ``_hear`` notices
                self.pipes[rank].send(None)
        self.ready.clear()

    def _check_whole(self) -> None:
        """Refuse a run if a rank was missing from a step although no faults were injected."""
        ranks = self.settings.ranks
        for step in sorted(self.applied):
            # before the first exchange, no rank contributes
            if (present := self._contributors(step)) not in (0, ranks):
                raise PeerError(
                    f"step {step}: without faults, {present} of {ranks} ranks contributed, so there is "
                    "nothing to compare with; start fewer --ranks, or less other work on this machine"
                )

    def _pause(self) -> float:
        return self.random.expovariate(1 / self.mean)

    def _kill(self, lab: Lab | None, address: str) -> None:
        """Kill and restart a contributing rank if other ranks also contribute."""
        living = self._contributing()
        if len(living) < 2:
            return
        rank = self.random.choice(living)
        self.processes[rank].kill()
        self.kills.append((time.time(), rank))
        self.processes[rank].join()
        while self._hear(rank, self.pipes[rank]):
            pass  # drop its earlier reports
        self._start(rank, lab, address)

    def _contributing(self) -> list[int]:
        """Return the ranks that have contributed to a recent step and have not been restarted since then.

        A rank that was restarted later has lost its weights, so its contribution does not count.
        """
        started = {rank: when for when, rank in self.starts}
        steps = sorted(self.applied)[-3:-1]
        counted = [one for step in steps for one in self._counted(step).items()]
        fresh = {rank for rank, one in counted if one.when > started[rank]}
        return sorted(fresh - self.ended.keys())

    def _time_left(self, step: int) -> float:
        """Estimate the seconds until the end of the run, from the mean time per step so far."""
        first = min(one.when for one in self.applied[min(self.applied)].values())
        return (self.settings.steps - step) * (time.time() - first) / step

    def _longest_return(self) -> float:
        """Return the longest time from a rank's start to its first step."""
        found = [self._first_since(rank, when) for when, rank in self.starts]
        return max(
            first - when for first, (when, _) in zip(found, self.starts, strict=True) if first
        )

    def _first_since(self, rank: int, when: float) -> float:
        """Return the time of a rank's first step since ``when``, or 0 if there is none yet."""
        own = [ones[rank].when for ones in self.applied.values() if rank in ones]
        return min((moment for moment in own if moment > when), default=0.0)

    def _give_up(self) -> None:
        """Kill ranks that have not returned when all other ranks have ended; they would train alone."""
        started = {rank: when for when, rank in self.starts}
        away = {rank for rank, when in started.items() if not self._first_since(rank, when)}
        if self.ended.keys() | away == started.keys():
            self.late = away
            for rank in away:
                self.processes[rank].kill()

    def _hear(self, rank: int, pipe: Connection) -> bool:
        """Receive a rank's report; return False if the rank has ended."""
        try:
            said = pipe.recv()
        except (EOFError, ConnectionError):
            self.pipes.pop(rank, None)
            return False
        if isinstance(said, str):
            raise PeerError(f"rank {rank}: {said}")
        if isinstance(said, Ready):
            self.ready.add(rank)
            self._release()
        elif isinstance(said, Ended):
            self.ended[rank] = said
        else:
            self.applied.setdefault(said.step, {})[rank] = said
        return True

    # ---- the figures -------------------------------------------------------------------------------

    def over(self, free: _Run) -> ElasticResult:
        """Return this run's figures, relative to the run ``free`` without faults."""
        every, ranks, steps = self._every(), self.settings.ranks, sorted(self.applied)
        survivors, returns = [], []
        for when, victim in self.kills:
            others = [one for one, rank in every if rank != victim]
            before = [one.attempt for one in others if one.when <= when][-1]
            later = [one.when for one in others if one.when > when and one.attempt != before]
            survivors += [later[0] - when] if later else []
        for when, started in self.starts[ranks:]:
            later = [o.when for o, rank in every if rank == started and o.counts and o.when > when]
            returns += [later[0] - when] if later else []
        contributors = [self._contributors(step) for step in steps]
        # Merge all ranks' reports: if every rank was killed once, no rank has seen all changes.  Ranks
        # may report different norms for a change, because some missed the last votes and know only an
        # older norm; the largest norm counts.
        seen = sorted({change for one, _ in every for change in one.changes})
        changes = {change[:3]: change for change in seen}.values()
        rate, free_rate = (
            sum(map(run._contributors, run.applied)) / run.seconds for run in (self, free)
        )
        return ElasticResult(
            algorithm=self.algorithm,
            ranks=ranks,
            steps=len(steps),
            kills=len(self.kills),
            recovered=min(len(survivors), len(returns)),
            survivor_seconds_median=median(survivors) if survivors else None,
            survivor_seconds_max=max(survivors, default=None),
            return_seconds_median=median(returns) if returns else None,
            return_seconds_max=max(returns, default=None),
            throughput_of_fault_free=rate / free_rate,
            throughput_of_present=rate / free_rate / self._present(),
            participation_mean=fmean(contributors) / ranks,
            lost_norm=math.hypot(*(change.lost_norm for change in changes)),
            replicas_equal=len({ended.weights for ended in self.ended.values()}) == 1,
            eval_loss=self._held_out(),
            eval_loss_fault_free=free._held_out(),
            seconds=self.seconds,
            seconds_fault_free=free.seconds,
            loss=list(map(self._loss, steps)),
            present=contributors,
            present_fault_free=[free._contributors(step) for step in sorted(free.applied)],
        )

    def _every(self) -> list[tuple[Applied, int]]:
        """Return all applied steps with their ranks, in order of time."""
        return sorted((one, rank) for ones in self.applied.values() for rank, one in ones.items())

    def _counted(self, step: int) -> dict[int, Applied]:
        return {rank: one for rank, one in self.applied[step].items() if one.counts}

    def _contributors(self, step: int) -> int:
        return max(one.contributors for one in self.applied[step].values())

    def _loss(self, step: int) -> float:
        ones = self._counted(step) or self.applied[step]
        return fmean(one.loss for one in ones.values())

    def _held_out(self) -> float:
        return Evaluation.total(ended.evaluation for ended in self.ended.values()).loss

    def _present(self) -> float:
        """Return the mean fraction of ranks present; a killed rank is absent until it contributes."""
        every, away = self._every(), 0.0
        end = every[-1][0].when
        for when, victim in self.kills:
            back = [o.when for o, rank in every if rank == victim and o.counts and o.when > when]
            away += min(back, default=end) - when
        return 1 - away / (self.settings.ranks * self.seconds)


# ---- the processes ---------------------------------------------------------------------------------


def be_lighthouse(
    pipe: Connection, seat: Seat | None, port: int = 0, silence: int = _HEARTBEAT
) -> None:
    """Run torchft's lighthouse, report its address, and serve until this process is killed.

    A rank that is silent for ``silence`` milliseconds counts as dead.
    """
    with ending_with_parent():
        from torchft.coordination import LighthouseServer  # only needed by this command

        _hush()
        if seat is not None:
            seat.enter()
        host = local_address() or _LOOPBACK
        server = LighthouseServer(
            bind=f"{host}:{port}",
            min_replicas=1,
            join_timeout_ms=60_000,
            quorum_tick_ms=50,
            heartbeat_timeout_ms=silence,
        )
        pipe.send(f"http://{host}:{server.address().rpartition(':')[2]}")
        with suppress(EOFError):
            pipe.recv()


def _be_rank(pipe: Connection, seat: Seat | None, *given: Any) -> None:
    """Train with the settings ``given``, and report steps; an error ends this rank and the run."""
    with ending_with_parent():
        _hush()
        if seat is not None:
            seat.enter()
        try:
            _train(pipe, *given)
        except SparsyncError as error:
            pipe.send(f"{type(error).__name__}: {error}")
        except (BrokenPipeError, EOFError):
            pass  # the parent no longer listens
        except Exception as error:  # exit: the others would wait for a rank that sends heartbeats
            traceback.print_exc()
            pipe.send(f"{type(error).__name__}: {error}; its traceback is above")
    os._exit(0)  # exit without cleaning up, because torchft's servers would keep the process alive


def _hush() -> None:
    """Discard the output of torchft's servers (several lines per step); keep the output of Python."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.getLogger("torchft").setLevel(logging.ERROR)


def _announce(manager: Any, lighthouse: str) -> None:
    """Send the first heartbeat now: the manager would send it at some later, unknown time."""
    from torchft.coordination import LighthouseClient
    from torchft.manager import REPLICA_ID_KEY

    from sparsync.elastic.group import group_of

    name = group_of(manager).store.get(REPLICA_ID_KEY).decode()
    LighthouseClient(lighthouse, connect_timeout=timedelta(seconds=_SILENT)).heartbeat(name)


def _train(
    pipe: Connection, rank: int, settings: TrainSettings, algorithm: str, lighthouse: str
) -> None:
    from sparsync.elastic import make_manager  # torchft is only needed by this command
    from sparsync.elastic.membership import Membership

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.ranks))
    workload = settings.make_workload()
    model = workload.make_model(settings.seed)
    # seed each rank differently, so that dropout removes different units on each
    torch.manual_seed(settings.seed * settings.ranks + rank)
    optimizers = settings.make_optimizers(model)
    workload.batch(Draw(settings.seed, 0, rank, settings.ranks, settings.batch_size))
    # do this last, because the next quorum waits for this rank from its first heartbeat on
    own = local_address() or _LOOPBACK
    keys = settings.curve_keys and settings.curve_keys / f"rank-{rank}.key_secret"
    manager = make_manager(
        1,
        lighthouse=lighthouse,
        name=str(rank),
        timeout=settings.timeout,
        transport="zmq" if settings.transport == "auto" else settings.transport,
        curve_keys=keys,
        interface=own,
    )
    delay = parse_delay(settings.delay)
    sync = attach_elastic(settings, algorithm, model, optimizers, manager)
    chosen = attached_as(settings, algorithm)
    sums = isinstance(chosen, Algorithm) and not chosen.average
    divisor = settings.lr_divisor(sums=sums)
    clip = settings.clip * (settings.ranks if sums else 1)  # --clip limits the mean
    assert isinstance(sync.membership, Membership)
    attendance = sync.membership.attendance
    known, last_group = 0, 0
    _announce(manager, lighthouse)
    pipe.send(Ready())
    pipe.recv()
    while sync.steps < settings.steps:
        step = sync.steps
        time.sleep(delay.seconds(step, rank, settings.ranks, settings.seed))
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate_at(step) / divisor
        draw = Draw(settings.seed, step, rank, settings.ranks, settings.batch_size)
        inputs, targets = workload.batch(draw)
        loss = workload.loss(outputs_of(model, inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        if sync.steps > step:
            last = attendance.last_step
            every = sync.stats()["elastic"]["changes"] if last[0] != last_group else []
            changes = [Change(*(one[name] for name in Change._fields)) for one in every[known:]]
            known, last_group = known + len(changes), last[0]
            pipe.send(Applied(time.time(), sync.steps, *last, loss.item(), tuple(changes)))
    sync.finish()
    evaluation = workload.evaluate(model, rank=rank, world_size=settings.ranks)
    pipe.send(Ended(evaluation, weights_digest(model.parameters())))
    sync.close()  # this tells the others that the rank has ended
