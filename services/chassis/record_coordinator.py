"""The coordinator on records: one for each role, and one for each session.

A candidate waits until the leader has resigned, or until its stamp has not changed for the grace
period, by the candidate's own clock. Then the candidate writes a stamp of the next epoch, if the
record still has the one that it has seen. Nothing but that tells whether a process is dead: a
leader that was killed is replaced after the grace period, as one that is paused.

With a lease, a leader takes itself for one without a look at its record while the lease runs.
Rules, each with the failure that it prevents:

- It begins when the last successful write or look began: these prove that there was no successor
  then, or later. Counted from their ends, it would include time in which there was one.
- The record names it. A successor reads nothing and answers nothing before the lease that it has
  found there has run out, from its own takeover on. Otherwise both answer at the same time, and the
  former leader does not know of what the successor has done.
- A takeover names the longer of its own lease and the one that it has found, until that has run
  out: the successor may die before, and the next one sees only what the record says.
- A leader that resigns gives up its lease before it says so in the record, where it then names none
  but a former one that it has not waited out.
- Only the rates of two clocks are compared, as in `percolator/bucket/log.py`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from math import ceil, inf
from typing import NamedTuple

import structlog

from percolator.bucket.log import CLOCK_RATES_RATIO_MAX
from percolator.errors import (
    InvalidArgument,
    NotReady,
    PercolatorError,
    StoreFault,
    StoreUnusable,
)
from percolator.services.chassis import coordinator
from percolator.services.chassis.coordinator import (
    USUAL_TIMES,
    BeatingSession,
    CoordinatorTimes,
    KnownLeader,
    OwnProcess,
    Silence,
    SilentSessions,
    Trouble,
    check_name,
    no_lost_leader,
    value_of,
)
from percolator.services.chassis.epoch_directory import SharedLook
from percolator.services.chassis.records import Records, Seen, unusable
from percolator.tasks import Tasks
from percolator.world import Clock, World

_LEASE = re.compile(rb"[1-9][0-9]{0,8}")
_FORMAT = re.compile(rb"([1-9][0-9]{0,17}) ([0-9a-f]{16}) ([0-9]{1,18})")


class Stamp(NamedTuple):
    """No two changes of a record leave the same one."""

    epoch: int
    """Grows by one with every leader."""
    token: str
    """Random, of one candidacy: it knows its own stamp, even if the answer was lost."""
    writes: int
    """Grows with every attempt to write, so that an earlier attempt that arrives late finds another
    stamp than it expects."""

    def encode(self) -> bytes:
        return b"%d %s %d" % (self.epoch, self.token.encode(), self.writes)

    @classmethod
    def decode(cls, data: bytes, role: str) -> Stamp:
        """Raises `StoreUnusable` for what `encode` cannot have written."""
        found = _FORMAT.fullmatch(data)
        if found is None:
            raise StoreUnusable(
                f"the stamp of the role {role!r} is damaged: {data[:64]!r}",
                fault=StoreFault.DAMAGED,
            )
        return cls(int(found[1]), found[2].decode(), int(found[3]))

    def is_of(self, other: Stamp) -> bool:
        """True if the same leader wrote both."""
        return (self.epoch, self.token) == (other.epoch, other.token)


STAMP = b"stamp"
LEADER = b"leader"
LEASE = b"lease"
ROLES = b"role/"
LED = b"led/"
"""A record for each role that had a leader. If it is there and the role's own is not, that is
lost."""
_LED = b"led"
_VALUE_BYTES_MAX = 32 << 20
"""Stores limit a value: Bigtable a cell to 100 MiB, and it recommends a tenth of that."""
_ATTEMPTS_MAX = 4
"""How often a write is sent again whose answers are lost."""
_WAS_HELD_BEATS = 2
"""Not longer than the grace period: nobody has taken over in that time because of silence."""

_log = structlog.get_logger("percolator.coordinator")


def role_key(role: str) -> bytes:
    return ROLES + role.encode()


def value_column(key: str) -> bytes:
    return b"=" + key.encode()


class RoleSeen(NamedTuple):
    """A role's record as of one time."""

    stamp: Stamp | None
    """None: the role never had a leader."""
    cells: Mapping[bytes, bytes]


class RoleRecord:
    """The record of one role."""

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
        """Changes the record if it has the stamp that was seen. Raises as `Records.change` does."""
        expected = Seen(STAMP, None if seen is None else seen.encode())
        return await self._records.change(self._key, expected, {STAMP: new.encode(), **changes})


