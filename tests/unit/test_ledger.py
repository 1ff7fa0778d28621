import threading

from sparsync.transports.ledger import Ledger, Parts, Traffic


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
    ledger.begin_step(2)
    assert (ledger.sent_max, ledger.received_max) == (32, 90)
    assert ledger.by_phase() == {
        "split": Traffic(34, 106, 2, 4, Parts(18, 8, 8)),
        "sizes": Traffic(8, 0, 0, 0, Parts(control=8)),
    }
    assert ledger.total() == Traffic(42, 106, 2, 4, Parts(18, 8, 8, 8))


def test_the_open_step_counts_in_the_totals_once():
    ledger = Ledger()
    for step in range(1, 4):
        ledger.sent("dense", 100, Parts(value=100))
        assert ledger.total().sent == 100 * step
        ledger.begin_step(step)
        assert ledger.total().sent == 100 * step


def test_traffic_as_plain_numbers():
    assert Traffic(3, 4, 1, 2, Parts(1, 0, 2)).as_dict() == {
        "sent": 3,
        "received": 4,
        "messages_sent": 1,
        "messages_received": 2,
        "sent_parts": {"header": 1, "index": 0, "value": 2, "control": 0},
    }


def test_time_that_another_thread_books_is_not_taken_from_a_stage():
    """Autograd's thread accumulates while the engine's communicates: both take their whole time."""
    ledger = Ledger()
    before = ledger.booked
    other = threading.Thread(target=ledger.spent, args=("accumulate", 5.0))
    other.start()
    other.join()
    assert ledger.booked == before
    ledger.spent("communicate", 2.0)
    assert ledger.booked == before + 2.0
    assert ledger.stages == {"accumulate": 5.0, "communicate": 2.0}
