"""The part of `benchmarks/incremental.py` that crawls, and finds out when changes are served."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from statistics import median, quantiles

from examples.webindex import tables
from examples.webindex.crawl import Crawl
from examples.webindex.load import Change, Crawling
from percolator import aio
from percolator.timestamps import seconds_between


@dataclass(frozen=True)
class Stage:
    """Changes written at one rate, and when their effects were served."""

    per_second: float
    """The rate at which changes were written."""
    changes: int
    seconds: float
    """From the first change to the last effect."""
    latencies: list[float]
    """In seconds, one for each change of which an effect is served."""

    @property
    def done_per_second(self) -> float:
        """Changes per second, including all work that follows from them."""
        return self.changes / self.seconds

    @property
    def median(self) -> float:
        return median(self.latencies)

    @property
    def p99(self) -> float:
        return quantiles(self.latencies, n=100, method="inclusive")[98]


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {what}", flush=True)


def endless_changes(crawl: Crawl) -> Iterator[Change]:
    """New content for each document in random order, over and over."""
    order, edition = Random(1).sample(range(crawl.documents), crawl.documents), 0
    while True:
        edition += 1
        for number in order:
            document = crawl.document(number, edition)
            yield document.url, document.body


async def stage(
    db: aio.Database, changes: Iterator[Change], count: int, rate: float | None
) -> Stage:
    """Writes changes at this rate, or as fast as possible, and waits for all that follows."""
    since = await db.timestamp()
    began = time.perf_counter()
    await Crawling(db, rate).write_all(islice(changes, count))
    per_second = rate or count / (time.perf_counter() - began)
    quiet = await db.wait_for_observers()
    if quiet.dead_letters:
        raise SystemExit(f"observers failed: {dict(quiet.dead_letters)}")
    served = await last_effects(db, since)
    latencies = [seconds_between(cause, commit) for cause, commit in served.items()]
    found = Stage(per_second, count, seconds_between(since, max(served.values())), latencies)
    say(
        f"{found.per_second:7.1f} changes/s: median {found.median * 1000:8.0f} ms, 99 of 100 "
        f"{found.p99 * 1000:8.0f} ms; {len(latencies):,} of {count:,} seen, {found.seconds:.0f} s"
    )
    return found


async def last_effects(db: aio.Database, since: int) -> dict[int, int]:
    """When the last effect of each change since then was committed, keyed by its `crawled`."""
    found: dict[int, int] = {}
    async with db.snapshot() as snapshot:
        for column in (tables.cause, tables.placed):
            async for page in snapshot.scan_cells(column.table, columns=[column.name]):
                for value, commit in zip(page.values, page.commit_timestamps, strict=True):
                    decoded = column.codec.decode(value)
                    cause = decoded if column is tables.cause else decoded[2]
                    if cause > since:
                        found[cause] = max(found.get(cause, 0), commit)
    return found


def three_rates(slowest: float, keeps_up: float) -> list[float]:
    """The slowest rate, and 0.5 and 1.5 times the rate that observers keep up with."""
    return [slowest, round(keeps_up / 2, 1), round(keeps_up * 1.5, 1)]


async def all_stages(
    address: str,
    crawl: Crawl,
    burst: int,
    seconds: float,
    rates: Callable[[float], Sequence[float]],
) -> list[Stage]:
    """The burst, then each of the rates, which may depend on the result of the burst."""
    changes = endless_changes(crawl)
    async with aio.connect(address, description="bench-incremental") as db:
        found = [await stage(db, changes, burst, None)]
        for rate in rates(found[0].done_per_second):
            count = max(2, int(rate * seconds))
            found.append(await stage(db, changes, count, rate))
    return found
