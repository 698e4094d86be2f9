"""A client's transactions, each written down for the checker beside the library that runs it.

A `Session` runs one transaction after another; what a transaction does is a function of a
`RecordedTx`. Now and then a session is impatient: it gives a commit little time, abandons it in the
middle, or asks afterwards for its outcome, and later checks that the library's answer was right.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from percolator.aio import Database, Transaction
from percolator.aio.transaction import Outcome
from percolator.errors import (
    ConflictError,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    SnapshotTooOld,
)
from percolator.protocol.environment import ROLLED_BACK
from percolator.retries import RetryPolicy
from percolator.world import Random
from tests.isolation.history import RecordedTransaction, Recorder, TransactionRecord
from tests.simulation.recorded_tx import Body, JoinedScans, RecordedTx

_ABANDONED_SECONDS_MAX = 0.02
_LATE_SHARE = 0.5
"""The share of transactions that fetch no timestamp unless they need it, as those of programs."""
_DELAYED_SHARE = 0.3
_DELAY_SECONDS_MAX = 0.02
LIMIT_SECONDS = 3.5
_SHORT_SECONDS = (0.05, 0.3, 2.0)


@dataclass
class Claim:
    """Outcome that the library later reported for a transaction of unknown outcome."""

    record: TransactionRecord
    committed: bool


@dataclass
class Chronicle:
    """Everything that all clients have written down, dead or alive."""

    recorder: Recorder
    claims: list[Claim] = field(default_factory=list)
    doubled_share: float = 0.0
    """The share of transactions that have two committers."""
    switches_feeds: bool = False
    """True if followers of change feeds have them switched on."""
    one_round_share: float = 0.0
    """The share of transactions that try to commit in one round."""
    committed_in_one_round: int = 0
    joined_share: float = 0.0
    """The share of scans that are made with joined pages, too."""
    occurred: Counter[str] = field(default_factory=Counter)
    """Rare situations that clients have met, by name: a run of many seeds must have met each."""
    doubled: set[int] = field(default_factory=set)
    """Start timestamps of transactions that two committers commit concurrently."""
    stopped: bool = False
    """True when the time is up: sessions begin no more transactions."""
    left: dict[str, int] = field(default_factory=dict)
    """The number of transactions still to be run, by session; any life of its client runs them."""
    parts: dict[int, int] = field(default_factory=dict)
    """The start timestamps of the chosen parts of shared transactions, and those of the whole."""
    broken: list[str] = field(default_factory=list)
    """Promises that the workload itself found broken."""


class Session:
    """Runs one transaction after another, as a thread of a program would."""

    def __init__(
        self, chronicle: Chronicle, name: str, life: int, database: Database, random: Random
    ) -> None:
        self.name = name
        self.random = random
        self.also_expected: type[PercolatorError] | None = None
        """An error that is useless to retry, and which this workload's transactions may meet."""
        self._recorded_as = f"{name} #{life}"
        # Separate, so that the share of one kind does not change what the transactions do.
        self._phases = Random(f"phases of {self._recorded_as}")
        self._delays = Random(f"delays of {self._recorded_as}")
        self._starts = Random(f"starts of {self._recorded_as}")
        self._joined = JoinedScans(
            chronicle.joined_share,
            Random(f"joined scans of {self._recorded_as}"),
            chronicle.occurred,
        )
        self._chronicle = chronicle
        self._database = database

    @property
    def client(self) -> str:
        """The client that it belongs to: its address, whichever life it is in."""
        return self.name.partition(" ")[0]

    @property
    def goes_on(self) -> bool:
        return not self._chronicle.stopped and self._chronicle.left[self.name] > 0

    def broken(self, promise: str) -> None:
        """Called by a workload that has seen what it must never see."""
        self._chronicle.broken.append(f"{self._recorded_as}: {promise}")

    @property
    def database(self) -> Database:
        """The database, for operations that are not transactions."""
        return self._database

    def count(self, name: str) -> None:
        """Counts something that the workload has met, and a run of many seeds must not miss."""
        self._chronicle.occurred[name] += 1

    @property
    def switches_feeds(self) -> bool:
        return self._chronicle.switches_feeds

    def skip(self) -> None:
        """Takes the place of a transaction without one."""
        self._chronicle.left[self.name] -= 1

    def begin_alone(self) -> RecordedTransaction:
        """A record for something that the workload does itself instead of running a transaction."""
        self._chronicle.left[self.name] -= 1
        return self._chronicle.recorder.begin(self._recorded_as)

    def note_parts(self, whole: int, parts: Sequence[int]) -> None:
        """Notes which parts a shared transaction of that start timestamp is to commit."""
        self._chronicle.parts.update(dict.fromkeys(parts, whole))

    def claim(self, recorded: RecordedTransaction, *, committed: bool) -> None:
        """Notes what the library has said about a transaction of unknown outcome."""
        self._claim(recorded, committed=committed)

    async def resolved(self, recorded: RecordedTransaction, error: OutcomeUnknown) -> None:
        """Asks the database for the outcome, and notes what it says."""
        try:
            outcome = await self._database.resolve(error, timeout=2.0)
        except PercolatorError as problem:
            self._expected(problem)
        else:
            self._claim(recorded, committed=outcome is Outcome.COMMITTED)

    def expect(self, error: PercolatorError) -> None:
        """Raises the error unless clients have to expect it from a cluster in trouble."""
        self._expected(error)

    def unique(self) -> bytes:
        """A value that no other transaction ever writes."""
        return b"%s %d" % (self._recorded_as.encode(), self.random.getrandbits(40))

    async def run(self, body: Body) -> bool:
        """Runs a transaction. Returns whether it is known to have committed. Raises no error that
        clients have to expect."""
        self._chronicle.left[self.name] -= 1
        impatience = self.random.random()
        timeout = self.random.choice(_SHORT_SECONDS) if impatience < 0.1 else None
        transaction = self._database.transaction(timeout=timeout)
        transaction._only_two_phases = self._takes_two_phases()
        try:
            return await self._run(transaction, body, impatience)
        finally:
            # The process may end in the middle: its transaction is not dropped by mistake.
            await transaction._leave()

    async def _run(self, transaction: Transaction, body: Body, impatience: float) -> bool:
        recorded = self._chronicle.recorder.begin(self._recorded_as)
        begins_late = self._starts.random() < _LATE_SHARE
        doubled = False
        try:
            if not begins_late:
                recorded.began(await transaction.timestamp())
            recorded_tx = RecordedTx(transaction, recorded, self._joined)
            await body(recorded_tx)
            if impatience <= 0.96:
                doubled = self.random.random() < self._chronicle.doubled_share
            if doubled:
                await transaction.timestamp()
            recorded_tx.note_start()
        except PercolatorError as error:
            transaction.rollback()
            recorded.aborted()
            return self._expected(error)
        self._note_commit(transaction, recorded)
        if impatience > 0.96:
            return await self._abandon(transaction, recorded)
        if doubled and recorded.record.locked():
            return await self._commit_twice(transaction, recorded)
        return await self._commit(transaction, recorded)

    async def run_again(self, body: Body) -> bool:
        """As `run`, but again after conflicts, as `Database.run` does. Each attempt is recorded."""
        self._chronicle.left[self.name] -= 1
        policy = RetryPolicy(deadline_seconds=LIMIT_SECONDS)
        try:
            return await self._database.run(self._attempt, body, retry=policy)
        except PercolatorError as error:
            return self._expected(error)

    async def _attempt(self, transaction: Transaction, body: Body) -> bool:
        transaction._only_two_phases = self._takes_two_phases()
        if self._delays.random() < _DELAYED_SHARE:
            # It is older than transactions that have begun to read before it.
            await asyncio.sleep(self._delays.random() * _DELAY_SECONDS_MAX)
        recorded = self._chronicle.recorder.begin(self._recorded_as)
        try:
            recorded_tx = RecordedTx(transaction, recorded, self._joined)
            await body(recorded_tx)  # its first read may wait for its turn
            if self._starts.random() >= _LATE_SHARE:
                await transaction.timestamp()
            recorded_tx.note_start()
        except PercolatorError:
            recorded.aborted()
            raise
        self._note_commit(transaction, recorded)
        try:
            commit = await transaction.commit()
        except OutcomeUnknown:
            recorded.unknown()
            raise
        except PercolatorError:
            recorded.aborted()
            raise
        recorded.committed(commit or 0)
        return True

    async def _commit_twice(self, transaction: Transaction, recorded: RecordedTransaction) -> bool:
        """Commits like a gateway whose caller has sent the same commit to another gateway, too."""
        if transaction._reader.late:
            # `commit` would do so first. The other gateway is sent all writes.
            try:
                await transaction._complete(self._database._engine.now() + LIMIT_SECONDS)
            except PercolatorError as error:
                recorded.aborted()
                return self._expected(error)
        self._chronicle.doubled.add(recorded.record.start_ts)
        transaction._alone = False
        other = transaction._prepare_commit()
        transaction._only_two_phases = self._takes_two_phases()
        now = self._database._engine.now

        async def again() -> None:
            await asyncio.sleep(self.random.random() ** 3 * _ABANDONED_SECONDS_MAX)
            try:
                await other.run(now() + LIMIT_SECONDS)
            except OutcomeUnknown:
                return
            except PercolatorError as error:
                if self._is_final(transaction, error):
                    self._claim(recorded, committed=False)
                self._expected(error)
            else:
                self._claim(recorded, committed=True)

        second = asyncio.ensure_future(again())
        committed = await self._commit(transaction, recorded)
        await second
        return committed

    async def _commit(self, transaction: Transaction, recorded: RecordedTransaction) -> bool:
        try:
            commit = await transaction.commit()
        except OutcomeUnknown as error:
            recorded.unknown()
            await self._ask(transaction, recorded, error)
            return False
        except PercolatorError as error:
            if self._is_final(transaction, error):
                recorded.aborted()
            return self._expected(error)
        recorded.committed(commit or 0)
        if commit and (transaction._commit is None or transaction._commit.is_whole):
            self._chronicle.committed_in_one_round += 1
        return True

    def _takes_two_phases(self) -> bool:
        return self._phases.random() >= self._chronicle.one_round_share

    async def _abandon(self, transaction: Transaction, recorded: RecordedTransaction) -> bool:
        """Cancels the transaction in the middle of its commit."""
        seconds = self.random.random() * _ABANDONED_SECONDS_MAX
        committing = asyncio.ensure_future(self._commit(transaction, recorded))
        await asyncio.wait([committing], timeout=seconds)
        if committing.done():
            return committing.result()
        committing.cancel()
        await asyncio.wait([committing])
        if transaction.outcome is Outcome.ABORTED:
            if recorded.record.commit_called is None:  # it was cancelled before its timestamp came
                recorded.aborted()
            self._claim(recorded, committed=False)
        return False

    async def _ask(
        self, transaction: Transaction, recorded: RecordedTransaction, error: OutcomeUnknown
    ) -> None:
        """Asks the transaction for its outcome, or the database, or does not ask."""
        chance = self.random.random()
        try:
            if chance < 0.4:
                outcome = await transaction.resolve(timeout=2.0)
            elif chance < 0.8:
                outcome = await self._database.resolve(error, timeout=2.0)
            else:
                return
        except PercolatorError as problem:
            self._expected(problem)
            return
        self._claim(recorded, committed=outcome is Outcome.COMMITTED)

    def _is_final(self, transaction: Transaction, error: PercolatorError) -> bool:
        """True if a transaction that was given up will never be committed.

        One of two committers may run out of time and give up a transaction that the other commits.
        As for a gateway, only a durable marker rules that out, or another transaction's newer
        commit of the primary.
        """
        start = transaction.start_timestamp
        if start not in self._chronicle.doubled:
            return True
        if self._database._engine.env.verdicts.get(start) == ROLLED_BACK:
            return True
        if isinstance(error, ConflictError) and error.other_commit_timestamp:
            return error.cell == min(transaction.internal.writes.stored(start))
        return False

    def _claim(self, recorded: RecordedTransaction, *, committed: bool) -> None:
        self._chronicle.claims.append(Claim(recorded.record, committed))

    def _expected(self, error: PercolatorError) -> bool:
        """Raises the error unless clients have to expect it from a cluster in trouble.

        History is kept hardly longer than a session takes to report what it needs, so an error
        about a snapshot that is too old has to be expected, too.
        """
        expected = ConflictError | OutcomeUnknown | SnapshotTooOld
        if error.retry is not Retry.USELESS or isinstance(error, expected):
            return False
        if self.also_expected is None or not isinstance(error, self.also_expected):
            raise error
        return False

    def _note_commit(self, transaction: Transaction, recorded: RecordedTransaction) -> None:
        """Notes that the transaction is being committed. If it is given its start timestamp for
        that, it is noted then: nothing is sent before."""
        writes = transaction.internal.writes.cells or transaction._reader.late
        if transaction.start_timestamp is not None or not writes:
            recorded.commit_called()
            return
        reader = transaction._reader
        set_start = reader.set_start

        def noted(start: int) -> None:
            set_start(start)
            recorded.began(start)
            recorded.commit_called()

        reader.set_start = noted  # type: ignore[method-assign]
