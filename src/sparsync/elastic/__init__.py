"""Elastic training continues while ranks join and leave; see ``docs/elastic.md``.  It uses torchft."""

from sparsync.elastic.group import ElasticGroup, make_manager

__all__ = ["ElasticGroup", "make_manager"]
