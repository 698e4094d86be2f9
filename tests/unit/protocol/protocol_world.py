"""Clients of the real protocol around one store, over a network that does its worst.

Everything happens in virtual time and is determined by one seed. Requests are lost, duplicated, and
delayed past their timeout; answers are lost; clients die at any await; live owners are declared
dead; two clients may commit one transaction at once; callers are cancelled in the middle of a
commit, and then ask twice for its outcome.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from percolator.errors import (
    CellAddress,
    ConflictError,
    OutcomeUnknown,
    PercolatorError,
    Unavailable,
)
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT, LockRecord
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
    OneRoundCommit,
    RangePage,
    RangeRequest,
    RowRequest,
    RowResult,
)
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1.tabletserver_pb2 import Change, Condition, RowRead
from percolator.wire.liveness import Liveness
from tests.simulation.virtual_time import VirtualClock, run_virtually
from tests.unit.protocol.naive_cells import LOCK, NOTIFY, ROLLBACK, WRITE, NaiveCells, pages

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

    def lock(self, cell: CellAddress) -> LockRecord:
        """The lock that is there."""
        found = self.store.lock_of(cell)
        assert found is not None
        return found

    async def seconds_of(self, work: Awaitable[object]) -> float:
        began = self.clock.monotonic_seconds()
        await work
        return self.clock.monotonic_seconds() - began

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
        self.commits: list[OneRoundCommit] = []
        self.loses_answer_of_commit = False
        self.loses_answer: Callable[[CellMutation], bool] = lambda step: False
        self.refuses: Callable[[CellMutation], PercolatorError | None] = lambda step: None
        """The answer to a step that does not reach the store."""
        self.scans: list[bytes] = []
        """Where the scans begin that have not ended."""
        self.scans_at_once = 0

    def slow(self, seconds: float, space: int, cell: CellAddress | None = None) -> None:
        """From now on, steps that put something in this space of the cell, or of any, take long."""

        async def wait(step: CellMutation) -> None:
            if puts(step, space) and cell in (None, address(step)):
                await asyncio.sleep(seconds)

        self.before_send = wait

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
        if answer is APPLIED and _rolls_back_expired(step):
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

    async def commit(self, commit: OneRoundCommit, deadline: float) -> CommitAnswer:
        world, faults, chance = self._world, self._world.faults, self._random.random

        def apply() -> CommitAnswer:
            return world.store.commit(commit, world.oracle.next)

        await self._travel()
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
        self.scans.append(request.start)
        self.scans_at_once = max(self.scans_at_once, len(self.scans))
        try:
            for page in pages(self._world.store, request):
                await self._travel()
                yield page
        finally:
            self.scans.remove(request.start)

    async def boundaries(self, table_id: int, start: bytes, end: bytes) -> list[bytes]:
        return [row for row in (b"2", b"5", b"6", b"8") if start < row and (not end or row < end)]

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
    """Reads and writes of one transaction, and the outcomes reported for it."""

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
    """True of a step that puts a lock where there must be none."""
    return puts(step, LOCK) and len(step.message().conditions) > 1


def _commits_primary(step: CellMutation) -> bool:
    return puts(step, WRITE) and len(step.message().conditions) > 2


def _rolls_back_expired(step: CellMutation) -> bool:
    """True of a step that rolls back a lock, not its absence, whose time to live has passed."""
    expectations = [condition.expectation for condition in step.message().conditions]
    return Condition.EXPECTATION_BEGINS_IF_PRESENT in expectations


# Cells to write, the steps that clients send for them, and transactions that stop halfway.

A = CellAddress(1, b"a", b"x")
B = CellAddress(1, b"b", b"x")
C = CellAddress(2, b"a", b"x")

PATIENT = Limits(lock_ttl_seconds=3.0, heartbeat_seconds=1.0)


def put(value: bytes) -> Write:
    return KIND_PUT, value


def puts(step: CellMutation, space: int) -> bool:
    return any(
        change.kind == Change.KIND_PUT and change.space == space
        for change in step.message().changes
    )


def address(step: CellMutation) -> CellAddress:
    return CellAddress(step.table_id, step.message().row, step.message().column)


def world() -> World:
    return World(0, NO_FAULTS)


async def settled(client: Client) -> None:
    await client.env.background.drain(60.0)


async def locked(client: Client, *cells: CellAddress) -> Commit:
    """A transaction that has prewritten these cells and does not continue by itself."""
    commit = client.commit(
        await client.start_timestamp(), {cell: put(b"pending") for cell in cells}
    )
    await commit.prewrite(client.deadline())
    return commit


async def give_up(client: Client, commit: Commit) -> None:
    with pytest.raises(ConflictError):
        await commit._give_up(ConflictError("gone"), client.deadline())


async def left_behind(here: World, *cells: CellAddress, committed: bool) -> int:
    """Leaves the locks of a client that died before or after its commit point; returns the start
    timestamp."""
    dead = here.client(PATIENT)
    commit = await locked(dead, *cells)
    if committed:
        await commit.commit_primary(dead.deadline())
    dead.crash()
    return commit._write.start


# One random run: writers, readers and second committers, then a quiet phase that settles all.

CELLS = [
    CellAddress(1, b"a", b"x"),
    CellAddress(1, b"a", OBSERVED),
    CellAddress(1, b"b", b"x"),
    CellAddress(2, b"a", b"x"),
    CellAddress(2, b"a", OBSERVED),
]


@dataclass
class Run:
    """Counts of the run of one seed, and the rules that it broke."""

    violations: list[str] = field(default_factory=list)
    committed: int = 0
    aborted: int = 0
    buried_alive: int = 0


def run(
    seed: int,
    faults: Faults | None = None,
    *,
    second_committers: int = 2,
    one_round_share: float = 0.0,
) -> Run:
    return run_virtually(_run(seed, faults or Faults(), second_committers, one_round_share))


async def _run(seed: int, faults: Faults, second_committers: int, one_round_share: float) -> Run:
    world = World(seed, faults, one_round_share)
    transactions: list[Transaction] = []
    reads: list[Read] = []
    work = [_write(world, transactions) for _ in range(8)]
    work += [_read(world, reads) for _ in range(3)]
    work += [_commit_again(world, transactions) for _ in range(second_committers)]
    tasks = [asyncio.create_task(one) for one in work]
    await asyncio.wait(tasks, timeout=15.0)
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()  # its client has died, so it would wait forever
    await asyncio.gather(*left, return_exceptions=True)
    buried_alive = world.buried_alive
    errors = [task.exception() for task in tasks if task not in left]
    world.faults = NO_FAULTS
    await asyncio.sleep(1.0)  # late messages arrive, background work ends, locks expire
    witness = world.client()
    for cell in CELLS:
        await witness.write_stubbornly({cell: (KIND_LOCK_ONLY, b"")})
    found = violations(world.store, [*transactions, *_unlisted(world, transactions)], reads)
    found += [repr(error) for error in errors if error is not None]
    for client in world.clients:
        client.heartbeats.close()
        await client.env.background.drain(0.0)
    outcomes = [outcome for transaction in transactions for outcome in transaction.outcomes]
    return Run(found, sum(map(bool, outcomes)), outcomes.count(0), buried_alive)


def _unlisted(world: World, transactions: list[Transaction]) -> list[Transaction]:
    """The witness's own transactions: lock-only, one for each cell."""
    known = {transaction.start for transaction in transactions}
    found = []
    for cell in CELLS:
        for _, record in world.store.commits(cell):
            if record.start_timestamp not in known:
                found.append(Transaction(record.start_timestamp, {cell: (KIND_LOCK_ONLY, b"")}))
    return found


