import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import SparseVector
from sparsync.errors import WireFormatError
from sparsync.transports.ledger import Parts, Raw, Several
from sparsync.wire import Coo
from sparsync.wire.base import MessageFraming


def message(count: int) -> torch.Tensor:
    return Coo().encode(SparseVector(torch.arange(count), torch.ones(count), 100)).payload


def test_raw_bytes_are_booked_as_said():
    payload = torch.zeros(12, dtype=torch.uint8)
    assert Raw("value").length(payload) == 12
    assert Raw("value").parts(payload) == Parts(value=12)
    assert Raw("control").parts(payload) == Parts(control=12)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 5))
def test_several_cuts_messages_apart_whatever_follows_them(counts, rest):
    messages = [message(count) for count in counts]
    garbage = torch.full((rest,), 0xFF, dtype=torch.uint8)
    buffer = torch.cat([*messages, garbage])
    capacities = [m.numel() + 40 for m in messages]
    several = Several(MessageFraming(Coo()), capacities)
    blocks = several.cut(buffer)
    assert all(torch.equal(b, m) for b, m in zip(blocks, messages, strict=True))
    assert several.length(buffer) == sum(m.numel() for m in messages)
    parts = several.parts(torch.cat([*messages, garbage[:0]]))
    assert parts == Parts(8 * len(counts), 4 * sum(counts), 4 * sum(counts))


def test_several_fixed_blocks_are_cut_by_capacity():
    blocks = Several(Raw("control"), [1, 0, 2]).cut(torch.arange(3, dtype=torch.uint8))
    assert [b.tolist() for b in blocks] == [[0], [], [1, 2]]


@pytest.mark.parametrize("capacity", [15, 23])
def test_a_message_longer_than_its_capacity_is_refused(capacity):
    with pytest.raises(WireFormatError, match=f"claims 24 bytes where at most {capacity} can be"):
        Several(MessageFraming(Coo()), [capacity]).cut(message(2))


def test_a_message_longer_than_the_buffer_is_refused():
    with pytest.raises(WireFormatError, match="claims 24 bytes where at most 20 can be"):
        Several(MessageFraming(Coo()), [100]).cut(message(2)[:20])


def test_a_buffer_that_ends_before_the_last_header_is_refused():
    with pytest.raises(WireFormatError, match="cannot hold a message header"):
        Several(MessageFraming(Coo()), [24, 24]).cut(message(2))
