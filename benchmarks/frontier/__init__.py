"""Bytes and loss with AdamW and Muon: the tasks, methods and runs of ``benchmarks/frontier.py``."""
