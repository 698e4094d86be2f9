"""A small store with snapshot isolation that produces histories, and can be told to break it.

Also a definition of snapshot isolation by brute force, which shares no idea with the judge: it
tries every order of all snapshots and commits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from percolator.world import Random
from tests.chaos.list_append.transactions import Append, Operation, Outcome, Read, Transaction

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
    """Whether any order of all snapshots and commits explains what was read, in real time.

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
