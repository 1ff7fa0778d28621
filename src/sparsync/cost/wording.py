"""A plan in words: times, rates and parts in units that people read, and the one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from sparsync.cost.predict import Prediction

__all__ = ["format_bandwidth", "format_bytes", "format_percent", "format_seconds", "why"]

_BITS_PER_BYTE = 8


def format_seconds(seconds: float) -> str:
    """Write a duration with three digits.

    Example:
        >>> format_seconds(0), format_seconds(12.34e-6), format_seconds(0.8237), format_seconds(95)
        ('0 s', '12.3 µs', '824 ms', '95 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 0.9995:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds * 1e9)} ns" if seconds else "0 s"


def format_bytes(nbytes: float) -> str:
    """Write a volume with a decimal unit and three digits.

    Example:
        >>> format_bytes(8), format_bytes(12_345_678)
        ('8 B', '12.3 MB')
    """
    return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB"))


def format_bandwidth(bytes_per_second: float) -> str:
    """Write a rate in bits, as networks are sold.

    Example:
        >>> format_bandwidth(1.25e8), format_bandwidth(12_500)
        ('1 Gbit/s', '100 kbit/s')
    """
    units = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
    return _scaled(_BITS_PER_BYTE * bytes_per_second, units)


def format_percent(part: float) -> str:
    """Write a part of 1 with two digits.

    Example:
        >>> format_percent(0.3123), format_percent(0.00042), format_percent(1.0)
        ('31 %', '0.042 %', '100 %')
    """
    return f"{_plain(100 * part, 2)} %"


def why(
    table: Sequence[Prediction],
    dense: Prediction,
    bandwidth: float | None,
    density: float | None,
    partners: int,
) -> str:
    """Say in one sentence what wins, by how much, and from where on something else would.

    Args:
        table: the candidates, the fastest first.
        dense: what all are compared with.
        bandwidth: ``Plan.break_even_bandwidth``.
        density: ``Plan.break_even_density``.
        partners: 1: one rank is alone; 0: there is nothing to exchange.
    """
    best = table[0]
    if partners <= 1:
        reason = (
            "one rank has nobody to exchange with" if partners else "there is nothing to exchange"
        )
        return f"{best.collective} wins here: {reason}"
    if best.collective == "dense":
        rival = next(iter(table[1:]), None)
        if rival is None:
            return (
                f"dense wins here: {format_seconds(best.seconds)}, and nothing else was asked for"
            )
        versus = f"{format_seconds(rival.seconds)} of {rival.collective}, the next best"
        return f"dense wins here: {format_seconds(best.seconds)} against {versus}" + _limits(
            "; sparse would win below", bandwidth, density
        )
    if all(entry.collective != "dense" for entry in table):  # over the budget, or not asked for
        times = [
            f"{format_seconds(p.seconds)} and {format_bytes(p.bytes_sent)}" for p in (best, dense)
        ]
        return f"{best.collective} wins here: {times[0]} against dense's {times[1]}"
    versus = f"{format_seconds(best.seconds)} against dense's {format_seconds(dense.seconds)}"
    return f"{best.collective} wins here: {versus}" + _limits(
        "; dense would win above", bandwidth, density
    )


def _limits(start: str, bandwidth: float | None, density: float | None) -> str:
    """Name the limits that there are."""
    named = [format_bandwidth(bandwidth)] if bandwidth else []
    named += [f"a density of {format_percent(density)}"] if density else []
    return f"{start} {' or '.join(named)}" if named else ""


def _scaled(number: float, units: Sequence[str]) -> str:
    last = len(units) - 1
    exponent = 0
    while number >= 999.5 and exponent < last:
        number, exponent = number / 1000, exponent + 1
    return f"{_three(number)} {units[exponent]}"


def _three(number: float) -> str:
    return _plain(number, 3)


def _plain(number: float, digits: int) -> str:
    """Write significant digits without an exponent."""
    return f"{float(f'{number:.{digits}g}'):,.12g}"
