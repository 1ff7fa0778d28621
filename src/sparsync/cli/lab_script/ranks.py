"""Run a script once per rank of a lab, forward its output, and count the bytes on the links."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, final

from sparsync.cli.lab import Lab
from sparsync.cli.lab_script import guard
from sparsync.cli.lab_script.rank_variables import rank_variables, searched
from sparsync.console import say

__all__ = ["ScriptResult", "run_script"]

_LOOK = 0.1  # seconds between checks of the counters and the processes
_ASKED = 5.0  # seconds between SIGTERM and SIGKILL
_LONGEST_LINE = 1 << 16  # bytes; longer lines are cut
_OF_A_SIGNAL = 128  # a shell's exit code for a signal is this plus the signal's number


@final
@dataclass(frozen=True)
class ScriptResult:
    """One run of a script; its fields are the JSON keys.  Lists have one value per rank or sample."""

    run: str  # "script"; with --compare "dense" and "attached"
    command: list[str]
    ranks: int
    links: str  # as ``parse_links`` reads them
    exit_code: int  # the first failed rank's exit code, or 0; 128 + N: ended by signal N
    exit_codes: list[int]
    seconds: float  # seconds from the time when all ranks have sent data until the last rank ends
    seconds_start: float  # seconds until all ranks have sent data: imports, and building the model
    bytes_sent: list[int]  # bytes on the rank's link, as counted by the kernel
    bytes_received: list[int]
    sampled_seconds: list[float]  # seconds since the start, one per sample
    # bytes sent until each sample, on the rank that sent most in total
    sampled_bytes_sent: list[int]

    @property
    def sent_most(self) -> int:
        """Bytes sent by the rank that sent most."""
        return max(self.bytes_sent)

    @property
    def received_most(self) -> int:
        """Bytes received by the rank that received most."""
        return max(self.bytes_received)


def run_script(
    command: Sequence[str],
    ranks: int,
    links: str,
    *,
    run: str = "script",
    variables: Mapping[str, str] | None = None,
    grace: float = 20.0,
    elastic: bool = False,
) -> ScriptResult:
    """Run a command on every rank, each behind its own link; return what the kernel counted.

    The output of rank r is forwarded line by line, prefixed with ``[r]``.  Once a rank has failed, the
    others have ``grace`` seconds to end by themselves.  If a signal ends a rank, the processes that it
    started are killed, as if its machine were lost.  In any case, no process is left in the lab.

    Args:
        command: a program and its arguments.
        ranks: number of ranks P.
        links: links of the lab, see ``parse_links``.
        run: name of this run in its result.
        variables: further environment variables of the ranks.
        grace: seconds that the other ranks have to end by themselves after one has failed.
        elastic: whether ranks may leave and join; if so, torchft's lighthouse is started on a separate
            link, and the failure of a rank does not end the other ranks.
    """
    places = ranks + elastic
    with (
        Lab(places, links) as lab,
        _kept_clean(lab, places) as namespaces,
        _lighthouse(lab, ranks) if elastic else _nothing() as lighthouse,
    ):
        environ = {**os.environ, **(variables or {}), **lighthouse}
        addresses = [lab.address(rank) for rank in range(ranks)]
        printer, started = _Printer(), time.monotonic()
        running = [
            _Rank(rank, lab, command, rank_variables(rank, addresses, environ), printer)
            for rank in range(ranks)
        ]
        watch = _Watch(lab, ranks, started)
        try:
            first_failed = _wait(running, watch, printer, grace, elastic=elastic)
        except KeyboardInterrupt:
            # Ctrl-C does not reach the ranks, because they run in their own sessions
            guard.signal_all(namespaces, signal.SIGINT)
            deadline = time.monotonic() + grace
            while guard.inside(namespaces) and time.monotonic() < deadline:
                time.sleep(_LOOK)
            raise
        # end processes that a script has left behind
        guard.end_all(namespaces - _of(lab, places, ranks), _ASKED)
        for one in running:
            one.join()
        watch.look()
        codes = [one.code for one in running]
        ended_well = elastic and 0 in codes
        return watch.result(
            run=run,
            command=list(command),
            ranks=ranks,
            links=links,
            exit_code=0 if first_failed is None or ended_well else codes[first_failed],
            exit_codes=codes,
        )


def _wait(
    running: Sequence[_Rank], watch: _Watch, printer: _Printer, grace: float, *, elastic: bool
) -> int | None:
    """Wait until all ranks have ended; return the first one that failed."""
    failed: int | None = None
    deadline: float | None = None
    while True:
        watch.look()
        printer.check()
        codes = [one.process.poll() for one in running]
        for one, code in zip(running, codes, strict=True):
            if code is not None and code < 0:
                one.lose()
        if failed is None:
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                left = sum(code is None for code in codes)
                how = _described(codes[failed] or 0)
                if left:
                    until = "" if elastic else f" and have {grace:g} s to end"
                    say(f"rank {failed} {how}; {left} of {len(codes)} ranks go on{until}")
                deadline = time.monotonic() + grace
        if None not in codes:
            return failed
        if not elastic and deadline is not None and time.monotonic() > deadline:
            hung = [rank for rank, code in enumerate(codes) if code is None]
            say(f"ranks {', '.join(map(str, hung))} did not end within {grace:g} s; ended")
            for rank in hung:
                running[rank].end()
            deadline = time.monotonic() + grace
        time.sleep(_LOOK)


def _described(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


# ---- a rank -----------------------------------------------------------------------------------------


class _Rank:
    """A process in a rank's namespace, and the threads that forward its output."""

    def __init__(
        self,
        rank: int,
        lab: Lab,
        command: Sequence[str],
        environ: Mapping[str, str],
        printer: _Printer,
    ) -> None:
        seat = lab.seat(rank)
        options: dict[str, Any] = {
            "env": {**environ, **seat.variables, "PATH": searched(environ)},
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "start_new_session": True,  # Ctrl-C is forwarded once, by this program
        }
        # the process starts in the namespace of the thread that starts it
        self.process = seat.run(lambda: subprocess.Popen(list(command), **options))
        self._seat, self._lost = guard.identity(seat.namespace), False
        pipes = (self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)
        self._copiers = [
            threading.Thread(target=printer.copy, args=(f"[{rank}] ", *pair), daemon=True)
            for pair in pipes
        ]
        for thread in self._copiers:
            thread.start()

    @property
    def code(self) -> int:
        """The exit code, as a shell would report it."""
        code = self.process.wait()
        return _OF_A_SIGNAL - code if code < 0 else code

    def lose(self) -> None:
        """Kill all processes that the rank has started, once a signal has ended the rank itself.

        A killed torchrun does not end its workers.  They would continue as if their node were still up.
        """
        if not self._lost:
            self._lost = True
            guard.signal_all([self._seat], signal.SIGKILL)

    def end(self) -> None:
        """End the rank and all processes that it has started."""
        guard.end_all([self._seat], _ASKED)

    def join(self) -> None:
        """Wait until all of the rank's output has been forwarded."""
        self.process.wait()
        for thread in self._copiers:
            thread.join()


