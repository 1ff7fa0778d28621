"""Run Python code in a fresh process, forked from one that has imported only torch.

Starting Python with torch takes seconds. Forking avoids this, and the code sees the same state as
in a new interpreter.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

SERVER = "import tests.fresh; tests.fresh.serve()"


class Done(NamedTuple):
    """The result of a process, as from ``subprocess.run``."""

    returncode: int
    stdout: str
    stderr: str


def run_python(script: str | Path, *, folder: Path | None = None, **environment: str) -> Done:
    """Run code, or the program at a path, as ``python -W error`` would; return exit code and output."""
    job = {"script": str(script), "file": isinstance(script, Path), "environment": environment}
    server = _server()
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps({**job, "folder": str(folder or Path.cwd())}) + "\n")
    server.stdin.flush()
    return Done(*json.loads(server.stdout.readline()))


@functools.cache
def _server() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    root = Path(__file__).parents[1]
    server = subprocess.Popen([sys.executable, "-c", SERVER], text=True, cwd=root, **pipes)
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Fork a process for each job in the input, one after the other."""
    torch.set_num_threads(1)
    gc.freeze()  # otherwise the first collection of each process would copy what they share
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os._exit(_run(job))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            texts = [os.pread(stream.fileno(), 1 << 24, 0).decode() for stream in (out, err)]
        sys.stdout.write(json.dumps([code, *texts]) + "\n")
        sys.stdout.flush()


def _run(job: dict[str, Any]) -> int:
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    warnings.simplefilter("error")
    script = job["script"]
    try:
        if job["file"]:
            sys.argv = [script]
            runpy.run_path(script, run_name="__main__")
        else:
            exec(compile(script, "<fresh>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return 0
