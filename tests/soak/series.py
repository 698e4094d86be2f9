"""Samples of a soak run: quantities, their tolerances, and the lives of processes.

A process that is restarted begins a new life, with series of its own. The longest life of each
process is judged.
"""

from __future__ import annotations

import csv
import json
import os
import re
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median

from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import Ready, ServiceProcess

# Does a series level off, or does it grow?
#
# The first third is warm-up: caches fill, the interpreter's heap finds its size. A series *grows*
# if all of this holds for the rest:
#
# 1. It is higher: the median of the last third is above that of the middle third by more than a
#    tolerance, which is a share of the latter and never less than a floor.
# 2. It rises steadily: the middle and last thirds are cut into eight parts, and in the 28 pairs of
#    their medians the later one is the higher one in at least 18 more pairs than it is the lower
#    one. Of series without a trend, one in sixty does that (Mann and Kendall's test).
# 3. It still rises: within the last third, the median of the second half is above that of the first
#    by more than a quarter of the whole rise. For steady growth it would be a half.
#
# Otherwise it levels off. Medians make single peaks harmless, parts are long compared with the
# teeth of a garbage collector or of compactions, and a single step, or a rise that slows down, is
# no leak.

POINTS_MIN = 36
"""With fewer, parts would be too short to have a meaningful median."""

_PARTS = 8
_MORE_PAIRS_MIN = 18
_LATE_SHARE = 0.25


@dataclass(frozen=True)
class Tolerance:
    """By how much a series may be higher in the last third than in the middle third."""

    share: float
    floor: float

    def of(self, level: float) -> float:
        return max(self.floor, self.share * abs(level))


@dataclass(frozen=True)
class Judgement:
    """Findings; values in the unit of the series."""

    points: int
    middle: float = 0.0
    """The median of the middle third."""
    last: float = 0.0
    """The median of the last third."""
    tolerated: float = 0.0
    more_pairs: int = 0
    """In how many more pairs of parts the later one is higher than in how many it is lower."""
    late_rise: float = 0.0
    """The rise from the first half of the last third to the second one."""

    @property
    def is_judged(self) -> bool:
        return self.points >= POINTS_MIN

    @property
    def grows(self) -> bool:
        rise = self.last - self.middle
        return (
            self.is_judged
            and rise > self.tolerated
            and self.more_pairs >= _MORE_PAIRS_MIN
            and self.late_rise > _LATE_SHARE * rise
        )


def judge(values: Sequence[float], tolerance: Tolerance) -> Judgement:
    """Judges samples that were taken at equal intervals."""
    count = len(values)
    if count < POINTS_MIN:
        return Judgement(count)
    rest = values[count // 3 :]
    middle, last = _parts(rest, 2)
    level = median(middle)
    medians = [median(part) for part in _parts(rest, _PARTS)]
    pairs = list(combinations(medians, 2))
    ups = sum(later > earlier for earlier, later in pairs)
    downs = sum(later < earlier for earlier, later in pairs)
    first_half, second_half = _parts(last, 2)
    return Judgement(
        count,
        level,
        median(last),
        tolerance.of(level),
        ups - downs,
        median(second_half) - median(first_half),
    )


def _parts(values: Sequence[float], count: int) -> list[Sequence[float]]:
    bounds = [len(values) * number // count for number in range(count + 1)]
    return [values[start:end] for start, end in pairwise(bounds)]


MEBIBYTE = 1 << 20

QUANTITIES = {
    "memory": Tolerance(0.03, 2.0),
    "descriptors": Tolerance(0.05, 4.0),
    "tasks": Tolerance(0.10, 10.0),
    "threads": Tolerance(0.0, 2.0),
    "files": Tolerance(0.25, 20.0),
    "bytes": Tolerance(0.25, 2.0),
    "median": Tolerance(0.50, 2.0),
    "p99": Tolerance(1.00, 20.0),
}
"""By how much each may rise from the middle third to the last one. Memory and bytes are in MiB,
latencies (median and 99th percentile) in milliseconds. Latencies depend on what else the machine
does, the size of the store on where LevelDB is in its compactions."""


@dataclass(frozen=True)
class Key:
    """Which series: of a process, of the store, or of a kind of operation."""

    source: str
    life: int
    quantity: str

    def __str__(self) -> str:
        life = f" #{self.life}" if self.life > 1 else ""
        return f"{self.source}{life}: {self.quantity}"


@dataclass(frozen=True)
class Judged:
    """A series and what was found."""

    key: Key
    points: list[tuple[float, float]]
    judgement: Judgement

    def reason(self) -> str:
        one = self.judgement
        return (
            f"{self.key} grows: {one.middle:,.1f} in the middle third, {one.last:,.1f} in the last "
            f"(tolerated: {one.tolerated:,.1f} more)"
        )


class Samples:
    """All series of a run."""

    def __init__(self) -> None:
        self._series: dict[Key, list[tuple[float, float]]] = {}

    def add(self, key: Key, seconds: float, value: float) -> None:
        self._series.setdefault(key, []).append((seconds, value))

    def __len__(self) -> int:
        return sum(map(len, self._series.values()))

    def judged(self) -> list[Judged]:
        """The longest life of each process, by name; series that are too short as well."""
        longest: dict[tuple[str, str], Key] = {}
        for key, points in self._series.items():
            best = longest.setdefault((key.source, key.quantity), key)
            if len(points) > len(self._series[best]):
                longest[key.source, key.quantity] = key
        return [
            Judged(
                key,
                self._series[key],
                judge([value for _, value in self._series[key]], QUANTITIES[key.quantity]),
            )
            for _, key in sorted(longest.items())
        ]

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["source", "life", "quantity", "seconds", "value"])
            for key, points in self._series.items():
                for seconds, value in points:
                    rows.writerow(
                        [key.source, key.life, key.quantity, f"{seconds:.2f}", f"{value:.4f}"]
                    )


def write_verdict(path: Path, judged: Iterable[Judged], problems: list[str]) -> None:
    """The verdict on each series, and everything else that went wrong."""
    series = [
        {
            "series": str(one.key),
            "points": one.judgement.points,
            "judged": one.judgement.is_judged,
            "grows": one.judgement.grows,
            "middle": round(one.judgement.middle, 3),
            "last": round(one.judgement.last, 3),
            "tolerated": round(one.judgement.tolerated, 3),
            "more_pairs": one.judgement.more_pairs,
            "late_rise": round(one.judgement.late_rise, 3),
        }
        for one in judged
    ]
    path.write_text(json.dumps({"problems": problems, "series": series}, indent=1) + "\n")


def growing(judged: Iterable[Judged]) -> Iterator[str]:
    """Series that grow, with figures."""
    for one in judged:
        if one.judgement.grows:
            yield one.reason()


# Samples processes by their metrics, the store by its files, and reads what the client reports.

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
