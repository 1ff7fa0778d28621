"""Bytes against loss under AdamW and Muon: the tasks, methods and runs of ``benchmarks/frontier.py``."""
