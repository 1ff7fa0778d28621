"""Run tests that PyTorch and Accelerate ship, on CPUs, with sparsync attached to every DDP they make.

``python -m tests.distributed.suites torch|accelerate RANKS SETTING [NAME ...]`` forks new ranks for
every test, kills them at a deadline, and prints each test's outcome as a line of JSON.
"""

import contextlib
import importlib
import inspect
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import sparsync
from sparsync.presets import resolve
from sparsync.wire import Packed

SETTINGS: dict[
    str, dict[str, Any]
] = {  # settings that lose nothing, so results equal those of DDP alone
    "dense": {"algorithm": "dense", "density": 1.0},
    "budgeted": {
        "algorithm": resolve("budgeted", codec=Packed(values="fp32"), budget=100.0),
        "density": 1.0,
    },
    "alone": {},  # not attached
}
SCRIPTS = ("test_ops", "test_script", "test_sync")  # of Accelerate
# seconds: of a test on all ranks, some of which compile beside other tests; of a message
DEADLINE, WAITS = 240.0, 40.0
CPU = torch.device("cpu")
Body = Callable[[int], object]  # of a rank


# ---- one rank --------------------------------------------------------------------------------------


@contextlib.contextmanager
def attaching(setting: str, made: list[int]) -> Iterator[None]:
    """Attach to every DDP model after moving it to the CPU, and count the models."""
    init = DistributedDataParallel.__init__

    def attached(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *a: Any, **k: Any
    ) -> None:
        init(self, module, None, None, *a, **k)
        made.append(1)
        if chosen := SETTINGS[setting]:
            transport = sparsync.Transport(timeout=WAITS)
            monitoring = sparsync.Monitoring(nonfinite="propagate")  # as DDP does
            sparsync.attach(self, **chosen, transport=transport, monitoring=monitoring)

    with patch.object(DistributedDataParallel, "__init__", attached):
        yield


def outcome(body: Body, rank: int, setting: str) -> dict[str, Any]:
    """Run a test on this rank; return how it ended, and why."""
    made: list[int] = []
    try:
        with attaching(setting, made):
            body(rank)
        end, why = "passed", ""
    except (unittest.SkipTest, SystemExit) as skipped:  # both are torch's
        end, why = "skipped", str(skipped)
    except BaseException as error:
        traceback.print_exc()
        end, why = "failed", f"{type(error).__name__}: {error}"
    return {"end": end, "why": why, "made": len(made)}


# ---- all ranks -------------------------------------------------------------------------------------


def run(body: Body, ranks: int, setting: str) -> dict[str, Any]:
    """Run a test on forked ranks; return the worst outcome, and its reason."""
    with tempfile.TemporaryDirectory() as name:
        folder, begin = Path(name), time.monotonic()
        os.environ["TEMP_DIR"] = name
        for each in ("barrier", "test_dir", "init_dir"):
            (folder / each).mkdir()
        running = {_forked(body, rank, ranks, setting, folder): rank for rank in range(ranks)}
        while running and time.monotonic() < begin + DEADLINE:
            time.sleep(0.02)
            for pid in list(running):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del running[pid]
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        results = []
        for rank in range(ranks):
            log = (folder / f"log-{rank}").read_text(errors="replace")[-2000:]
            result, lost = folder / f"result-{rank}", {"end": "died", "why": log, "made": 0}
            results.append(json.loads(result.read_text()) if result.exists() else lost)
            if rank in running.values():
                results[-1] |= {"end": "hangs", "why": log}
        ends = [result["end"] for result in results]
        worst = next(e for e in ("hangs", "died", "failed", "skipped", "passed") if e in ends)
        return {
            "end": worst,
            "why": [result["why"] for result in results if result["end"] == worst],
            "made": max(result["made"] for result in results),
            "seconds": round(time.monotonic() - begin, 2),
        }


def _forked(body: Body, rank: int, ranks: int, setting: str, folder: Path) -> int:
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        result = outcome(body, rank, setting)
        (folder / "new").with_suffix(f".{rank}").write_text(json.dumps(result))
        (folder / "new").with_suffix(f".{rank}").rename(folder / f"result-{rank}")
        if result["end"] == "passed":
            while len(list(folder.glob("result-*"))) < ranks:  # other ranks may still need this one
                time.sleep(0.02)
            if dist.is_initialized():
                dist.destroy_process_group()
        sys.stdout.flush()
    finally:
        os._exit(0)


# ---- PyTorch's -------------------------------------------------------------------------------------


