"""Test that on SIGTERM with ``elastic=``, the rank leaves and the program's handler runs."""

import signal

import pytest

pytest.importorskip("torchft")

from tests.fresh import run_python
from tests.tables import cases

BEGIN = """
import ctypes, os, signal, sys, threading, time
from sparsync.elastic import notice
notice._LEAVES = notice._NATIVE = 0.5
said = []
def leave(seconds):
    return "" if ours._over.wait(seconds) else "this rank has not left"
ours = notice.Notice(lambda: [said.append("leaves")] != [], leave)
"""


def ends_with(program):
    done = run_python(BEGIN + program)
    return done.returncode, done.stdout, done.stderr


def test_a_handler_that_is_set_later_has_the_signal_after_the_rank_has_left():
    code, said, _ = ends_with("""
signal.signal(signal.SIGTERM, lambda *_: said.append("theirs"))
ours.watch()
os.kill(os.getpid(), signal.SIGTERM)
said.append("left")
ours.pass_on()
print(*said, ours.came)
""")
    assert (code, said.split()) == (0, ["leaves", "left", "theirs", "True"])


def test_a_handler_that_was_not_seen_has_the_signal_once():
    code, said, _ = ends_with("""
signal.signal(signal.SIGTERM, lambda *_: said.append("theirs"))
os.kill(os.getpid(), signal.SIGTERM)
ours._over.wait(10)
time.sleep(2 * notice._NATIVE)
print(*sorted(said), ours.came)
""")
    assert (code, said.split()) == (0, ["leaves", "theirs", "True"])


def test_a_handler_that_is_set_later_stays_after_close():
    code, said, _ = ends_with("""
def theirs(*_): pass
signal.signal(signal.SIGTERM, theirs)
ours.close()
print(signal.getsignal(signal.SIGTERM) is theirs)
ours.watch()
ours.close()
print(signal.getsignal(signal.SIGTERM) is theirs)
""")
    assert (code, said.split()) == (0, ["True", "True"])


@cases(
    "time.sleep(60)",
    # block in native code that no signal interrupts, by locking a mutex twice
    "mutex = ctypes.create_string_buffer(128)\n"
    "for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(mutex)",
)
def test_a_rank_that_takes_no_step_ends_all_the_same(state):
    code, _, words = ends_with(f"""
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
{state}
""")
    assert code == -signal.SIGTERM
    assert words.startswith("sparsync: this rank has not left") and words.count("\n") == 1


def test_the_signal_is_passed_on_at_once_where_the_handle_is_gone():
    code, said, words = ends_with("""
ours._start = lambda: False
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
""")
    assert (code, said, words) == (-signal.SIGTERM, "", "")
