"""Tests in this folder may run on every rank."""

from tests.on_ranks import together  # noqa: F401
