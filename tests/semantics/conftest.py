"""The tests of this folder run on two ranks."""

from tests.on_ranks import together  # noqa: F401
