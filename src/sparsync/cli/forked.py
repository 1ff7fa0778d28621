"""Import the modules that every local rank needs; only the server that forks ranks imports this module.

Nothing that is imported here ever becomes garbage, so it is kept out of garbage collections.  A rank that
collected it would also copy all the memory that it shares with the server, which takes 0.4 s.
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
