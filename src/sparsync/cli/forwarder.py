"""The lab's wires on kernels without netem: a thread that delays packets.

Each rank's namespace has a TAP device.  The thread reads packets from it, carries them over two virtual
wires, and writes them to the device of their destination (``native/forwarder.cpp``).
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address
from typing import final

from sparsync.cli.lab_links import Link
from sparsync.errors import ConfigurationError
from sparsync.kernels.native import EXTENSION

__all__ = ["Forwarder", "open_device"]

_DEVICE = "/dev/net/tun"
# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_BITS_PER_BYTE = 8


def open_device(interface: str) -> int:
    """Create a TAP device in the calling thread's namespace; it disappears when the file is closed."""
    import fcntl  # not available on Windows, which imports this module too

    try:
        device = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigurationError(
            f"lab: cannot open {_DEVICE} ({error.strerror}), which links with delay or loss need "
            "where the kernel has no netem; load the module tun, or give the container the device"
        ) from None
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), flags))
    # packets stay on one machine, so skip checksums and segmentation, which a network card would do
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return device


@final
class Forwarder:
    """A thread that carries packets among devices until it is closed.

    Args:
        devices: files from ``open_device``, by rank; closed with the forwarder.
        links: the links of the ranks.
        network: the address directly below rank 0's address.
        queue: seconds that a packet may wait for a link.
    """

    def __init__(
        self, devices: Sequence[int], links: Sequence[Link], network: str, queue: float
    ) -> None:
        if EXTENSION is None:
            raise ConfigurationError(
                "lab: links with delay or loss need netem, which this kernel lacks, or the native "
                "kernels, which were not built; install a C++ compiler and sparsync again"
            )
        self._devices, (stop, self._stop) = devices, os.pipe()

        def wire(link: Link, rate: int) -> tuple[float, ...]:
            return rate / _BITS_PER_BYTE, *link.one_wire, queue

        ups = [wire(link, link.up) for link in links]
        downs = [wire(link, link.down) for link in links]

        def run() -> None:
            # give the thread a higher priority than the ranks, so that its timers are not late; without
            # the privilege to do so, the thread competes with the ranks for a core
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            EXTENSION.forward(devices, ups, downs, int(IPv4Address(network)), stop)
            os.close(stop)

        self._thread = threading.Thread(target=run, name="sparsync-forwarder", daemon=True)
        self._thread.start()

    def processor_seconds(self) -> float:
        """Return the thread's processor seconds so far, including the work of delivering packets."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def close(self) -> None:
        """Stop the thread and close the devices, which removes them."""
        os.close(self._stop)
        self._thread.join()
        for device in self._devices:
            os.close(device)
