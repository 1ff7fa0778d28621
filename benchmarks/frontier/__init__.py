"""The tasks, methods and runs of ``benchmarks/frontier.py``: bytes and loss with AdamW and Muon."""
