"""The coordinator in a row store: a row for each role, and a row for each session.

A candidate waits until the leader has resigned, or until its stamp has not changed for the grace
period, by the candidate's own clock. Then the candidate writes a stamp of the next epoch, if the
row still has the one that it has seen. Nothing but that tells whether a process is dead: a leader
that was killed is replaced after the grace period, as one that is paused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from percolator.errors import PercolatorError, StoreUnusable
from percolator.services.chassis.coordinator import stored_value
from percolator.services.chassis.coordinator.beating_session import BeatingSession, value_of
from percolator.services.chassis.coordinator.interface import (
    KnownLeader,
    check_name,
    no_lost_leader,
)
from percolator.services.chassis.coordinator.own_process import OwnProcess
from percolator.services.chassis.coordinator.row_leadership import (
    LEADER,
    RoleRow,
    RowLeadership,
    value_column,
)
from percolator.services.chassis.coordinator.silence import Silence, SilentSessions
from percolator.services.chassis.coordinator.stamp import Stamp
from percolator.services.chassis.coordinator.times import USUAL_TIMES, CoordinatorTimes
from percolator.services.chassis.records.records import Records
from percolator.world import World

SESSIONS = b"session/"
SESSION = b"session"
"""The one column of a session: a count that changes with every sign of life, and its value."""

_log = structlog.get_logger("percolator.coordinator")


class RowCoordinator(OwnProcess[RowLeadership]):
    """The coordinator for one process. Belongs to one event loop."""

    def __init__(
        self, records: Records, world: World, times: CoordinatorTimes = USUAL_TIMES
    ) -> None:
        super().__init__(world.clock, times)
        self._records = records
        self._random = world.random
        self._silent = SilentSessions(world.clock, times.grace_seconds)

    async def campaign(
        self, role: str, holder: str, lost: Callable[[], str] = no_lost_leader
    ) -> RowLeadership:
        check_name("role", role)
        row = RoleRow(self._records, role)
        token = f"{self._random.getrandbits(64):016x}"
        silence = Silence(self._clock, self._times.grace_seconds)
        while True:
            stamp = await self._try(row, token, holder, silence, lost)
            if stamp is not None:
                leadership = RowLeadership(
                    row, self._clock, stamp, beat_seconds=self._times.beat_seconds
                )
                return self._leads(role, leadership)
            await self._clock.sleep(self._times.poll_seconds)

    async def leader(self, role: str) -> KnownLeader | None:
        check_name("role", role)
        seen = await RoleRow(self._records, role).look(LEADER)
        holder = seen.cells.get(LEADER)
        if seen.stamp is None or holder is None:
            return None
        return KnownLeader(seen.stamp.epoch, holder.decode(errors="replace"))

    async def read(self, role: str, key: str) -> bytes | None:
        check_name("role", role)
        check_name("key", key)
        column = value_column(key)
        found = (await RoleRow(self._records, role).look(column)).cells.get(column)
        return None if found is None else stored_value.decode(found, f"{role}/{key}")

    async def open_session(self, name: str, value: bytes) -> BeatingSession:
        check_name("name", name)
        return await self._begin_session(SessionRow(self._records, name), name, value)

    async def sessions(self, prefix: str) -> Mapping[str, bytes]:
        if prefix:
            check_name("prefix", prefix)
        now = self._silent.tick()
        found = await self._records.all(SESSIONS + prefix.encode(), SESSION)
        named = {prefix + rest.decode(errors="replace"): content for rest, content in found.items()}
        judged = self._silent.judge(now, prefix, named)
        for name in judged.forgotten:
            await SessionRow(self._records, name).remove()
        return {name: value_of(content) for name, content in judged.alive.items()}

    # ------------------------------------------------------------------------- candidates

    async def _try(
        self, row: RoleRow, token: str, holder: str, silence: Silence, lost: Callable[[], str]
    ) -> Stamp | None:
        """The stamp with which this process leads. None while there is a leader that may be alive,
        or if another candidate was faster."""
        seen = await row.look(LEADER)
        stamp = seen.stamp
        if stamp is not None and stamp.token == token:
            return stamp  # an earlier attempt, whose answer was lost
        if stamp is not None and LEADER in seen.cells:
            is_lost = seen.cells[LEADER] == lost().encode()
            if not silence.lasts(stamp) and not is_lost:
                return None
        new = Stamp(1 if stamp is None else stamp.epoch + 1, token, 0)
        try:
            made = await row.change(stamp, new, {LEADER: holder.encode()})
        except StoreUnusable:
            raise
        except PercolatorError as error:
            _log.info("a candidate does not know yet whether it leads", error=str(error))
            return None
        return new if made else None


class SessionRow:
    """The row of one session."""

    def __init__(self, records: Records, name: str) -> None:
        self._records = records
        self._key = SESSIONS + name.encode()

    async def put(self, content: bytes) -> None:
        await self._records.put(self._key, {SESSION: content})

    async def remove(self) -> None:
        await self._records.put(self._key, {SESSION: None})
