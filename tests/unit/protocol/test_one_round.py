"""Commits with one message: when it is sent again, when two phases follow, when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    InvalidArgument,
    NotExecuted,
    NotReady,
    OutcomeUnknown,
    Overloaded,
    PercolatorError,
    Retry,
    SchemaError,
    SnapshotTooOld,
    Unavailable,
)
from percolator.formats.records import KIND_LOCK_ONLY
from percolator.limits import Limits
from percolator.protocol.commit import Commit, State
from percolator.protocol.conflicts import AnotherWriteSet
from percolator.protocol.environment import Statistics
from percolator.protocol.write_set import Write
from percolator.routing.cells import (
    Answer,
    CellMutation,
    CommitAnswer,
    NotInOneRound,
    NotSent,
    OneRoundCommit,
)
from tests.unit.protocol.naive_cells import LOCK, NOTIFY, ROLLBACK
from tests.unit.protocol.protocol_world import (
    OBSERVED,
    OBSERVER,
    PATIENT,
    WEAK_OBSERVER,
    A,
    B,
    C,
    Client,
    World,
    cancel,
    left_behind,
    locked,
    put,
    puts,
    settled,
)

WRITES = {A: put(b"1"), B: put(b"2")}


async def _commit(
    client: Client, writes: dict[CellAddress, Write] = WRITES, start: int = 0
) -> Commit:
    start = start or await client.start_timestamp()
    return client.commit(start, writes, alone=True, two_phases=False)


@pytest.fixture
@asynccontextmanager
async def client(here: World) -> AsyncIterator[Client]:
    yield here.client(PATIENT)


@pytest.fixture
@asynccontextmanager
async def younger(commit: Commit, here: World) -> AsyncIterator[Client]:
    """A client whose transactions begin after the commit's."""
    yield here.client(PATIENT)


@pytest.fixture
@asynccontextmanager
async def commit(client: Client) -> AsyncIterator[Commit]:
    """A commit of WRITES that has not begun."""
    yield await _commit(client)


def _answer_with(client: Client, *answers: Callable[[OneRoundCommit], CommitAnswer | None]) -> None:
    """Answers the next messages like this; None stands for the true answer."""
    correct, left = client.network.commit, list(answers)

    async def commit(message: OneRoundCommit, deadline: float) -> CommitAnswer:
        answer = left.pop(0)(message) if left else None
        return await correct(message, deadline) if answer is None else answer

    setattr(client.network, "commit", commit)  # noqa: B010 - a method is replaced


async def test_one_message_commits_and_leaves_no_locks(here: World, client: Client) -> None:
    statistics = Statistics()
    start = await client.start_timestamp()
    commit = client.commit(start, WRITES, statistics=statistics, two_phases=False)
    at = await commit.run(client.deadline())
    assert (statistics.round_trips, client.network.steps) == (1, [])
    assert [here.store.commits(cell)[0][0] for cell in WRITES] == [at, at]
    assert here.store.lock_of(A) is None
    await settled(client)
    assert client.network.steps == []


async def test_observers_and_weak_observers_are_notified_with_it(
    here: World, client: Client
) -> None:
    seen, weakly = CellAddress(1, b"s", OBSERVED), CellAddress(1, b"w", OBSERVED)
    commit = client.commit(
        await client.start_timestamp(), {seen: put(b"1")}, [weakly], two_phases=False
    )
    at = await commit.run(client.deadline())
    assert client.network.steps == []
    assert (NOTIFY, OBSERVER, at) in here.store.cells[seen]
    assert (NOTIFY, WEAK_OBSERVER, at) in here.store.cells[weakly]


@pytest.mark.parametrize(
    ("writes", "weak"),
    [
        ({A: put(b"1"), C: put(b"2")}, []),
        ({A: put(b"1")}, [CellAddress(2, b"w", OBSERVED)]),
        ({A: put(bytes(600_000))}, []),
    ],
    ids=["two tables", "weak notification in another table", "too large"],
)
async def test_what_cannot_be_one_message_takes_two_phases(
    writes: dict[CellAddress, Write], weak: list[CellAddress], client: Client
) -> None:
    start = await client.start_timestamp()
    assert await client.commit(start, writes, weak, two_phases=False).run(client.deadline())
    assert client.network.commits == []
    assert client.network.steps


async def test_the_limit_switches_it_off(here: World) -> None:
    client = here.client(Limits(one_round_cells_max=0))
    await (await _commit(client)).run(client.deadline())
    assert client.network.commits == []