class RecordLeadership:
    """A leadership in a record, made by `RecordCoordinator.campaign`.

    All that the leader writes is in one record, under its stamp.

        role/<role>     stamp       changes with every write, and so is the leader's heartbeat
                        leader      the leader's name for itself; absent after it resigned
                        lease       milliseconds for which a successor waits; absent for none
                        =<key>      a value

    Invariants:
    - Every write finds the stamp that its writer knows, and leaves a new one. So a leader whose
      stamp was replaced cannot write, and a call that arrives late changes nothing after a later
      one.
    - A value counts only if the record still had a stamp of this leader after the value was
      written.
    - The store's calls and their order decide; clocks only decide *when* another process takes
      over.
    """

    def __init__(
        self,
        record: RoleRecord,
        clock: Clock,
        stamp: Stamp,
        *,
        beat_seconds: float,
        lease_seconds: float = 0.0,
        former_lease_seconds: float = 0.0,
    ) -> None:
        """`stamp` is the one with which it began. Nothing may be done before `wait_for_former` has
        returned. If there is a lease, the record names it, or the former leader's, if that is
        longer."""
        self._record = record
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._former_lease_seconds = former_lease_seconds
        """The lease of former leaders, unless it is known to have run out."""
        self._leased_until = -inf
        self._first = self._stamp = stamp
        self._attempts = stamp.writes
        self._certain = True
        """True if `_stamp` is that of the record, unless another process leads."""
        self._beat_seconds = beat_seconds
        self._held_at = self._shown_at = clock.monotonic_seconds()
        """When it was last seen to be held, and when its last write was seen to succeed."""
        self._deposed = False
        self._writing = asyncio.Lock()
        self._tasks = Tasks()
        self._shared = SharedLook(self._look)
        self._trouble = Trouble(
            _log,
            "cannot show that this leader lives",
            "this leader shows again that it lives",
            role=record.role,
        )
        self._beating = asyncio.create_task(self._keep_beating(), name=f"lead as {record.role}")

    async def wait_for_former(self) -> None:
        """Returns when the lease that the record named before has run out."""
        seconds = self._former_lease_seconds
        if not seconds:
            return
        # From now on, since it may have been renewed just before the takeover.
        await self._clock.sleep(seconds * CLOCK_RATES_RATIO_MAX)
        self._former_lease_seconds = 0.0
        if seconds > self._lease_seconds:
            try:
                await self._tasks.run_to_the_end(
                    self._write({LEASE: _encode_lease(self._lease_seconds)})
                )
            except PercolatorError as error:
                # A successor waits for longer than it would have to.
                _log.info("a former lease stays", role=self._record.role, error=str(error))

    @property
    def epoch(self) -> int:
        return self._first.epoch

    @property
    def is_over(self) -> bool:
        """True if it has ended, and nothing of it is left to do."""
        return self._deposed and self._beating.done()

    async def is_held(self) -> bool:
        if self._deposed:
            return False
        if self._clock.monotonic_seconds() < self._leased_until:
            return True
        self._note(await self._shared())
        return not self._deposed

    async def was_held(self) -> bool:
        now = self._clock.monotonic_seconds()
        if not self._deposed and now - self._held_at <= _WAS_HELD_BEATS * self._beat_seconds:
            return True
        return await self.is_held()

    async def check(self) -> None:
        if not await self.is_held():
            raise NotReady(f"this process no longer leads as {self._record.role}")

    async def get(self, key: str) -> bytes | None:
        check_name("key", key)
        if not self._certain:
            # A write that failed may still arrive, and change what is about to be found.
            await self._tasks.run_to_the_end(self._write({}))
        column = value_column(key)
        seen = await self._record.look(column)
        self._note(seen.stamp)
        self._require_leading()
        found = seen.cells.get(column)
        return None if found is None else coordinator.decode(found, f"{self._record.role}/{key}")

    async def put(self, key: str, value: bytes) -> None:
        check_name("key", key)
        if len(value) > _VALUE_BYTES_MAX:
            raise InvalidArgument(
                "value",
                f"{self._record.role}/{key} would have {len(value)} bytes, and the store keeps "
                f"{_VALUE_BYTES_MAX} at most",
            )
        self._require_leading()
        changes = {value_column(key): coordinator.encode(value)}
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
        self._lease_seconds, self._leased_until = 0.0, -inf
        try:
            await self._tasks.run_to_the_end(
                self._write({LEADER: None, LEASE: _encode_lease(self._former_lease_seconds)})
            )
        except PercolatorError as error:
            _log.info("not resigned", role=self._record.role, error=str(error))
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
                began = self._clock.monotonic_seconds()
                new = self._first._replace(writes=self._attempts)
                attempted.add(new)
                self._certain = False
                try:
                    made = await self._record.change(self._stamp, new, changes)
                except StoreUnusable:
                    raise
                except PercolatorError as error:
                    if attempt + 1 == _ATTEMPTS_MAX:
                        raise unusable(error, "the store of the coordinator") from error
                    continue
                if made:
                    self._stamp, self._certain = new, True
                    self._shown_at = self._clock.monotonic_seconds()
                    self._was_led_at(began)
                    return
            raise NotReady(f"the record of the role {self._record.role!r} changes too fast")

    def _learn(self, found: Stamp | None) -> None:
        self._note(found)
        if found is not None and not self._deposed:
            self._stamp, self._certain = found, True

    # ------------------------------------------------------------------------- looking

    async def _look(self) -> Stamp | None:
        began = self._clock.monotonic_seconds()
        found = (await self._record.look()).stamp
        if found is not None and found.is_of(self._first):
            self._was_led_at(began)
        return found

    def _was_led_at(self, began: float) -> None:
        """`began`: when a write or look began that has shown it."""
        self._held_at = max(self._held_at, began)
        if self._lease_seconds:
            self._leased_until = max(self._leased_until, began + self._lease_seconds)

    def _note(self, found: Stamp | None) -> None:
        if not self._deposed and (found is None or not found.is_of(self._first)):
            self._deposed = True
            _log.warning("deposed by a later leader", role=self._record.role, epoch=self.epoch)

    def _require_leading(self) -> None:
        if self._deposed:
            raise NotReady(f"this process no longer leads as {self._record.role}")

    async def _keep_beating(self) -> None:
        due = self._shown_at + self._beat_seconds
        while not self._deposed:
            await self._clock.sleep(max(due - self._clock.monotonic_seconds(), 0.0))
            now = self._clock.monotonic_seconds()
            due = self._shown_at + self._beat_seconds
            if now < due:
                continue  # a write has shown it meanwhile
            due = now + self._beat_seconds
            try:
                await self._tasks.run_to_the_end(self._write({}))
            except NotReady:
                continue
            except PercolatorError as error:
                # Others may take over: they cannot tell a store that fails from a dead leader.
                self._trouble.lasts(error)
            else:
                self._trouble.is_over()
                due = self._shown_at + self._beat_seconds


