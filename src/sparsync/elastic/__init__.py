"""Ranks come and go, and training goes on; see ``docs/elastic.md``.  Built on torchft."""

from sparsync.elastic.group import ElasticGroup

__all__ = ["ElasticGroup"]
