"""The parts of `make gpu` (see gpu.py): each yields the rows of its table, or fails."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
RANKS = (2, 4)
STEPS = 6
DENSITY = 0.01
VGG, BERT, LARGE = 14_728_266, 133_547_324, 1 << 30
REPLICATE = "torch.distributed._composable.replicate_with_fsdp"
TINY = (5_000, 9_000, 1 << 40)  # the last does not fit into memory, which must be reported
CASES = {  # of ``attach``: the exchange and its transport
    "dense DDP": None,
    "gradients, gloo": ("gradients", "torch"),
    "gradients, zmq": ("gradients", "zmq"),
    "updates, gloo": ("updates", "torch"),
    "updates, zmq": ("updates", "zmq"),
}

Row = dict[str, Any]


def say(line: str) -> None:
    """Show progress."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


def device_of(rehearse: bool) -> torch.device:
    """Return the GPU, or its stand-in."""
    return torch.device("cpu") if rehearse else torch.device("cuda", 0)


def finish(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(
    call: Callable[[], object],
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Return a call's median time on the device's clock, after a warm-up call."""
    taken = []
    for _ in range(8 if device.type == "cuda" else 2):
        before()
        finish(device)
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken[1:])


def check(holds: bool, what: str) -> None:
    """Raise an error if a condition does not hold."""
    if not holds:
        raise AssertionError(what)


def check_device(device: torch.device, **tensors: Tensor | None) -> None:
    """Raise an error if a tensor is on another device."""
    for name, tensor in tensors.items():
        where = None if tensor is None else tensor.device
        check(where == device, f"{name} is on {where}, not on {device}")


# ---- kernels ---------------------------------------------------------------------------------------


def contracts(rehearse: bool) -> Iterator[Row]:
    """Compare every Triton kernel with the specification (in a rehearsal, only some)."""
    tests = [f"tests/unit/test_{name}.py" for name in ("triton", "gpu", "zmq")]
    chosen = "few_programs or any_codes" if rehearse else "test_triton.py or gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT)]
    command += ["-p", "no:cacheprovider", "-W", "ignore", "-m", "not slow", "-k", chosen]
    done = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines() or [done.stderr[-500:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    check(done.returncode == 0, "; ".join([lines[-1], *failed]))
    yield {"tests": "the Triton kernels and what needs a GPU", "outcome": lines[-1].strip("= ")}


# ---- attach ----------------------------------------------------------------------------------------


class Given(nn.Module):
    """A model whose gradients equal its inputs, bit for bit, on every device."""

    def __init__(self, size: int) -> None:
        super().__init__()
        cuts = [size // 2, size // 4, size // 8, size - size // 2 - size // 4 - size // 8]
        generator = torch.Generator().manual_seed(0)
        made = [nn.Parameter(torch.randn(cut, generator=generator)) for cut in cuts]
        self.weights = nn.ParameterList(made)

    def forward(self, wanted: Sequence[Tensor]) -> Tensor:
        """Return a loss whose gradients are ``wanted``."""
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, wanted, strict=True)]).sum()

    def gradients(self, rank: int, step: int) -> list[Tensor]:
        """Draw the gradients of a rank and step."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        return [
            torch.randn(w.numel(), generator=generator).to(w.device, w.dtype) for w in self.weights
        ]


def optimizer_of(model: nn.Module, exchange: str | None) -> torch.optim.Optimizer:
    """Return AdamW for updates, otherwise SGD with a rate of 1, which rounds equally on all devices."""
    if exchange == "updates":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=1.0)


def train(name: str, device: torch.device, size: int, group: Any = None) -> tuple[Row, Tensor]:
    """Train with one case of ``CASES``; return a row, and the weights on the CPU."""
    import sparsync

    cuda, case = device.type == "cuda", CASES[name]
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    model = Given(size).to(device)
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer, sync = optimizer_of(model, case and case[0]), None
    if case is not None:
        exchange, transport = case
        units = sparsync.Compression(unit_bytes=size) if exchange == "gradients" else None
        sync = sparsync.attach(
            ddp,
            optimizer,
            density=None if exchange == "updates" else DENSITY,
            exchange=exchange,
            compression=units,
            transport=sparsync.Transport(transport, timeout=60.0),
        )
    seconds = []
    for step in range(STEPS):
        wanted = model.gradients(dist.get_rank(), step)
        optimizer.zero_grad()
        finish(device)
        dist.barrier()
        started = time.perf_counter()
        ddp(wanted).backward()
        optimizer.step()
        finish(device)
        seconds.append(time.perf_counter() - started)
        check_device(device, **{f"gradient {i}": w.grad for i, w in enumerate(model.weights)})
    row: Row = {"case": name, "step ms": 1e3 * statistics.median(seconds[2:])}
    if sync is not None:
        row |= _of_exchange(sync, device)
        sync.finish()
        sync.close()
    row["peak MiB"] = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if cuda else None
    return row, torch.cat([w.detach().cpu() for w in model.weights])


