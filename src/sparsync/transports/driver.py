"""Drive coroutines that await operations: one to its end, several concurrently, or on a thread.

Algorithms are ``async def`` functions that await a communicator's calls; they do not depend on their
driver.  Every driver, including the simulator, resumes them through ``Task``.  If an operation fails,
its error is raised at the ``await`` that waits for it, where the algorithm may handle it.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, final

from sparsync.errors import ConfigurationError

__all__ = [
    "Abortable",
    "Engine",
    "Failure",
    "Finished",
    "Flight",
    "Operation",
    "Task",
    "close_at_exit",
    "run",
    "together",
]

T = TypeVar("T")

_PATIENCE = 0.001  # seconds between checks for a new job while others are in flight
_LONG = 0.1  # seconds between checks of younger coroutines when no new one may start
# limit on the coroutines in flight on an engine, because every check runs Python code for each of them
_MOST = 64
_IDLE = 0.05  # seconds that an idle engine's thread has to end without an abort
# Seconds that an engine's thread has to leave its current call after an abort.  Closing an aborted
# communicator takes another second, so a process ends within 5 s (``benchmarks/exits.md``).
_LAST = 3.5


class Operation(ABC):
    """A send or receive in flight.  ``await`` it for its result: the bytes received, or None."""

    done: bool = False
    result: Any = None

    @abstractmethod
    def wait(self) -> None:
        """Block until the operation is done; raise a ``CommunicationError`` if it fails."""

    def poll(self, seconds: float) -> bool:
        """Wait at most ``seconds``, which may be 0; return whether the operation is done.

        Errors are raised as in ``wait``.  A transport that cannot check without waiting returns False if
        ``seconds`` is 0, and otherwise waits until the operation is done.
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
    """An operation that was done from the start, because it needed no network."""

    def __init__(self, result: Any = None) -> None:
        self.done, self.result = True, result

    def wait(self) -> None:
        """Return immediately."""


@final
@dataclass(frozen=True)
class Failure:
    """The result of a coroutine that fails alone, while an engine's other coroutines continue."""

    error: Exception


class Task(Generic[T]):
    """A coroutine in progress."""

    waits_for: Operation
    result: T  # set once ``ended`` is true

    def __init__(self, program: Coroutine[Operation, None, T]) -> None:
        self.program, self.ended = program, False

    def resume(self, error: BaseException | None = None) -> None:
        """Run to the next wait or to the end; an ``error`` is raised at the current wait.

        Raises:
            BaseException: any error that the coroutine does not handle.
        """
        try:
            if error is None:
                self.waits_for = self.program.send(None)
            else:
                self.waits_for = self.program.throw(error)
        except StopIteration as stop:
            self.result, self.ended = stop.value, True

    def advance(self, seconds: float | None) -> bool:
        """Wait for the operation, at most ``seconds``; return whether the coroutine was resumed."""
        # a failed wait also resumes the coroutine: the error is raised at its ``await``, where the
        # algorithm may handle it
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
    """Coroutines in flight together, in the order in which they were started.

    The driver blocks only on the *oldest* member.  All ranks start their members in the same order, so
    all ranks block on the same member.  This avoids deadlocks even on a transport that cannot check
    whether a message has arrived.

    An error that a member does not handle ends the flight and closes the other members.
    """

    def __init__(self) -> None:
        self._members: list[tuple[Task[Any], Callable[[Any], None]]] = []

    def __len__(self) -> int:
        return len(self._members)

    def start(
        self, program: Coroutine[Operation, None, Any], finish: Callable[[Any], None]
    ) -> None:
        """Run ``program`` to its first wait; call ``finish(result)`` at its end."""
        member = Task(program), finish
        self._members.append(member)
        self._move(member, member[0].resume)

    def advance(self, seconds: float = 0.0) -> None:
        """Wait at most about ``seconds`` for the oldest member; run every member as far as possible."""
        for member in list(self._members):  # copied, because members that end are removed
            step = member[0].advance
            # Only the first wait of the oldest member may block.  Younger members are only polled:
            # blocking on one of them might wait for a peer that waits for this rank in an older member.
            while not member[0].ended and self._move(member, partial(step, seconds)):
                seconds = 0.0
            seconds = 0.0

    async def turn(self) -> None:
        """Await the operation that the oldest member is waiting for, then advance all members.

        This lets a coroutine drive a flight even in the simulator, where nothing may block.
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
    """Run coroutines concurrently, started in the given order; return their results in that order.

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
        # If a program failed at its start, later programs never started.  Close them, because Python
        # warns of coroutines that are never awaited
        for program in programs:
            program.close()
    return [results[i] for i in range(len(programs))]


class Abortable(Protocol):
    """One or more communicators in which an engine's jobs may be waiting."""

    def abort(self) -> None:
        """End other threads' waits with an error; only ``close`` may be called afterwards."""

    def close(self) -> None:
        """Release resources; no other thread may still be waiting."""


