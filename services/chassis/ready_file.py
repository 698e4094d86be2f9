"""The ready file: tells the launcher of a process on free ports where it listens."""

from __future__ import annotations

import json
import os
from pathlib import Path

from percolator import private_files
from percolator.v1 import cluster_pb2 as cluster
from percolator.wire.addresses import HostPort


class ReadyFile:
    """Exists exactly while the process is ready; a file that was left over is removed at start.

    JSON: {"address", "listen", "frames_address", "metrics_address", "server_id", "pid"}. Others
    dial `address`, which may be that of a proxy; `listen` is where this process takes calls.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None

    def write(
        self, server: cluster.Server, listen: HostPort, frames_address: HostPort | None
    ) -> None:
        """Writes the file, which appears at once with its whole content."""
        if self._path is None:
            return
        content = {
            "address": server.address,
            "listen": str(listen),
            "frames_address": str(frames_address or ""),
            "metrics_address": server.metrics_address,
            "server_id": server.server_id,
            "pid": os.getpid(),
        }
        temporary = self._path.with_name(self._path.name + ".new")
        with open(temporary, "w", encoding="utf-8", opener=private_files.opener) as file:
            file.write(json.dumps(content) + "\n")
        temporary.replace(self._path)

    def remove(self) -> None:
        """Removes the file: the process is not ready yet, or no longer."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