async def test_two_phases_follow_what_was_not_executed(here: World, client: Client) -> None:
    _answer_with(client, lambda _: NotReady("the oracle is slow"))
    at = await (await _commit(client)).run(client.deadline())
    assert any(puts(step, LOCK) for step in client.network.steps)
    await settled(client)
    assert [here.store.commits(cell)[0][0] for cell in WRITES] == [at, at]


async def test_there_is_time_for_the_marker_if_its_prewrites_are_not_answered_either(
    here: World, client: Client
) -> None:
    """Otherwise the outcome would be unknown, of what was never executed."""
    _answer_with(client, lambda _: NotExecuted("the deadline passed while it waited"))
    answered = client.network.mutate

    async def mutate(steps: Sequence[CellMutation], deadline: float) -> list[Answer]:
        if puts(steps[0], LOCK):
            await asyncio.sleep(deadline - here.clock.monotonic_seconds())
            return [DeadlineExceeded("no answer") for _ in steps]
        return await answered(steps, deadline)

    setattr(client.network, "mutate", mutate)  # noqa: B010 - a method is replaced
    commit, deadline = await _commit(client), client.deadline(2.0)
    with pytest.raises(DeadlineExceeded) as caught:
        await commit.run(deadline)
    assert caught.value.retry is Retry.SAFE
    assert here.clock.monotonic_seconds() < deadline
    assert (ROLLBACK, b"", commit._write.start) in here.store.cells[A]


# ---------------------------------------------------------------- without an answer


async def test_an_unanswered_message_is_sent_again_and_finds_its_commit(
    here: World,
    client: Client,
    commit: Commit,
) -> None:
    client.network.loses_answer_of_commit = True
    running = asyncio.ensure_future(commit.run(client.deadline()))
    await asyncio.sleep(0.1)
    assert len(client.network.commits) > 1
    client.network.loses_answer_of_commit = False
    at = await running
    assert [time for time, _ in here.store.commits(A)] == [at]
    await settled(client)
    assert not any(puts(step, LOCK) for step in client.network.steps)


async def test_two_phases_never_follow_an_unanswered_message(client: Client) -> None:
    _answer_with(client, lambda _: Unavailable("lost"), lambda _: NotReady("not now"))
    await (await _commit(client)).run(client.deadline())
    assert client.network.steps == []
    assert len(client.network.commits) == 1  # the third message reached the store


async def test_without_any_answer_the_outcome_is_unknown_and_the_same_message_settles_it(
    here: World,
    client: Client,
    commit: Commit,
) -> None:
    client.network.loses_answer_of_commit = True
    with pytest.raises(OutcomeUnknown) as caught:
        await commit.run(client.deadline(0.5))
    assert caught.value.primary == A
    assert commit.may_be_committed
    client.network.loses_answer_of_commit = False
    assert await commit.settle(client.deadline()) == here.store.commits(A)[0][0]


async def test_after_a_split_the_marker_settles_an_unanswered_message(
    here: World,
    client: Client,
    commit: Commit,
) -> None:
    late: list[OneRoundCommit] = []

    def keep(message: OneRoundCommit) -> CommitAnswer:
        late.append(message)
        return Unavailable("still on its way")

    _answer_with(client, keep, lambda _: NotInOneRound("split"))
    with pytest.raises(ConflictError, match="given up"):
        await commit.run(client.deadline())
    assert not commit.may_be_committed
    here.store.commit(late[0], here.oracle.next)
    assert here.store.commits(A) == here.store.commits(B) == []


async def test_a_caller_that_is_cancelled_without_an_answer_settles_it_later(
    here: World,
    client: Client,
    commit: Commit,
) -> None:
    client.network.loses_answer_of_commit = True
    running = asyncio.ensure_future(commit.run(client.deadline()))
    await asyncio.sleep(0.05)
    assert client.network.commits
    await cancel(running)
    assert commit.may_be_committed
    client.network.loses_answer_of_commit = False
    assert await commit.settle(client.deadline()) == here.store.commits(A)[0][0]


async def test_what_was_never_sent_needs_no_marker_to_count_as_aborted(
    client: Client,
    commit: Commit,
    younger: Client,
) -> None:
    await locked(younger, A)
    _answer_with(client, lambda _: NotSent("its server has fallen silent"))
    client.network.loses_answer = lambda step: puts(step, ROLLBACK)
    with pytest.raises(ConflictError, match="is locked"):
        await commit.run(client.deadline(0.5))
    assert not commit.may_be_committed