def _of_exchange(sync: Any, device: torch.device) -> Row:
    """Return the bytes of a step, and the share of exchange time for which training did not wait."""
    stats, reducer = sync.stats(), sync.reducer
    for i, (unit, residual) in enumerate(zip(reducer.units, reducer.residuals, strict=True)):
        # by default, residuals of rounded updates are kept in host memory
        offloaded = stats["exchange"] == "updates" and not unit.dense
        home = torch.device("cpu") if offloaded else device
        check_device(home, **{f"residual {i}": residual.accumulated})
    if stats["exchange"] == "updates":
        check_device(device, **{"the shared weights": sync.outer.memory["shared"]})
        busy, waited = stats["exchange_seconds"], stats["waited_seconds"]
    else:
        spans, wait = stats["spans_last_exchange"], stats["waited_last_exchange"]
        busy = max(end for _, _, end in spans) - min(begin for _, begin, _ in spans)
        waited = wait[1] - wait[0]
    overlap = max(0.0, 1 - waited / busy) if busy else None
    return {"MB sent per step": stats["bytes_sent_per_local_step"] / 1e6, "not waited for": overlap}


def attach_rank(rank: int, ranks: int, port: int, rehearse: bool, out: str) -> None:
    """Train on one of several ranks of a device; compare transports with each other and the CPU."""
    device = _enter(rank, ranks, port, rehearse)
    size, rows, weights = TINY[0] if rehearse else VGG, [], {}
    for name in CASES:
        row, weights[name] = train(name, device, size)
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, _fingerprint(weights[name]))
        check(len(set(everyone)) == 1, f"P = {ranks}, {name}: replicas differ: {everyone}")
        rows.append({"P": ranks, **row})
    for kind in ("gradients", "updates"):
        first, second = (weights[f"{kind}, {over}"] for over in ("gloo", "zmq"))
        check(torch.equal(first, second), f"P = {ranks}, {kind}: gloo and zmq differ")
        host = first if rehearse else train(f"{kind}, gloo", torch.device("cpu"), size)[1]
        moved = host - torch.cat([w.detach() for w in Given(size).weights])
        far = float((first - host).norm() / moved.norm())
        check(far == 0 if kind == "gradients" else far < 0.05, f"{kind}: {far} from the CPU's")
        for row in rows:
            if row["case"].startswith(kind):
                row["from the CPU's"] = far
    _leave(rank, rows, out)


def _fingerprint(weights: Tensor) -> str:
    return hashlib.blake2b(weights.numpy().tobytes(), digest_size=8).hexdigest()


def _enter(rank: int, ranks: int, port: int, rehearse: bool) -> torch.device:
    device = device_of(rehearse)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if not rehearse:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return device


