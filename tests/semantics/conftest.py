"""Run this folder's tests on two ranks."""

from tests.on_ranks import together  # noqa: F401
