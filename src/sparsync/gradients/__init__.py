"""The life of a gradient: DDP's buckets, replicas, shards, and what is checked on the way."""
