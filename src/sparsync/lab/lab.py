"""``Lab``: builds the network, counts what crosses it, and takes it away."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import final

from sparsync.errors import ConfigurationError
from sparsync.lab.commands import run_command
from sparsync.lab.namespaces import Namespace, require_linux
from sparsync.lab.network import Network, parse_rate
from sparsync.lab.privileges import explain_refusal
from sparsync.lab.seat import Seat
from sparsync.lab.traffic import LinkTraffic, counters_here

__all__ = ["Lab"]


@final
class Lab:
    """A network of shaped links between local ranks, for the time of a ``with`` block.

    ::

        with Lab(4, "200mbit") as lab:
            launch(function, 4, lab=lab)
            lab.traffic()

    Args:
        ranks: number of ranks P.
        rate: of every link, in each direction, as "200mbit"; see ``parse_rate``.
        burst_bytes: bucket of ``tbf``; None: see ``default_burst``.
        command_timeout: seconds that each command of iproute2 may take.

    Raises:
        ConfigurationError: an argument cannot work, iproute2 is missing, or the kernel forbids
            network namespaces to this process.
        LabError: a command failed.

    Cost: about 7 commands of some milliseconds per rank.
    State: the namespaces, held by open files of this process; no name, file or mount.
    """

    def __init__(
        self,
        ranks: int,
        rate: str,
        *,
        burst_bytes: int | None = None,
        command_timeout: float = 10.0,
    ) -> None:
        self.network = Network(ranks, parse_rate(rate), burst_bytes or 0)
        self._command_timeout = command_timeout
        self._bridge: Namespace | None = None
        self._ranks: list[Namespace] = []

    @property
    def ranks(self) -> int:
        """Number of ranks P."""
        return self.network.ranks

    @property
    def bits_per_second(self) -> int:
        """Rate of every link, in each direction."""
        return self.network.bits_per_second

    @property
    def burst_bytes(self) -> int:
        """Bytes that a link lets through at once after a silence; deduct them from wire times."""
        return self.network.burst_bytes

    def __enter__(self) -> Lab:
        require_linux()
        if self._bridge is not None:
            raise ConfigurationError("lab: this one is open already; make another")
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all namespaces; they are gone when the ranks inside are."""
        for namespace in (*self._ranks, *([self._bridge] if self._bridge else ())):
            namespace.close()
        self._bridge, self._ranks = None, []

    def seat(self, rank: int) -> Seat:
        """Return what a process needs to enter the namespace of a rank."""
        self._open()
        return Seat(self._ranks[rank].path, self.network.address(rank))

    def traffic(self) -> list[LinkTraffic]:
        """Return what has crossed each rank's link since the lab was opened, as the kernel counts."""
        counters = self._open().run(counters_here)
        ends = [counters[self.network.bridge_end(rank)] for rank in range(self.ranks)]
        # what the bridge's end receives is what the rank sent
        return [LinkTraffic(sent=end.received, received=end.sent) for end in ends]

    def _open(self) -> Namespace:
        if self._bridge is None:
            raise ConfigurationError("lab: it is not open; use it inside `with Lab(...) as lab:`")
        return self._bridge

    def _build(self) -> None:
        try:
            self._bridge = Namespace()
            for _ in range(self.ranks):
                self._ranks.append(Namespace())
        except PermissionError as error:
            raise explain_refusal(str(error)) from None
        self._run(self._bridge, self.network.bridge_commands())
        for rank, namespace in enumerate(self._ranks):
            self._run(self._bridge, self.network.link_commands(rank, namespace.path))
            self._run(namespace, self.network.rank_commands(rank))
            namespace.run(self._write_settings)

    def _run(self, namespace: Namespace, commands: list[str]) -> None:
        def run_all() -> None:
            for command in commands:
                run_command(command, self._command_timeout)

        namespace.run(run_all)

    def _write_settings(self) -> None:
        for path, text in self.network.settings().items():
            Path(path).write_text(text)
