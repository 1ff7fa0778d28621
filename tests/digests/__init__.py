"""Digests of a training's results, which stay the same while the code changes."""