SESSIONS = b"session/"
SESSION = b"session"
"""The one column of a session: a count that changes with every heartbeat, and its value."""

_log = structlog.get_logger("percolator.coordinator")


class RecordCoordinator(OwnProcess[RecordLeadership]):
    """The coordinator for one process. Belongs to one event loop."""

    def __init__(
        self, records: Records, world: World, times: CoordinatorTimes = USUAL_TIMES
    ) -> None:
        super().__init__(world.clock, times)
        self._records = records
        self._random = world.random
        self._silent = SilentSessions(world.clock, times.session_grace_seconds)
        self._listed: dict[str, tuple[float, Mapping[bytes, bytes]]] = {}
        """The sessions at the last look, by prefix, and when it began."""
        self._led_by: dict[str, KnownLeader | None] = {}
        """The leaders that this process, a candidate, has seen at its last check."""

    async def campaign(
        self, role: str, holder: str, lost: Callable[[], str] = no_lost_leader
    ) -> RecordLeadership:
        check_name("role", role)
        record = RoleRecord(self._records, role)
        token = f"{self._random.getrandbits(64):016x}"
        silence = Silence(self._clock, self._times.grace_seconds)
        try:
            while True:
                taken = await self._try(record, token, holder, silence, lost)
                if taken is not None:
                    stamp, former_lease_seconds = taken
                    await self._note_led(role)
                    leadership = RecordLeadership(
                        record,
                        self._clock,
                        stamp,
                        beat_seconds=self._times.beat_seconds,
                        lease_seconds=self._times.lease_seconds,
                        former_lease_seconds=former_lease_seconds,
                    )
                    self._leads(role, leadership)
                    try:
                        await leadership.wait_for_former()
                    except BaseException:
                        # Its heartbeats would keep everybody from leading, and this process, too.
                        await leadership.resign()
                        raise
                    return leadership
                await silence.sleep(self._times.poll_seconds)
        finally:
            self._led_by.pop(role, None)

    async def leader(self, role: str) -> KnownLeader | None:
        check_name("role", role)
        if role in self._led_by:
            return self._led_by[role]
        return _leader(await RoleRecord(self._records, role).look(LEADER))

    async def read(self, role: str, key: str) -> bytes | None:
        check_name("role", role)
        check_name("key", key)
        column = value_column(key)
        found = (await RoleRecord(self._records, role).look(column)).cells.get(column)
        return None if found is None else coordinator.decode(found, f"{role}/{key}")

    async def open_session(self, name: str, value: bytes) -> BeatingSession:
        check_name("name", name)
        return await self._begin_session(SessionRecord(self._records, name), name, value)

    async def sessions(self, prefix: str) -> Mapping[str, bytes]:
        if prefix:
            check_name("prefix", prefix)
        now = self._silent.tick()
        found = await self._all_sessions(prefix)
        named = {prefix + rest.decode(errors="replace"): content for rest, content in found.items()}
        judged = self._silent.judge(now, prefix, named)
        for name in judged.forgotten:
            await SessionRecord(self._records, name).remove()
        return {name: value_of(content) for name, content in judged.alive.items()}

    async def _all_sessions(self, prefix: str) -> Mapping[bytes, bytes]:
        """Sessions as of a look begun so recently that another one would hardly show more."""
        began = self._clock.monotonic_seconds()
        last = self._listed.get(prefix)
        slack = self._times.session_beat_seconds - self._times.beat_seconds
        if last is not None and began - last[0] < slack:
            return last[1]
        found = await self._records.all(SESSIONS + prefix.encode(), SESSION)
        self._listed[prefix] = began, found
        return found

    # ------------------------------------------------------------------------- candidates

    async def _try(
        self, record: RoleRecord, token: str, holder: str, silence: Silence, lost: Callable[[], str]
    ) -> tuple[Stamp, float] | None:
        """The stamp with which this process leads, and the lease that it has found. None while
        there is a leader that may be alive, or if another candidate was faster."""
        seen = await record.look(LEADER, LEASE)
        self._led_by[record.role] = _leader(seen)
        stamp, lease_seconds = seen.stamp, _lease(seen, record.role)
        if stamp is not None and stamp.token == token:
            return stamp, lease_seconds  # an earlier attempt, whose answer was lost
        if stamp is not None and LEADER in seen.cells:
            holder_is_lost = seen.cells[LEADER] == lost().encode()
            if not silence.lasts(stamp) and not holder_is_lost:
                return None
        if stamp is None and await self._was_led(record):
            return None
        new = Stamp(1 if stamp is None else stamp.epoch + 1, token, 0)
        named = _encode_lease(max(lease_seconds, self._times.lease_seconds))
        try:
            made = await record.change(stamp, new, {LEADER: holder.encode(), LEASE: named})
        except StoreUnusable:
            raise
        except PercolatorError as error:
            _log.info("a candidate does not know yet whether it leads", error=str(error))
            return None
        return (new, lease_seconds) if made else None

    async def _note_led(self, role: str) -> None:
        """Before anything counts on the role's record."""
        key = LED + role.encode()
        if not await self._records.read(key, [_LED]):
            try:
                await self._records.put(key, {_LED: b""})
            except StoreUnusable:
                raise
            except PercolatorError as error:
                raise unusable(error, "the store of the coordinator") from error

    async def _was_led(self, record: RoleRecord) -> bool:
        """True if the record, which was not there, is by now. `StoreUnusable` if it is lost."""
        if not await self._records.read(LED + record.role.encode(), [_LED]):
            return False
        # Another candidate may have begun to lead since the last look.
        if (await record.look()).stamp is None:
            raise StoreUnusable(
                f"the record of the role {record.role!r} is missing, though it had a leader: "
                "whoever led without it would know nothing of what that has recorded; see "
                "docs/formats.md",
                fault=StoreFault.DAMAGED,
            )
        return True


def _leader(seen: RoleSeen) -> KnownLeader | None:
    holder = seen.cells.get(LEADER)
    if seen.stamp is None or holder is None:
        return None
    return KnownLeader(seen.stamp.epoch, holder.decode(errors="replace"))


def _encode_lease(seconds: float) -> bytes | None:
    """The content of the column; None for no lease."""
    return b"%d" % ceil(seconds * 1000) if seconds else None


def _lease(seen: RoleSeen, role: str) -> float:
    """The lease that a record names, in seconds."""
    found = seen.cells.get(LEASE)
    if found is None:
        return 0.0
    if not _LEASE.fullmatch(found):
        raise StoreUnusable(
            f"the lease of the role {role!r} is damaged: {found[:64]!r}", fault=StoreFault.DAMAGED
        )
    return int(found) / 1000


class SessionRecord:
    """The record of one session."""

    def __init__(self, records: Records, name: str) -> None:
        self._records = records
        self._key = SESSIONS + name.encode()

    async def put(self, content: bytes) -> None:
        await self._records.put(self._key, {SESSION: content})

    async def remove(self) -> None:
        await self._records.remove(self._key, SESSION)
