"""Ranks come and go, and training goes on; see ``docs/elastic.md``.  Built on torchft."""

from sparsync.elastic.group import ElasticGroup, make_manager

__all__ = ["ElasticGroup", "make_manager"]
