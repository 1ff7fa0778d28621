"""Test that the public contracts can fail: each finds a violation and names the case."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sparsync import Algorithm, Reduced, SparseVector, testing
from sparsync.averaging import LocalSgd
from sparsync.collectives import Allgather, Collective
from sparsync.errors import DeadlineError, PeerError
from sparsync.selection import Exact, Selector
from sparsync.transports.communicator import Communicator
from sparsync.transports.groups import SoloCommunicator
from sparsync.wire import Coo
from sparsync.wire.codec import Codec, Encoded
from tests.tables import cases


@dataclass(frozen=True)
class Calls:
    count: int = 0


class Broken(Selector):
    """The selector ``Exact``, whose result ``change`` modifies."""

    def __init__(self, change):
        self.change, self.exact, self.state = change, Exact(), Calls()

    def select(self, accumulated, k, step, collected=None):
        selected = self.exact.select(accumulated, k, step)
        self.state = Calls(self.state.count + 1)
        return self.change(self, accumulated, selected)


def without_nan(self, accumulated, selected):
    return SparseVector.from_dense(selected.to_dense().nan_to_num(0.0))


def one_more(self, accumulated, selected):
    return Exact().select(accumulated, selected.nnz + 1, 0) if selected.nnz else selected


def rounded(self, accumulated, selected):
    return SparseVector(selected.indices, selected.values.bfloat16().float(), selected.size)


def with_a_zero(self, accumulated, selected):
    zeros = (accumulated == 0).nonzero().flatten()[:1]
    indices = torch.cat([selected.indices, zeros]).sort().values
    return SparseVector(indices, accumulated[indices], selected.size)


def fewer_when_new(self, accumulated, selected):
    return selected if self.state.count != 2 or selected.nnz < 2 else selected.top(1)


@cases(
    (without_nan, "a NaN was not selected"),
    (one_more, "case 'noise', step 0: 41 entries, not 40"),
    (rounded, "values"),
    (with_a_zero, "a zero was selected"),
)
def test_check_selector_finds(change, words):
    testing.check_selector(lambda: Broken(lambda *given: given[2]))
    with pytest.raises(AssertionError, match=words):
        testing.check_selector(lambda: Broken(change))


def test_check_selector_finds_a_state_that_is_not_restored():
    class Forgetful(Broken):
        def load_state_dict(self, state):
            self.state = Calls(7)

    testing.check_selector(lambda: Broken(fewer_when_new))
    with pytest.raises(AssertionError, match="reloaded differs"):
        testing.check_selector(lambda: Forgetful(fewer_when_new))


class Wrapped(Coo):
    """A codec like Coo, with the defects of subclasses."""

    def encode(self, vector):
        return Coo().encode(vector)

    def decode(self, payload, size):
        return Coo().decode(payload, size)

    def layout(self, header):
        return Coo().layout(header)


class WrongLength(Wrapped):
    def layout(self, header):
        return replace(Coo().layout(header), header=9)


class Trusting(Wrapped):
    def decode(self, payload, size):
        try:
            return super().decode(payload, size)
        except ValueError:
            return SparseVector.empty(size, torch.zeros(0))


class Unsorted(Wrapped):
    """A codec that returns indices in the order of the message."""

    def decode(self, payload, size):
        header, body = self.body(payload, size)
        indices, values = body.split([4 * header.entries, body.numel() - 4 * header.entries])
        indices, values = indices.clone().view(torch.int32), values.clone().view(header.dtype)
        return SparseVector(indices.long(), values, size)


class OfAnother(Codec):
    format = Coo.format

    encode, decode, layout = Wrapped.encode, Wrapped.decode, Wrapped.layout


class Rounding(Wrapped):
    def encode(self, vector):
        values = vector.values.to(torch.bfloat16).to(vector.values.dtype)
        return Encoded(Coo().encode(replace(vector, values=values)).payload, vector)


class Doubling(Wrapped):
    exact = False

    def encode(self, vector):
        return Coo().encode(replace(vector, values=-2 * vector.values))


class Overflowing(Wrapped):
    exact = False

    def encode(self, vector):
        values = vector.values.to(torch.float16).to(vector.values.dtype)
        return Coo().encode(replace(vector, values=values))


class Shrinking(Wrapped):
    def entries_within(self, nbytes, size, dtype=torch.float32):
        return max(super().entries_within(nbytes, size, dtype) - 1, 0)


@cases(
    (WrongLength(), "nbytes is wrong"),
    (Trusting(), "bytes were accepted"),
    (Unsorted(), r"bit \d of byte \d+ of \d+, flipped, gave ConfigurationError"),
    (OfAnother(), r"OfAnother\(\): format 1 belongs to coo; choose another number"),
    (Rounding(), "decode differs from decoded"),
    (Doubling(), "the error exceeds the vector"),
    (Overflowing(), r"3\.4\S+, 1\.0, inf.* \[inf, 1\.0, inf, .* finite values must stay finite"),
    (Shrinking(), "bytes"),
)
def test_check_codec_finds(codec, words):
    testing.check_codec(Wrapped())
    with pytest.raises(AssertionError, match=words):
        testing.check_codec(codec)


class Changed(Collective):
    """Allgather, except that ``change`` modifies its result."""

    def __init__(self, change):
        self.change = change

    async def reduce(self, comm, selected, k, step):
        reduced = await Allgather().reduce(comm, selected, k, step)
        return self.change(comm, selected, reduced)


def all_delivered(comm, selected, reduced):
    """Violate the contract: cut the total, with no rank keeping the rest."""
    return Reduced(reduced.total.top(5), reduced.delivered)


def own_total(comm, selected, reduced):
    return Reduced(reduced.total.top(5 + comm.rank), reduced.delivered)


def overwritten(comm, selected, reduced):
    selected.values.zero_()
    return reduced


@cases(
    (all_delivered, "the total is not the sum of the delivered vectors"),
    (own_total, "totals differ between ranks"),
    (overwritten, "the input was modified"),
)
def test_check_collective_finds(change, words):
    testing.check_collective(lambda: Changed(lambda *given: given[2]), world_sizes=(3,))
    with pytest.raises(AssertionError, match=words):
        testing.check_collective(lambda: Changed(change), world_sizes=(3,))


def test_check_algorithm_finds_mass_that_is_lost_and_nan_that_is_dropped():
    lossy = Algorithm("lossy", Exact, lambda: Changed(all_delivered))
    with pytest.raises(AssertionError, match=r"lossy, P = 2.* mass appeared or was lost"):
        testing.check_algorithm(lossy, world_sizes=(2,))
    deaf = Algorithm("deaf", lambda: Broken(without_nan), Allgather)
    with pytest.raises(AssertionError, match="deaf: NaN on one rank was not refused by all"):
        testing.check_algorithm(deaf, world_sizes=(2,))


class Drifting(LocalSgd):
    async def average(self, comm, vector, step):
        return await super().average(comm, vector, step) + 1


class Unfinished(LocalSgd):
    async def conclude(self, comm, vector, step):
        return vector


@cases((Drifting, 8, "step 0: the mean moved"), (Unfinished, 7, "conclude left different models"))
def test_check_averager_finds(averager, steps, words):
    assert testing.check_averager(LocalSgd, world_sizes=(3,)) < 1e-12
    with pytest.raises(AssertionError, match=words):
        testing.check_averager(averager, world_sizes=(3,), steps=steps)


class Ending(SoloCommunicator):
    """A communicator of one of two ranks; waiting for the other rank ends with ``outcome``."""

    def __init__(self, rank, outcome, closed):
        Communicator.__init__(self, rank, 2, torch.device("cpu"))
        self.outcome, self.closed = outcome, closed

    def start_recv(self, source, capacity, phase, framing):
        return SimpleNamespace(wait=self.outcome)

    def close(self):
        super().close()
        self.closed.append(self.rank)


@cases(
    (DeadlineError("rank 0, step 0, phase 'check'"), None),
    (PeerError("step 0: something went wrong"), "does not name rank 0, check"),
    (None, "nobody sent"),
)
def test_check_deadline_closes_both_and_finds(error, words):
    closed, outcome = [], Mock(side_effect=error)
    finds = pytest.raises(AssertionError, match=words) if words else nullcontext()
    with finds:
        testing.check_deadline(lambda: [Ending(rank, outcome, closed) for rank in range(2)])
    assert closed == [0, 1]
