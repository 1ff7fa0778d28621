"""Public contract checks: run them on your own selector, codec, collective, transport or averager.

Each ``check_*`` raises ``AssertionError`` with the case that failed.  The ``exercise_*`` coroutines
are the same checks for one rank of any ``Communicator``: drive them with ``sparsync.simulate`` or, on
a real transport, with ``sparsync.transports.base.run``; they return digests, equal on every transport.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.averaging.base import Averager
from sparsync.collectives.base import Collective, Reduced
from sparsync.errors import NonFiniteGradientError, WireFormatError
from sparsync.presets import Algorithm
from sparsync.reducer import Reducer
from sparsync.selection import Everything, Exact, Selector
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.base import Communicator
from sparsync.transports.framing import Raw
from sparsync.transports.sim import simulate
from sparsync.units import Slot, Unit
from sparsync.wire.base import Codec

__all__ = [
    "Case",
    "cases",
    "check_algorithm",
    "check_averager",
    "check_codec",
    "check_collective",
    "check_communicator",
    "check_selector",
    "exercise_algorithm",
    "exercise_collective",
    "exercise_communicator",
]

WORLD_SIZES = (1, 2, 3, 4, 7)
_STEPS = 3


@dataclass(frozen=True)
class Case:
    """One kind of input.

    Attributes:
        name: for messages.
        size: number of elements n.
        k: entries asked for.
        make: the accumulated gradient of a rank at a step, given ``(rank, world_size, step)``.
        exact: float sums of it are exact in any order.
    """

    name: str
    size: int
    k: int
    make: Callable[[int, int, int], Tensor]
    exact: bool = False


def cases() -> list[Case]:
    """Return the inputs that every algorithm must handle: typical, adversarial and degenerate."""

    def noise(rank: int, world_size: int, step: int, size: int = 499) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(size, generator=generator)

    def integers(rank: int, world_size: int, step: int) -> Tensor:
        return (3 * noise(rank, world_size, step)).round()

    def masked(rank: int, world_size: int, step: int, low: int, high: int) -> Tensor:
        result = torch.zeros(499)
        result[low:high] = noise(rank, world_size, step, high - low)
        return result

    def own_region(rank: int, world_size: int, step: int, shift: int = 0) -> Tensor:
        owner = (rank + shift) % world_size
        low, high = owner * 499 // world_size, (owner + 1) * 499 // world_size
        return masked(rank, world_size, step, low, high)

    def dominating(rank: int, world_size: int, step: int) -> Tensor:
        return own_region(rank, world_size, step, shift=1) * (100.0 if rank == 0 else 1.0)

    def cancelling(rank: int, world_size: int, step: int) -> Tensor:
        sign = 0.0 if rank == world_size - 1 and world_size % 2 else (-1.0) ** rank
        return sign * noise(0, world_size, step)

    return [
        Case("noise", 499, 40, noise),
        Case("integers", 499, 40, integers, exact=True),
        Case("all zero", 499, 40, lambda r, p, s: torch.zeros(499), exact=True),
        Case("zero at first", 499, 40, lambda r, p, s: integers(r, p, s) * (s > 0), exact=True),
        Case("empty", 0, 5, lambda r, p, s: torch.zeros(0), exact=True),
        Case("k = 0", 499, 0, integers, exact=True),
        Case("k = 1", 499, 1, noise),
        Case("k = n", 499, 499, noise),
        Case("k > n", 499, 1000, noise),
        Case("fewer elements than ranks", 3, 2, lambda r, p, s: noise(r, p, s, 3)),
        Case("one region", 499, 40, lambda r, p, s: masked(r, p, s, 0, 60)),
        Case("last elements", 499, 40, lambda r, p, s: masked(r, p, s, 490, 499)),
        Case("matching regions", 499, 40, own_region),
        Case("shifted regions", 499, 40, lambda r, p, s: own_region(r, p, s, shift=1)),
        Case("one rank dominates", 499, 40, dominating),
        Case("same everywhere", 499, 40, lambda r, p, s: noise(0, p, s)),
        Case("cancelling", 499, 40, cancelling),
        Case("one rank only", 499, 40, lambda r, p, s: noise(r, p, s) * (r == p - 1)),
        Case("one-hot", 499, 40, lambda r, p, s: torch.eye(499)[r], exact=True),
        Case("constant", 499, 40, lambda r, p, s: torch.full((499,), 2.0), exact=True),
        Case("growing", 499, 40, lambda r, p, s: noise(r, p, s) * 10.0**s),
        Case("shrinking", 499, 40, lambda r, p, s: noise(r, p, s) * 10.0**-s),
        Case("denormal", 499, 40, lambda r, p, s: noise(r, p, s) * 1e-42),
    ]


# ---- selection -----------------------------------------------------------------------------------


def check_selector(make: Callable[[], Selector]) -> None:
    """Check a selector: order, values, zeros, NaN, exactness when a period opens, saved state.

    Example:
        >>> check_selector(Exact)
    """
    for case in cases():
        first, second = make(), make()
        for step in range(_STEPS):
            accumulated = case.make(0, 2, step)
            before = accumulated.clone()
            selected = first.select(accumulated, case.k, step)
            where = f"{type(first).__name__}, case '{case.name}', step {step}"
            assert torch.equal(accumulated, before), f"{where}: the input was modified"
            assert selected.size == case.size, f"{where}: wrong size"
            if isinstance(selected, DenseVector):
                continue
            selected.check()
            assert torch.equal(selected.values, accumulated[selected.indices]), f"{where}: values"
            assert bool((selected.values != 0).all()), f"{where}: a zero was selected"
            if step == 0:
                expected = min(case.k, int((accumulated != 0).sum()))
                assert selected.nnz == expected, f"{where}: {selected.nnz} entries, not {expected}"
            second.load_state_dict(first.state_dict() if step == 0 else second.state_dict())
            if step == 1:
                again = second.select(accumulated, case.k, step)
                assert isinstance(again, SparseVector)
                assert torch.equal(again.indices, selected.indices), f"{where}: reloaded differs"
    broken = cases()[0].make(0, 1, 0)
    broken[17] = float("nan")
    for step in range(2):
        selector = make()
        seen = selector.select(broken, 5, step)
        assert not bool(seen.isfinite().all()), f"{type(selector).__name__}: a NaN was not selected"


# ---- wire ----------------------------------------------------------------------------------------


def check_codec(codec: Codec) -> None:
    """Check a codec: round trips, exact sizes, refusal of every truncated message.

    Example:
        >>> from sparsync.wire import Coo
        >>> check_codec(Coo())
    """
    for case in cases():
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            vector = SparseVector.from_dense(case.make(0, 2, 1).to(dtype))
            encoded = codec.encode(vector)
            where = f"{type(codec).__name__}, case '{case.name}', {dtype}"
            assert encoded.payload.dtype == torch.uint8, f"{where}: payload is not bytes"
            nbytes = codec.nbytes(vector.nnz, vector.size, dtype)
            assert encoded.payload.numel() == nbytes, f"{where}: nbytes is wrong"
            longer = torch.cat([encoded.payload, torch.zeros(9, dtype=torch.uint8)])
            assert codec.measure(longer).nbytes == nbytes, f"{where}: measure is wrong"
            decoded = codec.decode(encoded.payload, vector.size)
            assert _same(decoded, encoded.decoded), f"{where}: decode differs from decoded"
            if codec.exact:
                assert _same(decoded, vector), f"{where}: an exact codec changed the vector"
            for length in {0, 1, 7, nbytes // 2, nbytes - 1} - {nbytes}:
                try:
                    codec.decode(encoded.payload[:length], vector.size)
                except WireFormatError:
                    continue
                raise AssertionError(f"{where}: {length} of {nbytes} bytes were accepted")


# ---- collectives ---------------------------------------------------------------------------------


def check_collective(
    make: Callable[[], Collective],
    *,
    dense: bool = False,
    rank_ordered: bool = True,
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> None:
    """Check a collective on the simulator, for every case and world size.

    Args:
        make: builds one collective; called once per rank and case.
        dense: it takes dense vectors.
        rank_ordered: its sums are left folds in rank order, so they can be checked bit for bit.
        world_sizes: the numbers of virtual ranks.

    Example:
        >>> from sparsync.collectives import Allgather
        >>> check_collective(Allgather, world_sizes=(1, 3))
    """
    for world_size in world_sizes:

        async def program(comm: Communicator) -> list[str]:
            return await exercise_collective(comm, make, dense=dense, rank_ordered=rank_ordered)

        digests = simulate(program, world_size).results
        assert all(d == digests[0] for d in digests), f"P = {world_size}: totals differ"


async def exercise_collective(
    comm: Communicator,
    make: Callable[[], Collective],
    *,
    dense: bool = False,
    rank_ordered: bool = True,
) -> list[str]:
    """Run every case on this rank and check it; return one digest of the total per case and step."""
    digests = []
    selector: Selector = Everything() if dense else Exact()
    for case in cases():
        collective = make()
        for step in range(_STEPS):
            where = f"P = {comm.world_size}, case '{case.name}', step {step}"
            accumulated = case.make(comm.rank, comm.world_size, step)
            selected = selector.select(accumulated, case.k, step)
            before = selected.to_dense().clone()
            reduced = await collective.reduce(comm, selected, case.k, step)
            assert torch.equal(selected.to_dense(), before), f"{where}: the input was modified"
            await _check_law(comm, reduced, case, where, rank_ordered)
            digests.append(_digest(reduced.total))
    return digests


async def _check_law(
    comm: Communicator, reduced: Reduced, case: Case, where: str, rank_ordered: bool
) -> None:
    """Check ``sum over ranks(delivered) == total`` and that all ranks have the same total."""
    total = reduced.total.to_dense()
    if isinstance(reduced.total, SparseVector):
        reduced.total.check()
    for theirs in await comm.allgather(total.clone(), "verify"):
        assert torch.equal(theirs, total), f"{where}: totals differ between ranks"
    shares = await comm.allgather(reduced.delivered.to_dense().clone(), "verify")
    summed = torch.zeros_like(total)
    for share in shares:
        summed = summed + share
    if rank_ordered or case.exact:
        assert torch.equal(summed, total), f"{where}: the total is not the sum of what was delivered"
    else:
        scale = torch.stack(shares).abs().sum(0)
        assert _within(summed - total, scale, comm.world_size), f"{where}: the sum is off"


def check_algorithm(algorithm: Algorithm, *, world_sizes: Sequence[int] = WORLD_SIZES) -> None:
    """Check the law of a whole step, residuals included, per step: selector and collective together.

    Example:
        >>> from sparsync.presets import allgather
        >>> check_algorithm(allgather(), world_sizes=(2,))
    """
    for world_size in world_sizes:

        async def program(comm: Communicator) -> list[str]:
            return await exercise_algorithm(comm, algorithm)

        digests = simulate(program, world_size).results
        assert all(d == digests[0] for d in digests), f"P = {world_size}: totals differ"


async def exercise_algorithm(comm: Communicator, algorithm: Algorithm) -> list[str]:
    """Run every case through a ``Reducer`` on this rank; return one digest per case and step."""
    digests = []
    for case in cases():
        unit = Unit((Slot("w", 0, case.size),), torch.float32, torch.device("cpu"))
        density = case.k / case.size if case.size else 1.0
        reducer = Reducer(comm, [unit], algorithm, density)
        for step in range(_STEPS):
            where = f"{algorithm.name}, P = {comm.world_size}, case '{case.name}', step {step}"
            gradient = case.make(comm.rank, comm.world_size, step)
            digests.append(await _check_step(comm, reducer, gradient, where))
    await _check_refusal(comm, algorithm)
    return digests


async def _check_step(comm: Communicator, reducer: Reducer, gradient: Tensor, where: str) -> str:
    """Check ``sum(accumulated) == total + sum(residual)`` over one step."""
    kept = reducer.residuals[0]
    before = torch.zeros_like(gradient) if kept.value is None else kept.value.clone()
    (average,) = await reducer.reduce([gradient])
    after = torch.zeros_like(gradient) if kept.value is None else kept.value.clone()
    world_size = comm.world_size
    accumulated = await comm.allgather(before + gradient, "verify")
    residuals = await comm.allgather(after, "verify")
    total = average.to_dense().double() * world_size
    left = torch.stack(accumulated).double().sum(0)
    right = total + torch.stack(residuals).double().sum(0)
    scale = torch.stack(accumulated).abs().sum(0)
    # one more rounding than in the law: the average was divided by P
    assert _within(left - right, scale, world_size + 1), f"{where}: mass appeared or was lost"
    return _digest(average)


async def _check_refusal(comm: Communicator, algorithm: Algorithm) -> None:
    """Check that NaN on one rank is refused by all and leaves no trace in what follows."""
    case = cases()[0]
    unit = Unit((Slot("w", 0, case.size),), torch.float32, torch.device("cpu"))
    broken, untouched = (Reducer(comm, [unit], algorithm, 0.1) for _ in range(2))
    for step in range(_STEPS):
        gradient = case.make(comm.rank, comm.world_size, step)
        if step == 1:
            poisoned = gradient.clone()
            if comm.rank == comm.world_size - 1:
                poisoned[step] = float("nan")
            try:
                await broken.reduce([poisoned])
            except NonFiniteGradientError as error:
                assert "'w'" in str(error), "the parameter is not named"
                broken.refuse()
            else:
                raise AssertionError(f"{algorithm.name}: NaN on one rank was not refused by all")
        (one,), (other,) = await broken.reduce([gradient]), await untouched.reduce([gradient])
        assert _same(one, other), f"{algorithm.name}: a refused step left a trace"


# ---- transports ----------------------------------------------------------------------------------


def check_communicator(world_sizes: Sequence[int] = WORLD_SIZES) -> None:
    """Check the simulator's communicator; see ``exercise_communicator`` for your own transport."""
    for world_size in world_sizes:
        simulate(exercise_communicator, world_size)


