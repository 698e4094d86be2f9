"""One attempt at one task of a shared transaction: locks what the task writes.

The attempt writes blindly, in batches of any number. A cell that another transaction has committed
since the participant began is locked under a further participant, with a newer start timestamp,
unless the shared transaction says since when its cells may not have changed.

Cells that hold already what an attempt writes to them may be *kept*: they are locked, and not
written again. The lock is a lock-only write, as of `tx.lock`. So nobody is notified, the cell keeps
the commit timestamp that it has, and change feeds do not mention it. Left out altogether, a cell
would count as one that the job does not write, and an overwriting driver would delete it.

A cell of an index (protocol/indexes.py) gets its entries in a second step: the cell is locked, and
then what it held is read, past the attempt's own locks. Nobody else changes it any more, so the
entry that goes and the one that comes are certain. They are locked under the attempt's own
participants, so they share the fate of the cell, however often a task is run. An attempt keeps only
indexes of one column that are not unique, and none in a row store: of all other ones, an entry is
not the business of one cell, so the driver keeps them (entries.py).

Rules, each with the failure that it prevents:
- What an indexed cell held is read at the newest participant's start. At that of an older one, a
  value would be missed that others have committed before the cell was locked, and its entry stay.
- An entry is not asked whether it was changed since: that is for its cell to say. Otherwise, the
  build of an index, which adds entries, would fail every attempt at what was begun before it.
- An attempt that has locked cells of a table under other indexes than the table has now fails: an
  index that came in between would lack their entries, or have those of values that go.
- An indexed value is always in its lock, unless it is too long for an entry. Of one that is stored
  apart, the driver could not learn it, and the lock would not tell that the attempt has written
  another value before, which has an entry.
- A lock of another participant of the same transaction is not taken for our own: the write would be
  lost when the other attempt is not chosen.
- After an error, the attempt cannot finish: an unanswered message may lock a cell later on.
- A cell that has a lock of another attempt at the same transaction is written twice. If that
  attempt has been replaced (it is an earlier attempt at the same task, or one of an earlier
  generation), its participant is rolled back first, the primary before the cell; otherwise this is
  an error.
- An attempt that has finished may have been chosen already. It is replaced only after a while,
  which gives the scheduler of the tasks time to end one of the two. That time is added to the
  caller's deadline: otherwise a shorter deadline would end each try before it replaced anything.
- The lock of a kept cell is refused if the cell was committed at or above the timestamp at which it
  was read. Otherwise the job would confirm a value that another transaction has replaced, and show
  that one's value among its own. The cell is written in full then.
- A cell whose values expire is always written: the kept value would expire as if it had not been
  written again. The client may have learned the schema before the ttl was set, so it looks at the
  one under which the tablets have answered.
- Where the store asks for it (protocol/announcing.py says why), an attempt announces a cell once it
  has locked it, under the participant that holds the lock, and before it finishes. A participant is
  named only after that; so whatever is committed has its intents. An intent from before the lock
  would, for a cell that has to wait for others, soon look like that of a dead transaction: workers
  would put a marker into the cell, and the attempt would fail.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType

from percolator.codecs.indexes import IndexDefinition
from percolator.errors import (
    CellAddress,
    ConflictError,
    PercolatorError,
    Retry,
    SchemaChanged,
    UsageError,
    WrittenTwice,
)
from percolator.formats.records import (
    ATTEMPT_FINISHED,
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    KIND_PUT_IN_DATA,
    LOCK_HEADER,
    LockRecord,
    shared_part,
)
from percolator.protocol import conflicts, steps
from percolator.protocol.announcing import learn_schemas
from percolator.protocol.cleanup import Cleanup, learn_outcome
from percolator.protocol.commit import portions
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import ROLLED_BACK, Announcing, Environment, Statistics
from percolator.protocol.indexes import changed_entries
from percolator.protocol.read import PASSING_MAX, read_rows
from percolator.protocol.shared.participant import (
    Job,
    Observed,
    Participant,
    ParticipantKey,
    ParticipantName,
    observed_in,
    roll_back,
)
from percolator.protocol.write_set import Prewrite, Write
from percolator.routing.catalog import TableSchema
from percolator.routing.cells import (
    APPLIED,
    Answer,
    CellMutation,
    FoundCell,
    Groups,
    Refused,
    RowRequest,
)
from percolator.v1.tabletserver_pb2 import RowRead

PARTICIPANTS_MAX = 256
"""How many participants one attempt may have: each is one more that the driver commits."""

KEPT: Write = (KIND_LOCK_ONLY, b"")


class _Round:
    """One round of prewrites: the cells that it has locked, and the others, with the reasons."""

    def __init__(self, unchanged_since: int) -> None:
        self.unchanged_since = unchanged_since
        """Since when the cells may not have been committed; 0 if that does not matter."""
        self.missed: list[CellAddress] = []
        self.locked: defaultdict[int, list[CellAddress]] = defaultdict(list)
        """The cells that are locked now, by the start timestamp of the participant."""
        self.left: list[CellAddress] = []
        """The cells that chosen participants have locked."""
        self.met: list[MetLock] = []
        self.problem: PercolatorError | None = None
        """Why there was no answer."""
        self.changed: list[CellAddress] = []
        """The cells that were to be kept, and that others have committed since they were read."""
        self.is_overtaken = False
        """Others have committed or locked cells since the participant began."""


class Attempt:
    """The participants of one attempt. Only one call at a time."""

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
        row_bytes_max: int,
        chosen: Set[int] = frozenset(),
        only_changes: bool = False,
    ) -> None:
        """`replace_after_seconds`: how long a later attempt waits before it replaces a finished
        one. `chosen`: participants, by their start timestamps, that are to be committed with this
        attempt. What they have locked is left to them; it is not written twice. `only_changes`:
        cells that hold already what is written to them are kept as they are."""
        self._env = env
        self._groups = groups
        self._cleanup = cleanup
        self._job = job
        self._task = task
        self._generation = generation
        self._replace_after_seconds = replace_after_seconds
        self._row_bytes_max = row_bytes_max
        self._spared_since: dict[int, float] = {}
        """Since when finished attempts are in the way, by their first start timestamps."""
        self._chosen = chosen
        self._only_changes = only_changes
        self.participants: list[Participant] = []
        self._current: Participant | None = None
        """The participant under which cells are locked now."""
        self._heads: dict[int, bytes] = {}
        """The beginning of its locks, by the kind of write: all but the value."""
        self.announced: dict[int, Observed] = {}
        """By table, the observers to which all of its cells were announced."""
        self._indexes: dict[int, tuple[IndexDefinition, ...]] = {}
        """By table, the indexes under which its cells were locked."""
        self._has_failed = False
        self._is_over = False
        self.tables: set[int] = set()
        """The tables in which cells were locked."""
        self.cells = 0
        """How many cells were locked. Those that are left to chosen participants do not count."""
        self.kept = 0
        """How many of them are not written again."""

    @property
    def start(self) -> int:
        """The start timestamp of its first participant; 0 before it has one."""
        return self.participants[0].start if self.participants else 0

    @property
    def left(self) -> dict[int, tuple[IndexDefinition, ...]]:
        """By table that it has written, the indexes whose entries are left to the driver."""
        left = {
            table_id: tuple(one for one in indexes if not self._keeps(one))
            for table_id, indexes in self._indexes.items()
        }
        return {table_id: indexes for table_id, indexes in left.items() if indexes}

    def _keeps(self, index: IndexDefinition) -> bool:
        """True if an entry of the index follows from one cell, wherever tablets tell of indexes."""
        return self._env.announcing is None and not index.unique and len(index.columns) == 1

    # ------------------------------------------------------------------ writing

    async def prewrite(self, writes: Mapping[CellAddress, Write], deadline: float) -> None:
        """Locks the cells. Raises `WrittenTwice`, `ConflictError`, or the error that prevented it;
        after an error, the attempt can only be abandoned."""
        self._require_going_on()
        try:
            locked = await self._lock(writes, deadline)
            entries = await self._entries(locked, deadline)
            await self.lock(entries, deadline)
        except BaseException:
            self._has_failed = True
            raise
        self.cells += len(locked)
        self.tables.update({cell.table_id for cell in locked})
        self.kept += sum(write is KEPT for write in locked.values())

    async def lock(
        self, writes: Mapping[CellAddress, Write], deadline: float, unchanged_since: int = 0
    ) -> None:
        """Locks cells besides those of the task: what others have committed to them before does not
        matter, unless it was since then. Cells of chosen participants are left to these."""
        try:
            await self._lock_all(writes, dict(writes), 0, unchanged_since, deadline)
        except BaseException:
            self._has_failed = True
            raise
        self.tables.update({cell.table_id for cell in writes})

    async def _lock(
        self, given: Mapping[CellAddress, Write], deadline: float
    ) -> Mapping[CellAddress, Write]:
        """Returns what was locked: the writes, or that cells are kept."""
        writes, read_at = dict(given), 0
        if self._only_changes:
            read_at = await self.newest_start(deadline)
            writes = await with_kept_cells(self._env, self._cleanup, given, read_at, deadline)
        since = self._job.unchanged_since
        return await self._lock_all(given, writes, read_at, since, deadline)

    async def _lock_all(
        self,
        given: Mapping[CellAddress, Write],
        writes: dict[CellAddress, Write],
        read_at: int,
        unchanged_since: int,
        deadline: float,
    ) -> Mapping[CellAddress, Write]:
        """Locks the cells for `writes`, in which some that were `given` are kept, as they were at
        `read_at`. Returns what was locked."""
        if not writes:
            return writes
        env = self._env
        pending: Sequence[CellAddress] = sorted(given)
        backoff = env.backoff()
        began = env.now()
        allowed = deadline - began
        while True:
            participant = await self._participant(deadline)
            result = _Round(unchanged_since)
            schemas = await self._schemas({cell.table_id for cell in pending}, deadline)
            for cells in portions(pending):
                steps_ = [
                    self._prewrite(
                        participant,
                        cell,
                        writes[cell],
                        read_at,
                        unchanged_since,
                        schemas[cell.table_id],
                    )
                    for cell in cells
                ]
                answers = await env.cells.mutate(steps_, deadline)
                await env.refresh_schemas(steps_, answers, deadline)
                if answers.count(APPLIED) != len(cells):
                    self._sort_out(participant, writes, cells, answers, result)
                    for cell in result.left:
                        del writes[cell]
                    result.left.clear()
                else:
                    result.locked[participant.start] += cells
            for table_id in {cell.table_id for cells in result.locked.values() for cell in cells}:
                self._indexes.setdefault(table_id, schemas[table_id].indexes)
            if env.announcing is not None:
                await self._announce(env.announcing, result.locked, writes, deadline)
            for cell in result.changed:
                writes[cell] = given[cell]
            if not result.missed:
                return writes
            pending = result.missed
            waited = env.now() - began if backoff.rounds else 0.0
            if result.met:
                spared_until = await self._replace_others(result.met, deadline)
                await self._cleanup.resolve(
                    result.met, deadline=deadline, known_now=self.start, waited_seconds=waited
                )
                if spared_until:
                    deadline = max(deadline, spared_until + allowed)
            if result.is_overtaken:
                self._current = None
            if not await backoff.pause(deadline):
                if result.met:
                    raise conflicts.locked(env, participant.start, result.met[0])
                raise result.problem or ConflictError("no time was left to lock the cells")

    async def _schemas(self, tables: Set[int], deadline: float) -> dict[int, TableSchema]:
        """The schemas of the tables. Raises `ConflictError` if the indexes were changed since cells
        were locked."""
        schemas: dict[int, TableSchema] = {}
        for table_id in tables:
            schema = schemas[table_id] = await self._env.schema(table_id, deadline)
            if self._indexes.get(table_id, schema.indexes) != schema.indexes:
                raise ConflictError(
                    f"the indexes of {schema.codecs.table!r} were changed while task "
                    f"{self._task!r} was writing",
                    start_timestamp=self.start,
                )
        return schemas

    async def _entries(
        self, locked: Mapping[CellAddress, Write], deadline: float
    ) -> dict[CellAddress, Write]:
        """The entries that go and come with these cells, which are locked."""
        if not any(self._indexes.values()):
            return {}
        indexed = {
            cell: [
                index
                for index in self._indexes[cell.table_id]
                if index.names == (cell.column,) and self._keeps(index)
            ]
            for cell, write in locked.items()
            if write is not KEPT
        }
        cells = [cell for cell, found in indexed.items() if found]
        if not cells:
            return {}
        stored = await self.former(cells, deadline)
        entries: dict[CellAddress, Write] = {}
        for cell in cells:
            kind, value = locked[cell]
            before = stored[cell].value if cell in stored else None
            after = value if kind == KIND_PUT else None
            for index in indexed[cell]:
                entries |= changed_entries(
                    self._env, index, cell, before, after, self._row_bytes_max
                )
        return entries

    async def former(
        self,
        cells: Iterable[CellAddress],
        deadline: float,
        passing: Mapping[tuple[int, bytes], Iterable[int]] = MappingProxyType({}),
    ) -> dict[CellAddress, FoundCell]:
        """Cells as they were before this attempt has locked them, and before other participants
        have that are given for their rows. Those without a value are missing."""
        columns: dict[tuple[int, bytes], list[bytes]] = {}
        for table_id, row, column in cells:
            columns.setdefault((table_id, row), []).append(column)
        read_at = await self.newest_start(deadline)
        own = [participant.start for participant in self.participants]
        requests = [
            RowRequest(
                table_id,
                RowRead(
                    row=row,
                    columns=names,
                    timestamp=read_at,
                    # As many as a read may carry. It waits for others, and passes them, too.
                    passing=[*passing.get((table_id, row), ()), *own][:PASSING_MAX],
                ),
            )
            for (table_id, row), names in columns.items()
        ]
        answers = await read_rows(self._env, self._cleanup, requests, deadline, Statistics())
        return {
            CellAddress(table_id, row, column): cell
            for (table_id, row), answer in zip(columns, answers, strict=True)
            for column, cell in answer.found.items()
        }

    async def newest_start(self, deadline: float) -> int:
        """The start timestamp of the participant under which cells are locked now."""
        return (await self._participant(deadline)).start

    async def _participant(self, deadline: float) -> Participant:
        """The participant under which to lock cells now; begins one if there is none."""
        if self._current is not None:
            if self._current.is_gone:
                raise self._current.gone()
            return self._current
        if len(self.participants) >= PARTICIPANTS_MAX:
            raise ConflictError(
                f"task {self._task!r} has lost to other transactions {PARTICIPANTS_MAX} times"
            )
        start = await self._env.timestamp(deadline)
        name = ParticipantName(
            self._generation, self.start or start, len(self.participants), self._task
        )
        participant = Participant(self._env, self._groups, self._job, name, start)
        self.participants.append(participant)
        await participant.begin(deadline)
        self._current = participant
        self._heads = {}
        return participant

    def _prewrite(
        self,
        participant: Participant,
        cell: CellAddress,
        write: Write,
        read_at: int,
        unchanged_since: int,
        schema: TableSchema,
    ) -> CellMutation:
        """`read_at`: when it was seen that kept cells need not be written."""
        kind, value = write
        data = None
        if len(value) > self._env.limits.value_inline_bytes_max and (
            len(value) > self._row_bytes_max or cell.column not in schema.indexed
        ):
            kind, value, data = KIND_PUT_IN_DATA, b"", value
        start = participant.start
        head = self._heads.get(kind)
        if head is None:
            # Others look at the primary's time to live; this one counts while that is not there.
            ttl = int(self._job.ttl_seconds * 1000)
            header = LOCK_HEADER.pack(start, start + 1, ttl, kind)
            head = self._heads[kind] = header + shared_part(b"", participant.primary)
        lock = head + value
        since = unchanged_since or (read_at if kind == KIND_LOCK_ONLY else 0) or start
        table_id, row, column = cell
        if since < start:
            step = steps.prewrite_since(row, column, start, since, lock, data)
        elif data is not None:
            step = steps.prewrite(row, column, start, lock, data)
        else:
            return CellMutation(table_id, Prewrite(row, column, lock, start), schema.version)
        return CellMutation(table_id, step, schema.version)

    def _sort_out(
        self,
        participant: Participant,
        writes: Mapping[CellAddress, Write],
        cells: Sequence[CellAddress],
        answers: Sequence[Answer],
        result: _Round,
    ) -> None:
        """Adds to `result` what became of the cells. Raises what cannot be dealt with."""
        for cell, answer in zip(cells, answers, strict=True):
            if answer is APPLIED:
                result.locked[participant.start].append(cell)
                continue
            if not isinstance(answer, Refused):
                if answer.retry is not Retry.UNKNOWN and not isinstance(answer, SchemaChanged):
                    raise answer
                result.problem = answer
            elif answer.condition == steps.OWN_COMMIT:
                raise UsageError("the shared transaction was committed while this task was writing")
            elif answer.condition == steps.OWN_ROLLBACK:
                raise participant.gone()
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
                result.is_overtaken |= met.lock.start_timestamp > participant.start
            elif result.unchanged_since:
                raise self._changed(cell, answer, result.unchanged_since)
            elif writes[cell] is KEPT:
                result.changed.append(cell)
                result.is_overtaken |= answer.offender.timestamp > participant.start
            else:
                result.is_overtaken = True
            result.missed.append(cell)

    def _is_ours(self, met: MetLock, write: Write) -> bool:
        """True if this attempt has locked the cell before, with the same value."""
        name = self._job.participant_of(met.lock.primary)
        if name is None or (name.attempt, name.task) != (self.start, self._task):
            return False
        if not _writes_the_same(met.lock, write):
            raise self._written_twice(met.address)
        return True

    def _written_twice(self, cell: CellAddress) -> WrittenTwice:
        where = self._env.described(cell)
        return WrittenTwice(f"task {self._task!r} writes {where} twice", cell=cell)

    def _changed(self, cell: CellAddress, answer: Refused, since: int) -> ConflictError:
        record = answer.offender
        return ConflictError(
            f"{self._env.described(cell)} was committed at {record.timestamp}, and the shared "
            f"transaction writes only what was not changed since {since}",
            cell=cell,
            start_timestamp=self.start,
            other_commit_timestamp=record.timestamp,
        )

    async def _announce(
        self,
        store: Announcing,
        locked: Mapping[int, Sequence[CellAddress]],
        writes: Mapping[CellAddress, Write],
        deadline: float,
    ) -> None:
        """Announces cells, by the start timestamp of the participant that has locked them. A
        lock-only write changes nothing."""
        env = self._env
        changing = {
            start: [cell for cell in cells if writes[cell][0] != KIND_LOCK_ONLY]
            for start, cells in locked.items()
        }
        tables = {cell.table_id for cells in changing.values() for cell in cells}
        await learn_schemas(env, tables, deadline)
        for start, cells in changing.items():
            wanted: list[tuple[CellAddress, bytes]] = []
            for table_id in {cell.table_id for cell in cells}:
                schema = await env.schema(table_id, deadline)
                observed = observed_in(schema)
                self.announced[table_id] = self.announced.get(table_id, observed) & observed
                wanted += [
                    (cell, observer)
                    for cell in cells
                    if cell.table_id == table_id
                    for observer in schema.observers.get(cell.column, ())
                ]
            if wanted:
                await store.announce(start, wanted, deadline)

    # ------------------------------------------------------------------ other attempts

    async def _replace_others(self, met: Sequence[MetLock], deadline: float) -> float:
        """Rolls back the participants, among the owners of these locks, that this attempt replaces.
        Returns until when finished attempts are spared, or 0. Raises if a participant is not to be
        replaced."""
        spared_until = 0.0
        siblings: dict[ParticipantName, MetLock] = {}
        for one in met:
            name = self._job.participant_of(one.lock.primary)
            if name is not None:
                siblings.setdefault(name, one)
        for name, one in siblings.items():
            spared_until = max(spared_until, await self._replace(name, one, deadline))
        return spared_until

    async def _replace(self, other: ParticipantName, met: MetLock, deadline: float) -> float:
        """Rolls back another attempt's participant if this attempt replaces it, or raises. Returns
        until when the other one is spared, or 0."""
        lock = met.lock
        is_finished = await self._is_finished(lock, deadline)
        verdict = self._env.verdicts.get(lock.start_timestamp)
        if verdict == ROLLED_BACK or is_finished is None:
            return 0.0
        if verdict is not None:
            raise UsageError("the shared transaction was committed while this task was writing")
        if other.generation == self._generation and other.task != self._task:
            cell = self._env.described(met.address)
            raise WrittenTwice(
                f"tasks {other.task!r} and {self._task!r} both write {cell}",
                cell=met.address,
            )
        if (other.generation, other.attempt) > (self._generation, self.start):
            raise ConflictError(
                f"a later attempt at task {self._task!r} has begun",
                cell=met.address,
                start_timestamp=self.start,
                other_start_timestamp=lock.start_timestamp,
            )
        if is_finished:
            now = self._env.now()
            since = self._spared_since.setdefault(other.attempt, now)
            spared_until = since + self._replace_after_seconds
            if now < spared_until:
                return spared_until
        await roll_back(self._env, [(lock.primary, lock.start_timestamp)], deadline)
        return 0.0

    async def _is_finished(self, lock: LockRecord, deadline: float) -> bool | None:
        """True if the attempt of another participant has locked all of its cells; None if there is
        no answer. If the participant is decided, that is known afterwards."""
        start = lock.start_timestamp
        if self._env.verdicts.get(start) is not None:
            return True
        table_id, row, column = lock.primary
        step = CellMutation(table_id, steps.status(row, column, start))
        (answer,) = await self._env.cells.mutate((step,), deadline)
        if answer is APPLIED:
            return False
        if not isinstance(answer, Refused):
            return None
        if learn_outcome(self._env, start, answer):
            return True
        return LockRecord.decode(answer.offender.value).value == ATTEMPT_FINISHED

    # ------------------------------------------------------------------ the end

    async def finish(self, deadline: float) -> list[ParticipantKey]:
        """Names the participants, once everything that was written is locked. Raises
        `ConflictError` if one of them was rolled back."""
        self._require_going_on()
        self._is_over = True
        for participant in self.participants:
            await participant.finish(deadline)
        return [participant.key for participant in self.participants]

    async def abandon(self, deadline: float) -> None:
        """Rolls the participants back. Clients that meet their locks remove them."""
        self._is_over = True
        for participant in self.participants:
            await roll_back(self._env, [(participant.primary, participant.start)], deadline)

    async def beat(self) -> None:
        """Keeps the participants alive: all at once, since one may be lost, or its tablet
        silent."""
        deadline = self._env.now() + self._job.beat_seconds
        beats = [one.beat(deadline) for one in self.participants if not one.is_gone]
        for outcome in await asyncio.gather(*beats, return_exceptions=True):
            if outcome is not None:
                raise outcome

    def _require_going_on(self) -> None:
        if self._has_failed:
            raise UsageError("the attempt has failed: start a new attempt")
        if self._is_over:
            raise UsageError("the attempt is over")


def _writes_the_same(lock: LockRecord, write: Write) -> bool:
    """True if the lock stands for the same write, as far as it can tell: a value that is stored
    apart is not compared."""
    kind, value = write
    if lock.kind == KIND_PUT_IN_DATA:
        return kind == KIND_PUT
    return lock.kind == kind and (kind != KIND_PUT or lock.value == value)


async def with_kept_cells(
    env: Environment,
    cleanup: Cleanup,
    writes: Mapping[CellAddress, Write],
    read_at: int,
    deadline: float,
) -> dict[CellAddress, Write]:
    """The writes, with `KEPT` for each cell that holds at `read_at` what is written to it."""
    columns: dict[tuple[int, bytes], list[bytes]] = {}
    for table_id, row, column in writes:
        columns.setdefault((table_id, row), []).append(column)
    requests = [
        RowRequest(table_id, RowRead(row=row, columns=names, timestamp=read_at))
        for (table_id, row), names in columns.items()
    ]
    answers = await read_rows(env, cleanup, requests, deadline, Statistics())
    found = {
        CellAddress(table_id, row, column): cell.value
        for (table_id, row), answer in zip(columns, answers, strict=True)
        for column, cell in answer.found.items()
    }
    expiring = {
        table_id: (await env.schema_of_reads(table_id, deadline)).expiring
        for table_id in {table_id for table_id, _ in columns}
    }
    return {
        cell: KEPT
        if found.get(cell) == (None if write[0] == KIND_DELETE else write[1])
        and cell.column not in expiring[cell.table_id]
        else write
        for cell, write in writes.items()
    }
