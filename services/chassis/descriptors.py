"""The limit of open files: connections take them, even idle and half-open ones, and tablets do."""

from __future__ import annotations

import resource


def raise_limit() -> int:
    """Raises the soft limit (RLIMIT_NOFILE) as far as the hard one allows; returns what holds now.

    The usual soft limit of 1,024 ends at as many clients, or at a few dozen tablets, with an error
    in mid-flight: an oracle that has none left cannot write its mark.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except ValueError:
        # Some systems (macOS) name a hard limit that they do not grant.
        return soft
    return hard
