"""Records of a cluster about itself: roles, sessions, and the identity of a row store.

A record has columns, which are small values by name. It is read as of one time, and changed only if
one of its columns is still as it was seen: of several processes that change a record, one does. All
else, who leads and what counts, is logic on top of that (`record_coordinator.py`).

`RowRecords` keeps each record in a row of a row store, `BucketRecords` in an object of a bucket.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

import structlog

from percolator.bucket.bucket import Bucket
from percolator.bucket.port import Stored, require_key
from percolator.codecs.values import after_prefix
from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    Retry,
    SchemaError,
    StoreFault,
    StoreUnusable,
)
from percolator.rowstore.identity import TABLE_ID
from percolator.rowstore.layout import DATA
from percolator.rowstore.port import (
    TIME_UNIT,
    Change,
    Check,
    DeleteCell,
    RowStore,
    Selection,
    SetCell,
    StoredRow,
)
from percolator.services.chassis.coordinator import decode, encode
from percolator.tasks import Tasks
from percolator.wire.backoff import Backoff
from percolator.world import Random, World

FAMILY = DATA
"""All tables of a store have the same families."""
_TIME = TIME_UNIT
_NEVER = b"\0never"
"""A column that nobody writes. A check that does not find it always passes."""
_CALL_SECONDS = 1.0
_PATIENCE_SECONDS = 1.5
"""How long a store that does not answer is asked again. Shorter than callers of an oracle wait."""
_PAUSE_SECONDS_MIN = 0.02
_PAUSE_SECONDS_MAX = 0.25

Cells = dict[bytes, bytes]
"""Values by column."""


class Seen(NamedTuple):
    """A cell as it was seen."""

    column: bytes
    value: bytes | None
    """None: there was none."""


class NoRecords(StoreUnusable):
    """There is no table of records: nothing made one yet, or somebody deleted it."""


class Records(Protocol):
    """The records, as one process reaches them. Belongs to one event loop.

    Raises `StoreUnusable` if the store does not do what it is asked.
    """

    async def read(self, key: bytes, columns: Sequence[bytes]) -> Cells:
        """Columns of the record, all as of one time after this was called."""

    async def all(self, prefix: bytes, column: bytes) -> Mapping[bytes, bytes]:
        """One column of all records whose keys begin with a prefix, by the rest of the key. Those
        that were made or removed a moment ago may be missing, or still there."""

    async def change(self, key: bytes, seen: Seen, changes: Mapping[bytes, bytes | None]) -> bool:
        """Sets or, for None, deletes columns of a record if one of its columns is still as it was
        seen. Returns whether it was; False, too, if another process has changed it since then.

        Raises `StoreUnusable` if nothing was executed. After any other error it may have been, or
        may still be: the call may be on its way.
        """

    async def put(self, key: bytes, changes: Mapping[bytes, bytes | None]) -> None:
        """Changes the record without a check. May be repeated."""

    async def remove(self, key: bytes, column: bytes) -> None:
        """Removes a record that has this one column. One that is put meanwhile may stay."""


class RowRecords:
    """Records in one table of a row store: a row of small cells for each.

    Each cell has one version, at one fixed time: no clock takes part, and a later value replaces
    the earlier one. A row is read and changed at one time.
    """

    def __init__(self, store: RowStore, world: World) -> None:
        self._store = store
        self._world = world

    async def read(self, key: bytes, columns: Sequence[bytes]) -> Cells:
        selections = [_one(column) for column in columns]
        patience = self._patience()
        while True:
            try:
                rows = await self._store.read(TABLE_ID, [key], selections, _CALL_SECONDS)
            except PercolatorError as error:
                await patience.outlast(error, is_read=True)
            else:
                return _cells(rows[0]) if rows else {}

    async def all(self, prefix: bytes, column: bytes) -> Mapping[bytes, bytes]:
        patience = self._patience()
        while True:
            try:
                return await self._scanned(prefix, column)
            except PercolatorError as error:
                await patience.outlast(error, is_read=True)

    async def _scanned(self, prefix: bytes, column: bytes) -> Mapping[bytes, bytes]:
        scan = self._store.scan(
            TABLE_ID,
            prefix,
            after_prefix(prefix),
            [_one(column)],
            rows_max=0,
            reverse=False,
            timeout_seconds=_CALL_SECONDS,
        )
        async with aclosing(scan) as found:
            return {row.key[len(prefix) :]: _cells(row)[column] async for row in found}

    async def change(self, key: bytes, seen: Seen, changes: Mapping[bytes, bytes | None]) -> bool:
        made = [_changed(column, value) for column, value in changes.items()]
        patience = self._patience()
        while True:
            try:
                return await self._store.check_and_mutate(
                    TABLE_ID, key, _check(seen), made, _CALL_SECONDS
                )
            except PercolatorError as error:
                await patience.outlast(error, is_read=False)

    async def put(self, key: bytes, changes: Mapping[bytes, bytes | None]) -> None:
        await self.change(key, Seen(_NEVER, None), changes)

    async def remove(self, key: bytes, column: bytes) -> None:
        await self.put(key, {column: None})

    def _patience(self) -> _Patience:
        return _Patience(self._world)


class _Patience:
    """One caller's attempts."""

    def __init__(self, world: World) -> None:
        self._backoff = Backoff(world.clock, world.random, _PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX)
        self._deadline = world.clock.monotonic_seconds() + _PATIENCE_SECONDS

    async def outlast(self, error: PercolatorError, *, is_read: bool) -> None:
        """Returns if the call may be sent again, after a pause."""
        if error.retry is Retry.UNKNOWN and not is_read:
            raise error
        if error.retry is Retry.USELESS or not await self._backoff.pause(self._deadline):
            raise unusable(error, "the row store") from error


