"""Numbers as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`42s`, `3m05s`, `2h10m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def quantity(value: float) -> str:
    """`873`, `4.2k`, `21k`, `1.3M`."""
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale:
            short = value / scale
            return f"{short:.0f}{unit}" if short >= 9.95 else f"{short:.1f}{unit}"
    return f"{value:.0f}"
