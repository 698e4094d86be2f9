"""Does a store keep the promises of the port? Each is tried on a table of its own.

What the protocol relies on most is tried under concurrency: a check and its changes happen at one
moment, and a row is read as of one moment.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from statistics import quantiles
from typing import NamedTuple

from percolator.errors import PercolatorError
from percolator.rowstore.layout import DATA, LOCKS, WRITES
from percolator.rowstore.port import (
    TIME_UNIT,
    Change,
    Check,
    DeleteCell,
    RowStore,
    Selection,
    SetCell,
    StoredCell,
)
from percolator.world import Clock

_TASKS = 16
_ROUNDS = 8
_COLUMN = b"c"
_VALUE_BYTES = 4 * 1024 * 1024
_KEY_BYTES = 4_096
_ANYTHING = (Selection(LOCKS), Selection(WRITES), Selection(DATA))
_NOTHING, _SOMETHING = Check(_ANYTHING, found=False), Check(_ANYTHING, found=True)


class Verdict(NamedTuple):
    """Result of the check of one promise."""

    promise: str
    broken: str
    """Why it is not kept; empty if it is."""


class Conformance:
    """Tries a store on one of its tables, which may hold nothing else, and empties it again."""

    def __init__(
        self, store: RowStore, table_id: int, run: bytes, latest_time: int, timeout_seconds: float
    ) -> None:
        """`run` begins all keys: two runs at the same time do not meet. `latest_time` is the last
        one that has to work."""
        self._store = store
        self._table_id = table_id
        self._run = run
        self._latest = latest_time // TIME_UNIT * TIME_UNIT
        self._seconds = timeout_seconds

    async def verdicts(self) -> AsyncIterator[Verdict]:
        """One promise after the other. Raises what prevents any call at all."""
        promises: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("of many who check the same, one makes its changes", self._one_wins),
            ("a check that finds, and one that counts", self._counts),
            ("a row is read at once", self._read_at_once),
            ("a deletion deletes one version", self._one_version),
            ("times and values are selected by range, and the newest", self._ranges),
            ("times far in the future", self._late_times),
            ("keys of 4,096 bytes, and values of 4 MiB", self._sizes),
            ("many rows with one call, and scans forwards", self._many_rows),
        ]
        if self._store.scans_backwards:
            promises.append(("scans backwards", self._backwards))
        for promise, trial in promises:
            try:
                yield Verdict(promise, await trial())
            except PercolatorError as error:
                yield Verdict(promise, str(error))

    async def clean_up(self) -> None:
        """Deletes what the trials have left."""
        end = self._run[:-1] + bytes((self._run[-1] + 1,))
        for key, cells in await self._scanned(self._run, end):
            await self._make(key, _SOMETHING, [DeleteCell(*cell[:3]) for cell in cells])

    # ------------------------------------------------------------------ promises

    async def _one_wins(self) -> str:
        for number in range(_ROUNDS):
            key = self._key(b"wins-%d" % number)
            nothing = Check((Selection(LOCKS),), found=False)
            made = await asyncio.gather(
                *(
                    self._make(key, nothing, [SetCell(LOCKS, _COLUMN, _time(task), b"%d" % task)])
                    for task in range(1, _TASKS + 1)
                )
            )
            held = await self._read(key)
            if sum(made) != 1 or len(held) != 1:
                return f"{sum(made)} of {_TASKS} were told that they won, and {len(held)} had"
        return ""

    async def _counts(self) -> str:
        key = self._key(b"counts")
        await self._make(
            key, _NOTHING, [SetCell(LOCKS, b"c%d" % n, _time(1), b"") for n in range(3)]
        )
        locks = (Selection(LOCKS),)
        for more_than, expected in ((0, True), (2, True), (3, False)):
            check = Check(locks, found=True, more_than=more_than)
            if await self._make(key, check, [SetCell(DATA, _COLUMN, _time(1), b"")]) != expected:
                return f"3 cells were {'not ' if expected else ''}more than {more_than}"
        if await self._make(
            key, Check(locks, found=False), [SetCell(DATA, _COLUMN, _time(9), b"")]
        ):
            return "3 cells were found to be nothing"
        return ""

    async def _read_at_once(self) -> str:
        """A lock becomes a record in one change: a reading shows the one or the other."""
        key = self._key(b"read at once")
        lock, record = (
            SetCell(LOCKS, _COLUMN, _time(1), b""),
            SetCell(WRITES, _COLUMN, _time(2), b""),
        )
        no_lock, no_record = DeleteCell(*lock[:3]), DeleteCell(*record[:3])
        await self._make(key, _NOTHING, [lock])

        async def swap() -> None:
            for _ in range(_ROUNDS):
                await self._make(key, _SOMETHING, [no_lock, record])
                await self._make(key, _SOMETHING, [no_record, lock])

        odd, _ = await asyncio.gather(self._odd(key), swap())
        return f"{odd} readings showed lock and record, or neither" if odd else ""

    async def _odd(self, key: bytes) -> int:
        """How many of some readings of a row show not exactly one cell."""
        return sum([len(await self._read(key)) != 1 for _ in range(4 * _ROUNDS)])

    async def _one_version(self) -> str:
        key = self._key(b"version")
        versions: list[Change] = [SetCell(WRITES, _COLUMN, _time(n), b"%d" % n) for n in (1, 2, 3)]
        await self._make(key, _NOTHING, versions)
        await self._make(key, _SOMETHING, [DeleteCell(WRITES, _COLUMN, _time(2))])
        left = [cell.time for cell in await self._read(key)]
        return (
            "" if sorted(left) == [_time(1), _time(3)] else f"the times {left} are left of 1, 2, 3"
        )

    async def _ranges(self) -> str:
        key = self._key(b"ranges")
        await self._make(
            key, _NOTHING, [SetCell(WRITES, _COLUMN, _time(n), b"%d" % n) for n in (1, 2, 3, 4)]
        )
        for selection, expected in (
            (Selection(WRITES, from_time=_time(2), until_time=_time(4)), [2, 3]),
            (Selection(WRITES, until_time=_time(3), newest=True), [2]),
            (Selection(WRITES, first_value=b"3"), [3, 4]),
            (Selection(WRITES, first_column=b"d"), []),
            (Selection(LOCKS), []),
        ):
            cells = await self._read(key, (selection,))
            found = sorted(cell.time // TIME_UNIT for cell in cells)
            if found != expected:
                return f"{selection} selects {found}, not {expected}"
        return ""

    async def _late_times(self) -> str:
        key = self._key(b"late")
        await self._make(key, _NOTHING, [SetCell(WRITES, _COLUMN, self._latest, b"late")])
        found = [cell.time for cell in await self._read(key)]
        return "" if found == [self._latest] else f"{self._latest} became {found}"

    async def _sizes(self) -> str:
        key = self._key(b"sizes").ljust(_KEY_BYTES, b"x")
        value = bytes(_VALUE_BYTES)
        await self._make(key, _NOTHING, [SetCell(DATA, _COLUMN, _time(1), value)])
        found = await self._read(key)
        return "" if [cell.value for cell in found] == [value] else "the value came back changed"

    async def _many_rows(self) -> str:
        keys = await self._rows_named(b"many")
        rows = await self._store.read(self._table_id, keys, _ANYTHING, self._seconds)
        if sorted(row.key for row in rows) != keys:
            return f"{len(rows)} of {len(keys)} rows were read"
        scanned = [key for key, _ in await self._scanned(keys[0], keys[-1])]
        return "" if scanned == keys[:-1] else "a scan has other rows, or another order"

    async def _backwards(self) -> str:
        keys = await self._rows_named(b"many")
        scanned = [key for key, _ in await self._scanned(keys[0], keys[-1], reverse=True)]
        return "" if scanned == keys[-2::-1] else "the direction is ignored"

    # ------------------------------------------------------------------ calls

    async def _rows_named(self, name: bytes) -> list[bytes]:
        keys = [self._key(b"%s-%02d" % (name, number)) for number in range(20)]
        change = SetCell(WRITES, _COLUMN, _time(1), b"")
        await asyncio.gather(*(self._make(key, _NOTHING, [change]) for key in keys))
        return keys

    def _key(self, name: bytes) -> bytes:
        return self._run + name

    async def _make(self, key: bytes, check: Check, changes: Sequence[Change]) -> bool:
        return await self._store.check_and_mutate(
            self._table_id, key, check, changes, self._seconds
        )

    async def _read(
        self, key: bytes, selections: Sequence[Selection] = _ANYTHING
    ) -> list[StoredCell]:
        rows = await self._store.read(self._table_id, [key], selections, self._seconds)
        return rows[0].cells if rows else []

    async def _scanned(
        self, first: bytes, end: bytes, *, reverse: bool = False
    ) -> list[tuple[bytes, list[StoredCell]]]:
        scan = self._store.scan(
            self._table_id,
            first,
            end,
            _ANYTHING,
            rows_max=0,
            reverse=reverse,
            timeout_seconds=self._seconds,
        )
        async with aclosing(scan) as rows:
            return [(row.key, row.cells) async for row in rows]


def _time(number: int) -> int:
    return number * TIME_UNIT


# How many checks with changes a store makes in a second, and how long each takes.

_KEYS = 1_000
CALLS_OF_A_TRANSFER = 6
"""Calls of a transaction that reads and writes two rows: two reads, two prewrites, two commits."""
_LOAD_MAX = 0.7
"""The share of a node's capacity that Google advises to use at most, in a single cluster."""
_HOURS_OF_A_MONTH = 730