async def exercise_communicator(comm: Communicator) -> None:
    """Check every call of a ``Communicator`` on this rank; all ranks must run it together."""
    rank, world_size = comm.rank, comm.world_size
    ones = torch.arange(7, dtype=torch.float32) + rank
    expected = world_size * torch.arange(7.0) + sum(range(world_size))
    assert torch.equal(await comm.allreduce(ones, "check"), expected), "allreduce sum"
    for dtype in (torch.int32, torch.int64, torch.float64):
        value = torch.tensor([rank, -rank], dtype=dtype)
        highest = await comm.allreduce(value, "check", "max")
        assert highest.tolist() == [world_size - 1, 0], f"allreduce max of {dtype}"
        lowest = await comm.allreduce(value, "check", "min")
        assert lowest.tolist() == [0, 1 - world_size], f"allreduce min of {dtype}"
    empty = await comm.allreduce(torch.zeros(0), "check")
    assert empty.numel() == 0, "allreduce of nothing"
    gathered = await comm.allgather(torch.tensor([[rank, 5]]), "check")
    assert [g.tolist() for g in gathered] == [[[r, 5]] for r in range(world_size)], "allgather"
    lengths = [r % 3 for r in range(world_size)]
    mine = torch.full((lengths[rank],), rank, dtype=torch.uint8)
    for gather in (comm.allgatherv, comm.ring_allgatherv):
        blocks = await gather(mine, lengths, "check", Raw("control"))
        for r, block in enumerate(blocks):
            assert block.tolist() == [r] * lengths[r], f"{gather.__name__}: block {r}"
    outgoing = [torch.full((r + 1,), rank, dtype=torch.uint8) for r in range(world_size)]
    received = await comm.alltoallv(outgoing, [rank + 1] * world_size, "check", Raw("control"))
    assert [m.tolist() for m in received] == [[r] * (rank + 1) for r in range(world_size)]
    await _check_order(comm)
    half = await comm.split(rank % 2, key=-rank)
    members = [r for r in range(world_size) if r % 2 == rank % 2][::-1]
    shared = await half.allgather(torch.tensor([rank]), "check")
    assert [int(t) for t in shared] == members, "split orders by key"
    await comm.barrier()


