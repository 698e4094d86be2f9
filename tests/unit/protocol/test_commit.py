"""Commits, step by step: what is sent when, and what is concluded from the answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.errors import (
    CellAddress,
    ConflictError,
    InvariantViolation,
    NotReady,
    OutcomeUnknown,
    PercolatorError,
    PermissionDenied,
    Retry,
    TransactionTooLarge,
    Unavailable,
)
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT, lock_prefix
from percolator.limits import Limits
from percolator.protocol import commit, steps
from percolator.protocol.commit import Commit
from percolator.protocol.environment import ROLLED_BACK, Statistics
from percolator.protocol.write_set import KeptIndexes, Write, WriteSet, WriteSteps
from percolator.routing.catalog import TableSchema
from percolator.routing.cells import APPLIED, CellMutation
from percolator.timestamps import SEQUENCE_BITS
from tests.unit.protocol.naive_cells import DATA, LOCK, NOTIFY, ROLLBACK, WRITE
from tests.unit.protocol.protocol_world import (
    LIMITS,
    NO_FAULTS,
    OBSERVED,
    OBSERVER,
    PATIENT,
    A,
    B,
    C,
    Client,
    Faults,
    World,
    address,
    cancel,
    give_up,
    locked,
    put,
    puts,
    settled,
    world,
)


async def test_a_commit_is_prewrite_then_timestamp_then_primary_then_the_rest(
    here: World, client: Client
) -> None:
    commit = await client.write({B: put(b"2"), A: put(b"1"), C: put(b"3")})
    await settled(client)
    kinds = [
        (address(step), "lock" if puts(step, LOCK) else "commit") for step in client.network.steps
    ]
    assert (sorted(kinds[:3]), kinds[3]) == ([(A, "lock"), (B, "lock"), (C, "lock")], (A, "commit"))
    assert sorted(kinds[4:]) == [(B, "commit"), (C, "commit")]
    for cell, value in ((A, b"1"), (B, b"2"), (C, b"3")):
        ((at, record),) = here.store.commits(cell)
        assert (at, record.value) == (commit, value)
        assert here.store.lock_of(cell) is None


async def test_the_commit_timestamp_is_fetched_after_the_last_prewrite_was_answered(
    here: World, client: Client
) -> None:
    start = await client.start_timestamp()

    async def slow(step: CellMutation) -> None:
        if address(step) == B and puts(step, LOCK):
            await asyncio.sleep(1.0)
            at_last_prewrite.append(here.oracle.next())

    at_last_prewrite: list[int] = []
    client.network.before_send = slow
    commit = await client.commit(start, {A: put(b"1"), B: put(b"2")}).run(client.deadline())
    assert commit > at_last_prewrite[0] > start


async def test_the_least_cell_that_carries_a_lock_is_the_primary() -> None:
    client = world().client()
    commit = client.commit(5, {C: put(b""), B: (KIND_LOCK_ONLY, b""), A: (KIND_DELETE, b"")})
    assert commit._write.primary == A


async def test_an_unanswered_commit_is_repeated_with_the_same_timestamp(client: Client) -> None:
    lost = iter([True, True])
    client.network.loses_answer = lambda step: puts(step, WRITE) and next(lost, False)
    commit = await client.write({A: put(b"1")})
    attempts = [step for step in client.network.steps if puts(step, WRITE)]
    assert len(attempts) == 3
    assert {change.timestamp for s in attempts for change in s.message().changes} == {0, commit}


async def test_an_unanswered_prewrite_that_was_applied_counts_as_done(
    here: World, client: Client
) -> None:
    lost = iter([True])
    client.network.loses_answer = lambda step: puts(step, LOCK) and next(lost, False)
    commit = await client.write({A: put(b"1")})
    assert [at for at, _ in here.store.commits(A)] == [commit]


async def test_a_pushed_lock_makes_the_commit_take_a_later_timestamp(here: World) -> None:
    writer, reader = here.client(PATIENT), here.client()

    async def wait(step: CellMutation) -> None:
        if puts(step, WRITE) and not waited.is_set():
            waited.set()
            await asyncio.sleep(0.5)

    waited = asyncio.Event()
    writer.network.before_send = wait
    writing = asyncio.ensure_future(writer.write({A: put(b"1")}))
    await waited.wait()
    timestamp = await reader.start_timestamp()
    assert await reader.read(A, timestamp) is None  # passes the live writer, having pushed it
    assert not writing.done()
    assert await writing > timestamp
    assert await reader.read(A, timestamp) is None


async def test_aborting_touches_nothing_before_the_marker_on_the_primary_is_durable(
    here: World, client: Client
) -> None:
    start = await client.start_timestamp()
    await here.client().write({C: put(b"newer")})
    marked = asyncio.Event()

    async def slow(step: CellMutation) -> None:
        if puts(step, ROLLBACK) and address(step) == A:
            await asyncio.sleep(1.0)
            marked.set()
        elif puts(step, ROLLBACK):
            assert marked.is_set()

    client.network.before_send = slow
    with pytest.raises(ConflictError):
        await client.commit(start, {A: put(b"1"), B: put(b"2"), C: put(b"3")}).run(
            client.deadline()
        )
    assert marked.is_set(), "reported as aborted before the marker was durable"
    assert client.env.verdicts.get(start) == ROLLED_BACK
    await settled(client)
    assert here.store.lock_of(A) is here.store.lock_of(B) is here.store.lock_of(C) is None


async def test_a_marker_that_meets_the_commit_record_reports_committed(here: World) -> None:
    """Another client committed the same transaction while this one was giving up."""
    slow, quick, stranger = here.client(PATIENT), here.client(PATIENT), here.client(PATIENT)
    start = await slow.start_timestamp()
    writes = {A: put(b"1"), B: put(b"2")}
    in_the_way = await locked(stranger, B)

    async def let_the_other_finish(step: CellMutation) -> None:
        if puts(step, ROLLBACK):
            slow.network.before_send = None
            await give_up(stranger, in_the_way)
            committed.append(await quick.commit(start, writes).run(quick.deadline()))

    committed: list[int] = []
    slow.network.before_send = let_the_other_finish
    assert await slow.commit(start, writes).run(slow.deadline()) == committed[0]
    assert [at for at, _ in here.store.commits(A)] == committed


async def test_a_conflict_names_the_cell_and_the_other_transaction_and_needs_no_marker(
    here: World, client: Client
) -> None:
    start = await client.start_timestamp()
    other = await here.client().write({A: put(b"other")})
    with pytest.raises(ConflictError) as caught:
        await client.commit(start, {A: put(b"mine")}).run(client.deadline())
    error = caught.value
    assert (error.cell, error.start_timestamp, error.other_commit_timestamp) == (A, start, other)
    assert start < error.other_start_timestamp < other
    assert error.retry is Retry.SAFE
    await settled(client)
    assert not any(puts(step, ROLLBACK) for step in client.network.steps)


async def test_the_older_transaction_does_not_wait_for_the_younger(here: World) -> None:
    old, young = here.client(PATIENT), here.client(PATIENT)
    start = await old.start_timestamp()
    await locked(young, A)
    before = here.clock.monotonic_seconds()
    with pytest.raises(ConflictError, match="is locked by"):
        await old.commit(start, {A: put(b"old")}).run(old.deadline())
    assert here.clock.monotonic_seconds() - before < 0.05


async def test_the_younger_waits_for_the_older_to_end(here: World) -> None:
    old, young = here.client(PATIENT), here.client(PATIENT)
    holder = await locked(old, A)
    statistics = Statistics()
    waiting = asyncio.ensure_future(
        young.commit(await young.start_timestamp(), {A: put(b"young")}, statistics=statistics).run(
            young.deadline()
        )
    )
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await give_up(old, holder)
    assert await waiting
    (wait,) = statistics.lock_waits
    assert wait.holder_start_timestamp == holder._write.start
    assert 0.3 < wait.seconds < 0.7


async def test_an_orphan_lock_is_cleaned_up_by_a_writer_that_reads_nothing(here: World) -> None:
    dead = here.client(PATIENT)
    await locked(dead, A, B)
    dead.crash()
    writer = here.client(PATIENT)
    # Its session says that it is gone, so the time to live of three seconds is not waited for.
    assert await here.seconds_of(writer.write({B: put(b"new")})) < 0.2
    assert [record.value for _, record in here.store.commits(B)] == [b"new"]


async def test_an_orphan_lock_without_a_session_is_cleaned_up_after_its_time_to_live(
    here: World,
) -> None:
    dead = here.client(PATIENT)
    dead.network.session_id = None
    await locked(dead, A)
    dead.crash()
    writer = here.client(PATIENT)
    assert 2.8 < await here.seconds_of(writer.write({A: put(b"new")})) < 3.5


async def test_heartbeats_keep_a_slow_commit_alive(here: World) -> None:
    limits = Limits(lock_ttl_seconds=0.3, heartbeat_seconds=0.1)
    slow, impatient = here.client(limits), here.client(limits)
    slow.network.session_id = None
    slow.network.slow(2.0, WRITE)
    writing = asyncio.ensure_future(slow.write({A: put(b"1")}))
    await asyncio.sleep(0.2)
    meeting = asyncio.ensure_future(impatient.write_stubbornly({A: put(b"2")}))
    commit = await writing
    assert here.store.commits(A)[0][0] == commit
    await meeting


async def test_heartbeats_continue_after_a_prewrite_whose_answer_was_lost(here: World) -> None:
    """The lock has the time to live of the first attempt, not of the attempt that found it."""
    client = here.client(Limits(lock_ttl_seconds=0.3, heartbeat_seconds=0.1))
    lost = iter([True])
    client.network.loses_answer = lambda step: puts(step, LOCK) and next(lost, False)
    client.network.slow(2.0, WRITE)
    writing = asyncio.ensure_future(client.write({A: put(b"1")}))
    await asyncio.sleep(1.5)
    assert here.lock(A).ttl_milliseconds > 1_500
    await writing


async def test_a_time_to_live_counts_from_the_start_of_the_transaction(
    here: World, patient: Client
) -> None:
    """A program that took five seconds before its commit must not write expired locks."""
    start = await patient.start_timestamp()
    commit = patient.commit(start, {A: put(b"1")})
    await asyncio.sleep(5.0)
    await commit.prewrite(patient.deadline())
    lock = here.lock(A)
    age = (here.oracle.next() >> SEQUENCE_BITS) - (start >> SEQUENCE_BITS)
    assert lock.ttl_milliseconds - age == pytest.approx(3000, abs=20)


async def test_long_values_are_stored_apart_and_removed_by_a_rollback(
    here: World, client: Client
) -> None:
    long = bytes(LIMITS.value_inline_bytes_max + 1)
    start = await client.start_timestamp()
    await client.commit(start, {A: put(long)}).run(client.deadline())
    assert here.store.cells[A][(DATA, b"", start)] == long
    ((_, record),) = here.store.commits(A)
    assert record.value == b""
    start = await client.start_timestamp()
    commit = client.commit(start, {B: put(long)})
    await commit.prewrite(client.deadline())
    await give_up(client, commit)
    assert (DATA, b"", start) not in here.store.cells[B]


async def test_a_commit_under_an_old_schema_is_sent_again_with_the_new_notifications(
    here: World, client: Client
) -> None:
    cell = CellAddress(1, b"a", OBSERVED)
    here.store.schema_versions[1] = 2

    class Stale:
        schema = TableSchema(1)

        def get(self, table_id: int) -> TableSchema:
            return self.schema

        async def refresh(self, table_id: int, deadline: float) -> TableSchema:
            self.schema = TableSchema(2, {OBSERVED: (OBSERVER,)})
            return self.schema

    object.__setattr__(client.env, "schemas", Stale())
    assert (NOTIFY, OBSERVER, await client.write({cell: put(b"1")})) in here.store.cells[cell]


async def test_a_lock_only_write_notifies_no_observer(here: World) -> None:
    cell = CellAddress(1, b"a", OBSERVED)
    commit = await here.client().write({cell: (KIND_LOCK_ONLY, b"")})
    assert (NOTIFY, OBSERVER, commit) not in here.store.cells[cell]


async def test_a_large_transaction_is_sent_in_portions_and_is_still_one(
    here: World, client: Client
) -> None:
    cells = {CellAddress(1, b"%06d" % i, b"x"): put(b"") for i in range(9_000)}
    start = await client.start_timestamp()
    statistics = Statistics()
    commit = await client.commit(start, cells, statistics=statistics).run(client.deadline(600))
    await settled(client)
    assert {at for cell in cells for at, _ in here.store.commits(cell)} == {commit}
    assert statistics.round_trips == 3 + 1 + 1


async def test_what_is_wrong_with_one_commit_stops_no_other_that_is_completed_with_it(
    here: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list[tuple[WriteSteps, int]]()
    with monkeypatch.context() as patch:
        patch.setattr(commit, "start_secondaries", lambda _, *one: left.append(one))
        await client.write({A: put(b"1"), B: put(b"1"), C: put(b"1")})
    assert here.store.lock_of(C) is not None
    torn = WriteSteps(await client.start_timestamp(), {A: put(b"2"), B: put(b"2")}, 1024)
    with pytest.raises(InvariantViolation, match=f"transaction {torn.start} is committed"):
        await commit.commit_secondaries(client.env, [(torn, torn.start + 1), *left])
    assert here.store.lock_of(B) is here.store.lock_of(C) is None


async def test_what_a_committer_adds_for_an_index_is_left_if_another_has_decided_without_it(
    here: World, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    start = await client.start_timestamp()
    decided = await client.commit(start, {A: put(b"1")}, two_phases=True).run(client.deadline())
    await locked(client, B)
    cells = WriteSet(LIMITS)
    cells.put(A, b"1")
    cells.lock(B)
    write = WriteSteps(start, cells.cells, 1024, kept=KeptIndexes({}, cells, frozenset({B})))
    knows_more = Commit(
        client.env,
        client.cleanup,
        client.heartbeats,
        write,
        started_seconds=here.clock.monotonic_seconds(),
        statistics=Statistics(),
        only_two_phases=True,
    )
    assert await knows_more.run(client.deadline()) == decided
    await settled(client)
    assert caplog.messages == [], "the cell was taken for a torn commit"


async def test_a_schema_that_cannot_be_had_stops_no_commit_that_is_completed_with_others(
    here: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list[tuple[WriteSteps, int]]()
    last = CellAddress(1, b"c", b"x")
    with monkeypatch.context() as patch:
        patch.setattr(commit, "start_secondaries", lambda _, *one: left.append(one))
        await client.write({A: put(b"1"), C: put(b"1")})
        await client.write({B: put(b"1"), last: put(b"1")})
    here.store.schema_versions[C.table_id] = 7

    async def fail(table_id: int, deadline: float) -> TableSchema:
        raise Unavailable(f"no master knows table {table_id}")

    monkeypatch.setattr(client.env.schemas, "refresh", fail)
    monkeypatch.setattr(commit, "STEPS_AT_ONCE_MAX", 1)
    with pytest.raises(Unavailable, match="no master knows table 2"):
        await commit.commit_secondaries(client.env, left)
    assert here.store.lock_of(C) is not None
    assert here.store.lock_of(last) is None


async def test_with_too_much_background_work_committers_wait_for_their_own(here: World) -> None:
    client = here.client(Limits(background_tasks_max=1))
    client.network.slow(5.0, WRITE, B)
    await client.write({A: put(b"1"), B: put(b"2")})
    before = here.clock.monotonic_seconds()
    c = CellAddress(1, b"c", b"x")
    d = CellAddress(1, b"d", b"x")
    await client.write({c: put(b"1"), d: put(b"2")})
    assert here.store.lock_of(d) is None, "left to the background although that is full"
    assert here.clock.monotonic_seconds() - before < 1.0


# Commits that fail before their commit point: when may they be reported as aborted?

WRITES = {A: put(b"1"), B: put(b"2")}


async def _in_conflict(here: World, client: Client, *, alone: bool = False) -> Commit:
    """A commit that can lock its primary but not its other cell; its marker gets no answer."""
    start = await client.start_timestamp()
    await here.client().write({B: put(b"newer")})
    client.network.loses_answer = lambda step: puts(step, ROLLBACK)
    return client.commit(start, WRITES, alone=alone)


async def test_without_an_answer_to_the_marker_the_outcome_is_unknown(
    here: World, patient: Client
) -> None:
    commit = await _in_conflict(here, patient)
    with pytest.raises(OutcomeUnknown) as caught:
        await commit.run(patient.deadline(1.0))
    assert caught.value.primary == A
    assert isinstance(caught.value.__cause__, ConflictError)


async def test_a_transaction_being_given_up_is_settled_by_its_marker_and_never_committed(
    here: World, patient: Client
) -> None:
    commit = await _in_conflict(here, patient)
    with pytest.raises(OutcomeUnknown):
        await commit.run(patient.deadline(1.0))
    patient.network.loses_answer = lambda step: False
    with pytest.raises(ConflictError, match="given up"):
        await commit.settle(patient.deadline())
    await settled(patient)
    assert here.store.lock_of(A) is here.store.lock_of(B) is None
    assert here.store.commits(A) == []
    assert not any(puts(step, WRITE) for step in patient.network.steps)


async def test_a_transaction_being_given_up_may_have_been_committed_by_another_client() -> None:
    here = World(0, replace(NO_FAULTS))
    slow, quick, younger = here.client(PATIENT), here.client(PATIENT), here.client(PATIENT)

    async def loses_marks(step: CellMutation) -> None:
        here.faults.lost = float(puts(step, ROLLBACK))

    async def loses_nothing(step: CellMutation) -> None:
        here.faults.lost = 0.0

    slow.network.before_send = loses_marks
    quick.network.before_send = younger.network.before_send = loses_nothing
    start = await slow.start_timestamp()
    in_the_way = await locked(younger, B)
    giving_up = slow.commit(start, WRITES)
    with pytest.raises(OutcomeUnknown):
        await giving_up.run(slow.deadline(0.5))
    await give_up(younger, in_the_way)
    at = await quick.commit(start, WRITES).run(quick.deadline())
    slow.network.before_send = loses_nothing
    assert await giving_up.settle(slow.deadline()) == at
    await settled(slow)
    await settled(quick)
    assert [at for at, _ in here.store.commits(B)] == [at]


async def test_a_lone_committer_reports_the_conflict_without_its_marker(
    here: World, patient: Client
) -> None:
    commit = await _in_conflict(here, patient, alone=True)
    with pytest.raises(ConflictError, match="was committed by transaction"):
        await commit.run(patient.deadline(1.0))


@pytest.mark.parametrize(
    "refusal",
    [NotReady("the tablet is not served here"), PermissionDenied("the token was withdrawn")],
    ids=lambda refusal: type(refusal).__name__,
)
async def test_a_commit_that_was_refused_may_arrive_late_so_only_its_marker_tells(
    here: World, refusal: PercolatorError, patient: Client
) -> None:
    """A server refuses one copy; another copy finds the tablet there, or was sent before the token
    was withdrawn."""
    commits: list[CellMutation] = []

    def refused(step: CellMutation) -> PercolatorError | None:
        if puts(step, WRITE):
            commits.append(step)
        is_final = puts(step, WRITE) or puts(step, ROLLBACK)
        return refusal if is_final else None

    patient.network.refuses = refused
    commit = patient.commit(await patient.start_timestamp(), WRITES, alone=True)
    with pytest.raises(OutcomeUnknown):
        await commit.run(patient.deadline(1.0))
    assert commit.may_be_committed
    patient.network.refuses = lambda step: None
    assert here.store.apply(commits[0]) is APPLIED
    assert await commit.settle(patient.deadline()) == here.store.commits(A)[0][0]


async def test_a_transaction_without_a_lock_on_its_primary_fails_with_its_conflict(
    here: World,
) -> None:
    client, younger = here.client(PATIENT), here.client(PATIENT)
    start = await client.start_timestamp()
    await locked(younger, A)
    client.network.loses_answer = lambda step: puts(step, ROLLBACK)
    with pytest.raises(ConflictError, match="is locked"):
        await client.commit(start, WRITES).run(client.deadline(1.0))


async def test_giving_up_a_lock_only_transaction_leaves_nothing(
    here: World, client: Client
) -> None:
    commit = client.commit(await client.start_timestamp(), {A: (KIND_LOCK_ONLY, b"")})
    await commit.prewrite(client.deadline())
    await give_up(client, commit)
    assert here.store.lock_of(A) is None


# Commits whose answer never comes, or whose caller does not wait for it.


async def test_without_an_answer_before_the_deadline_the_outcome_is_unknown(
    here: World, client: Client
) -> None:
    client.network.loses_answer = lambda step: puts(step, WRITE)
    commit = client.commit(await client.start_timestamp(), {A: put(b"1"), B: put(b"2")})
    with pytest.raises(OutcomeUnknown) as caught:
        await commit.run(client.deadline(1.0))
    assert caught.value.primary == A
    assert caught.value.retry is Retry.UNKNOWN
    client.network.loses_answer = lambda step: False
    at = await commit.settle(client.deadline())
    await settled(client)
    assert [at for at, _ in here.store.commits(B)] == [at]


async def test_an_unknown_outcome_may_prove_to_be_a_rollback(here: World, client: Client) -> None:
    commit = client.commit(await client.start_timestamp(), {A: put(b"1")})
    client.network.slow(3600.0, WRITE)
    client.network.session_id = None
    waiting = asyncio.ensure_future(commit.run(client.deadline(10.0)))
    await asyncio.sleep(5.0)  # its time to live has passed, and no heartbeat arrived
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    client.network.before_send = None
    client.heartbeats.close()
    here.store.apply(commit._write.roll_back_step(A))
    with pytest.raises(ConflictError, match="presumed"):
        await commit.settle(client.deadline())


async def test_an_unanswered_prewrite_fails_as_safe_to_retry() -> None:
    here = World(0, Faults(1.0, 0, 0, 0, 0, 0))
    client = here.client()
    start = await client.start_timestamp()
    with pytest.raises(Unavailable) as caught:
        await client.commit(start, {A: put(b"1")}, alone=True).run(client.deadline(1.0))
    assert caught.value.retry is Retry.SAFE
    await settled(client)


async def test_a_caller_cancelled_during_prewrite_leaves_no_locks_behind(
    here: World, client: Client
) -> None:
    client.network.slow(0.5, LOCK, B)
    start = await client.start_timestamp()
    running = asyncio.ensure_future(
        client.commit(start, {A: put(b"1"), B: put(b"2")}).run(client.deadline())
    )
    await asyncio.sleep(0.1)
    await cancel(running)
    await asyncio.sleep(1.0)
    await settled(client)
    assert (here.store.lock_of(A), here.store.lock_of(B), here.store.commits(A)) == (None, None, [])


async def test_a_caller_cancelled_after_the_commit_was_sent_is_committed_nevertheless(
    here: World, client: Client
) -> None:
    sent = asyncio.Event()

    async def note(step: CellMutation) -> None:
        if puts(step, WRITE):
            sent.set()

    client.network.before_send = note
    commit = client.commit(await client.start_timestamp(), {A: put(b"1"), B: put(b"2")})
    running = asyncio.ensure_future(commit.run(client.deadline()))
    await sent.wait()
    await cancel(running)
    await settled(client)
    await settled(client)
    assert len(here.store.commits(A)) == len(here.store.commits(B)) == 1


async def _left_with_the_commit_on_its_way(here: World, client: Client) -> Commit:
    """A commit that was sent but not answered, and whose lock a reader has pushed since."""
    commit = client.commit(await client.start_timestamp(), {A: put(b"1"), B: put(b"2")})
    sent = asyncio.Event()

    async def hang(step: CellMutation) -> None:
        if puts(step, WRITE):
            sent.set()
            await asyncio.Event().wait()

    client.network.before_send = hang
    running = asyncio.ensure_future(commit.run(client.deadline()))
    await sent.wait()
    client.network.before_send = None
    lock = here.lock(A)
    seen = lock_prefix(lock.start_timestamp, lock.min_commit_timestamp, lock.ttl_milliseconds)
    pushed = replace(lock, min_commit_timestamp=here.oracle.next() + 1)
    push = steps.replace_lock(A.row, A.column, seen, pushed.encode())
    assert here.store.apply(CellMutation(A.table_id, push)) is APPLIED
    await cancel(running)
    return commit


async def test_all_who_settle_a_commit_learn_one_timestamp_and_all_cells_have_it() -> None:
    """Its caller was cancelled, so it is being settled in the background when others ask too."""
    for seed in range(20):
        here = World(seed, NO_FAULTS)
        client = here.client()
        commit = await _left_with_the_commit_on_its_way(here, client)
        told = await asyncio.gather(*(commit.settle(client.deadline()) for _ in range(2)))
        await settled(client)
        stored = [at for cell in (A, B) for at, _ in here.store.commits(cell)]
        assert [*told, *stored] == [told[0]] * 4
        attempts = [step for step in client.network.steps if puts(step, WRITE)]
        assert len([step for step in attempts if address(step) == A]) == 2


async def test_settling_continues_when_its_caller_is_cancelled(here: World, client: Client) -> None:
    commit = await _left_with_the_commit_on_its_way(here, client)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(commit.settle(client.deadline()), 0.0001)
    at = await commit.settle(client.deadline())
    await settled(client)
    assert [at for at, _ in here.store.commits(A)] == [at]


async def test_settling_ends_for_each_caller_at_its_own_deadline(
    here: World, client: Client
) -> None:
    commit = await _left_with_the_commit_on_its_way(here, client)

    async def slow(step: CellMutation) -> None:
        await asyncio.sleep(5.0)

    client.network.before_send = slow
    began = here.clock.monotonic_seconds()
    with pytest.raises(OutcomeUnknown):
        await commit.settle(client.deadline(1.0))
    assert here.clock.monotonic_seconds() - began == pytest.approx(1.0)
    assert await commit.settle(client.deadline()) > 0
    await settled(client)


# What a transaction is about to write.


def test_the_last_write_of_a_cell_counts() -> None:
    own = WriteSet(Limits())
    own.put(A, b"1")
    own.put(A, b"22")
    own.lock(A)
    assert (own.cells[A], own.size_bytes) == ((KIND_PUT, b"22"), 2 + len(A.row) + len(A.column))
    own.delete(A)
    own.lock(B)
    own.put(C, b"")
    assert {cell: kind for cell, (kind, _) in own.cells.items()} == {
        A: KIND_DELETE,
        B: KIND_LOCK_ONLY,
        C: KIND_PUT,
    }


def test_writes_that_do_not_all_fit_change_nothing() -> None:
    own = WriteSet(Limits(transaction_cells_max=2))
    own.put(A, b"1")
    before, size_bytes = dict(own.cells), own.size_bytes
    with pytest.raises(TransactionTooLarge):
        own.write_together([(A, None), (B, b"2"), (C, b"3")])
    assert (own.cells, own.size_bytes) == (before, size_bytes)


CELLS = [
    CellAddress(table, row, column)
    for table in (1, 2)
    for row in (b"", b"a", b"a\0", b"b", b"c")
    for column in (b"x", b"y", b"z", b"zz", b"zzz")
]
Step = tuple[str, list[CellAddress]]
write_steps: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete", "lock", "together", "adopt", "look"]),
        st.lists(st.sampled_from(CELLS), min_size=1, max_size=20),
    ),
    max_size=20,
)


@given(write_steps, st.sampled_from([b"", b"a", b"b"]), st.sampled_from([b"", b"a\0", b"c"]))
def test_writes_are_found_by_their_rows_however_many_there_are_and_however_they_came(
    course: list[Step], start: bytes, end: bytes
) -> None:
    own = WriteSet(Limits(transaction_cells_max=45))
    for kind, cells in course:
        with suppress(TransactionTooLarge):
            _take(own, kind, cells)
    for table in (1, 2):
        found: dict[bytes, dict[bytes, Write]] = {}
        for cell, write in own.cells.items():
            if cell.table_id == table:
                found.setdefault(cell.row, {})[cell.column] = write
        assert own.of_rows(table, [b"c", b"a", b"no"]) == {
            row: found[row] for row in (b"c", b"a") if row in found
        }
        assert own.rows(table, start, end) == {
            row: writes for row, writes in found.items() if start <= row and (not end or row < end)
        }


def _take(own: WriteSet, kind: str, cells: list[CellAddress]) -> None:
    if kind == "adopt":
        other = WriteSet(Limits())
        for cell in cells:
            other.put(cell, b"adopted")
        own.adopt(other)
    elif kind == "together":
        own.write_together([(cell, None if cell.row == b"b" else b"1") for cell in cells])
    elif kind == "look":
        own.rows(1, b"", b"")
    else:
        for cell in cells:
            {"put": lambda one: own.put(one, b"2"), "delete": own.delete, "lock": own.lock}[kind](
                cell
            )
