"""Run jobs in which one rank fails: fork the ranks, watch them to their end, and ask what they saw."""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsync.cli.lab import Seat, _run_command
from sparsync.transports.communicator import Communicator
from sparsync.transports.process_group import connect_group

POLL = 0.005  # seconds between checks of the ranks
ACTOR = "actor"  # the phase of a companion's messages, whenever they are sent


@dataclass(frozen=True)
class Fault:
    """How a job's ranks communicate, and how one of them fails.

    Attributes:
        transport: "zmq" or "torch".
        timeout: the longest wait, in seconds.
        victim: the rank that fails.
        moment: when it fails: a step, a phase and the number of the operation in it, or another value
            that the program understands.
        how: the name of the signal that it sends to itself, or the iproute2 commands that it runs.
        thaw: seconds after which a frozen rank continues; with 0, it continues after the others
            have ended.
        limit: seconds after which ranks that have not ended are killed and counted as hung.
        seats: the seats in a lab, by rank.
    """

    transport: str = "zmq"
    timeout: float = 10.0
    victim: int = -1
    moment: Any = None
    how: str | list[str] = "SIGKILL"
    thaw: float = 0.0
    limit: float = 30.0
    seats: list[Seat] | None = None


@dataclass
class Member:
    """A rank of a job: it joins the others, and fails if it is the victim."""

    rank: int
    ranks: int
    port: int  # of the store, which outlives all ranks
    fault: Fault

    @property
    def is_victim(self):
        return self.rank == self.fault.victim

    def join(self):
        """Make the default group; return the store."""
        at_most = timedelta(seconds=self.fault.timeout)
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        if self.fault.seats:  # the store stays outside of the lab
            self.fault.seats[self.rank].enter()
        dist.init_process_group("gloo", None, at_most, self.ranks, self.rank, store)
        return store

    def connect(self):
        """Join, and return a communicator; that of the victim fails at its moment."""
        store = self.join()
        comm = connect_group(transport=self.fault.transport, timeout=self.fault.timeout)
        self.meet(store, "seated", range(self.ranks))  # no rank fails while others connect
        watched = self.is_victim and isinstance(self.fault.moment, tuple)
        return Watched(comm, self.fault.moment if watched else None, self.break_down)

    def meet(self, store, place, ranks):
        """Wait until these ranks have arrived, using the store."""
        store.set(f"{place} {self.rank}", "")
        store.wait([f"{place} {rank}" for rank in ranks])

    def break_down(self):
        if isinstance(self.fault.how, str):
            os.kill(os.getpid(), getattr(signal, self.fault.how))
        else:
            for command in self.fault.how:
                _run_command(command)


class Watched(Communicator):
    """A communicator that counts operations by step and phase in ``seen``.

    It calls ``happen`` before the operation at ``moment``.
    """

    def __init__(self, inner, moment=None, happen=None, seen=None):
        super().__init__(inner.rank, inner.world_size, inner.device)
        self.inner, self.moment, self.happen = inner, moment, happen
        self.ledger, self.pads, self.tag = inner.ledger, inner.pads, inner.tag
        self.seen = Counter() if seen is None else seen

    def note(self, phase):
        """Count an operation that is about to begin."""
        place = self.ledger.step, phase
        if self.moment is not None and self.moment[1] == phase:
            # the step in which an actor sends is unknown
            late = phase == ACTOR and self.ledger.step >= self.moment[0]
            if late or (*place, self.seen[place]) == self.moment:
                self.happen()
        self.seen[place] += 1

    def channel(self, tag):
        return Watched(self.inner.channel(tag), self.moment, self.happen, self.seen)

    def isend(self, payload, dest, phase, framing):
        self.note(phase)
        return self.inner.isend(payload, dest, phase, framing)

    def irecv(self, source, capacity, phase, framing):
        self.note(phase)
        return self.inner.irecv(source, capacity, phase, framing)

    def start_send(self, payload, dest, phase, framing):
        self.note(phase)  # of a subgroup
        return self.inner.start_send(payload, dest, phase, framing)

    def start_recv(self, source, capacity, phase, framing):
        self.note(phase)  # of a subgroup
        return self.inner.start_recv(source, capacity, phase, framing)

    async def allreduce(self, tensor, phase, *op, **how):
        self.note(phase)
        return await self.inner.allreduce(tensor, phase, *op, **how)

    async def alltoallv(self, payloads, capacities, phase, framing):
        self.note(phase)
        return await self.inner.alltoallv(payloads, capacities, phase, framing)

    @property
    def now(self):
        return self.inner.now

    def stage(self, name):
        return self.inner.stage(name)

    def work(self, nbytes, *, dense=False):
        return self.inner.work(nbytes, dense=dense)

    def host(self, actor):
        host = self.inner.host(actor)
        send = host.send

        def noted(dest, payload):
            self.note(ACTOR)
            send(dest, payload)

        host.send = noted
        return host

    def close(self):
        super().close()
        self.inner.close()

    def __getattr__(self, name):
        return getattr(self.inner, name)


# ---- jobs -----------------------------------------------------------------------------------------


def run(program, ranks, fault, **arguments):
    """Call ``program(member, **arguments)`` on every rank; return the outcome of each.

    An outcome has the exit code (negative: the signal that ended the rank), its report, and the seconds
    from the first death or stop of a rank until it ended.  No rank may hang, and no rank that
    ends by itself may leave a thread.
    """
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(ranks):
        pipe, theirs = context.Pipe(duplex=False)
        member = Member(rank, ranks, store.port, fault)
        started = context.Process(
            target=_be, args=(theirs, program, member, arguments), daemon=True
        )
        started.start()
        theirs.close()
        processes.append(started)
        pipes.append(pipe)
    broke, ended, hung = watch(processes, fault)
    answer = []
    for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True)):
        said = pipe.recv() if process.exitcode == 0 else None
        answer.append({"code": process.exitcode, "said": said, "seconds": ended[rank] - broke})
    assert not hung, (hung, answer)
    assert all(one["said"]["threads"] == [] for one in answer if one["said"]), answer
    return answer


def watch(processes, fault):
    """Return when the first rank failed, when each rank ended, and which ranks had to be killed."""
    broke, ended, frozen, until = 0.0, {}, [], time.monotonic() + fault.limit
    while len(ended) < len(processes) and time.monotonic() < until:
        for rank, process in enumerate(processes):
            if rank not in ended and process.exitcode is not None:
                ended[rank] = time.monotonic()
            elif rank not in ended and rank not in frozen and _is_stopped(process.pid):
                frozen.append(rank)
        if ended or frozen:
            broke = broke or time.monotonic()
        alone = len(ended) + len(frozen) == len(processes)
        if frozen and (alone or 0 < fault.thaw < time.monotonic() - broke):
            os.kill(processes[frozen.pop()].pid, signal.SIGCONT)
        time.sleep(POLL)
    hung = [rank for rank in range(len(processes)) if rank not in ended]
    for rank in hung:
        processes[rank].kill()
        processes[rank].join()
    return broke, ended | dict.fromkeys(hung, time.monotonic()), hung


def _is_stopped(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended


def _be(pipe, program, member, arguments):
    """Run as a rank of a job; report its observations, and the threads that remain."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    code = 1
    try:
        said = program(member, **arguments)
        others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        pipe.send({"threads": others, **said})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
