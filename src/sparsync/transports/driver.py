"""Drive coroutines over operations: to the end, side by side, or on a background thread.

Algorithms are ``async def`` over a communicator's calls and never learn who drives them.  Every
driver, the simulator included, resumes them through ``Task``: an operation that fails raises its
error at the ``await`` that waits for it, where the algorithm may handle it.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, final

from sparsync.errors import ConfigurationError

__all__ = [
    "Abortable",
    "Engine",
    "Finished",
    "Flight",
    "Operation",
    "Task",
    "close_at_exit",
    "run",
    "together",
]

T = TypeVar("T")

_PATIENCE = 0.001  # seconds between looks for a new job while others are in flight
_LONG = 0.1  # seconds between looks at the younger members when no new one may start
_MOST = 64  # coroutines in flight on an engine: every look at them costs Python for each
_IDLE = 0.05  # seconds in which an engine without work ends by itself
# seconds in which an engine's thread must leave the call that it is in.  With the second that an aborted
# communicator takes to close, a process ends within 5 s (``benchmarks/exits.md``)
_LAST = 3.5


class Operation(ABC):
    """A send or receive under way.  ``await`` it for its result: the bytes received, or None."""

    done: bool = False
    result: Any = None

    @abstractmethod
    def wait(self) -> None:
        """Block until done (real transports); raise a ``CommunicationError`` if it cannot be."""

    def poll(self, seconds: float) -> bool:
        """Wait at most ``seconds`` (0: not at all); tell whether it is done; raise as ``wait``.

        A transport that cannot look without waiting says False to 0 and waits to the end otherwise.
        """
        if not self.done and seconds > 0:
            self.wait()
        return self.done

    def __await__(self) -> Generator[Operation, None, Any]:
        if not self.done:
            yield self
        return self.result


@final
class Finished(Operation):
    """An operation that needed no network."""

    def __init__(self, result: Any = None) -> None:
        self.done, self.result = True, result

    def wait(self) -> None:
        """Return at once."""


class Task(Generic[T]):
    """A coroutine under way."""

    waits_for: Operation
    result: T  # once ``ended``

    def __init__(self, program: Coroutine[Operation, None, T]) -> None:
        self.program, self.ended = program, False

    def resume(self, error: BaseException | None = None) -> None:
        """Run to the next wait or the end; ``error`` is raised at the present wait.

        Raises:
            BaseException: any that the coroutine does not handle.
        """
        try:
            if error is None:
                self.waits_for = self.program.send(None)
            else:
                self.waits_for = self.program.throw(error)
        except StopIteration as stop:
            self.result, self.ended = stop.value, True

    def advance(self, seconds: float | None) -> bool:
        """Wait for the operation, at most ``seconds``, and resume; tell whether the coroutine went on."""
        # a wait that fails resumes the coroutine as well, with the error at its ``await``, so that an
        # algorithm may handle it there
        error = None
        try:
            if seconds is None:
                self.waits_for.wait()
            elif not self.waits_for.poll(seconds):
                return False
        except BaseException as caught:
            error = caught
        self.resume(error)
        return True


def run(coroutine: Coroutine[Operation, None, T]) -> T:
    """Drive an algorithm to its end, blocking at each operation that it awaits."""
    task = Task(coroutine)
    task.resume()
    while not task.ended:
        task.advance(None)
    return task.result


@final
class Flight:
    """Coroutines under way at once, in the order in which they were started.

    Its driver blocks on the *oldest* member alone.  All ranks start their members in the same order,
    so the oldest always finds its peers in the same member: there is no deadlock, even on a transport
    that cannot be asked whether a message is there.

    An error that a member does not handle ends the flight: the other members are closed.
    """

    def __init__(self) -> None:
        self._members: list[tuple[Task[Any], Callable[[Any], None]]] = []

    def __len__(self) -> int:
        return len(self._members)

    def start(
        self, program: Coroutine[Operation, None, Any], finish: Callable[[Any], None]
    ) -> None:
        """Run ``program`` to its first wait; ``finish(result)`` is called at its end."""
        member = Task(program), finish
        self._members.append(member)
        self._move(member, member[0].resume)

    def advance(self, seconds: float = 0.0) -> None:
        """Wait for the oldest, at most about ``seconds``; take every member as far as it can go."""
        for member in list(self._members):  # a copy: members that end leave the list
            step = member[0].advance
            # only the first wait of the oldest may take time.  The younger ones are polled: a wait for
            # one of them could be for a peer that still waits for this rank in an older one
            while not member[0].ended and self._move(member, partial(step, seconds)):
                seconds = 0.0
            seconds = 0.0

    async def turn(self) -> None:
        """Await the operation that the oldest member awaits, then advance all.

        So a flight can be driven by a coroutine, in the simulator as well, where nothing may block.
        """
        oldest = self._members[0]
        try:
            await oldest[0].waits_for
        except Exception as error:
            self._move(oldest, partial(oldest[0].resume, error))
        self.advance()

    def close(self) -> None:
        """End every member."""
        members, self._members = self._members, []
        for task, _ in members:
            task.program.close()

    def _move(self, member: tuple[Task[Any], Callable[[Any], None]], step: Callable[[], T]) -> T:
        task, finish = member
        try:
            moved = step()
        except BaseException:
            self.close()
            raise
        if task.ended:
            self._members.remove(member)
            finish(task.result)
        return moved


async def together(programs: Sequence[Coroutine[Operation, None, T]]) -> list[T]:
    """Run coroutines side by side, started in the order given; return their results in that order.

    Example:
        >>> async def one(): return 1
        >>> async def two(): return 2
        >>> run(together([one(), two()]))
        [1, 2]
    """
    results: dict[int, T] = {}
    flight = Flight()
    try:
        for i, program in enumerate(programs):
            flight.start(program, lambda result, i=i: results.update({i: result}))  # type: ignore[misc]
        while flight:
            await flight.turn()
    finally:
        flight.close()
        # where one failed at its start, the later ones never ran, and Python warns of coroutines that
        # nobody awaited
        for program in programs:
            program.close()
    return [results[i] for i in range(len(programs))]


class Abortable(Protocol):
    """A communicator, or several, in which an engine's jobs may wait."""

    def abort(self) -> None:
        """End the waits of other threads with an error; only ``close`` is legal from now on."""

    def close(self) -> None:
        """Release its resources; no thread waits in it any more."""