def _leave(rank: int, rows: list[Row], out: str) -> None:
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _spawn(function: Callable[..., None], ranks: int, rehearse: bool) -> list[Row]:
    """Run ``function`` in spawned processes, as CUDA requires; return rank 0's output."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows.json"
        given = ranks, store.port, rehearse, out
        torch.multiprocessing.spawn(function, given, nprocs=ranks)
        return json.loads(Path(out).read_text())


def attach(rehearse: bool) -> Iterator[Row]:
    """Train on several ranks that share the device: DDP over gloo, exchanges over gloo and ZeroMQ."""
    for ranks in RANKS[: 1 if rehearse else None]:
        say(f"  attach, {ranks} ranks")
        yield from _spawn(attach_rank, ranks, rehearse)


def nccl_rank(rank: int, ranks: int, port: int, rehearse: bool, out: str) -> None:
    """Try DDP over NCCL with two ranks on one device, which most versions of NCCL refuse."""
    device = _enter(rank, ranks, port, rehearse)
    rows = [{"case": "two ranks, one device", "outcome": "trains"}]
    try:
        group = dist.new_group(backend="gloo" if rehearse else "nccl")
        dist.all_reduce(torch.ones(1, device=device), group=group)
        finish(device)
    except RuntimeError as error:  # NCCL is no longer usable in this process
        rows[0]["outcome"] = "NCCL refuses: " + str(error).strip().splitlines()[-1][:120]
        if rank == 0:
            Path(out).write_text(json.dumps(rows))
        os._exit(0)
    for name in ("gradients, zmq", "updates, zmq"):
        rows.append(train(name, device, TINY[0], group)[0])
    _leave(rank, rows, out)


def nccl(rehearse: bool) -> Iterator[Row]:
    """Run DDP over NCCL, where two ranks may share a device."""
    try:
        yield from _spawn(nccl_rank, 2, rehearse)
    except torch.multiprocessing.ProcessExitedException as error:  # died without raising
        yield {"case": "two ranks, one device", "outcome": f"NCCL ended a process: {error}"}


# ---- one rank: NCCL, FSDP2, replicate() ------------------------------------------------------------


def one_rank(rehearse: bool) -> Iterator[Row]:
    """Attach to DDP, FSDP2, ``replicate()`` and a plain model on a mesh of one device."""
    from torch.distributed.device_mesh import init_device_mesh

    device, backend = device_of(rehearse), "gloo" if rehearse else "nccl"
    if not rehearse:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, world_size=1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("replicate", "shard"))
    for kind in ("DDP", "FSDP2", "replicate()", "plain"):
        if kind == "replicate()" and importlib.util.find_spec(REPLICATE) is None:
            say(f"  one_rank, {kind} skipped: torch {torch.__version__} has no {REPLICATE}")
            continue
        for exchange in ("gradients", "updates"):
            yield {"model": kind, "group": backend, **one_model(kind, exchange, mesh, device)}
    dist.destroy_process_group()


def one_model(kind: str, exchange: str, mesh: Any, device: torch.device) -> Row:
    """Train the only replica; check that its gradient is applied whole, or that its steps are AdamW's."""
    import sparsync
    from sparsync.units import local_of

    size = TINY[0]
    alone, model = Given(size).to(device), Given(size).to(device)
    if kind == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh["shard"])
    elif kind == "replicate()":
        importlib.import_module(REPLICATE).replicate(model, mesh=mesh["shard"])
    attached = DistributedDataParallel(model) if kind == "DDP" else model
    optimizer, plain = optimizer_of(model, exchange), optimizer_of(alone, exchange)
    given = {} if kind == "DDP" else {"replicate": mesh["replicate"]}
    transport = sparsync.Transport(timeout=60.0)
    density = None if exchange == "updates" else DENSITY
    more = {"density": density, "exchange": exchange, "transport": transport}
    with sparsync.attach(attached, optimizer, **more, **given) as sync:
        for step in range(STEPS):
            wanted = alone.gradients(0, step)
            for one, its, loss in ((alone, plain, alone), (model, optimizer, attached)):
                its.zero_grad()
                loss(wanted).backward()
                if step == 0 and one is model and exchange == "gradients":
                    got = torch.cat([local_of(w.grad) for w in model.weights])
                    kept = sync.reducer.residuals[0]
                    check_device(device, gradient=got, residual=kept.accumulated)
                    check(torch.equal(got, torch.cat(wanted)), f"{kind}: not the whole gradient")
                    check(kept.value is None, f"{kind}: one replica keeps something back")
                its.step()
        if exchange == "updates":
            sync.finish()
    pairs = zip(model.weights, alone.weights, strict=True)
    far = max(float((local_of(w) - v).detach().abs().max()) for w, v in pairs)
    check(exchange == "gradients" or far < 1e-4, f"{kind}, updates: {far} from plain AdamW")
    return {"exchange": exchange, "outcome": "as expected"}


# ---- selection -------------------------------------------------------------------------------------


def selection(rehearse: bool) -> Iterator[Row]:
    """Compare the selection of the k largest of n with ``torch.topk``."""
    device = device_of(rehearse)
    for size in TINY if rehearse else (VGG, BERT, LARGE):
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 30
        if (need := 28 * size) > free:  # x, the gradient, |x|, the keys, and topk's own memory
            say(f"  selection, n = {size:,} skipped: {need >> 30} GiB do not fit in {free >> 30}")
            continue
        for density in (0.001, 0.01):
            say(f"  selection, n = {size:,}, {density:.1%}")
            try:
                yield select(size, max(1, round(density * size)), device)
            except torch.OutOfMemoryError as error:
                say(f"  selection, n = {size:,} skipped: {str(error).splitlines()[0]}")
            if device.type == "cuda":
                torch.cuda.empty_cache()


