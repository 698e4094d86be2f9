"""Histories that were doctored by hand, one for each anomaly, and those that must be accepted."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from percolator.world import Random
from tests.chaos.list_append.judge import (
    Append,
    Operation,
    Outcome,
    Read,
    Transaction,
    judge,
    lost_appends,
)

# A small store with snapshot isolation that produces histories, and can be told to break it.
#
# Also a definition of snapshot isolation by brute force, which shares no idea with the judge: it
# tries every order of all snapshots and commits.

KEYS = ("x", "y", "z")
Version = tuple[str, ...]


@dataclass
class Running:
    """A transaction in progress."""

    name: str
    plan: list[tuple[str, str]]
    start_ts: int
    begin_called: float
    begin_returned: float
    snapshot: dict[str, Version]
    operations: list[Operation] = field(default_factory=list)
    own: dict[str, Version] = field(default_factory=dict)


class NaiveStore:
    """Lists in memory; every transaction works on a copy of them."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._lists: dict[str, Version] = dict.fromkeys(KEYS, ())
        self._changed: dict[str, int] = dict.fromkeys(KEYS, 0)
        self._clock = itertools.count(1)
        self._elements = itertools.count(1)

    def history(self, transactions: int, *, sessions: int = 3) -> list[Transaction]:
        """A valid history, which ends with a transaction that reads every list."""
        running: dict[int, Running] = {}
        done: list[Transaction] = []
        left = transactions
        while left or running:
            session = self._random.randrange(sessions)
            current = running.get(session)
            if current is None:
                if left:
                    left -= 1
                    running[session] = self._begin(f"t{transactions - left}")
            elif current.plan:
                self._step(current)
            else:
                done.append(self._end(running.pop(session)))
        last = self._begin("last", [("read", key) for key in KEYS])
        while last.plan:
            self._step(last)
        done.append(self._end(last, sure=True))
        return done

    def _begin(self, name: str, plan: list[tuple[str, str]] | None = None) -> Running:
        if plan is None:
            kinds = ("append", "append", "read")
            plan = [
                (self._random.choice(kinds), self._random.choice(KEYS))
                for _ in range(self._random.randint(1, 3))
            ]
        called, start, returned = (next(self._clock) for _ in range(3))
        return Running(name, plan, start, called, returned, dict(self._lists))

    def _step(self, one: Running) -> None:
        what, key = one.plan.pop(0)
        own = one.own.get(key, ())
        # Reads before it appends, as a client that can only put a whole list.
        one.operations.append(Read(key, one.snapshot[key] + own))
        if what == "append":
            element = f"e{next(self._elements)}"
            one.operations.append(Append(key, element))
            one.own[key] = (*own, element)

    def _end(self, one: Running, *, sure: bool = False) -> Transaction:
        called = next(self._clock)
        conflict = any(self._changed[key] > one.start_ts for key in one.own)
        commit_ts, outcome = 0, Outcome.ABORTED
        chance = 1.0 if sure else self._random.random()
        if not conflict and chance > 0.1:
            outcome = Outcome.COMMITTED
            if one.own:
                commit_ts = next(self._clock)
                for key, elements in one.own.items():
                    self._lists[key] += elements
                    self._changed[key] = commit_ts
        if one.own and chance > 0.1 and self._random.random() < 0.1:
            outcome, commit_ts = Outcome.UNKNOWN, 0
        return Transaction(
            one.name,
            tuple(one.operations),
            outcome,
            one.start_ts,
            commit_ts,
            one.begin_called,
            one.begin_returned,
            called,
            next(self._clock),
        )


def is_snapshot_isolation(transactions: Sequence[Transaction]) -> bool:
    """True if any order of all snapshots and commits explains what was read, in real time.

    Unknown outcomes are tried both ways. For few transactions only.
    """
    unknown = [one for one in transactions if one.outcome is Outcome.UNKNOWN]
    surely = {one.name for one in transactions if one.outcome is Outcome.COMMITTED}
    for count in range(len(unknown) + 1):
        for chosen in itertools.combinations(unknown, count):
            committed = surely | {one.name for one in chosen}
            if _explained(transactions, committed):
                return True
    return False


