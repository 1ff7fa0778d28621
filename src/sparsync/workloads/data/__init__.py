"""Readers of data sets in the formats that they are published in; nothing is ever downloaded.

One file per format; ``docs/data.md`` says which files each expects.  A reader's ``Samples`` answers
with batches of tensors.
"""
