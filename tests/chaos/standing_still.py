"""Waits for a process to stop: it does so a little later than it is told."""

from __future__ import annotations

import time

import psutil


class DidNotStrike(Exception):
    """A fault could not be shown to have happened."""


def require_stopped(pid: int) -> None:
    """Waits until the process is stopped: a signal takes effect a little later than it is sent."""
    process = psutil.Process(pid)
    deadline = time.monotonic() + 5
    while process.status() != psutil.STATUS_STOPPED:
        if time.monotonic() > deadline:
            raise DidNotStrike(f"process {pid} did not stop")
