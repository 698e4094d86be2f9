"""Clients of the real protocol around one store, over a network that does its worst.

Everything happens on virtual time and by one seed. Requests are lost, delayed past their time-out,
duplicated; answers are lost; clients die at any await; living owners are declared dead; one
transaction may be committed by two clients at once; callers leave in the middle of a commit, and
then ask twice what became of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from percolator.errors import (
    CellAddress,
    ConflictError,
    OutcomeUnknown,
    PercolatorError,
    Unavailable,
)
from percolator.limits import Limits
from percolator.protocol.background import Background
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.commit import Commit
from percolator.protocol.heartbeats import Heartbeats
from percolator.protocol.read import read_rows
from percolator.protocol.surroundings import Statistics, Surroundings
from percolator.protocol.verdicts import Verdicts
from percolator.protocol.write_steps import Write, WriteSteps
from percolator.testing.virtual_time import VirtualClock
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1.tabletserver_pb2 import Change, Condition, RowRead
from percolator.wire.catalog import TableSchema
from percolator.wire.liveness import Liveness
from percolator.wire.questions import (
    APPLIED,
    Answer,
    RangePage,
    RangeQuestion,
    RowAnswer,
    RowQuestion,
    Step,
)

from .naive_cells import LOCK, WRITE, NaiveCells, pages

LIMITS = Limits(
    call_seconds=20.0,
    value_inline_bytes_max=8,
    lock_ttl_seconds=0.03,
    heartbeat_seconds=0.01,
    lock_wait_seconds=0.2,
    push_after_seconds=0.001,
    backoff_seconds_min=0.0005,
    backoff_seconds_max=0.01,
    background_seconds=20.0,
)
OBSERVED = b"seen"
OBSERVER = b"observer"
WEAK_OBSERVER = b"weak"


@dataclass
class Faults:
    """How often, out of one."""

    lost: float = 0.04
    late: float = 0.06
    answer_lost: float = 0.04
    duplicated: float = 0.06
    wrongly_dead: float = 0.1
    crash: float = 0.15
    given_up: float = 0.2
    """Commits whose callers leave in the middle."""
    prewrite_answer_lost: float = 0.0
    """Answers to prewrites that were applied."""
    slow_commit: float = 0.2
    """Commits of primaries that are on their way for long, so that heartbeats are needed."""
    slow_commit_seconds: float = 0.05


NO_FAULTS = Faults(0, 0, 0, 0, 0, 0, 0, 0, 0)
SLOW = Faults(0, 0, 0, 0, 0, 0, 0, 0.4, 1.0, slow_commit_seconds=0.2)
"""Nobody fails; but every commit takes longer than a time to live, and answers are lost."""
IMPATIENT = Faults(0, 0, 0, 0, 0, 0, 1.0, 0.0, 0.8, slow_commit_seconds=0.01)
"""Nobody fails; but every caller leaves in the middle, and then asks twice what became of it."""


class Oracle:
    """Strictly increasing timestamps, whose physical part is the virtual clock's."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.last = 0

    def next(self) -> int:
        self.last = max(self.last + 1, self._clock.wall_milliseconds() << SEQUENCE_BITS)
        return self.last


class Schemas:
    """One schema for all tables."""

    def __init__(self) -> None:
        self.schema = TableSchema(1, {OBSERVED: (OBSERVER,)}, {OBSERVED: (WEAK_OBSERVER,)})

    def get(self, table_id: int) -> TableSchema | None:
        return self.schema

    async def refresh(self, table_id: int, deadline: float) -> TableSchema:
        return self.schema


class World:
    """The store, the oracle, and the clients around them."""

    def __init__(self, seed: int, faults: Faults) -> None:
        loop = asyncio.get_running_loop()
        self.random = random.Random(seed)
        self.faults = faults
        self.clock = VirtualClock(loop)
        self.store = NaiveCells()
        self.oracle = Oracle(self.clock)
        self.schemas = Schemas()
        self.clients: list[Client] = []
        self.in_flight: set[asyncio.Task[None]] = set()
        self.buried_alive = 0
        """Transactions that were rolled back because their time to live was over."""

    def client(self, limits: Limits = LIMITS) -> Client:
        client = Client(self, len(self.clients) + 1, limits)
        self.clients.append(client)
        return client

    def later(self, action: Callable[[], object], seconds: float) -> None:
        async def act() -> None:
            await asyncio.sleep(seconds)
            action()

        task = asyncio.create_task(act())
        self.in_flight.add(task)
        task.add_done_callback(self.in_flight.discard)