class Measured(NamedTuple):
    """Measurements by one client."""

    calls: int
    seconds: float
    median_seconds: float
    late_seconds: float
    """Within which 99 of 100 calls were answered."""

    @property
    def per_second(self) -> float:
        return self.calls / self.seconds


class CapacityVerdict(NamedTuple):
    """Nodes and cells that a number of transactions needs."""

    nodes: int
    cost_per_month: float
    """0 if no price was given."""


async def measured(
    store: RowStore,
    table_id: int,
    run: bytes,
    clock: Clock,
    *,
    seconds: float,
    in_flight: int,
    timeout_seconds: float,
) -> Measured:
    """Locks and unlocks rows, spread over many keys, with `in_flight` calls at a time. Nothing is
    left of it. Raises what prevents a call."""
    latencies: list[float] = []
    lock = SetCell(LOCKS, b"c", TIME_UNIT, b"measured")
    steps = (
        (Check((Selection(LOCKS),), found=False), lock),
        (Check((Selection(LOCKS),), found=True), DeleteCell(*lock[:3])),
    )
    began = clock.monotonic_seconds()

    async def work(first: int) -> None:
        number = first
        while clock.monotonic_seconds() < began + seconds:
            key = run + b"%05d" % (number * 7919 % _KEYS) + b"-%d" % first
            number += 1
            for check, change in steps:
                sent = clock.monotonic_seconds()
                await store.check_and_mutate(table_id, key, check, [change], timeout_seconds)
                latencies.append(clock.monotonic_seconds() - sent)

    await asyncio.gather(*(work(first) for first in range(in_flight)))
    cuts = quantiles(latencies, n=100)
    took = clock.monotonic_seconds() - began
    return Measured(len(latencies), took, cuts[49], cuts[98])


def verdict(
    found: Measured, nodes: int, transfers_per_second: float, price_per_node_hour: float
) -> CapacityVerdict:
    """Needs of that many transfers, if `nodes` nodes carry what was measured."""
    per_node = found.per_second / nodes * _LOAD_MAX
    needed = max(math.ceil(transfers_per_second * CALLS_OF_A_TRANSFER / per_node), 1)
    return CapacityVerdict(needed, needed * price_per_node_hour * _HOURS_OF_A_MONTH)
