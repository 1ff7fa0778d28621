"""Digests of training results, which must not change when the code is refactored."""
