"""The judge finds in small histories exactly what no order of snapshots and commits explains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from percolator.world import Random
from tests.chaos.list_append.judge import judge
from tests.chaos.list_append.transactions import Operation, Outcome, Read, Transaction
from tests.unit.list_append.naive_store import NaiveStore, is_snapshot_isolation, small_histories

SMALL = 150
MUTATED = 1_200


def test_valid_histories_are_accepted_however_long() -> None:
    for seed in range(30):
        history = NaiveStore(Random(f"long {seed}")).history(300, sessions=6)
        assert judge(history) == []


def test_the_definition_accepts_what_the_store_produces() -> None:
    for seed, history in small_histories(SMALL):
        assert is_snapshot_isolation(history), seed


Mutation = Callable[[list[Transaction], Random], list[Transaction]]


def truncated_read(history: list[Transaction], random: Random) -> list[Transaction]:
    """A transaction reads an older version of a list."""
    return _with_read(history, random, lambda read: read.elements[:-1])


def missing_element(history: list[Transaction], random: Random) -> list[Transaction]:
    """A read lacks an element in the middle."""

    def without_one(read: Read) -> tuple[str, ...]:
        lost = random.randrange(len(read.elements)) if read.elements else 0
        return read.elements[:lost] + read.elements[lost + 1 :]

    return _with_read(history, random, without_one)


def swapped_elements(history: list[Transaction], random: Random) -> list[Transaction]:
    return _with_read(history, random, lambda read: read.elements[::-1])


def future_read(history: list[Transaction], random: Random) -> list[Transaction]:
    """A transaction reads the list as it is at the end."""
    last = {one.key: one.elements for one in history[-1].reads()}
    return _with_read(history, random, lambda read: last.get(read.key, ()))


def other_outcome(history: list[Transaction], random: Random) -> list[Transaction]:
    """What was acknowledged was not done, or what was refused was done."""
    at = random.randrange(len(history) - 1)
    opposite = {Outcome.COMMITTED: Outcome.ABORTED, Outcome.ABORTED: Outcome.COMMITTED}
    outcome = opposite.get(history[at].outcome, Outcome.COMMITTED)
    return [*history[:at], replace(history[at], outcome=outcome), *history[at + 1 :]]


def later_begin(history: list[Transaction], random: Random) -> list[Transaction]:
    """A transaction says that it began only when it committed."""
    at = random.randrange(len(history) - 1)
    one = history[at]
    moved = replace(one, begin_called=one.commit_called, begin_returned=one.commit_called)
    return [*history[:at], moved, *history[at + 1 :]]


def earlier_commit(history: list[Transaction], random: Random) -> list[Transaction]:
    """A transaction says that it had committed as soon as it had begun."""
    at = random.randrange(len(history) - 1)
    one = history[at]
    moved = replace(one, commit_called=one.begin_returned, commit_returned=one.begin_returned)
    return [*history[:at], moved, *history[at + 1 :]]


def _with_read(
    history: list[Transaction], random: Random, changed: Callable[[Read], tuple[str, ...]]
) -> list[Transaction]:
    places = [
        (number, place)
        for number, one in enumerate(history)
        for place, operation in enumerate(one.operations)
        if isinstance(operation, Read) and operation.elements
    ]
    if not places:
        return history
    number, place = random.choice(places)
    operations: list[Operation] = list(history[number].operations)
    read = operations[place]
    if not isinstance(read, Read):
        raise TypeError(read)
    operations[place] = Read(read.key, changed(read))
    mutated = replace(history[number], operations=tuple(operations))
    return [*history[:number], mutated, *history[number + 1 :]]


MUTATIONS: tuple[Mutation, ...] = (
    truncated_read,
    missing_element,
    swapped_elements,
    future_read,
    other_outcome,
    later_begin,
    earlier_commit,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.__name__)
def test_a_history_that_was_changed_at_random_is_refused_exactly_if_nothing_explains_it(
    mutation: Mutation,
) -> None:
    verdicts: Counter[bool] = Counter()
    for seed in range(MUTATED // len(MUTATIONS)):
        random = Random(f"{mutation.__name__} {seed}")
        history = NaiveStore(random).history(random.randint(2, 4))
        # Timestamps say more than real time, which is all that the definition knows.
        doctored = [replace(one, start_ts=0, commit_ts=0) for one in mutation(history, random)]
        explained = is_snapshot_isolation(doctored)
        found = judge(doctored)
        assert explained is not bool(found), (seed, found, doctored)
        verdicts[explained] += 1
    assert verdicts[False] >= 10, verdicts


def test_of_long_histories_a_single_stale_read_is_found() -> None:
    for seed in range(20):
        random = Random(f"stale {seed}")
        history = NaiveStore(random).history(200, sessions=6)
        assert judge(truncated_read(history, random)) != []
