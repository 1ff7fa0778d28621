"""Digests of what a training computes: they stay the same while the code around it changes."""
