"""Forks the ranks of many small jobs from one warm process: starting Python with torch takes seconds.

The server has imported everything and has no threads.  It reads a job per line and answers with what
became of its ranks; ``Jobs`` is its client.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

POLL = 0.005  # seconds between looks at the ranks


@dataclass
class Rank:
    """One process, and what is known of it."""

    pid: int
    pipe: int
    code: int | None = None  # below zero: the signal that ended it
    ended: float = 0.0


class Jobs:
    """A client of a server of its own."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def run(
        self, program: str, ranks: int, limit: float = 30.0, thaw: float = 0.0, **arguments: Any
    ) -> Any:
        """Run ``program(rank=, ranks=, port=, tell=, **arguments)`` on every rank.

        Args:
            program: "module.function", of this package.
            ranks: how many.
            limit: seconds after which ranks that have not ended are killed, and called hung.
            thaw: seconds after which a frozen rank goes on; 0: when the others have ended.
            arguments: what JSON can carry.

        Returns:
            ``ranks``: code, said and seconds (since the first rank died or stopped) of each;
            ``left``: what they left behind; ``hung``: those that had to be killed.
        """
        job = {"program": program, "ranks": ranks, "limit": limit, "thaw": thaw}
        job["arguments"] = arguments
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, f"the server of ranks died with {self._server.wait()}"
        return json.loads(answer)

    def close(self) -> None:
        """End the server."""
        self._server.communicate(timeout=10)


def serve() -> None:
    """Do the jobs of the input, one after the other."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        module, name = job["program"].split(".")
        program = getattr(importlib.import_module(f"tests.distributed.{module}"), name)
        assert len(list(Path("/proc/self/task").iterdir())) == 1, (
            "a process with threads must not fork"
        )
        sys.stdout.write(json.dumps(do(program, job)) + "\n")
        sys.stdout.flush()


def do(program: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks of a job, watch them until all have ended, and look what is left."""
    keeper, port = fork_store()
    ranks: list[Rank] = []
    for number in range(job["ranks"]):
        arguments = {"rank": number, "ranks": job["ranks"], "port": port, **job["arguments"]}
        ranks.append(fork_rank(program, arguments, ranks))
    broke, hung = watch(ranks, time.monotonic() + job["limit"], job["thaw"])
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    reports, left = [], [f"group {ranks[0].pid}"] if group_is_alive(ranks[0].pid) else []
    for rank in ranks:
        with os.fdopen(rank.pipe) as pipe:
            ports, *said = [json.loads(line) for line in pipe] or [[]]
        left += [f"port {port}" for port, inode in ports if is_stuck(port, inode)]
        seconds = rank.ended - broke
        reports.append({"code": rank.code, "said": said[0] if said else None, "seconds": seconds})
    return {"ranks": reports, "left": left, "hung": hung}


def fork_store() -> tuple[int, int]:
    """Start the process that holds the store, as a launcher does: it outlives every rank."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        while True:
            signal.pause()
    port = int(os.read(reading, 16))
    os.close(reading), os.close(writing)
    return pid, port


def fork_rank(program: Any, arguments: dict[str, Any], others: list[Rank]) -> Rank:
    """Start a rank, in the process group of the first one."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, others[0].pid if others else 0)
            os.close(reading)
            tell = os.fdopen(writing, "w", buffering=1)
            said = program(tell=lambda what: tell.write(json.dumps(what) + "\n"), **arguments)
            tell.write(json.dumps(said) + "\n")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # not into the server's loop
    os.close(writing)
    with contextlib.suppress(OSError):  # it may have done so itself, and ended
        os.setpgid(pid, others[0].pid if others else pid)
    return Rank(pid, reading)


def watch(ranks: list[Rank], until: float, thaw: float) -> tuple[float, list[int]]:
    """Wait for all ranks; let a frozen one go on after a while, or when the others have ended.

    Returns:
        When the first rank was killed or frozen (or has ended), and who had to be killed here.
    """
    broke, frozen = 0.0, list[Rank]()
    while open_ranks := [rank for rank in ranks if rank.code is None]:
        for rank in open_ranks:
            pid, status = os.waitpid(rank.pid, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                continue
            broke = broke or time.monotonic()
            if os.WIFSTOPPED(status):
                frozen.append(rank)
            else:
                rank.code, rank.ended = os.waitstatus_to_exitcode(status), time.monotonic()
        alone = all(rank.code is not None for rank in ranks if rank not in frozen)
        if frozen and (alone or 0 < thaw < time.monotonic() - broke):
            os.kill(frozen.pop().pid, signal.SIGCONT)
        if time.monotonic() > until:
            break
        time.sleep(POLL)
    hung = [number for number, rank in enumerate(ranks) if rank.code is None]
    for number in hung:
        os.kill(ranks[number].pid, signal.SIGKILL)
        os.waitpid(ranks[number].pid, 0)
    return broke, hung


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def listeners() -> list[tuple[int, str]]:
    """Return the ports on which somebody listens, and the inodes of the sockets."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    state_of_listening = "0A"
    return [(int(row[1][-4:], 16), row[9]) for row in rows if row[3] == state_of_listening]


def is_stuck(port: int, inode: str) -> bool:
    """Tell whether a socket of the job still has its port: other programs may have taken it since."""
    holders = [holder for taken, holder in listeners() if taken == port]
    return inode in holders or not (holders or is_free(port))


def is_free(port: int) -> bool:
    """Tell whether a new job could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True


if __name__ == "__main__":
    serve()
