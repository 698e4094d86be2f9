"""Clients of the real protocol around one store, over a network that does its worst.

Everything happens in virtual time and is determined by one seed. Requests are lost, duplicated, and
delayed past their timeout; answers are lost; clients die at any await; live owners are declared
dead; two clients may commit one transaction at once; callers are cancelled in the middle of a
commit, and then ask twice for its outcome.
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
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.commit import Commit
from percolator.protocol.environment import Environment, Statistics, Verdicts
from percolator.protocol.read import read_rows
from percolator.protocol.write_set import Heartbeats, Write, WriteSteps
from percolator.routing.catalog import TableSchema
from percolator.routing.cells import (
    APPLIED,
    Answer,
    CellMutation,
    CommitAnswer,
    RangePage,
    RangeRequest,
    RowRequest,
    RowResult,
    WholeCommit,
)
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1.tabletserver_pb2 import Change, Condition, RowRead
from percolator.wire.liveness import Liveness
from tests.simulation.virtual_time import VirtualClock

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
    """The probability of each fault."""

    lost: float = 0.04
    late: float = 0.06
    answer_lost: float = 0.04
    duplicated: float = 0.06
    wrongly_dead: float = 0.1
    crash: float = 0.15
    given_up: float = 0.2
    """Commits whose callers are cancelled in the middle."""
    prewrite_answer_lost: float = 0.0
    """Answers to prewrites that were applied."""
    slow_commit: float = 0.2
    """Commits of primaries that take long to arrive, so that heartbeats are needed."""
    slow_commit_seconds: float = 0.05


NO_FAULTS = Faults(0, 0, 0, 0, 0, 0, 0, 0, 0)
SLOW = Faults(0, 0, 0, 0, 0, 0, 0, 0.4, 1.0, slow_commit_seconds=0.2)
"""No client fails, but every commit takes longer than a time to live, and answers are lost."""
IMPATIENT = Faults(0, 0, 0, 0, 0, 0, 1.0, 0.0, 0.8, slow_commit_seconds=0.01)
"""No client fails, but every caller is cancelled midway, and then asks twice for the outcome."""


class Oracle:
    """Strictly increasing timestamps with the physical part from the virtual clock."""

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

    def __init__(self, seed: int, faults: Faults, one_round_share: float = 0.0) -> None:
        """`one_round_share` of the commits are tried in one round."""
        loop = asyncio.get_running_loop()
        self.random = random.Random(seed)
        self.faults = faults
        self._phases = random.Random(f"phases {seed}")
        self._one_round_share = one_round_share
        self.clock = VirtualClock(loop)
        self.store = NaiveCells()
        self.oracle = Oracle(self.clock)
        self.schemas = Schemas()
        self.clients: list[Client] = []
        self.in_flight: set[asyncio.Task[None]] = set()
        self.buried_alive = 0
        """How many transactions were rolled back because their time to live had passed."""

    def client(self, limits: Limits = LIMITS) -> Client:
        client = Client(self, len(self.clients) + 1, limits)
        self.clients.append(client)
        return client

    def takes_two_phases(self) -> bool:
        return self._phases.random() >= self._one_round_share

    def later(self, action: Callable[[], object], seconds: float) -> None:
        async def act() -> None:
            await asyncio.sleep(seconds)
            action()

        task = asyncio.create_task(act())
        self.in_flight.add(task)
        task.add_done_callback(self.in_flight.discard)


class Network:
    """One client's connection to the store, and its `Cells`, `Timestamps` and `Owners`."""

    def __init__(self, world: World, session: bytes) -> None:
        self._world = world
        self._random = world.random
        self.session_id: bytes | None = session
        self.dead = False
        self.steps: list[CellMutation] = []
        self.before_send: Callable[[CellMutation], Awaitable[None]] | None = None
        self.before_answer: Callable[[CellMutation, Answer], Awaitable[None]] | None = None
        self.commits: list[WholeCommit] = []
        self.before_commit: Callable[[], Awaitable[None]] | None = None
        self.loses_answer_of_commit = False
        self.loses_answer: Callable[[CellMutation], bool] = lambda step: False
        self.refuses: Callable[[CellMutation], PercolatorError | None] = lambda step: None
        """The answer to a step that does not reach the store."""

    async def mutate(self, steps: Sequence[CellMutation], deadline: float) -> list[Answer]:
        return list(await asyncio.gather(*(self._mutate(step) for step in steps)))

    async def _mutate(self, step: CellMutation) -> Answer:
        world, faults, chance = self._world, self._world.faults, self._random.random
        await self._travel()
        if self.before_send is not None:
            await self.before_send(step)
        if _commits_primary(step) and chance() < faults.slow_commit:
            await asyncio.sleep(faults.slow_commit_seconds)
        self.steps.append(step)
        refusal = self.refuses(step)
        if refusal is not None:
            return refusal
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
        if self.before_answer is not None:
            await self.before_answer(step, answer)
        if self.loses_answer(step) or chance() < faults.answer_lost:
            return Unavailable("answer lost")
        if answer is APPLIED and _prewrites(step) and chance() < faults.prewrite_answer_lost:
            return Unavailable("answer of a prewrite lost")
        return answer

    async def commit(self, commit: WholeCommit, deadline: float) -> CommitAnswer:
        world, faults, chance = self._world, self._world.faults, self._random.random

        def apply() -> CommitAnswer:
            return world.store.commit(commit, world.oracle.next)

        await self._travel()
        if self.before_commit is not None:
            await self.before_commit()
        self.commits.append(commit)
        luck = chance()
        if luck < faults.lost:
            await self._time_out()
            return Unavailable("lost")
        if luck < faults.lost + faults.late:
            world.later(apply, self._random.expovariate(1 / 0.03))
            await self._time_out()
            return Unavailable("late")
        found = apply()
        if chance() < faults.duplicated:
            world.later(apply, self._random.expovariate(1 / 0.03))
        await self._travel()
        if self.loses_answer_of_commit or chance() < faults.answer_lost:
            return Unavailable("answer lost")
        return found

    async def read(
        self, requests: Sequence[RowRequest], deadline: float, *, bytes_max: int = 0
    ) -> list[RowResult]:
        return list(await asyncio.gather(*(self._read(request) for request in requests)))

    async def _read(self, request: RowRequest) -> RowResult:
        await self._travel()
        answer = self._world.store.look(request)
        await self._travel()
        return answer

    async def scan(
        self, request: RangeRequest, timeout_seconds: float
    ) -> AsyncGenerator[RangePage, None]:
        for page in pages(self._world.store, request):
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
    """What one transaction read and wrote, and the outcomes reported for it."""

    start: int
    writes: dict[CellAddress, Write]
    started_seconds: float = 0.0
    weak: list[CellAddress] = field(default_factory=list)
    reads: dict[CellAddress, bytes | None] = field(default_factory=dict)
    outcomes: list[int] = field(default_factory=list)
    """Commit timestamps that were reported; 0 for "aborted"."""


