"""Which releases work together: those of one major version, one minor version apart at most."""

from __future__ import annotations

import re

_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})(?:\D.*)?", re.DOTALL)
MINOR_DISTANCE_MAX = 1


def are_compatible(one: str, other: str) -> bool:
    """Whether, say, "1.4.2" and "1.5.0" may work in one cluster. False for an invalid version."""
    first, second = _VERSION.fullmatch(one), _VERSION.fullmatch(other)
    if first is None or second is None:
        return False
    distance = abs(int(first[2]) - int(second[2]))
    return int(first[1]) == int(second[1]) and distance <= MINOR_DISTANCE_MAX
