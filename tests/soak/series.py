"""What is sampled in a soak run: quantities, their tolerances, and the lives of processes.

A process that is restarted begins a new life, with series of its own. The longest life of each
process is judged.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.soak.levelling import Judgement, Tolerance, judge

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
    """What grows, with figures."""
    for one in judged:
        if one.judgement.grows:
            yield one.reason()
