"""One attempt at one task of a shared transaction: locks what the task writes.

The attempt writes blindly, in batches of any number. A cell that another transaction has committed
since the part began is locked under a further part, with a newer start timestamp, unless the shared
transaction says since when its cells may not have changed.

Rules, each with the failure that it prevents:
- A lock of another part of the same transaction is not taken for our own: the write would be lost
  when the other attempt is not chosen (other_attempts.py).
- After an error, the attempt cannot finish: an unanswered message may lock a cell later on.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from percolator.errors import (
    CellAddress,
    ConflictError,
    PercolatorError,
    Retry,
    UsageError,
    WrittenTwice,
)
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    KIND_PUT,
    KIND_PUT_IN_DATA,
    LOCK_HEADER,
    LockRecord,
    shared_part,
)
from percolator.protocol import conflicts, steps
from percolator.protocol.commit import portions
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import Environment
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.shared.announcing import AttemptAnnouncement, Observed
from percolator.protocol.shared.kept_cells import KEPT, with_kept_cells
from percolator.protocol.shared.names import Job, PartKey, PartName
from percolator.protocol.shared.other_attempts import OtherAttempts
from percolator.protocol.shared.part import Part
from percolator.protocol.shared.rolling_back import roll_back_part
from percolator.protocol.write_set import Prewrite, Write
from percolator.routing.cells import APPLIED, Answer, CellMutation, Groups, Refused

PARTS_MAX = 256
"""How many parts one attempt may have: each is one more that the driver commits."""


class _Round:
    """What a round of prewrites has locked, and what not, and why not."""

    def __init__(self) -> None:
        self.missed: list[CellAddress] = []
        self.locked: defaultdict[int, list[CellAddress]] = defaultdict(list)
        """Those that are locked now, by the start timestamp of the part."""
        self.left: list[CellAddress] = []
        """Those that chosen parts have locked."""
        self.met: list[MetLock] = []
        self.problem: PercolatorError | None = None
        """Why there was no answer."""
        self.changed: list[CellAddress] = []
        """Those that were to be kept, and that others have committed since they were read."""
        self.is_overtaken = False
        """Others have committed or locked cells since the part began."""

    def to_announce(self, writes: Mapping[CellAddress, Write]) -> dict[int, list[CellAddress]]:
        """The locked cells that will change; a lock-only write changes nothing."""
        return {
            start: [cell for cell in cells if writes[cell][0] != KIND_LOCK_ONLY]
            for start, cells in self.locked.items()
        }


class Attempt:
    """The parts of one attempt. Only one call at a time."""

    def __init__(
        self,
        env: Environment,
        groups: Groups,
        cleanup: Cleanup,
        job: Job,
        task: str,
        generation: int,
        *,
        replace_after_seconds: float,
        chosen: Set[int] = frozenset(),
        only_changes: bool = False,
    ) -> None:
        """`replace_after_seconds`: how long a later attempt waits before it replaces a finished
        one. `chosen`: parts, by their start timestamps, that are to be committed with this attempt.
        What they have locked is left to them; it is not written twice. `only_changes`: cells that
        hold already what is written to them are kept as they are (kept_cells.py)."""
        self._env = env
        self._groups = groups
        self._cleanup = cleanup
        self._job = job
        self._task = task
        self._generation = generation
        self._others = OtherAttempts(env, job, task, generation, replace_after_seconds)
        self._chosen = chosen
        self._only_changes = only_changes
        self._parts: list[Part] = []
        self._part: Part | None = None
        """The part under which cells are locked now."""
        self._heads: dict[int, bytes] = {}
        """What the locks of the part begin with, by the kind of write: all but the value."""
        self._announcement = (
            None if env.announcing is None else AttemptAnnouncement(env, env.announcing)
        )
        self._has_failed = False
        self._is_over = False
        self.tables: set[int] = set()
        """Those in which cells were locked."""
        self.cells = 0
        """How many cells were locked. Those that are left to chosen parts do not count."""
        self.kept = 0
        """How many of them are not written again."""

    @property
    def parts(self) -> Sequence[Part]:
        return self._parts

    @property
    def announced(self) -> Mapping[int, Observed]:
        """By table, the observers to which all of its cells were announced."""
        return {} if self._announcement is None else self._announcement.announced

    @property
    def start(self) -> int:
        """The start timestamp of its first part; 0 before it has one."""
        return self._parts[0].start if self._parts else 0

    # ------------------------------------------------------------------ writing

    async def prewrite(self, writes: Mapping[CellAddress, Write], deadline: float) -> None:
        """Locks the cells. Raises `WrittenTwice`, `ConflictError`, or the error that prevented it;
        after an error, the attempt can only be abandoned."""
        self._require_going_on()
        try:
            locked = await self._lock(writes, deadline)
        except BaseException:
            self._has_failed = True
            raise
        self.cells += len(locked)
        self.tables.update({cell.table_id for cell in locked})
        self.kept += sum(write is KEPT for write in locked.values())

    async def _lock(
        self, given: Mapping[CellAddress, Write], deadline: float
    ) -> Mapping[CellAddress, Write]:
        """Returns what was locked: the writes, or that cells are kept."""
        env = self._env
        pending: Sequence[CellAddress] = sorted(given)
        backoff = env.backoff()
        began = env.now()
        allowed = deadline - began
        writes, read_at = dict(given), 0
        if self._only_changes:
            read_at = (await self._current(deadline)).start
            writes = await with_kept_cells(env, self._cleanup, given, read_at, deadline)
        while True:
            part = await self._current(deadline)
            result = _Round()
            for cells in portions(pending):
                steps_ = [self._prewrite(part, cell, writes[cell], read_at) for cell in cells]
                answers = await env.cells.mutate(steps_, deadline)
                if answers.count(APPLIED) != len(cells):
                    self._sort_out(part, writes, cells, answers, result)
                    for cell in result.left:
                        del writes[cell]
                    result.left.clear()
                else:
                    result.locked[part.start] += cells
            if self._announcement is not None:
                await self._announcement.announce(result.to_announce(writes), deadline)
            for cell in result.changed:
                writes[cell] = given[cell]
            if not result.missed:
                return writes
            pending = result.missed
            waited = env.now() - began if backoff.rounds else 0.0
            if result.met:
                spared_until = await self._resolve(result.met, waited, deadline)
                if spared_until:
                    deadline = max(deadline, spared_until + allowed)
            if result.is_overtaken:
                self._part = None
            if not await backoff.pause(deadline):
                if result.met:
                    raise conflicts.locked(env, part.start, result.met[0])
                raise result.problem or ConflictError("no time was left to lock the cells")

    async def _current(self, deadline: float) -> Part:
        """The part under which to lock cells now; begins one if there is none."""
        if self._part is not None:
            if self._part.is_lost:
                raise self._part.gone()
            return self._part
        if len(self._parts) >= PARTS_MAX:
            raise ConflictError(
                f"task {self._task!r} has lost to other transactions {PARTS_MAX} times"
            )
        left = max(deadline - self._env.now(), 0.001)
        start = await self._env.timestamps.get(timeout_seconds=left)
        name = PartName(self._generation, self.start or start, len(self._parts), self._task)
        part = Part(self._env, self._groups, self._job, name, start)
        self._parts.append(part)
        await part.begin(deadline)
        self._part = part
        self._heads = {}
        return part

    def _prewrite(self, part: Part, cell: CellAddress, write: Write, read_at: int) -> CellMutation:
        """`read_at`: when it was seen that kept cells need not be written."""
        kind, value = write
        data = None
        if len(value) > self._env.limits.value_inline_bytes_max:
            kind, value, data = KIND_PUT_IN_DATA, b"", value
        start = part.start
        lock = (self._heads.get(kind) or self._head(part, kind)) + value
        since = self._job.unchanged_since or (read_at if kind == KIND_LOCK_ONLY else start)
        table_id, row, column = cell
        if since < start:
            step = steps.prewrite_since(row, column, start, since, lock, data)
        elif data is not None:
            step = steps.prewrite(row, column, start, lock, data)
        else:
            return CellMutation(table_id, Prewrite(row, column, lock, start))
        return CellMutation(table_id, step)

    def _head(self, part: Part, kind: int) -> bytes:
        # Others look at the primary's time to live; this one counts while that is not there.
        ttl = int(self._job.ttl_seconds * 1000)
        header = LOCK_HEADER.pack(part.start, part.start + 1, ttl, kind)
        head = self._heads[kind] = header + shared_part(b"", part.primary)
        return head

    def _sort_out(
        self,
        part: Part,
        writes: Mapping[CellAddress, Write],
        cells: Sequence[CellAddress],
        answers: Sequence[Answer],
        result: _Round,
    ) -> None:
        """Adds to `result` what became of the cells. Raises what cannot be dealt with."""
        for cell, answer in zip(cells, answers, strict=True):
            if answer is APPLIED:
                result.locked[part.start].append(cell)
                continue
            if not isinstance(answer, Refused):
                if answer.retry is not Retry.UNKNOWN:
                    raise answer
                result.problem = answer
            elif answer.condition == steps.OWN_COMMIT:
                raise UsageError("the shared transaction was committed while this task was writing")
            elif answer.condition == steps.OWN_ROLLBACK:
                raise part.gone()
            elif answer.condition == steps.PREWRITE_LOCKED:
                met = MetLock.of(cell.table_id, answer.offender)
                if met.lock.start_timestamp in self._chosen:
                    result.left.append(cell)
                    continue
                if self._is_ours(met, writes[cell]):
                    result.locked[met.lock.start_timestamp].append(cell)
                    continue
                result.met.append(met)
                # Only the younger waits for the older: two that wait for each other never stop.
                result.is_overtaken |= met.lock.start_timestamp > part.start
            elif self._job.unchanged_since:
                raise self._changed(cell, answer)
            elif writes[cell] is KEPT:
                result.changed.append(cell)
                result.is_overtaken |= answer.offender.timestamp > part.start
            else:
                result.is_overtaken = True
            result.missed.append(cell)

    def _is_ours(self, met: MetLock, write: Write) -> bool:
        """Whether this attempt has locked the cell before, with the same value."""
        name = self._job.part_of(met.lock.primary)
        if name is None or (name.attempt, name.task) != (self.start, self._task):
            return False
        if not _writes_the_same(met.lock, write):
            cell = self._env.described(met.address)
            raise WrittenTwice(f"task {self._task!r} writes {cell} twice", cell=met.address)
        return True

    def _changed(self, cell: CellAddress, answer: Refused) -> ConflictError:
        record = answer.offender
        return ConflictError(
            f"{self._env.described(cell)} was committed at {record.timestamp}, and the shared "
            f"transaction writes only what was not changed since {self._job.unchanged_since}",
            cell=cell,
            start_timestamp=self.start,
            other_commit_timestamp=record.timestamp,
        )

    # ------------------------------------------------------------------ other locks

    async def _resolve(self, met: Sequence[MetLock], waited: float, deadline: float) -> float:
        """Removes what it may. Returns until when finished attempts are spared, or 0."""
        spared_until = await self._others.replace(met, self.start, deadline)
        await self._cleanup.resolve(
            met, deadline=deadline, known_now=self.start, waited_seconds=waited
        )
        return spared_until

    # ------------------------------------------------------------------ the end

    async def finish(self, deadline: float) -> list[PartKey]:
        """Names the parts, once everything that was written is locked. Raises `ConflictError` if
        one of them was rolled back."""
        self._require_going_on()
        self._is_over = True
        for part in self._parts:
            await part.finish(deadline)
        return [part.key for part in self._parts]

    async def abandon(self, deadline: float) -> None:
        """Rolls the parts back. Those who meet their locks remove them."""
        self._is_over = True
        for part in self._parts:
            await roll_back_part(self._env, part.primary, part.start, deadline)

    async def beat(self) -> None:
        """Keeps the parts alive: all at once, since one may be lost, or its tablet silent."""
        deadline = self._env.now() + self._job.beat_seconds
        beats = [part.beat(deadline) for part in self._parts if not part.is_lost]
        for outcome in await asyncio.gather(*beats, return_exceptions=True):
            if outcome is not None:
                raise outcome

    def _require_going_on(self) -> None:
        if self._has_failed:
            raise UsageError("the attempt has failed: start a new attempt")
        if self._is_over:
            raise UsageError("the attempt is over")


def _writes_the_same(lock: LockRecord, write: Write) -> bool:
    """Whether the lock stands for the same write, as far as it can tell: a value that is stored
    apart is not compared."""
    kind, value = write
    if lock.kind == KIND_PUT_IN_DATA:
        return kind == KIND_PUT
    return lock.kind == kind and (kind != KIND_PUT or lock.value == value)
