"""What the command line runs: training, benchmarks, and the launcher of local ranks."""