def select(size: int, k: int, device: torch.device) -> Row:
    """Measure both selections at one size; they must find the same magnitudes."""
    from sparsync.kernels import magnitude_keys
    from sparsync.kernels import triton as backend

    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(size, generator=generator, device=device)
    zeros = torch.zeros_like(x)
    keys = magnitude_keys(x)
    largest = torch.topk(keys, k, sorted=False).values
    # call the backend directly, to use the Triton kernels and not torch's
    positions = backend.top(x, k)
    check_device(device, positions=positions)
    check(bool((positions.diff() > 0).all()), "positions do not ascend")
    check(torch.equal(keys[positions].sort().values, largest.sort().values), "others are larger")
    many = int(torch.topk(keys, min(2 * k, size), sorted=False).values.min())
    del keys, largest

    def fused() -> Tensor:
        found = backend.accumulate_(x, zeros, many, 4 * k)
        assert found is not None
        return found[0][backend.top(found[1], k)]

    check(torch.equal(fused(), positions), "the candidates' k largest are others")
    by_torch = milliseconds(lambda: torch.topk(x.abs(), k, sorted=False), device)
    by_top = milliseconds(lambda: backend.top(x, k), device)
    by_fused = milliseconds(fused, device, zeros.zero_)
    by_add = milliseconds(lambda: x.add_(zeros), device, zeros.zero_)
    return {
        "n": size,
        "k": k,
        "topk / top": by_torch / by_top,
        "(add_ + topk) / (accumulate_ + top of 2 k)": (by_add + by_torch) / by_fused,
        "topk ms": by_torch,
        "top ms": by_top,
        "accumulate_ + top ms": by_fused,
        "add_ ms": by_add,
    }


# ---- updates ---------------------------------------------------------------------------------------