async def _write(world: World, transactions: list[Transaction]) -> None:
    chance = world.random
    await asyncio.sleep(chance.uniform(0, 0.04))
    client = world.client()
    if chance.random() < world.faults.crash:
        world.later(client.crash, chance.uniform(0, 0.02))
    start = await client.start_timestamp()
    transaction = Transaction(start, {}, world.clock.monotonic_seconds())
    for cell in chance.sample(CELLS, chance.randint(0, 2)):
        transaction.reads[cell] = await client.read(cell, start)
    for cell in chance.sample(CELLS, chance.randint(1, 3)):
        transaction.writes[cell] = _some_write(world, cell, start)
    if chance.random() < 0.4:
        transaction.weak = [CellAddress(1, b"weakly", OBSERVED)]
    transactions.append(transaction)
    await client.commit_and_settle(transaction)


def _some_write(world: World, cell: CellAddress, start: int) -> Write:
    kind = world.random.choice([KIND_PUT, KIND_PUT, KIND_PUT, KIND_DELETE, KIND_LOCK_ONLY])
    if kind != KIND_PUT:
        return kind, b""
    value = f"{cell.row!r}{start}".encode()
    return kind, value if world.random.random() < 0.5 else value[-4:]


async def _read(world: World, reads: list[Read]) -> None:
    await asyncio.sleep(world.random.uniform(0, 0.06))
    client = world.client()
    timestamp = await client.start_timestamp()
    for cell in world.random.choices(CELLS, k=8):
        value = await client.read(cell, timestamp)
        reads.append((timestamp, cell, value))


