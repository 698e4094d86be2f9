"""Samples processes by their metrics, the store by its files, and reads what the client reports."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections import Counter
from pathlib import Path

from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import Ready, ServiceProcess
from tests.soak.series import MEBIBYTE, Key, Samples

_METRICS = {
    "memory": ("process_resident_memory_bytes", MEBIBYTE),
    "descriptors": ("process_open_fds", 1),
    "tasks": ("percolator_event_loop_tasks", 1),
    "threads": ("percolator_process_threads", 1),
}
_ANSWER_SECONDS = 5.0
_LEVELDB = re.compile(r"[0-9]+\.(ldb|sst|log)|MANIFEST-[0-9]+")


class Sampler:
    """Takes the samples of one run. Counts what it could not get."""

    def __init__(self, cluster: LocalCluster, report: Path, samples: Samples, began: float) -> None:
        """`began` is the moment, by the monotonic clock, from which seconds are counted."""
        self._cluster = cluster
        self._report = report
        self._read_to = 0
        self._samples = samples
        self._began = began
        self._lives: dict[str, list[int]] = {}
        """The process ids of each process so far."""
        self.unanswered: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def sample(self, seconds: float) -> None:
        """One sample of everything. It blocks."""
        for process in list(self._cluster.processes.values()):
            self._process(process, seconds)
        files, size = leveldb_files(self._cluster.data / "store")
        self._samples.add(Key("store", 1, "files"), seconds, files)
        self._samples.add(Key("store", 1, "bytes"), seconds, size / MEBIBYTE)
        self._client()

    def _process(self, process: ServiceProcess, seconds: float) -> None:
        ready = process.ready
        if ready is None or process.exit_code is not None or ready.pid != process.pid:
            return
        try:
            values = metrics_of(ready)
        except OSError:
            # It is being restarted, or paused by others on this machine.
            self.unanswered[process.name] += 1
            return
        lives = self._lives.setdefault(process.name, [])
        if ready.pid not in lives:
            lives.append(ready.pid)
        for quantity, value in values.items():
            self._samples.add(Key(process.name, len(lives), quantity), seconds, value)

    def _client(self) -> None:
        """Takes the lines that the client has written since the last time."""
        if not self._report.exists():
            return
        with self._report.open("rb") as file:
            file.seek(self._read_to)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._read_to += len(complete) + len(newline)
        for line in complete.splitlines():
            told = json.loads(line)
            seconds = told["at"] - self._began
            for quantity in _METRICS:
                self._samples.add(Key("client", 1, quantity), seconds, told[quantity])
            for operation, percentiles in told["milliseconds"].items():
                for quantity, value in percentiles.items():
                    self._samples.add(Key(operation, 1, quantity), seconds, value)
            self.done, self.failed = Counter(told["done"]), Counter(told["failed"])


def metrics_of(ready: Ready) -> dict[str, float]:
    """The sampled quantities of a service. Raises `OSError` if it does not answer."""
    url = f"http://{ready.metrics_address}/metrics"
    with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS) as answer:
        text = answer.read().decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
    return {
        quantity: float(lines[name]) / unit
        for quantity, (name, unit) in _METRICS.items()
        if name in lines
    }


def leveldb_files(store: Path) -> tuple[int, int]:
    """How many files LevelDB has below the store root, and their bytes.

    Clones share files by hard links, so each inode counts once. Files may vanish meanwhile.
    """
    found: dict[int, int] = {}
    for directory, _, names in os.walk(store):
        for name in names:
            if _LEVELDB.fullmatch(name):
                try:
                    status = os.stat(os.path.join(directory, name))
                except FileNotFoundError:
                    continue
                found[status.st_ino] = status.st_size
    return len(found), sum(found.values())