class Network:
    """One client's way to the store, and its `Cells`, `Timestamps` and `Owners`."""

    def __init__(self, world: World, session: bytes) -> None:
        self._world = world
        self._random = world.random
        self.session_id: bytes | None = session
        self.dead = False
        self.steps: list[Step] = []
        self.before_send: Callable[[Step], Awaitable[None]] | None = None
        self.loses_answer: Callable[[Step], bool] = lambda step: False

    async def mutate(self, steps: Sequence[Step], deadline: float) -> list[Answer]:
        return list(await asyncio.gather(*(self._mutate(step) for step in steps)))

    async def _mutate(self, step: Step) -> Answer:
        world, faults, chance = self._world, self._world.faults, self._random.random
        await self._travel()
        if self.before_send is not None:
            await self.before_send(step)
        if _commits_primary(step) and chance() < faults.slow_commit:
            await asyncio.sleep(faults.slow_commit_seconds)
        self.steps.append(step)
        luck = chance()
        if luck < faults.lost:
            await self._time_out()
            return Unavailable("lost")
        if luck < faults.lost + faults.late:
            world.later(lambda: world.store.apply(step), self._random.expovariate(1 / 0.03))
            await self._time_out()
            return Unavailable("late")
        answer = world.store.apply(step)
        if answer is APPLIED and _buries(step):
            world.buried_alive += 1
        if chance() < faults.duplicated:
            world.later(lambda: world.store.apply(step), self._random.expovariate(1 / 0.03))
        await self._travel()
        if self.loses_answer(step) or chance() < faults.answer_lost:
            return Unavailable("answer lost")
        if answer is APPLIED and _prewrites(step) and chance() < faults.prewrite_answer_lost:
            return Unavailable("answer of a prewrite lost")
        return answer

    async def read(self, questions: Sequence[RowQuestion], deadline: float) -> list[RowAnswer]:
        return list(await asyncio.gather(*(self._read(question) for question in questions)))

    async def _read(self, question: RowQuestion) -> RowAnswer:
        await self._travel()
        answer = self._world.store.look(question)
        await self._travel()
        return answer

    async def scan(
        self, question: RangeQuestion, timeout_seconds: float
    ) -> AsyncGenerator[RangePage, None]:
        for page in pages(self._world.store, question):
            await self._travel()
            yield page

    async def get(self, count: int = 1, timeout_seconds: float | None = None) -> int:
        await self._travel()
        timestamp = self._world.oracle.next()
        await self._travel()
        return timestamp

    async def liveness(self, session_ids: Sequence[bytes]) -> list[Liveness]:
        await self._travel()
        dead = {client.session for client in self._world.clients if client.network.dead}
        return [
            Liveness.DEAD
            if session in dead or self._random.random() < self._world.faults.wrongly_dead
            else Liveness.ALIVE
            for session in session_ids
        ]

    async def _travel(self) -> None:
        await asyncio.sleep(self._random.expovariate(1 / 0.0005))
        if self.dead:
            await asyncio.get_running_loop().create_future()

    async def _time_out(self) -> None:
        await asyncio.sleep(0.005)
        await self._travel()


@dataclass
class Transaction:
    """What one transaction read, wrote and was told."""

    start: int
    writes: dict[CellAddress, Write]
    started_seconds: float = 0.0
    weak: list[CellAddress] = field(default_factory=list)
    reads: dict[CellAddress, bytes | None] = field(default_factory=dict)
    outcomes: list[int] = field(default_factory=list)
    """Commit timestamps that were reported; 0 for "aborted"."""