async def _commit_again(world: World, transactions: list[Transaction]) -> None:
    """Commits again, like a gateway whose caller got no answer from another one."""
    await asyncio.sleep(world.random.uniform(0.005, 0.06))
    open_ones = [transaction for transaction in transactions if not transaction.outcomes]
    if open_ones:
        client: Client = world.client()
        await client.commit_and_settle(world.random.choice(open_ones))


# What must hold for a store and the histories of its clients, whatever happened to them.

Read = tuple[int, CellAddress, bytes | None]


def violations(
    store: NaiveCells, transactions: Iterable[Transaction], reads: Iterable[Read]
) -> list[str]:
    """A description of each broken rule; empty if all hold."""
    found: list[str] = []
    by_start = {transaction.start: transaction for transaction in transactions}
    committed = _commits(store, found)
    for start, cells in committed.items():
        found += _whole(store, by_start[start], cells)
    for start, transaction in by_start.items():
        found += _told_the_truth(start, transaction, committed.get(start, {}))
    for start, transaction in by_start.items():
        reads = [*reads, *((start, cell, value) for cell, value in transaction.reads.items())]
    for timestamp, cell, value in reads:
        shown = store.at(cell, timestamp)
        expected = shown.value if shown else None
        if value != expected:
            found.append(f"read of {cell} at {timestamp} gave {value!r}, not {expected!r}")
    return found


def _commits(store: NaiveCells, found: list[str]) -> dict[int, dict[CellAddress, int]]:
    committed: dict[int, dict[CellAddress, int]] = {}
    for cell, versions in store.cells.items():
        spans = sorted((record.start_timestamp, commit) for commit, record in store.commits(cell))
        for (first, first_commit), (second, _) in itertools.pairwise(spans):
            if first == second:
                found.append(f"{first} committed {cell} twice")
            elif first_commit >= second:
                found.append(f"lost update on {cell}: {first}..{first_commit} overlaps {second}")
        for start, commit in spans:
            if commit <= start:
                found.append(f"{start} committed before it began, at {commit}")
            if (ROLLBACK, b"", start) in versions:
                found.append(f"{start} is committed and rolled back on {cell}")
            committed.setdefault(start, {})[cell] = commit
        if store.lock_of(cell):
            found.append(f"a lock is left on {cell}")
    return committed


def _whole(store: NaiveCells, transaction: Transaction, cells: dict[CellAddress, int]) -> list[str]:
    found = []
    start = transaction.start
    if set(cells) != set(transaction.writes):
        found.append(f"torn: {start} wrote {set(transaction.writes)}, committed {set(cells)}")
    if len(set(cells.values())) > 1:
        found.append(f"{start} has several commit timestamps: {cells}")
    commit = max(cells.values())
    for cell in cells:
        kind, value = transaction.writes[cell]
        if kind == KIND_LOCK_ONLY:
            continue
        shown = store.at(cell, cells[cell])
        if shown is None or shown.value != (None if kind == KIND_DELETE else value):
            found.append(f"{start} wrote {value!r} to {cell}, which shows {shown}")
        notified = (NOTIFY, OBSERVER, cells[cell]) in store.cells[cell]
        if cell.column == OBSERVED and not notified:
            found.append(f"no observer is notified of {start} on {cell}")
    found += [
        f"the weak notification of {start} on {cell} is lost"
        for cell in transaction.weak
        if (NOTIFY, WEAK_OBSERVER, commit) not in store.cells.get(cell, {})
    ]
    return found


def _told_the_truth(
    start: int, transaction: Transaction, cells: dict[CellAddress, int]
) -> list[str]:
    found = []
    for outcome in transaction.outcomes:
        if outcome and set(cells.values()) != {outcome}:
            found.append(f"{start} was reported committed at {outcome}; stored is {cells}")
        if not outcome and cells:
            found.append(f"{start} was reported aborted; stored is {cells}")
    return found


async def cancel(running: asyncio.Task[int] | asyncio.Task[None]) -> None:
    """Its caller gives up, and hears of nothing else."""
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
