"""Elastic training, built on torchft: ranks may join and leave while training continues.

See ``docs/elastic.md``.
"""

from sparsync.elastic.group import ElasticGroup, make_manager

__all__ = ["ElasticGroup", "make_manager"]
