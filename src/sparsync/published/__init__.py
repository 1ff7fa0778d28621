"""One room per paper: its algorithm, settings and words.  Training with the defaults imports none."""