def unusable(error: PercolatorError, store: str) -> StoreUnusable:
    """The error of a store that does not do what it is asked."""
    # What is refused now will be refused again.
    fault = StoreFault.READ_ONLY if error.retry is Retry.USELESS else StoreFault.INPUT_OUTPUT
    kind = NoRecords if isinstance(error, SchemaError) else StoreUnusable
    return kind(f"{store}: {error.message}", fault=fault, where=error.where)


def _one(column: bytes) -> Selection:
    return Selection(FAMILY, column, column + b"\0")


def _check(seen: Seen) -> Check:
    if seen.value is None:
        return Check((_one(seen.column),), found=False)
    as_seen = _one(seen.column)._replace(first_value=seen.value, end_value=seen.value + b"\0")
    return Check((as_seen,), found=True)


def _changed(column: bytes, value: bytes | None) -> Change:
    if value is None:
        return DeleteCell(FAMILY, column, _TIME)
    return SetCell(FAMILY, column, _TIME, value)


def _cells(row: StoredRow) -> Cells:
    return {cell.column: cell.value for cell in row.cells}


FOLDER = "coordinator"
"""All keys of records begin with it."""
_VALUES = "values"
_LONG_BYTES = 4_096
"""A longer value has an object of its own."""
_NUMBER = re.compile(r"/([0-9]+)-[0-9a-f]+-[0-9]+$")
"""The version for which a long value was written."""
_RACES_MAX = 8
"""How often others may get ahead of a change, or of a read."""

_log = structlog.get_logger("percolator.coordinator")


class LongValue(NamedTuple):
    """A value that is in an object of its own, as its record names it."""

    key: str
    size: int
    crc32: int

    @classmethod
    def of(cls, key: str, value: bytes) -> LongValue:
        return cls(key, len(value), zlib.crc32(value))