def updates(rehearse: bool) -> Iterator[Row]:
    """Compare the passes of AdamW's updates with a copy of n elements, and with torch's operations."""
    device = device_of(rehearse)
    for size in TINY[:1] if rehearse else (VGG, BERT):
        say(f"  updates, n = {size:,}")
        yield from update_passes(size, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def update_passes(size: int, device: torch.device) -> Iterator[Row]:
    """Check each pass of a one-bit exchange against the specification, bit for bit; then measure it."""
    from sparsync.kernels import moves, normal_levels, triton_levels, triton_moves
    from sparsync.updates import gradient_noise

    bits, block, limit = 1, 512, 2.0**120
    generator = torch.Generator(device).manual_seed(0)
    shared, weights, kept, moved = torch.randn(4, size, generator=generator, device=device)
    levels = bits, block, limit, *normal_levels._tables(bits, device)
    middle = normal_levels.SCALE_BYTES * -(-size // block)
    plainly = normal_levels.quantise_plainly
    messages = torch.stack([plainly(x, bits, block, limit) for x in (shared, weights, kept)])
    numbers = 300.0, 1000.0, 1e-8, -1e-3
    variance = weights.square()

    def add_plainly(into: Tensor, many: Tensor, divisor: float) -> None:
        for raw in many:
            normal_levels.decode_plainly_(into, raw, bits, block, divisor)

    def keep_plainly(into: Tensor) -> None:
        add_plainly(into.add_(moved), messages[:1], -1.0)

    def sum_plainly(into: Tensor) -> None:
        add_plainly(into.zero_(), messages, 1.0)
        into.add_(moved + kept)

    def quantise(into: Tensor) -> None:
        raw = into.view(torch.uint8)[: messages.shape[1]]
        triton_levels.quantise_(raw[:middle], raw[middle:], moved, kept, levels)

    def quantise_plainly(into: Tensor) -> None:
        raw = plainly(moved + kept, bits, block, limit)
        into.view(torch.uint8)[: raw.numel()] = raw

    def decode(into: Tensor, many: Tensor, divisor: float = 1.0, **named: Any) -> None:
        triton_levels.decode_levels_(into, many, levels, divisor, **named)

    one, several = messages.shape[1] / size, messages.numel() / size
    # pass -> bytes read and written per element, the kernel, and torch's operations
    rows: dict[str, tuple[float, Callable[[Tensor], None], Callable[[Tensor], None]]] = {
        "moved": (
            16.0,
            lambda into: triton_moves.move_(into, shared, kept, weights, None),
            lambda into: moves.move_plainly_(into, shared, kept, weights),
        ),
        "quantise moved + residual": (8 + one, quantise, quantise_plainly),
        "keep the error": (
            12 + one,
            lambda into: decode(into, messages[:1], -1.0, terms=(into, moved)),
            keep_plainly,
        ),
        "sum 3 messages and the own share": (
            12 + several,
            lambda into: decode(into, messages, terms=(moved, kept)),
            sum_plainly,
        ),
        "decode and apply the average": (
            8 + one,
            lambda into: decode(into, messages[:1], -4.0, terms=(into,)),
            lambda into: add_plainly(into, messages[:1], -4.0),
        ),
        "lengthen Adam's step": (
            16.0,
            lambda into: triton_moves.lengthen_(kept, variance, into, numbers),
            lambda into: gradient_noise._lengthen_plainly(kept, variance, into, numbers),
        ),
    }
    copied = milliseconds(lambda: moved.copy_(kept), device)
    moved.copy_(weights.flip(0))
    for name, (per_element, fused, plain) in rows.items():
        mine, expected = torch.ones(2, size, device=device)
        fused(mine)
        plain(expected)
        same = torch.equal(mine.view(torch.int32), expected.view(torch.int32))
        check(same, f"{name}: not the specification's bits")
        fast, slow = (milliseconds(partial(call, mine), device) for call in (fused, plain))
        rate = per_element * size / fast
        yield {
            "n": size,
            "pass": name,
            "of a copy's bytes/s": rate / (8 * size / copied),
            "torch / Triton": slow / fast,
            "GB/s": 1e-6 * rate,
            "ms": fast,
            "torch ms": slow,
            "copy ms": copied,
        }


# ---- transfer --------------------------------------------------------------------------------------


def transfer(rehearse: bool) -> Iterator[Row]:
    """Measure how much of the time to copy k entries to the host can hide behind a backward pass."""
    from sparsync.kernels import packing
    from sparsync.kernels import triton as backend

    device, size = device_of(rehearse), TINY[0] if rehearse else BERT
    cuda, width, k = device.type == "cuda", 64 if rehearse else 4096, round(DENSITY * size)
    layers = [nn.Linear(width, width) for _ in range(2 if rehearse else 8)]
    model, batch = nn.Sequential(*layers).to(device), torch.randn(width // 2, width, device=device)
    x = torch.randn(size, generator=torch.Generator(device).manual_seed(0), device=device)
    indices = backend.top(x, k)
    values = x[indices]
    side = torch.cuda.Stream(device) if cuda else None
    losses = []

    def forward() -> None:
        model.zero_grad()
        losses[:] = [model(batch).square().mean()]

    def backward() -> None:
        losses.pop().backward()

    def to_host(pinned: bool) -> Callable[[], object]:
        sources = indices, values
        hosts = [torch.empty_like(s, device="cpu", pin_memory=pinned and cuda) for s in sources]

        def copy() -> None:
            for host, source in zip(hosts, sources, strict=True):
                host.copy_(source, non_blocking=pinned)

        copy()
        finish(device)
        check(all(torch.equal(h, s.cpu()) for h, s in zip(hosts, sources, strict=True)), "copies")
        return copy

    room = packing.value_bytes(k, packing.BF16, 1) + packing.index_bytes(k, size)
    message = torch.empty(room, dtype=torch.uint8, pin_memory=cuda)

    def pack() -> None:
        at = backend.top(x, k)
        raw = backend.pack_values(x[at], packing.BF16, 1), backend.pack_indices(at, size)
        message.copy_(torch.cat(raw), non_blocking=True)

    alone = milliseconds(backward, device, forward)
    for name, job, stream in (
        ("k entries, pinned, side stream", to_host(True), side),
        ("k entries, pinned, the same stream", to_host(True), None),
        ("k entries, pageable, side stream", to_host(False), side),
        ("select, pack, pinned, side stream", pack, side),
    ):
        once = milliseconds(job, device)
        times = max(1, round(alone / 2 / once))  # half of the backward pass

        def several(job: Callable[[], object] = job, times: int = times) -> None:
            for _ in range(times):
                job()

        def both(stream: Any = stream, several: Callable[[], object] = several) -> None:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(device))
            backward()  # starts on the device while the host continues
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                several()
            if stream is not None:
                torch.cuda.current_stream(device).wait_stream(stream)

        work = milliseconds(several, device)
        together = milliseconds(both, device, forward)
        hidden = (alone + work - together) / min(alone, work)
        row = {"job": name, "hidden": hidden, "ms": once, "times": times}
        yield row | {"backward ms": alone, "both ms": together}
    packed = backend.pack_values(values, packing.BF16, 1), backend.pack_indices(indices, size)
    check(torch.equal(message, torch.cat(packed).cpu()), "the message is not what was packed")


# ---- all -------------------------------------------------------------------------------------------

# the parts, with their time limits in seconds
PARTS: dict[str, tuple[Callable[[bool], Iterator[Row]], int]] = {
    "contracts": (contracts, 480),
    "one_rank": (one_rank, 150),
    "attach": (attach, 360),
    "nccl": (nccl, 100),
    "selection": (selection, 300),
    "updates": (updates, 60),
    "transfer": (transfer, 100),
}
