"""One profile for all property tests: the same examples on every run and machine, no deadline."""

import os

import torch
from hypothesis import settings

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, max_examples=100
)
settings.load_profile("repeatable")
torch.set_num_threads(1)  # the vectors are small; more threads only wait for each other
if not torch.cuda.is_available():
    # Triton decides when it is imported whether it interprets; some test may import it before those
    # of its kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")