class Client:
    """One process with the protocol in it."""

    def __init__(self, world: World, number: int, limits: Limits) -> None:
        self.world = world
        self.session = number.to_bytes(16, "big")
        self.network = Network(world, self.session)
        self.around = Surroundings(
            cells=self.network,
            timestamps=self.network,
            owners=self.network,
            schemas=world.schemas,
            clock=world.clock,
            random=world.random,
            limits=limits,
            verdicts=Verdicts(limits.verdicts_max),
            background=Background(limits.background_tasks_max),
        )
        self.cleanup = Cleanup(self.around)
        self.heartbeats = Heartbeats(self.around)

    async def start_timestamp(self) -> int:
        return await self.network.get()

    async def read(self, cell: CellAddress, timestamp: int) -> bytes | None:
        question = RowQuestion(
            cell.table_id, RowRead(row=cell.row, columns=[cell.column], timestamp=timestamp)
        )
        (answer,) = await read_rows(
            self.around, self.cleanup, [question], timestamp, self.deadline(), Statistics()
        )
        found = answer.found.get(cell.column)
        return None if found is None else found.value

    def commit(
        self,
        start: int,
        writes: dict[CellAddress, Write],
        weak: Sequence[CellAddress] = (),
        statistics: Statistics | None = None,
        started_seconds: float | None = None,
        *,
        alone: bool = False,
    ) -> Commit:
        write = WriteSteps(
            start, writes, self.network.session_id or b"", self.around.limits.value_inline_bytes_max
        )
        return Commit(
            self.around,
            self.cleanup,
            self.heartbeats,
            write,
            weak_notifications=weak,
            started_seconds=(
                self.world.clock.monotonic_seconds() if started_seconds is None else started_seconds
            ),
            statistics=statistics or Statistics(),
            alone=alone,
        )

    async def commit_and_settle(self, transaction: Transaction) -> None:
        """Commits, asks again if the outcome is unknown, and notes what was reported."""
        commit = self.commit(
            transaction.start,
            transaction.writes,
            transaction.weak,
            started_seconds=transaction.started_seconds,
        )
        chance = self.world.random
        patience = None
        if chance.random() < self.world.faults.given_up:
            patience = chance.uniform(0.0, 0.02)
        try:
            async with asyncio.timeout(patience):
                await self._note(transaction, commit.run(self.deadline()))
        except TimeoutError:
            if not commit.may_be_committed:
                return  # nobody was told anything
        except OutcomeUnknown:
            pass
        else:
            return
        later = self._settle_later(transaction, commit)
        settling = (self._note(transaction, commit.settle(self.deadline())), later)
        for outcome in await asyncio.gather(*settling, return_exceptions=True):
            if outcome is not None and not isinstance(outcome, OutcomeUnknown):
                raise outcome

    async def _settle_later(self, transaction: Transaction, commit: Commit) -> None:
        await asyncio.sleep(self.world.random.uniform(0.0, 0.01))
        await self._note(transaction, commit.settle(self.deadline()))

    @staticmethod
    async def _note(transaction: Transaction, ending: Coroutine[None, None, int]) -> None:
        try:
            outcome = await ending
        except OutcomeUnknown:
            raise
        except PercolatorError:
            outcome = 0
        transaction.outcomes.append(outcome)

    async def write(self, writes: dict[CellAddress, Write]) -> int:
        """A blind transaction."""
        start = await self.start_timestamp()
        return await self.commit(start, writes).run(self.deadline())

    async def write_stubbornly(self, writes: dict[CellAddress, Write]) -> int:
        while True:
            try:
                return await self.write(writes)
            except ConflictError:
                continue

    def deadline(self, seconds: float = 20.0) -> float:
        return self.world.clock.monotonic_seconds() + seconds

    def crash(self) -> None:
        """From now on, nothing that it sends arrives, and nothing that it awaits comes."""
        self.network.dead = True
        # Nor does its timer ring: nobody would hear of it.
        self.heartbeats.close()


def _prewrites(step: Step) -> bool:
    """It puts a lock where none may be."""
    return _puts(step, LOCK) and len(step.mutation.conditions) > 1


def _commits_primary(step: Step) -> bool:
    return _puts(step, WRITE) and len(step.mutation.conditions) > 2


def _buries(step: Step) -> bool:
    """It rolls back because a time to live is over; of a lock, and not of the absence of one."""
    expectations = [condition.expectation for condition in step.mutation.conditions]
    return Condition.EXPECTATION_BEGINS_IF_PRESENT in expectations


def _puts(step: Step, space: int) -> bool:
    return any(
        change.kind == Change.KIND_PUT and change.space == space for change in step.mutation.changes
    )
