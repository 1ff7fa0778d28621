"""A stand-in for a GPU: tensors that claim to be on ``cuda:0``, and refuse operands from the CPU.

Without a GPU, these tensors reveal two errors that would occur on a GPU: operands on different
devices, and reads of device memory from Python. ``memory`` counts the bytes that tensors hold on
the device, ``waits`` the operations for which the host would wait until the device has caught up,
and ``passes`` the passes over device memory. All computation is on the CPU, and there are no
streams. As on CUDA, a division by a number multiplies by its rounded reciprocal. With
``far_device(triton=True)``, the Triton kernels run in Triton's interpreter.
"""

import importlib
import threading
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sparsync import kernels

__all__ = ["FAR", "Memory", "far", "far_device", "launches", "memory", "passes", "waits"]

FAR = torch.device("cuda", 0)
# operations that copy between devices, by name
_CROSSING = ("copy_", "_to_copy")
# The host reads the results of these operations: a number (``item``, ``bool``), or the number of
# elements.
_READS = ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero")
_READS += ("repeat_interleave", "unique_consecutive", "_unique2")
# operations that touch no memory
_FREE = ("alias", "detach", "empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view")
# modules whose kernels are launched, beginning with the module that defines the launch
_LAUNCHING = ("sparsync.kernels.triton", "sparsync.kernels.triton_levels")


class Memory:
    """The bytes of device memory that tensors hold, and the maximum since ``reset``."""

    def __init__(self):
        self._holders, self._lock = Counter(), threading.RLock()  # tensors by storage
        self.now = self.most = 0

    def reset(self):
        """Reset the maximum."""
        self.most = self.now

    def hold(self, far, near):
        """Count a tensor's storage while the tensor lives."""
        storage = near.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        weakref.finalize(far, self._release, key, size)
        with self._lock:
            self._holders[key] += 1
            self.now += size * (self._holders[key] == 1)
            self.most = max(self.most, self.now)

    def _release(self, key, size):
        with self._lock:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.now -= size


memory = Memory()
# number of waits for the device, by operation; for tests on one thread
waits = Counter()
# bytes of each operation's largest tensor in device memory, summed by operation and Triton kernel;
# divided by a vector's bytes, these are the passes over the vector
passes = Counter()
launches = Counter()  # the number of launches, by Triton kernel


class _Far(Tensor):
    """A tensor that claims to be on the device; the tensor ``near`` holds its elements."""

    @staticmethod
    def __new__(cls, near):
        # for the device itself, torch would ask its driver
        like = {"device": "meta", "dtype": near.dtype, "strides": near.stride()}
        like["storage_offset"] = near.storage_offset()
        far = Tensor._make_wrapper_subclass(cls, near.shape, **like)
        far.near = near
        memory.hold(far, near)
        return far

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _compute(function, args, kwargs or {})

    device, is_cuda, is_cpu, is_meta = FAR, True, False, False
    reciprocals = True

    def to(self, *given, **named):
        """Return the tensor itself if torch would do so on a device."""
        alike = given and all(one in (FAR, self.dtype) for one in given) and not named
        return self if alike else super().to(*given, **named)

    def record_stream(self, _):
        """Do nothing, because there is one stream."""

    def tolist(self):
        waits["tolist"] += 1
        return self.near.tolist()

    def numpy(self, *_):
        raise TypeError("memory of the device cannot be read by NumPy")

    def data_ptr(self):
        raise TypeError("memory of the device cannot be read by C++ of the CPU")


class _Stream:
    """Return the only stream."""

    def synchronize(self):
        """Do nothing, because everything is done at once."""


def far(tensor):
    """Return a tensor on the device with the elements of one on the CPU."""
    return _Far(tensor.detach().clone())