def _explained(transactions: Sequence[Transaction], committed: set[str]) -> bool:
    spans = {(one.name, "s"): (one.begin_called, one.begin_returned) for one in transactions}
    for one in transactions:
        if one.name in committed and any(one.appends()):
            spans[one.name, "c"] = (one.commit_called, one.commit_returned)
    by_name = {one.name: one for one in transactions}

    def extend(order: tuple[tuple[str, str], ...], lists: dict[str, Version]) -> bool:
        """Depth first; `lists` is what is stored after these instants."""
        rest = [event for event in spans if event not in order]
        if not rest:
            return True
        for event in rest:
            name, what = event
            if what == "c" and (name, "s") not in order:
                continue
            called = spans[event][0]
            if any(_returned(spans[other]) < (called or 0) for other in rest if other != event):
                continue
            transaction = by_name[name]
            if what == "s":
                if not _reads_from(transaction, lists):
                    continue
                after = lists
            else:
                began = order.index((name, "s"))
                keys = {append.key for append in transaction.appends()}
                between = [other for other, kind in order[began:] if kind == "c"]
                if any(keys & {one.key for one in by_name[other].appends()} for other in between):
                    continue
                after = dict(lists)
                for append in transaction.appends():
                    after[append.key] = (*after.get(append.key, ()), append.element)
            if extend((*order, event), after):
                return True
        return False

    return extend((), {})


def _returned(span: tuple[float | None, float | None]) -> float:
    return float("inf") if span[1] is None else span[1]


def _reads_from(transaction: Transaction, lists: dict[str, Version]) -> bool:
    own: dict[str, Version] = {}
    for operation in transaction.operations:
        mine = own.get(operation.key, ())
        if isinstance(operation, Append):
            own[operation.key] = (*mine, operation.element)
        elif operation.elements != lists.get(operation.key, ()) + mine:
            return False
    return True


def small_histories(count: int) -> Iterator[tuple[int, list[Transaction]]]:
    """Valid histories of a few transactions, with their seeds."""
    for seed in range(count):
        random = Random(f"history {seed}")
        yield seed, NaiveStore(random).history(random.randint(2, 4))


def appended(transactions: Sequence[Transaction]) -> Counter[str]:
    return Counter(one.element for each in transactions for one in each.appends())


def t(
    name: str,
    *operations: Operation,
    outcome: Outcome = Outcome.COMMITTED,
    at: tuple[float, float, float, float] | None = None,
    ts: tuple[int, int] = (0, 0),
) -> Transaction:
    return Transaction(name, operations, outcome, *ts, *(at or (None, None, None, None)))


def r(key: str, elements: str = "") -> Read:
    return Read(key, tuple(elements))


def a(key: str, element: str) -> Append:
    return Append(key, element)


def kinds(*history: Transaction) -> set[str]:
    return {one.kind for one in judge(history)}


def test_a_serial_history_is_accepted() -> None:
    assert not kinds(
        t("1", r("x"), a("x", "a"), at=(0, 1, 2, 3), ts=(1, 2)),
        t("2", r("x", "a"), a("x", "b"), r("x", "ab"), at=(4, 5, 6, 7), ts=(3, 4)),
        t("3", r("x", "ab"), at=(8, 9, 10, 11), ts=(5, 0)),
    )


def test_write_skew_is_accepted_for_snapshot_isolation_allows_it() -> None:
    assert not kinds(
        t("1", r("x"), r("y"), a("x", "a")),
        t("2", r("x"), r("y"), a("y", "b")),
        t("3", r("x", "a"), r("y", "b")),
    )


def test_a_long_fork_is_found() -> None:
    assert kinds(
        t("1", r("x"), a("x", "a")),
        t("2", r("y"), a("y", "b")),
        t("3", r("x", "a"), r("y")),
        t("4", r("x"), r("y", "b")),
        t("5", r("x", "a"), r("y", "b")),
    ) == {"G-nonadjacent"}


