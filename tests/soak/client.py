"""The client process of a soak run: `python -m tests.soak.client SETTINGS`, which are JSON.

It works until SIGTERM, and writes a line of JSON per interval about itself and about how long its
operations took. What it needs is sampled like every other process: the library may leak as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TextIO

import psutil

from percolator import aio
from tests.soak.series import MEBIBYTE
from tests.soak.traffic import TABLES, Traffic

_P99_OPERATIONS_MIN = 20


@dataclass(frozen=True)
class Settings:
    """Where the cluster is, and where to report."""

    address: str
    gateway: str
    report: str
    interval_seconds: float

    def argument(self) -> str:
        return json.dumps(asdict(self))


async def prepare(address: str) -> None:
    """Creates the tables, so that workers can begin."""
    async with aio.connect(address) as database:
        for table, splits in TABLES:
            await database.create_table(table, splits)


async def live(settings: Settings, report: TextIO) -> None:
    async with (
        aio.connect(settings.address, description="soak") as near,
        aio.connect(settings.gateway, description="soak by gateway") as far,
    ):
        traffic = Traffic(near, far, settings.address, settings.gateway)
        await traffic.fill()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, traffic.stop)
        reporting = asyncio.create_task(_report(traffic, report, settings.interval_seconds))
        try:
            await traffic.run()
        finally:
            reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reporting


async def _report(traffic: Traffic, file: TextIO, interval_seconds: float) -> None:
    process = psutil.Process()
    while True:
        await asyncio.sleep(interval_seconds)
        took, traffic.took = traffic.took, {}
        line: dict[str, Any] = {
            "at": time.monotonic(),
            "memory": process.memory_info().rss / MEBIBYTE,
            "descriptors": process.num_fds(),
            "tasks": len(asyncio.all_tasks()),
            "threads": len(os.listdir("/proc/self/task")),
            "milliseconds": {name: _percentiles(seconds) for name, seconds in took.items()},
            "done": traffic.done,
            "failed": traffic.failed,
        }
        file.write(json.dumps(line) + "\n")
        file.flush()


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """The median and, if there are enough, the 99th percentile, in milliseconds."""
    found = {"median": 1000 * median(seconds)}
    if len(seconds) >= _P99_OPERATIONS_MIN:
        found["p99"] = 1000 * quantiles(seconds, n=100, method="inclusive")[98]
    return found


if __name__ == "__main__":
    given = Settings(**json.loads(sys.argv[1]))
    with Path(given.report).open("a") as opened:
        asyncio.run(live(given, opened))
