"""How long something lasts, or how long ago it was, as people type it: 90s, 15m, 2h, 1d."""

from __future__ import annotations

from math import isfinite

from percolator.errors import InvalidArgument

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def duration_seconds(field: str, text: str) -> float:
    """Parses "90", "90s", "15m", "2h" or "1d"."""
    unit = _UNITS.get(text[-1:])
    try:
        seconds = float(text if unit is None else text[:-1]) * (unit or 1)
    except ValueError:
        seconds = 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise InvalidArgument(field, f"expected a time such as 90s, 15m or 2h, found {text!r}")
    return seconds
