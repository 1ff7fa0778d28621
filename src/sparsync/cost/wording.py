"""Formats times, volumes, rates and fractions in readable units."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_bandwidth", "format_bytes", "format_percent", "format_seconds"]

_BITS_PER_BYTE = 8


def format_seconds(seconds: float) -> str:
    """Format a duration with three digits.

    Example:
        >>> format_seconds(0), format_seconds(12.34e-6), format_seconds(0.8237), format_seconds(95)
        ('0 s', '12.3 µs', '824 ms', '95 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 0.9995:
            return f"{_plain(seconds * factor, 3)} {unit}"
    return f"{_plain(seconds * 1e9, 3)} ns" if seconds else "0 s"


def format_bytes(nbytes: float) -> str:
    """Format a volume with a decimal unit and three digits.

    Example:
        >>> format_bytes(8), format_bytes(12_345_678)
        ('8 B', '12.3 MB')
    """
    return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB"))


def format_bandwidth(bytes_per_second: float) -> str:
    """Format a rate in bits per second, the usual unit for networks.

    Example:
        >>> format_bandwidth(1.25e8), format_bandwidth(12_500)
        ('1 Gbit/s', '100 kbit/s')
    """
    units = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
    return _scaled(_BITS_PER_BYTE * bytes_per_second, units)


def format_percent(part: float) -> str:
    """Format a fraction as a percentage with two digits.

    Example:
        >>> format_percent(0.3123), format_percent(0.00042), format_percent(1.0)
        ('31 %', '0.042 %', '100 %')
    """
    return f"{_plain(100 * part, 2)} %"


def _scaled(number: float, units: Sequence[str]) -> str:
    last = len(units) - 1
    exponent = 0
    while number >= 999.5 and exponent < last:
        number, exponent = number / 1000, exponent + 1
    return f"{_plain(number, 3)} {units[exponent]}"


def _plain(number: float, digits: int) -> str:
    """Format significant digits without an exponent."""
    return f"{float(f'{number:.{digits}g}'):,.12g}"
