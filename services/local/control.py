"""Requests to a running launcher: to kill one of its processes, or to start one again.

The launcher is the parent of its processes and keeps their ports: it alone knows that a process id
is still that of its process, and can start it where its callers look for it. It listens on a Unix
socket, DATA/run/control; a request and its answer are one line of JSON each.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from percolator.services.local.directory import data_option, running
from percolator.services.local.process import LocalClusterError

CarryOut = Callable[[str, str], str]
"""Carries out an action on the named process, and returns the text of the answer."""

_NAME = "control"
_REQUEST_SECONDS = 1.0
"""A request is one write: a connection that sends nothing must not block the launcher."""
_ANSWER_SECONDS = 90.0
"""Longer than a process takes to stop and to start again."""
_BYTES_MAX = 64 << 10


class Control:
    """The launcher's end."""

    def __init__(self, data: Path) -> None:
        self._path = data / "run" / _NAME
        # Left by a launcher that was killed.
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        with _short(self._path) as path:
            self._socket.bind(path)
        self._path.chmod(0o600)
        self._socket.listen()

    def serve(self, seconds: float, carry_out: CarryOut) -> None:
        """Carries out one request, if there is one within so many seconds."""
        readable, _, _ = select.select([self._socket], [], [], seconds)
        if not readable:
            return
        asking, _ = self._socket.accept()
        with asking:
            asking.settimeout(_REQUEST_SECONDS)
            try:
                request = _received(asking)
                answer = _answered(request["action"], request["name"], carry_out)
                _send(asking, answer)
            except (OSError, ValueError, KeyError, TypeError):
                # Who asked is gone, or is no `percolator dev`: nothing to answer to.
                return

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)


def ask(data: Path, action: str, name: str) -> str:
    """Asks the launcher of a running cluster. Returns what it told."""
    state = running(data)
    if state is None:
        raise LocalClusterError(
            f"no cluster is running on {data}: `percolator dev{data_option(data)}` starts one"
        )
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(_ANSWER_SECONDS)
        try:
            with _short(data / "run" / _NAME) as path:
                asked.connect(path)
            _send(asked, {"action": action, "name": name})
            answer = _received(asked)
        except (OSError, ValueError):
            raise LocalClusterError(
                f"the launcher of {data} did not answer: it is starting, stopping, or was killed"
            ) from None
    if "error" in answer:
        raise LocalClusterError(answer["error"])
    return answer["told"]


def _answered(action: str, name: str, carry_out: CarryOut) -> dict[str, str]:
    try:
        return {"told": carry_out(action, name)}
    except LocalClusterError as error:
        return {"error": str(error)}


def _send(to: socket.socket, message: dict[str, str]) -> None:
    to.sendall((json.dumps(message) + "\n").encode())


def _received(sent_by: socket.socket) -> dict[str, str]:
    with sent_by.makefile("rb") as lines:
        message: dict[str, str] = json.loads(lines.readline(_BYTES_MAX))
    return message


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Another name of a socket: its address has room for 107 bytes, and directories are deep."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