@final
class Engine:
    """Runs jobs on a daemon thread: the communication of one model.

    Coroutines run side by side, started in the order submitted, which is the same on all ranks; a
    callable waits until everything before it has ended.  No job waits inside a callback of another's
    future, which deadlocks gloo.

    An engine that is dropped, or that still exists when the process ends, ends at once: nobody can look
    at the results any more.  The thread must end before the interpreter does, which would stop it inside
    native code: gloo's then calls ``std::terminate``, and libzmq aborts when sockets are closed under it.

    Args:
        name: of the thread.
        comms: communicators of its jobs.  They are aborted where jobs have to end, and then closed.  An
            engine keeps them alive, so they must not keep the engine alive.

    Example:
        >>> engine = Engine("demo")
        >>> engine.submit(lambda: 6 * 7).result(timeout=5)
        42
        >>> engine.close()
    """

    def __init__(self, name: str, comms: Sequence[Abortable] = ()) -> None:
        self._jobs: _Jobs = SimpleQueue()
        over = threading.Event()
        # a function, not a method: its thread would keep the engine alive, which could then never be
        # dropped
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, over), name=f"sparsync-{name}", daemon=True
        )
        self._thread.start()
        # a finalizer runs once: when the engine is dropped, at exit, or when it is called, as a method
        # would be.  None of its arguments may lead to the engine
        self.end = weakref.finalize(
            self, _end, self._jobs, over, self._thread, tuple(comms), os.getpid()
        )

    @property
    def running(self) -> bool:
        """Whether the thread still takes jobs."""
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether the engine's thread runs, and is not this one: it may use the communicators."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread

    def submit(self, job: Callable[[], T] | Coroutine[Operation, None, T]) -> Future[T]:
        """Queue a job; the future has its result or its exception.

        When a coroutine fails, those in flight with it fail with the same exception.
        """
        if not self._thread.is_alive():  # nobody would run it: its future would wait for ever
            if isinstance(job, Coroutine):
                job.close()
            raise ConfigurationError(
                "this engine is closed, or its handle was: attach again to a freshly wrapped model"
            )
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def close(self, patience: float | None = None) -> None:
        """Finish the queued jobs, then end the thread.

        After ``patience`` seconds ``end`` breaks off the jobs that are left.  Called on the thread
        itself, by a job, this returns at once, and the thread ends after the queued jobs.
        """
        self._jobs.put(None)
        # a thread cannot join itself: the collector may drop an engine's owner during one of its jobs
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
            self.end()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self.end()


