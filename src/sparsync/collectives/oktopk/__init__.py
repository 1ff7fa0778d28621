"""Ok-Topk: the O(k) sparse allreduce (Li & Hoefler, PPoPP 2022)."""
