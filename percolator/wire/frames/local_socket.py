"""The socket for frames within one machine, for both sides.

A message over TCP costs more than over a Unix socket, also within one machine. The socket has no
file, but a name that exists only in the server's network namespace, as its loopback addresses do:
who can dial one can dial the other. Linux has such names; elsewhere there is no such socket.
"""

from __future__ import annotations

import asyncio
import socket
import sys

AVAILABLE = sys.platform == "linux"

_PREFIX = b"\0percolator-frames-"
"""No server can make its callers connect to a socket of something else."""


def bound(name: str) -> socket.socket:
    """A socket to listen at. Raises `OSError`."""
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        taken.bind(_PREFIX + name.encode())
    except BaseException:
        taken.close()
        raise
    return taken


async def connected(name: str) -> socket.socket:
    """Raises `OSError`."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, _PREFIX + name.encode())
    except BaseException:
        made.close()
        raise
    return made