class Client:
    """One process that runs the protocol."""

    def __init__(self, world: World, number: int, limits: Limits) -> None:
        self.world = world
        self.session = number.to_bytes(16, "big")
        self.network = Network(world, self.session)
        self.env = Environment(
            cells=self.network,
            timestamps=self.network,
            owners=self.network,
            schemas=world.schemas,
            clock=world.clock,
            random=world.random,
            limits=limits,
            verdicts=Verdicts(limits.verdicts_max),
        )
        self.cleanup = Cleanup(self.env)
        self.heartbeats = Heartbeats(self.env)

    async def start_timestamp(self) -> int:
        return await self.network.get()

    async def read(self, cell: CellAddress, timestamp: int) -> bytes | None:
        request = RowRequest(
            cell.table_id, RowRead(row=cell.row, columns=[cell.column], timestamp=timestamp)
        )
        (answer,) = await read_rows(
            self.env, self.cleanup, [request], self.deadline(), Statistics()
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
        two_phases: bool | None = None,
    ) -> Commit:
        write = WriteSteps(
            start,
            writes,
            self.env.limits.value_inline_bytes_max,
            weak_notifications=weak,
        )
        return Commit(
            self.env,
            self.cleanup,
            self.heartbeats,
            write,
            started_seconds=(
                self.world.clock.monotonic_seconds() if started_seconds is None else started_seconds
            ),
            statistics=statistics or Statistics(),
            alone=alone,
            only_two_phases=self.world.takes_two_phases() if two_phases is None else two_phases,
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
                return  # no outcome was reported
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
        """From now on, nothing that the client sends arrives, and nothing that it awaits comes."""
        self.network.dead = True
        # Its timer does not fire either.
        self.heartbeats.close()


def _prewrites(step: CellMutation) -> bool:
    """Whether the step puts a lock where there must be none."""
    return _puts(step, LOCK) and len(step.message().conditions) > 1


def _commits_primary(step: CellMutation) -> bool:
    return _puts(step, WRITE) and len(step.message().conditions) > 2


def _buries(step: CellMutation) -> bool:
    """Whether the step rolls back a lock (not the absence of one) whose time to live has passed."""
    expectations = [condition.expectation for condition in step.message().conditions]
    return Condition.EXPECTATION_BEGINS_IF_PRESENT in expectations


def _puts(step: CellMutation, space: int) -> bool:
    return any(
        change.kind == Change.KIND_PUT and change.space == space
        for change in step.message().changes
    )