class _Printer:
    """Writes whole lines of all ranks, one at a time."""

    def __init__(self) -> None:
        self._lock, self._error = threading.Lock(), list[OSError]()

    def copy(self, prefix: str, source: IO[bytes], target: IO[str]) -> None:
        """Forward lines until the source ends."""
        waiting = b""
        while chunk := os.read(source.fileno(), _LONGEST_LINE):
            *lines, waiting = (waiting + chunk).split(b"\n")
            if len(waiting) > _LONGEST_LINE:
                lines, waiting = [*lines, waiting], b""
            self._write(prefix, lines, target)
        self._write(prefix, [waiting] if waiting else [], target)
        source.close()

    def _write(self, prefix: str, lines: Sequence[bytes], target: IO[str]) -> None:
        # read a rank's output even if it can no longer be written; otherwise, the rank would block
        if not lines or self._error:
            return
        # keep only the last state of a progress bar, which is what a terminal would show
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]
        with self._lock:
            try:
                target.write("".join(f"{prefix}{line}\n" for line in shown))
                target.flush()
            except OSError as error:
                self._error.append(error)

    def check(self) -> None:
        """Raise the error if writing the output has failed, e.g. because its reader has ended."""
        if self._error:
            raise self._error[0]


# ---- the links --------------------------------------------------------------------------------------


class _Watch:
    """Reads the kernel's counters periodically."""

    def __init__(self, lab: Lab, ranks: int, started: float) -> None:
        self._lab, self._ranks, self._started = lab, ranks, started
        self._all_have_sent: float | None = None
        self._seconds, self._sent = list[float](), list[list[int]]()
        self._received = [0] * ranks

    def look(self) -> None:
        """Record the counters."""
        now, traffic = time.monotonic() - self._started, self._lab.traffic()[: self._ranks]
        self._seconds.append(now)
        self._sent.append([one.sent for one in traffic])
        self._received = [one.received for one in traffic]
        if self._all_have_sent is None and all(one.sent for one in traffic):
            self._all_have_sent = now

    def result(self, **facts: Any) -> ScriptResult:
        """Return the result of a run that has just ended."""
        sent, total = self._sent[-1], self._seconds[-1]
        start = 0.0 if self._all_have_sent is None else self._all_have_sent
        most = sent.index(max(sent))
        return ScriptResult(
            **facts,
            seconds=total - start,
            seconds_start=start,
            bytes_sent=sent,
            bytes_received=self._received,
            sampled_seconds=self._seconds,
            sampled_bytes_sent=[at[most] for at in self._sent],
        )


# ---- around the ranks -------------------------------------------------------------------------------


def _of(lab: Lab, places: int, ranks: int) -> set[guard.Identity]:
    """Return the namespaces that belong to no rank: the lighthouse's namespace, if there is one."""
    return {guard.identity(lab.seat(place).namespace) for place in range(ranks, places)}


@contextmanager
def _kept_clean(lab: Lab, places: int) -> Iterator[set[guard.Identity]]:
    """Kill all processes in the lab at the end; if this process is killed, a guard does so."""
    paths = [lab.seat(place).namespace for place in range(places)]
    namespaces = {guard.identity(path) for path in paths}
    files = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, *map(str, files)],
            stdin=subprocess.PIPE,
            pass_fds=files,
            start_new_session=True,
        )
    finally:
        for file in files:
            os.close(file)
    try:
        yield namespaces
    finally:
        guard.end_all(namespaces, _ASKED)
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()


@contextmanager
def _nothing() -> Iterator[dict[str, str]]:
    yield {}


@contextmanager
def _lighthouse(lab: Lab, place: int) -> Iterator[dict[str, str]]:
    """Run torchft's lighthouse; yield the variable that names its address."""
    from sparsync.cli.launch import fork_server
    from sparsync.cli.train.elastic import be_lighthouse

    context = fork_server()
    here, theirs = context.Pipe()
    process = context.Process(target=be_lighthouse, args=(theirs, lab.seat(place)), daemon=True)
    process.start()
    theirs.close()
    try:
        yield {"TORCHFT_LIGHTHOUSE": here.recv()}
    finally:
        with suppress(OSError):
            here.close()
        process.terminate()
        process.join()
