"""Public contract checks: run them on your own selector, codec, collective, transport or averager.

If a check fails, ``check_*`` raises an ``AssertionError`` that names the case.  The ``exercise_*``
coroutines run the same checks on one rank of any ``Communicator``.  Run them with ``sparsync.simulate``
or, on a real transport, with ``sparsync.transports.driver.run``.  They return digests, which are equal
on every transport.
"""

from sparsync.testing.averaging import check_averager
from sparsync.testing.cases import Case, cases
from sparsync.testing.selection import check_selector
from sparsync.testing.sums import (
    check_algorithm,
    check_collective,
    exercise_algorithm,
    exercise_collective,
)
from sparsync.testing.transports import check_communicator, check_deadline, exercise_communicator
from sparsync.testing.wire import check_codec

__all__ = [
    "Case",
    "cases",
    "check_algorithm",
    "check_averager",
    "check_codec",
    "check_collective",
    "check_communicator",
    "check_deadline",
    "check_selector",
    "exercise_algorithm",
    "exercise_collective",
    "exercise_communicator",
]