@final
class Engine:
    """Runs one model's communication jobs on a daemon thread.

    Coroutines run concurrently, started in the order in which they were submitted.  This order must be
    the same on all ranks.  A callable runs once every job submitted before it has ended.  No job may
    wait inside a callback of another job's future, because that deadlocks gloo.

    An engine ends as soon as it is dropped or the process exits, because its results can no longer be
    used.  Its thread must end before the interpreter does.  Otherwise the interpreter would stop the
    thread inside native code: gloo would call ``std::terminate``, and libzmq would abort when its
    sockets are closed.

    Args:
        name: name of the thread.
        comms: communicators that the jobs use.  They are aborted and then closed if jobs must be broken
            off.  The engine keeps them alive, so they must not keep the engine alive.

    Example:
        >>> engine = Engine("demo")
        >>> engine.submit(lambda: 6 * 7).result(timeout=5)
        42
        >>> engine.close()
    """

    def __init__(self, name: str, comms: Sequence[Abortable] = ()) -> None:
        self._jobs: _Jobs = SimpleQueue()
        over = threading.Event()
        # the thread's target is a plain function: a bound method would keep the engine alive forever
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, over), name=f"sparsync-{name}", daemon=True
        )
        self._thread.start()
        # A finalizer runs once: when the engine is dropped, at exit, or when ``end`` is called.  None of
        # its arguments may refer to the engine, because that would keep the engine alive.
        self.end = weakref.finalize(
            self, _end, self._jobs, over, self._thread, tuple(comms), os.getpid()
        )

    @property
    def running(self) -> bool:
        """Whether the thread still accepts jobs."""
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether the engine's thread is running and is not the calling thread."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread

    def submit(self, job: Callable[[], T] | Coroutine[Operation, None, T | Failure]) -> Future[T]:
        """Queue a job; return a future for its result or exception, which cannot be cancelled.

        If a coroutine raises, all other coroutines in flight fail with the same exception.  If it
        returns a ``Failure``, only its own future fails.
        """
        # on a thread that has ended, the job would never run, and its future would wait forever
        if not self._thread.is_alive():
            if isinstance(job, Coroutine):
                job.close()
            raise ConfigurationError(
                "this engine is closed, or its handle was: attach again to a freshly wrapped model"
            )
        future: Future[T] = Future()
        # mark the future as running, so that it cannot be cancelled: other ranks rely on the exchange
        future.set_running_or_notify_cancel()
        self._jobs.put((job, future))
        return future

    def close(self, patience: float | None = None) -> None:
        """Finish the queued jobs, then end the thread.

        After ``patience`` seconds, ``end`` interrupts the remaining jobs.  If a job calls this on the
        engine's own thread, the call returns immediately, and the thread ends after the queued jobs.
        """
        self._jobs.put(None)
        # a thread cannot join itself, but this may run on it: the garbage collector may finalize the
        # engine's owner during a job
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


_Jobs = SimpleQueue[tuple[Any, Future[Any]] | None]  # None marks the end


def _work(jobs: _Jobs, over: threading.Event) -> None:
    """Run jobs until the end mark, or until ``over`` is set."""
    flight, flying = Flight(), list[Future[Any]]()

    def guarded(step: Callable[[], None]) -> None:
        """Run a step; if it fails, end the flight and pass the error to all open futures."""
        try:
            if over.is_set():
                flight.close()
                raise _ended()
            step()
        except BaseException as error:
            for future in flying:
                if not future.done():
                    future.set_exception(error)
        flying[:] = [future for future in flying if not future.done()]

    while True:
        # with coroutines in flight, only poll the queue; the waiting is done for the oldest coroutine
        try:
            item = jobs.get(block=not flight)
        except Empty:
            guarded(partial(flight.advance, _PATIENCE))
            continue
        coroutine = item is not None and isinstance(item[0], Coroutine)
        # a callable, such as a step's commit, waits for every earlier job; a coroutine waits only until
        # there is room for it
        while flight and (not coroutine or len(flight) >= _MOST):
            guarded(partial(flight.advance, _LONG))
        if item is None:
            return
        job, future = item
        if over.is_set():
            if coroutine:
                job.close()
            future.set_exception(_ended())
        elif coroutine:
            flying.append(future)
            guarded(partial(flight.start, job, partial(_settle, future)))
        else:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
        del item, job, future  # must not keep a model alive during the next wait


def _settle(future: Future[Any], result: Any) -> None:
    if isinstance(result, Failure):
        future.set_exception(result.error)
    else:
        future.set_result(result)


def _ended() -> ConfigurationError:
    return ConfigurationError(
        "the exchange under way was ended: its handle was closed or dropped, or the process ends"
    )


def _end(
    jobs: _Jobs,
    over: threading.Event,
    thread: threading.Thread,
    comms: Sequence[Abortable],
    pid: int,
) -> None:
    """End an engine's thread, whatever it waits for; the engine itself no longer exists."""
    # in a forked child, there is no such thread, and the connections belong to the parent
    if not thread.is_alive() or os.getpid() != pid:
        return
    # The order matters.  The flag comes first, because a thread that wakes up checks it before it
    # continues.  Then ``abort``, the only call that is allowed from another thread, ends the waits.
    # Sockets are closed last, when no thread can be inside libzmq any more.
    over.set()
    jobs.put(None)
    if threading.current_thread() is thread:  # a job held the last reference and ends first
        return
    thread.join(_IDLE)
    if not thread.is_alive():
        return
    for comm in comms:
        comm.abort()
    thread.join(_LAST)
    if not thread.is_alive():  # otherwise it is stuck in native code, whose resources must stay
        for comm in comms:
            comm.close()


def close_at_exit(owner: Any) -> None:
    """Call ``owner.close()`` at process exit if the owner of a thread is still alive.

    Owners are closed in reverse order of creation, because a later one may use an earlier one.
    """
    # A strong reference would keep the owner alive until the process exits.  If the owner has been
    # dropped by then, the finalizer does nothing.
    weakref.finalize(owner, _close, weakref.ref(owner), os.getpid())


def _close(owner: weakref.ref[Any], pid: int) -> None:
    if (present := owner()) is not None and os.getpid() == pid:
        present.close()
