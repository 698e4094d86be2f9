"""Ports that stay free for a process while it does not run, so that it finds them again.

A socket of the launcher is bound to the port and never listens. Linux gives such a port to no one
who asks for any free one, neither to listen nor to dial, but lets a process listen there that asks
for this very port and reuses addresses, as gRPC and the metrics endpoint do.
"""

from __future__ import annotations

import os
import socket
import sys
import weakref

_HOST = "127.0.0.1"


class ReservedPort:
    """A port of this machine. It is given back when this object is forgotten."""

    def __init__(self) -> None:
        with socket.socket() as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((_HOST, 0))
            self.address = f"{_HOST}:{bound.getsockname()[1]}"
            # Other systems would refuse the port to the process, too: there it is only chosen.
            if sys.platform == "linux":
                weakref.finalize(self, os.close, bound.detach())
