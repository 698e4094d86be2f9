"""The limit of open files, which connections (even idle and half-open ones) and tablets use up."""

from __future__ import annotations

import re
import resource
from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The version of the installed distribution: "1.4.2"."""
    return metadata.version("percolator-store")


_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})(?:\D.*)?", re.DOTALL)
MINOR_DISTANCE_MAX = 1


def are_compatible(one: str, other: str) -> bool:
    """True if, say, "1.4.2" and "1.5.0" may work in one cluster. False for an invalid version."""
    first, second = _VERSION.fullmatch(one), _VERSION.fullmatch(other)
    if first is None or second is None:
        return False
    distance = abs(int(first[2]) - int(second[2]))
    return int(first[1]) == int(second[1]) and distance <= MINOR_DISTANCE_MAX


def raise_descriptor_limit() -> int:
    """Raises the soft limit (RLIMIT_NOFILE) as far as the hard one allows; returns the new limit.

    The usual soft limit of 1,024 is reached with that many clients, or with a few dozen tablets,
    and then operations fail half-way: an oracle without free descriptors cannot write its mark.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except ValueError:
        # Some systems (macOS) report a hard limit that they do not grant.
        return soft
    return hard