class OnCpu(TorchFunctionMode):
    """Replace requests for a GPU by the CPU, and shrink images that would take a CPU minutes."""

    def __torch_function__(self, func: Any, _kinds: Any, args: Any = (), given: Any = None) -> Any:
        """Call with another device."""
        name, given = getattr(func, "__name__", ""), dict(given or {})
        if given.get("device") is not None:
            given["device"] = CPU
        if name == "cuda":
            return args[0]
        if name == "to":
            args = map(_on_cpu, args)
        elif name == "ones" and args[-2:] == (1000, 1000):
            args = (*args[:-2], 50, 50)
        return func(*args, **given)


def _on_cpu(one: Any) -> Any:
    """Return the CPU instead of a GPU, which may be a number."""
    named = isinstance(one, str | torch.device) and str(one).startswith("cuda")
    return CPU if named or type(one) is int else one


def _without_gpus() -> None:
    """Make ``torch.cuda`` report no GPU, and modules of this process use the CPU."""
    to: Any = torch.nn.Module.to

    def to_cpu(self: Any, *args: Any, **given: Any) -> Any:
        return to(self, *map(_on_cpu, args), **{name: _on_cpu(one) for name, one in given.items()})

    cuda: Any = torch.cuda
    torch.nn.Module.to = to_cpu  # type: ignore[assignment]
    # these are two equal functions, because Dynamo needs a separate one for each name
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_, **__: None
    cuda.device = lambda *_: nullcontext()
    cuda.current_device = dist.get_rank
    cuda.device_count = lambda: 8


def _torchs_tests() -> Any:
    """Import PyTorch's tests without the decorators that skip them if there are few GPUs or ranks."""
    from torch.testing._internal import common_distributed as common

    def kept(test: Any) -> Any:
        return test

    with ExitStack() as patches:
        for name in ("skip_if_no_gpu", "skip_if_small_worldsize"):
            patches.enter_context(patch.object(common, name, kept))
        for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu"):
            patches.enter_context(patch.object(common, name, lambda *_, **__: kept))
        return importlib.import_module("torch.testing._internal.distributed.distributed_test")


def torchs(ranks: int) -> dict[str, Body]:
    """Return PyTorch's tests that wrap a model in DDP, in their own source or in helpers they call."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": "0", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
    tests = _torchs_tests()
    from torch.testing._internal.common_utils import TestCase, set_rng_seed

    class Case(TestCase, tests.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        world_size = ranks
        file_name = ""

        def _should_stop_test_suite(self) -> bool:
            return False

    def body_of(name: str) -> Body:
        def body(rank: int) -> None:
            _without_gpus()
            dist.init_process_group(
                "gloo",
                init_method=f"file://{os.environ['TEMP_DIR']}/store",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=WAITS),
            )
            case = Case(name)
            case.rank = rank
            set_rng_seed()
            with OnCpu():
                getattr(case, name)()

        return body

    return {name: body_of(name) for name in _wrapping(tests.DistributedTest._DistTestBase)}


def _wrapping(base: type) -> list[str]:
    members = {name: m for name, m in vars(base).items() if isinstance(m, types.FunctionType)}
    sources = {name: inspect.getsource(inspect.unwrap(m)) for name, m in members.items()}
    wraps = re.compile(r"\b(DistributedDataParallel|DDP)\(")
    found = {name for name, source in sources.items() if wraps.search(source)}
    while True:
        calls = re.compile(rf"self\.({'|'.join(found)})\b")
        more = {name for name, source in sources.items() if calls.search(source)} - found
        if not more:
            return sorted(name for name in found if name.startswith("test_"))
        found |= more


# ---- Accelerate's ----------------------------------------------------------------------------------


def accelerates(ranks: int) -> dict[str, Body]:
    """Return Accelerate's own scripts; ``test_script`` divides batches of 8 by the ranks."""
    names = [name for name in SCRIPTS if name != "test_script" or 8 % ranks == 0]

    def body_of(name: str) -> Body:
        module: Any = importlib.import_module(f"accelerate.test_utils.scripts.{name}")

        def body(rank: int) -> None:
            # a store in a file needs no port
            store = dist.FileStore(f"{os.environ['TEMP_DIR']}/store", ranks)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "ACCELERATE_USE_CPU": "true"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            module.main()

        return body

    return {name: body_of(name) for name in names}


def main(suite: str, ranks: int, setting: str, names: list[str]) -> None:
    """Run the tests of a suite one after the other."""
    torch.set_num_threads(1)
    bodies = {"torch": torchs, "accelerate": accelerates}[suite](ranks)
    for name in names or bodies:
        print(json.dumps({"name": name, **run(bodies[name], ranks, setting)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