_Jobs = SimpleQueue[tuple[Any, Future[Any]] | None]  # None: the last one


def _work(jobs: _Jobs, over: threading.Event) -> None:
    """Do jobs until the last one, or until it is ``over``."""
    flight, flying = Flight(), list[Future[Any]]()

    def guarded(step: Callable[[], None]) -> None:
        """Give an error, which ends the flight, to all futures that are still open."""
        try:
            if over.is_set():
                flight.close()
                raise ConfigurationError(
                    "the exchange under way was ended: its handle was closed or dropped, or the "
                    "process ends"
                )
            step()
        except BaseException as error:
            for future in flying:
                if not future.done():
                    future.set_exception(error)
        flying[:] = [future for future in flying if not future.done()]

    while True:
        # with coroutines in flight the queue is only looked at: the time is spent in the oldest one's
        # wait
        try:
            item = jobs.get(block=not flight)
        except Empty:
            guarded(partial(flight.advance, _PATIENCE))
            continue
        coroutine = item is not None and isinstance(item[0], Coroutine)
        # a callable, such as the commit of a step, comes after all before it; a coroutine waits for
        # room alone
        while flight and (not coroutine or len(flight) >= _MOST):
            guarded(partial(flight.advance, _LONG))
        if item is None:
            return
        job, future = item
        if over.is_set():
            if coroutine:
                job.close()
            future.cancel()
        elif coroutine:
            flying.append(future)
            guarded(partial(flight.start, job, future.set_result))
        else:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
        del item, job, future  # while this waits, it must not keep a model alive


def _end(
    jobs: _Jobs,
    over: threading.Event,
    thread: threading.Thread,
    comms: Sequence[Abortable],
    pid: int,
) -> None:
    """End an engine's thread, whatever it waits for.  Not a method: it runs when the engine is gone."""
    # a forked child has the memory, but not the thread; the connections are its parent's
    if not thread.is_alive() or os.getpid() != pid:
        return
    # in this order.  The flag first: a thread that wakes looks at it before it goes on.  Then the waits
    # are ended by ``abort``, the one call that another thread may make.  Sockets are closed last, when
    # no thread can be inside libzmq any more
    over.set()
    jobs.put(None)
    if threading.current_thread() is thread:  # a job had the last reference; it ends first
        return
    thread.join(_IDLE)
    if not thread.is_alive():
        return
    for comm in comms:
        comm.abort()
    thread.join(_LAST)
    if not thread.is_alive():  # else it is stuck in native code, and what that uses must stay
        for comm in comms:
            comm.close()


def close_at_exit(owner: Any) -> None:
    """Call ``owner.close()`` at the end of the process, if the owner, which has a thread, is still alive.

    The last one made is closed first, since it may use earlier ones.
    """
    # the argument is a weak reference: a strong one would keep the owner alive until the end.  When the
    # owner is dropped earlier, the finalizer runs, finds nothing, and is done
    weakref.finalize(owner, _close, weakref.ref(owner), os.getpid())


def _close(owner: weakref.ref[Any], pid: int) -> None:
    if (present := owner()) is not None and os.getpid() == pid:
        present.close()
