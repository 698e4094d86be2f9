"""A process that is told to stand still does so a little later."""

from __future__ import annotations

import time

import psutil


class DidNotStrike(Exception):
    """A fault that was to be shown did not happen."""


def require_stopped(pid: int) -> None:
    """A signal takes effect a little later than it is sent."""
    process = psutil.Process(pid)
    deadline = time.monotonic() + 5
    while process.status() != psutil.STATUS_STOPPED:
        if time.monotonic() > deadline:
            raise DidNotStrike(f"process {pid} did not stop")
