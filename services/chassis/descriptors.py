"""The limit of open files, which connections (even idle and half-open ones) and tablets use up."""

from __future__ import annotations

import resource


def raise_limit() -> int:
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