async def test_after_an_unanswered_message_one_that_was_not_sent_changes_nothing(
    client: Client,
) -> None:
    _answer_with(client, lambda _: Unavailable("lost"), lambda _: NotSent("no time"))
    await (await _commit(client)).run(client.deadline())
    assert client.network.steps == []


# ---------------------------------------------------------------- definite refusals

FINAL = [
    SnapshotTooOld("too old"),
    SchemaError("the table is gone"),
    InvalidArgument("rows", "too long"),
]


@pytest.mark.parametrize("refusal", FINAL, ids=lambda error: type(error).__name__)
async def test_a_definite_refusal_needs_no_marker(
    refusal: PercolatorError, client: Client, commit: Commit
) -> None:
    """Every copy of the message is refused likewise, and so is the marker, perhaps."""
    _answer_with(client, lambda _: refusal)
    client.network.refuses = lambda step: refusal
    with pytest.raises(type(refusal)):
        await commit.run(client.deadline())
    assert not commit.may_be_committed


@pytest.mark.parametrize("refusal", FINAL, ids=lambda error: type(error).__name__)
async def test_after_an_unanswered_message_it_leaves_the_outcome_open_and_says_so_at_once(
    here: World, refusal: PercolatorError, client: Client, commit: Commit
) -> None:
    _answer_with(client, lambda _: Unavailable("lost"), lambda _: refusal)
    client.network.refuses = lambda step: refusal
    for attempt in (commit.run, commit.settle):
        with pytest.raises(OutcomeUnknown, match=str(refusal)):
            await attempt(client.deadline())
    assert here.clock.monotonic_seconds() < 1.0
    assert commit.may_be_committed


async def test_what_is_committed_is_settled_even_below_the_safe_point(
    here: World,
    client: Client,
    commit: Commit,
) -> None:
    client.network.loses_answer_of_commit = True
    with pytest.raises(OutcomeUnknown):
        await commit.run(client.deadline(0.5))
    client.network.loses_answer_of_commit = False
    here.store.safe_point = await client.start_timestamp()
    assert await commit.settle(client.deadline()) == here.store.commits(A)[0][0]


async def test_if_the_marker_can_be_put_it_decides_then(
    here: World,
    client: Client,
    commit: Commit,
) -> None:
    client.network.loses_answer_of_commit = True
    with pytest.raises(OutcomeUnknown):
        await commit.run(client.deadline(0.5))
    at = here.store.commits(A)[0][0]
    _answer_with(client, lambda _: SchemaError("the table is being deleted"))
    assert await commit.settle(client.deadline()) == at


async def test_settling_what_is_rolled_back_ends_with_a_conflict_whatever_the_reason(
    client: Client,
    commit: Commit,
) -> None:
    _answer_with(client, *[lambda _: Unavailable("lost")] * 100)
    with pytest.raises(OutcomeUnknown):
        await commit.run(client.deadline(0.1))
    _answer_with(client, lambda _: SchemaError("the table is being deleted"))
    with pytest.raises(ConflictError, match="given up"):
        await commit.settle(client.deadline())


async def test_an_overloaded_server_is_left_alone_as_long_as_it_asks_for(
    here: World, client: Client
) -> None:
    _answer_with(client, lambda _: Overloaded("full", retry_after_seconds=3.0))
    assert await (await _commit(client)).run(client.deadline())
    assert 3.0 <= here.clock.monotonic_seconds() < 4.0
    assert client.network.steps == []


async def test_with_no_time_to_wait_for_that_the_marker_ends_it(
    here: World,
    client: Client,
    commit: Commit,
) -> None:
    _answer_with(client, lambda _: Overloaded("full", retry_after_seconds=3.0))
    with pytest.raises(Overloaded):
        await commit.run(client.deadline(2.0))
    assert (ROLLBACK, b"", commit._write.start) in here.store.cells[A]
    assert not commit.may_be_committed


# ---------------------------------------------------------------- obstacles


async def test_a_newer_commit_of_any_cell_ends_it_without_another_message(
    here: World, client: Client
) -> None:
    """It stops every copy of the message, too."""
    start = await client.start_timestamp()
    await here.client().write({B: put(b"newer")})
    commit = await _commit(client, start=start)
    with pytest.raises(ConflictError) as caught:
        await commit.run(client.deadline())
    assert caught.value.cell == B
    assert not commit.may_be_committed
    assert client.network.steps == []


