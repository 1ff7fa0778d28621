"""Test the ledger's records, and the parts of messages."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import SparseVector
from sparsync.errors import WireFormatError
from sparsync.transports.ledger import Ledger, Parts, Raw, Several, Traffic
from sparsync.wire import Coo
from sparsync.wire.codec import MessageFraming


def test_books_of_two_steps():
    ledger = Ledger()
    ledger.sent("split", 24, Parts(8, 8, 8))
    ledger.received("split", 16)
    ledger.sent("sizes", 8, Parts(control=8), messages=0)
    assert ledger.current_step() == Traffic(32, 16, 1, 1, Parts(8, 8, 8, 8))
    ledger.begin_step(1)
    assert (ledger.step, ledger.phases) == (1, {})
    ledger.sent("split", 10, Parts(10))
    ledger.received("split", 90, messages=3)
    assert ledger.last_step.sent == 32
    assert ledger.current_step() == Traffic(10, 90, 1, 3, Parts(10))
    assert ledger.total().sent == 42
    ledger.begin_step(2)
    assert (ledger.sent_max, ledger.received_max) == (32, 90)
    assert ledger.by_phase() == {
        "split": Traffic(34, 106, 2, 4, Parts(18, 8, 8)),
        "sizes": Traffic(8, 0, 0, 0, Parts(control=8)),
    }
    assert ledger.total() == Traffic(42, 106, 2, 4, Parts(18, 8, 8, 8))


def test_what_is_sent_outside_of_steps_counts_for_none():
    ledger = Ledger()
    ledger.sent("agreement", 100, Parts(control=100))
    assert ledger.set_up().sent == 100
    ledger.sent("split", 24, Parts(value=24))
    with ledger.outside_steps():
        ledger.sent("average", 1000, Parts(value=1000))
        ledger.received("average", 500)
    ledger.sent("split", 6, Parts(value=6))
    ledger.begin_step(1)
    assert (ledger.last_step.sent, ledger.sent_max, ledger.received_max) == (30, 30, 0)
    assert ledger.of_steps() == Traffic(130, 0, 3, 0, Parts(value=30, control=100))
    assert ledger.outside == Traffic(1000, 500, 1, 1, Parts(value=1000))
    assert ledger.total().sent == 1130 and ledger.by_phase()["average"].sent == 1000


def test_traffic_as_plain_numbers():
    parts = {"header": 1, "index": 0, "value": 2, "control": 0}
    counts = {"sent": 3, "received": 4, "messages_sent": 1, "messages_received": 2}
    assert Traffic(3, 4, 1, 2, Parts(1, 0, 2)).as_dict() == {**counts, "sent_parts": parts}


def test_time_that_another_thread_books_is_not_taken_from_a_stage():
    """Autograd's thread accumulates while the engine's communicates; each stage gets its full time."""
    ledger = Ledger()
    before = ledger.booked
    other = threading.Thread(target=ledger.spent, args=("accumulate", 5.0))
    other.start()
    other.join()
    assert ledger.booked == before
    ledger.spent("communicate", 2.0)
    assert ledger.booked == before + 2.0
    assert ledger.stages == {"accumulate": 5.0, "communicate": 2.0}


def message(count: int) -> torch.Tensor:
    return Coo().encode(SparseVector(torch.arange(count), torch.ones(count), 100)).payload


def test_raw_bytes_are_booked_as_said():
    payload = torch.zeros(12, dtype=torch.uint8)
    assert Raw("value").length(payload) == 12
    assert Raw("value").parts(payload) == Parts(value=12)
    assert Raw("control").parts(payload) == Parts(control=12)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 5))
def test_several_cuts_messages_apart_and_measures_them_whatever_follows(counts, rest):
    messages = [message(count) for count in counts]
    payload = torch.cat([*messages, torch.empty(0, dtype=torch.uint8)])
    capacities = [m.numel() + 40 for m in messages]
    several = Several(MessageFraming(Coo()), capacities)
    assert all(torch.equal(b, m) for b, m in zip(several.cut(payload), messages, strict=True))
    garbage = torch.full((rest,), 0xFF, dtype=torch.uint8)
    assert several.length(torch.cat([payload, garbage])) == sum(m.numel() for m in messages)
    assert several.parts(payload) == Parts(8 * len(counts), 4 * sum(counts), 4 * sum(counts))


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


def test_bytes_left_over_after_the_last_message_are_refused():
    payload = torch.cat([message(1), message(2)])
    payload[16 + 4] -= 1  # the count of the second message, whose bytes stay
    with pytest.raises(WireFormatError, match="2 messages claim 32 bytes of 40"):
        Several(MessageFraming(Coo()), [24, 24]).cut(payload)


def test_fixed_blocks_that_the_buffer_lacks_or_exceeds_are_refused():
    several = Several(Raw("control"), [1, 2])
    with pytest.raises(WireFormatError, match="claims 2 bytes where at most 1 can be"):
        several.cut(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(WireFormatError, match="2 messages claim 3 bytes of 4"):
        several.cut(torch.zeros(4, dtype=torch.uint8))


def test_a_buffer_that_ends_before_the_last_header_is_refused():
    with pytest.raises(WireFormatError, match="cannot hold a message header"):
        Several(MessageFraming(Coo()), [24, 24]).cut(message(2))
