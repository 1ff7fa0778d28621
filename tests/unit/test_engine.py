import threading

import pytest

from sparsync import ConfigurationError
from sparsync.transports.engine import Engine

SECONDS = 10.0  # far more than any of these takes: a hang fails instead of hanging


@pytest.fixture
def engine():
    engine = Engine("test")
    yield engine
    engine.close()


def test_jobs_run_one_at_a_time_in_the_order_submitted(engine):
    seen = []
    futures = [
        engine.submit(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(50)
    ]
    for future in futures:
        future.result(timeout=SECONDS)
    assert [i for i, _ in seen] == list(range(50))
    assert {thread for _, thread in seen} == {engine._thread.ident} != {threading.get_ident()}


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_an_error_reaches_its_future_and_the_next_job_runs(engine, error):
    def fail():
        raise error

    failed, fine = engine.submit(fail), engine.submit(lambda: 1)
    assert failed.exception(timeout=SECONDS) is error
    assert fine.result(timeout=SECONDS) == 1


def test_a_job_may_submit_another(engine):
    outer = engine.submit(lambda: engine.submit(lambda: "inner"))
    assert outer.result(timeout=SECONDS).result(timeout=SECONDS) == "inner"


def test_close_finishes_what_is_queued():
    engine, release = Engine("test"), threading.Event()
    engine.submit(release.wait)
    last = engine.submit(lambda: "done")
    release.set()
    engine.close()
    assert last.done() and last.result() == "done"
    assert not engine._thread.is_alive()


def test_two_engines_do_not_wait_for_each_other(engine):
    other, met = Engine("other"), threading.Barrier(2)
    futures = [e.submit(lambda: met.wait(SECONDS)) for e in (engine, other)]
    assert sorted(f.result(timeout=SECONDS) for f in futures) == [0, 1]
    other.close()


def test_a_closed_engine_refuses_jobs():
    engine = Engine("test")
    engine.close()
    with pytest.raises(ConfigurationError, match="closed"):
        engine.submit(lambda: None)