async def _check_order(comm: Communicator) -> None:
    """Check that messages between two ranks arrive in the order sent."""
    if comm.world_size == 1:
        return
    raw = Raw("control")
    dest, source = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    receiving = [comm.irecv(source, 1, "check", raw) for _ in range(5)]
    sending = [
        comm.isend(torch.tensor([i], dtype=torch.uint8), dest, "check", raw) for i in range(5)
    ]
    assert [int(await r) for r in receiving] == list(range(5)), "messages overtook each other"
    for operation in sending:
        await operation


# ---- averaging -----------------------------------------------------------------------------------


def check_averager(
    make: Callable[[], Averager], *, world_sizes: Sequence[int] = WORLD_SIZES, steps: int = 24
) -> None:
    """Check an averager: the mean of the models is preserved, ``finish`` leaves them equal."""

    async def program(comm: Communicator) -> None:
        averager = make()
        model = torch.arange(5, dtype=torch.float64) * (comm.rank + 1)
        for step in range(steps):
            before = torch.stack(await comm.allgather(model, "verify")).mean(0)
            model = await averager.average(comm, model, step)
            after = torch.stack(await comm.allgather(model, "verify")).mean(0)
            torch.testing.assert_close(after, before)
            model = model + (comm.rank + 1) * (step + 1)  # the ranks drift apart again
        model = await averager.finish(comm, model)
        for theirs in await comm.allgather(model, "verify"):
            assert torch.equal(theirs, model), "finish left different models"

    for world_size in world_sizes:
        simulate(program, world_size)


# ---- small helpers -------------------------------------------------------------------------------


def _within(difference: Tensor, scale: Tensor, world_size: int) -> bool:
    """Tell whether |difference| <= (P + 2) 2^-24 scale (and a denormal's unit), element-wise."""
    smallest = 2.0**-149 * world_size
    tolerance = (world_size + 2) * 2.0**-24 * scale.double() + smallest
    return bool((difference.double().abs() <= tolerance).all())


def _same(a: Vector, b: Vector) -> bool:
    return torch.equal(a.to_dense(), b.to_dense())


def _digest(vector: Vector) -> str:
    raw = vector.to_dense().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]

