"""The memory of processes while a benchmark runs: what it was at the start, and at most."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import psutil

_INTERVAL_SECONDS = 0.25
_MEBIBYTE = 1 << 20


class WatchedMemory:
    """Looks at the resident memory of processes until the end of its block."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.first = {name: rss(process) for name, process in self._processes.items()}
        """In MiB, when it was made."""
        self.most = dict(self.first)
        """In MiB."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def add(self, name: str, pid: int) -> None:
        """Watches one more process from now on."""
        process = psutil.Process(pid)
        self.first[name] = self.most[name] = rss(process)
        self._processes = self._processes | {name: process}

    def now(self) -> dict[str, float]:
        """In MiB; processes that have ended are left out."""
        return {name: found for name, one in self._processes.items() if (found := rss(one))}

    def _look(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            for name, found in self.now().items():
                self.most[name] = max(self.most[name], found)

    def __enter__(self) -> WatchedMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def rss(process: psutil.Process) -> float:
    """In MiB; 0 after it has ended."""
    try:
        return float(process.memory_info().rss) / _MEBIBYTE
    except psutil.Error:
        return 0.0
