"""The life of a gradient: DDP's buckets, replicas, shards, and the checks between them."""