async def test_the_lock_of_an_older_transaction_is_settled_and_the_message_sent_again(
    here: World,
) -> None:
    await left_behind(here, A, C, committed=True)
    client = here.client(PATIENT)
    with pytest.raises(ConflictError):  # rolled forward, above or below: it was older
        await (await _commit(client, start=here.oracle.last - 1)).run(client.deadline())
    assert await (await _commit(client)).run(client.deadline())


async def test_the_lock_of_a_younger_transaction_is_a_conflict_and_leaves_a_marker(
    here: World,
    client: Client,
    commit: Commit,
    younger: Client,
) -> None:
    """The lock may go away, and a copy of the message come after that."""
    await locked(younger, B)
    with pytest.raises(ConflictError):
        await commit.run(client.deadline())
    assert (ROLLBACK, b"", commit._write.start) in here.store.cells[A]
    assert not commit.may_be_committed


async def test_without_an_answer_to_that_marker_the_outcome_is_unknown(
    client: Client,
    commit: Commit,
    younger: Client,
) -> None:
    """Even if no other process commits it: a copy of the message might."""
    await locked(younger, B)
    client.network.loses_answer = lambda step: puts(step, ROLLBACK)
    with pytest.raises(OutcomeUnknown):
        await commit.run(client.deadline(0.5))
    assert commit.may_be_committed
    client.network.loses_answer = lambda step: False
    with pytest.raises(ConflictError):
        await commit.settle(client.deadline())


async def test_for_a_caller_cancelled_while_it_waits_for_a_lock_the_marker_decides(
    here: World,
) -> None:
    older, client = here.client(PATIENT), here.client(PATIENT)
    await locked(older, B)
    commit = await _commit(client)
    running = asyncio.ensure_future(commit.run(client.deadline()))
    await asyncio.sleep(0.05)
    await cancel(running)
    assert commit.may_be_committed
    with pytest.raises(ConflictError, match="given up"):
        await commit.settle(client.deadline())
    assert (ROLLBACK, b"", commit._write.start) in here.store.cells[A]
    copy = client.network.commits[0]
    here.store.cells[B].pop((LOCK, b"", 0))
    here.store.commit(copy, here.oracle.next)
    assert here.store.commits(B) == []


async def test_a_marker_on_the_primary_ends_it(here: World, client: Client, commit: Commit) -> None:
    await here.client(PATIENT).env.cells.mutate(
        [commit._write.roll_back_step(A)], client.deadline()
    )
    with pytest.raises(ConflictError, match="rolled it back"):
        await commit.run(client.deadline())


async def test_a_second_committer_joins_the_one_in_two_phases(here: World) -> None:
    one, other = here.client(PATIENT), here.client(PATIENT)
    start = await one.start_timestamp()
    first = one.commit(start, WRITES, two_phases=True)
    await first.prewrite(one.deadline())
    second = other.commit(start, WRITES, two_phases=False)
    at = await second.run(other.deadline())
    assert await first.run(one.deadline()) == at
    await settled(one)
    await settled(other)
    assert [here.store.commits(cell)[0][0] for cell in WRITES] == [at, at]


async def test_another_write_set_under_the_same_start_is_noticed(client: Client) -> None:
    start = await client.start_timestamp()
    await (await _commit(client, start=start)).run(client.deadline())
    with pytest.raises(AnotherWriteSet):
        await (await _commit(client, {A: put(b"else")}, start)).run(client.deadline())


async def test_locks_commit_in_one_round_too(here: World, client: Client) -> None:
    await (await _commit(client, {A: (KIND_LOCK_ONLY, b"")})).run(client.deadline())
    ((_, record),) = here.store.commits(A)
    assert (record.kind, client.network.steps) == (KIND_LOCK_ONLY, [])


async def test_what_was_sent_is_settled_for_a_caller_who_was_cancelled(
    here: World, client: Client, commit: Commit
) -> None:
    running = asyncio.ensure_future(commit.run(client.deadline()))
    await asyncio.sleep(0)
    await cancel(running)
    assert commit.may_be_committed
    assert await commit.settle(client.deadline()) == here.store.commits(A)[0][0]


async def test_a_caller_cancelled_before_anything_was_sent_leaves_nothing_behind(
    client: Client, commit: Commit
) -> None:
    running = asyncio.ensure_future(commit.run(client.deadline()))
    await cancel(running)
    assert not commit.may_be_committed
    assert commit.state is State.UNSENT