class Version(NamedTuple):
    """A version of a record, as its object has it."""

    number: int
    """Grows by one with each change."""
    columns: Mapping[bytes, bytes | LongValue]
    tag: str = ""

    def encode(self, writer: str) -> bytes:
        """`writer` makes the bytes unique: it was never used before."""
        short, long = dict[str, str](), dict[str, Any]()
        for column, value in sorted(self.columns.items()):
            if isinstance(value, LongValue):
                long[column.decode()] = value._asdict()
            else:
                short[column.decode()] = b64encode(value).decode()
        content = {"version": self.number, "writer": writer, "columns": short, "values": long}
        return encode(json.dumps(content).encode() + b"\n")

    @classmethod
    def decode(cls, stored: Stored, where: str) -> Version:
        """Raises `StoreUnusable` for what `encode` cannot have written."""
        try:
            content = json.loads(decode(stored.data, where))
            columns: dict[bytes, bytes | LongValue] = {
                column.encode(): b64decode(value, validate=True)
                for column, value in content["columns"].items()
            }
            for column, found in content["values"].items():
                columns[column.encode()] = _long_value(**found)
            number = content["version"]
            if type(number) is not int or number < 1:
                raise ValueError(f"its version is {number!r}")  # noqa: TRY301  # one message for all
        except (
            InvalidArgument,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise _damaged(where, str(error)) from None
        return cls(number, columns, stored.tag)


def _long_value(key: Any, size: Any, crc32: Any) -> LongValue:  # noqa: ANN401  # parsed JSON
    if type(key) is not str or type(size) is not int or type(crc32) is not int:
        raise ValueError(f"it names {key!r} of {size!r} bytes")
    require_key(key)
    return LongValue(key, size, crc32)


class BucketRecords:
    """Records in a bucket: an object for each, and one for each long value.

        coordinator/role/master                          a record
        coordinator/values/role/master/7-9f0c12d3…-3     a long value that its version 7 was to have

    Rules, each with the failure that it prevents:

    - A change replaces the object of the version that was seen, by its tag, and every version is
      unique: it has the number of one attempt of one process. Otherwise, two processes would take
      each other's version for their own, and a change that arrives late would be applied to a
      version that has come back.
    - A long value is written before the version that names it, under a key that is never used
      again. Otherwise, a record names what is not there, or a value changes under its readers. A
      heartbeat, which is a change, too, writes the record without its long values: a leader would
      upload a map of many megabytes twice a second.
    - A long value is deleted only if a version with at least its number is there that does not name
      it: only that version could have been the first to name it. Otherwise, a process that was
      paused would delete what its successor is about to name. If its creation arrives once more
      after that, nothing names it. So each change that replaces a long value deletes all of them
      that a list shows, not only the one that it has replaced.
    - A long value that is gone is looked for once more, by the record as it is then. Otherwise, a
      reader that met a change would take the record for damaged.
    """

    def __init__(self, bucket: Bucket, long: Bucket, random: Random) -> None:
        """`long` is the same bucket, with the patience that long values take."""
        self._bucket = bucket
        self._long = long
        self._writer = f"{random.getrandbits(64):016x}"
        self._writes = 0
        self._own: dict[str, Version] = {}
        """The versions that this process wrote last, by the keys of their objects: while nobody
        else changes them, a change needs no look."""
        self._read_last: dict[tuple[str, bytes], tuple[LongValue, bytes]] = {}
        """The long values that were read last, by record and column: they do not change."""
        self._tasks = Tasks()

    async def read(self, key: bytes, columns: Sequence[bytes]) -> Cells:
        name = _key(key)
        missing: LongValue | None = None
        for _ in range(_RACES_MAX):
            found = await self._look(name)
            if found is None:
                return {}
            cells: Cells = {}
            gone: LongValue | None = None
            for column in columns:
                value = found.columns.get(column)
                if isinstance(value, LongValue):
                    whole = await self._whole(name, column, value)
                    if whole is None:
                        gone = value
                        break
                    cells[column] = whole
                elif value is not None:
                    cells[column] = value
            if gone is None:
                return cells
            if gone == missing:
                raise _damaged(self._where(gone.key), f"it is missing, and {name} names it")
            missing = gone
        raise self._busy(name)

    async def all(self, prefix: bytes, column: bytes) -> Mapping[bytes, bytes]:
        first = _key(prefix)
        folder = first.rpartition("/")[0]
        names = list[str]()
        try:
            async with aclosing(self._bucket.all(folder)) as listed:
                async for name, _ in listed:
                    if name.startswith(first):
                        names.append(name)
        except PercolatorError as error:
            raise unusable(error, "the bucket") from error
        rest = [name.removeprefix(first).encode() for name in names]
        found = await asyncio.gather(*(self.read(prefix + one, [column]) for one in rest))
        return {one: cells[column] for one, cells in zip(rest, found, strict=True) if cells}

    async def change(self, key: bytes, seen: Seen, changes: Mapping[bytes, bytes | None]) -> bool:
        name = _key(key)
        found = self._own.pop(name, None)
        if found is None or found.columns.get(seen.column) != seen.value:
            found = await self._look(name)
        for _ in range(_RACES_MAX):
            if (None if found is None else found.columns.get(seen.column)) != seen.value:
                return False
            new = await self._made(name, found, changes)
            data = new.encode(self._unique())
            try:
                if found is None:
                    made = await self._bucket.create(name, data)
                else:
                    made = await self._bucket.replace(name, data, found.tag)
            except PercolatorError as error:
                if error.retry is Retry.UNKNOWN:
                    raise
                raise unusable(error, "the bucket") from error
            there = self._decoded(name, made.found)
            if made.is_own and there is not None:
                self._own[name] = there
                self._clear_up(name, found, there)
                return True
            found = there
        raise self._busy(name)

    async def put(self, key: bytes, changes: Mapping[bytes, bytes | None]) -> None:
        await self.change(key, Seen(_NEVER, None), changes)

    async def remove(self, key: bytes, column: bytes) -> None:
        """Deletes the record of a session. Of no role: its leader may send a change meanwhile."""
        name = _key(key)
        self._own.pop(name, None)
        try:
            await self._bucket.delete(name)
        except PercolatorError as error:
            raise unusable(error, "the bucket") from error

    # ------------------------------------------------------------------ versions

    async def _look(self, name: str) -> Version | None:
        try:
            return self._decoded(name, await self._bucket.read(name))
        except StoreUnusable:
            raise
        except PercolatorError as error:
            raise unusable(error, "the bucket") from error

    def _decoded(self, name: str, stored: Stored | None) -> Version | None:
        return None if stored is None else Version.decode(stored, self._where(name))

    async def _made(
        self, name: str, found: Version | None, changes: Mapping[bytes, bytes | None]
    ) -> Version:
        """The next version. Its long values are in the bucket."""
        number = 1 if found is None else found.number + 1
        columns = {} if found is None else dict(found.columns)
        for column, value in changes.items():
            if value is None:
                columns.pop(column, None)
            elif len(value) > _LONG_BYTES:
                columns[column] = await self._stored(name, number, value)
            else:
                columns[column] = value
        return Version(number, columns)

    async def _stored(self, name: str, number: int, value: bytes) -> LongValue:
        long = LongValue.of(f"{_values(name)}/{number}-{self._unique()}", value)
        try:
            made = await self._long.create(long.key, value)
        except PercolatorError as error:
            # The record is as it was.
            raise unusable(error, "the bucket") from error
        if not made.is_own:
            raise _damaged(self._where(long.key), "it was there before it was written")
        return long

    async def _whole(self, name: str, column: bytes, long: LongValue) -> bytes | None:
        """None if it is gone."""
        last = self._read_last.get((name, column))
        if last is not None and last[0] == long:
            return last[1]
        try:
            found = await self._long.read(long.key)
        except PercolatorError as error:
            raise unusable(error, "the bucket") from error
        if found is None:
            return None
        if LongValue.of(long.key, found.data) != long:
            raise _damaged(self._where(long.key), "its checksum is not the one that is recorded")
        self._read_last[name, column] = long, found.data
        return found.data

    # ------------------------------------------------------------------ long values not needed

    def _clear_up(self, name: str, former: Version | None, new: Version) -> None:
        replaced = (set() if former is None else _named(former)) - _named(new)
        if replaced:
            self._tasks.start(self._sweep(name, replaced, new), name=f"sweep {name}")

    async def _sweep(self, name: str, replaced: set[str], present: Version) -> None:
        """Deletes long values that are not needed any more: what this process has replaced, and
        what was left by failed deletions, by creations that arrived late, and by the dead. What a
        list lacks is left to a later change."""
        former, folder = set(replaced), _values(name)
        try:
            async with aclosing(self._bucket.all(folder)) as listed:
                async for key, _ in listed:
                    number = _NUMBER.search(key)
                    if number is not None and int(number[1]) <= present.number:
                        former.add(key)
        except PercolatorError as error:
            _log.info("long values of earlier versions not listed", folder=folder, error=str(error))
        for key in sorted(former - _named(present)):
            try:
                await self._bucket.delete(key)
            except PercolatorError as error:
                # The only cost is space, until the next change.
                _log.info("a long value of an earlier version not deleted", error=str(error))
                return

    def _unique(self) -> str:
        self._writes += 1
        return f"{self._writer}-{self._writes}"

    def _where(self, key: str) -> str:
        return f"{key} in {self._bucket.name}"

    def _busy(self, name: str) -> StoreUnusable:
        return StoreUnusable(
            f"{self._where(name)} changes too fast: {_RACES_MAX} attempts met another change",
            fault=StoreFault.INPUT_OUTPUT,
        )


def _key(key: bytes) -> str:
    return f"{FOLDER}/{key.decode()}"


def _values(name: str) -> str:
    """The folder of a record's long values."""
    return f"{FOLDER}/{_VALUES}/{name.removeprefix(FOLDER + '/')}"


def _named(version: Version) -> set[str]:
    return {one.key for one in version.columns.values() if isinstance(one, LongValue)}


def _damaged(where: str, reason: str) -> StoreUnusable:
    return StoreUnusable(f"{where} is damaged: {reason}", fault=StoreFault.DAMAGED)