@contextmanager
def far_device(triton=False, reciprocals=True):
    """Allow tensors to be made on the device and moved to it, with PyTorch's or Triton's kernels.

    Without ``reciprocals``, divisions by numbers are exact, as on the CPU.
    """

    def tensor(*args, device=None, **kwargs):
        made = plain_tensor(*args, **kwargs)
        return made if device is None else made.to(device)

    def run(thread):
        with _Everywhere():
            plain_run(thread)

    def launch(kernel, programs, *arguments, **constants):
        if programs:
            there = [x for x in arguments if isinstance(x, _Far)]
            passes[kernel.__name__] += max(x.nbytes for x in there)
            launches[kernel.__name__] += 1
            with _disable_current_modes():
                plain_launch(kernel, programs, *_mapped(arguments, _near), **constants)

    backend = importlib.import_module(_LAUNCHING[0]) if triton else None
    plain_launch = backend and backend._launch
    plain_tensor, plain_run = torch.tensor, threading.Thread.run
    with (
        mock.patch.object(threading.Thread, "run", run),  # a mode is its thread's own
        mock.patch.object(torch, "tensor", tensor),  # modes do not see it
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch.object(torch.cuda, "current_stream", lambda _: _Stream()),
        mock.patch.object(torch.cuda, "stream", lambda _: nullcontext()),
        mock.patch.object(kernels, "_triton", lambda _: backend),
        mock.patch.object(_Far, "reciprocals", reciprocals),
        ExitStack() as patches,
        _Everywhere(),
    ):
        for name in _LAUNCHING if triton else ():
            module = importlib.import_module(name)
            patches.enter_context(mock.patch.object(module, "_launch", launch))
        yield


class _Everywhere(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _compute(function, args, kwargs or {})


def _compute(function, args, kwargs):
    name = function.__name__.partition(".")[0]
    given = list(_tensors((args, kwargs)))
    there = [x for x in given if isinstance(x, _Far)]
    here = [x for x in given if not isinstance(x, _Far) and x.dim()]
    crosses = name in _CROSSING or (name.startswith("index") and isinstance(args[0], _Far))
    if there and here and not crosses:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    if there and (waited := _waits_for(name, args, kwargs)):
        waits[waited] += 1
    if kwargs.get("pin_memory"):  # for which a driver is asked
        kwargs = {**kwargs, "pin_memory": False}
    asked = kwargs.get("device")
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    # C++ code that reads a tensor's device sees the device on which the tensor was made
    moves = bool(there) if asked is None else torch.device(asked).type in (FAR.type, "meta")
    near_args, near_kwargs = _mapped((args, kwargs), _near)
    divides = name in ("div", "div_") and isinstance(args[0], _Far)
    if divides and not isinstance(args[1], _Far) and _Far.reciprocals:
        function, near_args = _multiplication(function, *near_args)
    result = function(*near_args, **near_kwargs)
    crossing = crosses and (bool(here) or (asked is not None and not moves))
    if (there or (crossing and moves)) and not function.is_view and name not in _FREE:
        sizes = [x.nbytes for x in (*given, *_tensors(result))]
        passes["copy from or to the host" if crossing else name] += max(sizes)
    if not moves:
        return result
    # in-place operations return the same tensor
    by_memory = {id(x.near): x for x in there} | {id(x): x for x in here}
    return _mapped(result, lambda x: by_memory[id(x)] if id(x) in by_memory else _Far(x))


def _multiplication(function, dividend, divisor):
    """Return the product that CUDA computes for a division by a number, and its factors."""
    product = getattr(torch.ops.aten, function.__name__.partition(".")[0].replace("div", "mul"))
    wide = torch.promote_types(dividend.dtype, torch.float32)
    factor = 1 / torch.tensor(float(divisor), dtype=wide)
    return getattr(product, function._overloadname), (dividend, factor.item())


def _near(x):
    return getattr(x, "near", x)


# arguments and results contain no other containers; torch.utils._pytree takes three times as long
def _tensors(tree):
    """Yield the tensors of nested lists, tuples and dictionaries."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(one)


def _mapped(tree, change):
    """Apply a change to each tensor in nested lists, tuples and dictionaries."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _mapped(one, change) for key, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        found = [_mapped(one, change) for one in tree]
        return found if type(tree) is list else tuple(found)
    return tree


def _waits_for(name, args, kwargs):
    """Return the name of the wait that an operation on device tensors would cause, if any."""
    if name in _READS:
        return name
    mask = (torch.bool, torch.uint8)
    if name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
        isinstance(one, Tensor) and one.dtype in mask for one in args[1] or ()
    ):
        return "index by a mask"
    if name == "copy_":
        target, source, *rest = args
        blocking = not (rest[0] if rest else kwargs.get("non_blocking", False))
        if blocking and isinstance(target, _Far) != isinstance(source, _Far):
            return "copy to the device" if isinstance(target, _Far) else "copy to the host"
    if name == "_to_copy" and not kwargs.get("non_blocking", False):
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cpu":
            return "copy to the host"
    return ""