ANOMALIES: dict[str, tuple[str, Sequence[Transaction]]] = {
    "lists that are written in opposite orders": (
        "G0",
        [
            t("1", a("x", "a"), a("y", "b")),
            t("2", a("x", "c"), a("y", "d")),
            t("3", r("x", "ac"), r("y", "db")),
        ],
    ),
    "an aborted element is read": (
        "G1a",
        [t("1", a("x", "a"), outcome=Outcome.ABORTED), t("2", r("x", "a"))],
    ),
    "half of a transaction is read": (
        "G1b",
        [t("1", a("x", "a"), a("x", "b")), t("2", r("x", "a")), t("3", r("x", "ab"))],
    ),
    "two transactions read from each other": (
        "G1c",
        [
            t("1", r("y", "b"), a("x", "a")),
            t("2", r("x", "a"), a("y", "b")),
        ],
    ),
    "one list is read before, the other after a transaction": (
        "G-single",
        [
            t("1", r("x"), r("y"), a("x", "a"), a("y", "b")),
            t("2", r("x"), r("y", "b")),
            t("3", r("x", "a"), r("y", "b")),
        ],
    ),
    "read skew of a transaction that was aborted": (
        "G-single",
        [
            t("1", r("x"), r("y"), a("x", "a"), a("y", "b")),
            t("2", r("x"), r("y", "b"), outcome=Outcome.ABORTED),
            t("3", r("x", "a"), r("y", "b")),
        ],
    ),
    "two append to the same version": (
        "lost update",
        [t("1", r("x"), a("x", "a")), t("2", r("x"), a("x", "b")), t("3", r("x", "b"))],
    ),
    "two append to the same version, and both are there": (
        "lost update",
        [t("1", r("x"), a("x", "a")), t("2", r("x"), a("x", "b")), t("3", r("x", "ab"))],
    ),
    "a list loses an element in the middle": (
        "incompatible order",
        [
            t("1", r("x"), a("x", "a")),
            t("2", r("x", "a"), a("x", "b")),
            t("3", r("x", "ab")),
            t("4", r("x", "b")),
        ],
    ),
    "the same element appears twice": (
        "duplicate element",
        [t("1", r("x"), a("x", "a")), t("2", r("x", "aa"))],
    ),
    "an element that was appended elsewhere": (
        "garbage read",
        [t("1", r("x"), a("x", "a")), t("2", r("y", "a"))],
    ),
    "an element that was never appended": ("garbage read", [t("1", r("x", "q"))]),
    "two reads of one transaction differ": (
        "internal",
        [t("1", r("x"), a("x", "a")), t("2", r("x"), r("x", "a"))],
    ),
    "a transaction does not see its own element": (
        "internal",
        [t("1", r("x"), a("x", "a"), r("x"))],
    ),
    "a snapshot older than an acknowledged commit": (
        "G-single-realtime",
        [
            t("1", r("x"), a("x", "a"), at=(0, 1, 2, 3)),
            t("2", r("x"), at=(4, 5, 6, 7)),
            t("3", r("x", "a"), at=(8, 9, 10, 11)),
        ],
    ),
    "an acknowledged element that no one ever reads": (
        "G-single-realtime",
        [
            t("1", r("x"), a("x", "a"), at=(0, 1, 2, 3)),
            t("2", r("x"), at=(4, 5, 6, 7)),
        ],
    ),
    "an element is read before its commit was called": (
        "G1c-realtime",
        [
            t("1", r("x"), a("x", "a"), at=(0, 1, 9, 10)),
            t("2", r("x", "a"), at=(4, 5, 6, 7)),
        ],
    ),
    "timestamps in the wrong order": (
        "order-timestamps",
        [t("1", r("x"), at=(0, 1, 2, 3), ts=(9, 0)), t("2", r("x"), at=(4, 5, 6, 7), ts=(8, 0))],
    ),
    "a snapshot that lacks a commit with a lower timestamp": (
        "G-single-timestamps",
        [t("1", r("x"), a("x", "a"), ts=(1, 2)), t("2", r("x"), ts=(3, 0)), t("3", r("x", "a"))],
    ),
    "one timestamp for two": (
        "shared timestamp",
        [t("1", r("x"), a("x", "a"), ts=(1, 2)), t("2", r("y"), a("y", "b"), ts=(2, 3))],
    ),
}


@pytest.mark.parametrize("name", ANOMALIES)
def test_each_anomaly_is_found_and_named(name: str) -> None:
    kind, history = ANOMALIES[name]
    assert kinds(*history) == {kind}


def test_an_unknown_transaction_counts_as_committed_once_another_has_read_it() -> None:
    unknown = t("1", r("x"), a("x", "a"), outcome=Outcome.UNKNOWN, at=(0, 1, 2, 3))
    assert not kinds(unknown, t("2", r("x"), at=(4, 5, 6, 7)))
    later = t("3", r("x"), at=(8, 9, 10, 11))
    assert kinds(unknown, t("2", r("x", "a"), at=(4, 5, 6, 7)), later) == {"G-single-realtime"}


def test_an_anomaly_says_which_transactions_and_why() -> None:
    _, history = ANOMALIES["one list is read before, the other after a transaction"]
    (found,) = judge(history)
    assert "snapshot 2 < commit 1 (rw: did not read a of x)" in str(found)
    assert "commit 1 < snapshot 2 (wr: read b of y)" in str(found)


def test_what_was_acknowledged_must_be_there_at_the_end() -> None:
    history = [
        t("1", r("x"), a("x", "a")),
        t("2", r("x"), a("x", "b"), outcome=Outcome.ABORTED),
        t("3", r("x"), a("x", "c"), outcome=Outcome.UNKNOWN),
    ]
    assert not lost_appends(history, {"x": ("a",)})
    assert [one.kind for one in lost_appends(history, {"x": ("c",)})] == ["lost append"]


def test_an_element_that_is_appended_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="appended twice"):
        judge([t("1", a("x", "a")), t("2", a("y", "a"))])


# The judge finds in small histories exactly what no order of snapshots and commits explains.

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
    """A history with one outcome inverted: done but refused, or acknowledged but not done."""
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
