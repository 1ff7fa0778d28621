"""Imported by the server that forks local ranks: modules that every rank needs, for all of them once.

Nothing that is imported here is ever garbage.  If ranks looked for garbage in it, they would also copy
all memory that they share with the server: 0.4 s per rank.
"""

import gc
from importlib import import_module

__all__: list[str] = []

gc.disable()
# sparsync imports torch; making an optimizer imports torch._dynamo, which would take each rank 3 s
for _name in ("sparsync", "torch._dynamo"):
    import_module(_name)
gc.freeze()
gc.enable()
