"""Leading a role in a row store: all that the leader writes is in one row, under its stamp.

    role/<role>     stamp       changes with every write, and so is the leader's sign of life
                    leader      the name that the leader has given itself; absent after it resigned
                    =<key>      a value

Invariants:
- Every write finds the stamp that its writer knows, and leaves a new one. So a leader whose stamp
  was replaced cannot write, and a call that arrives late changes nothing after a later one.
- A value counts only if the row still had a stamp of this leader after the value was written.
- The store's calls and their order decide; clocks only decide *when* another process takes over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import structlog

from percolator.errors import InvalidArgument, NotReady, PercolatorError, StoreUnusable
from percolator.services.chassis.coordinator import stored_value
from percolator.services.chassis.coordinator.interface import check_name
from percolator.services.chassis.coordinator.stamp import Stamp
from percolator.services.chassis.records.records import Records, Seen, unusable
from percolator.services.chassis.store.shared_look import SharedLook
from percolator.services.chassis.trouble import Trouble
from percolator.tasks import Tasks
from percolator.world import Clock

STAMP = b"stamp"
LEADER = b"leader"
ROLES = b"role/"
_VALUE_BYTES_MAX = 32 << 20
"""Stores of rows limit a cell: Bigtable to 100 MiB, and it recommends a tenth of that."""
_ATTEMPTS_MAX = 4
"""How often a write is sent again whose answers are lost."""

_log = structlog.get_logger("percolator.coordinator")


def role_key(role: str) -> bytes:
    return ROLES + role.encode()


def value_column(key: str) -> bytes:
    return b"=" + key.encode()


class RoleSeen(NamedTuple):
    """A role's row as of one moment."""

    stamp: Stamp | None
    """None: the role never had a leader."""
    cells: Mapping[bytes, bytes]


class RoleRow:
    """The row of one role."""

    def __init__(self, records: Records, role: str) -> None:
        self.role = role
        self._records = records
        self._key = role_key(role)

    async def look(self, *columns: bytes) -> RoleSeen:
        """The stamp, and these columns."""
        cells = await self._records.read(self._key, (STAMP, *columns))
        found = cells.get(STAMP)
        return RoleSeen(None if found is None else Stamp.decode(found, self.role), cells)

    async def change(
        self, seen: Stamp | None, new: Stamp, changes: Mapping[bytes, bytes | None]
    ) -> bool:
        """Changes the row if it has the stamp that was seen. Raises as `Records.change` does."""
        expected = Seen(STAMP, None if seen is None else seen.encode())
        return await self._records.change(self._key, expected, {STAMP: new.encode(), **changes})


class RowLeadership:
    """A leadership in a row, made by `RowCoordinator.campaign`."""

    def __init__(self, row: RoleRow, clock: Clock, stamp: Stamp, *, beat_seconds: float) -> None:
        """`stamp` is the one with which it began."""
        self._row = row
        self._clock = clock
        self._first = self._stamp = stamp
        self._attempts = stamp.writes
        self._certain = True
        """Whether `_stamp` is that of the row, unless another process leads."""
        self._beat_seconds = beat_seconds
        self._deposed = False
        self._writing = asyncio.Lock()
        self._tasks = Tasks()
        self._shared = SharedLook(self._look)
        self._trouble = Trouble(
            _log,
            "cannot show that this leader lives",
            "this leader shows again that it lives",
            role=row.role,
        )
        self._beating = asyncio.create_task(self._keep_beating(), name=f"lead as {row.role}")

    @property
    def epoch(self) -> int:
        return self._first.epoch

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and nothing of it is left to do."""
        return self._deposed and self._beating.done()

    async def stands(self) -> bool:
        if self._deposed:
            return False
        self._note(await self._shared())
        return not self._deposed

    async def check(self) -> None:
        if not await self.stands():
            raise NotReady(f"this process no longer leads as {self._row.role}")

    async def get(self, key: str) -> bytes | None:
        check_name("key", key)
        if not self._certain:
            # A write that failed may still arrive, and change what is about to be found.
            await self._tasks.run_to_the_end(self._write({}))
        column = value_column(key)
        seen = await self._row.look(column)
        self._note(seen.stamp)
        self._require_leading()
        found = seen.cells.get(column)
        return None if found is None else stored_value.decode(found, f"{self._row.role}/{key}")

    async def put(self, key: str, value: bytes) -> None:
        check_name("key", key)
        if len(value) > _VALUE_BYTES_MAX:
            raise InvalidArgument(
                "value",
                f"{self._row.role}/{key} would have {len(value)} bytes, and a row store keeps "
                f"{_VALUE_BYTES_MAX} at most",
            )
        self._require_leading()
        changes = {value_column(key): stored_value.encode(value)}
        # Not torn by a cancellation: what was written has to be known here.
        await self._tasks.run_to_the_end(self._write(changes))
        # This process may have been paused since then.
        await self.check()

    async def resign(self) -> None:
        """If the store does not answer, the next leader waits until this one was silent."""
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        if self._deposed:
            return
        try:
            await self._tasks.run_to_the_end(self._write({LEADER: None}))
        except PercolatorError as error:
            _log.info("not resigned", role=self._row.role, error=str(error))
        self._deposed = True

    # ------------------------------------------------------------------------- writing

    async def _write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Returns when it is written, by one of several attempts of which one at most has an
        effect. After an error it may be written or not, and so until the next write."""
        async with self._writing:
            self._require_leading()
            attempted: set[Stamp] = set()
            for attempt in range(_ATTEMPTS_MAX):
                if not self._certain:
                    self._learn(await self._look())
                    self._require_leading()
                    if self._stamp in attempted:
                        return
                self._attempts += 1
                new = self._first._replace(writes=self._attempts)
                attempted.add(new)
                self._certain = False
                try:
                    made = await self._row.change(self._stamp, new, changes)
                except StoreUnusable:
                    raise
                except PercolatorError as error:
                    if attempt + 1 == _ATTEMPTS_MAX:
                        raise unusable(error) from error
                    continue
                if made:
                    self._stamp, self._certain = new, True
                    return
            raise NotReady(f"the row of the role {self._row.role!r} changes too fast")

    def _learn(self, found: Stamp | None) -> None:
        self._note(found)
        if found is not None and not self._deposed:
            self._stamp, self._certain = found, True

    # ------------------------------------------------------------------------- looking

    async def _look(self) -> Stamp | None:
        return (await self._row.look()).stamp

    def _note(self, found: Stamp | None) -> None:
        if not self._deposed and (found is None or not found.is_of(self._first)):
            self._deposed = True
            _log.warning("deposed by a later leader", role=self._row.role, epoch=self.epoch)

    def _require_leading(self) -> None:
        if self._deposed:
            raise NotReady(f"this process no longer leads as {self._row.role}")

    async def _keep_beating(self) -> None:
        while not self._deposed:
            await self._clock.sleep(self._beat_seconds)
            try:
                await self._tasks.run_to_the_end(self._write({}))
            except NotReady:
                continue
            except PercolatorError as error:
                # Others may take over: they cannot tell a store that fails from a dead leader.
                self._trouble.lasts(error)
            else:
                self._trouble.is_over()
