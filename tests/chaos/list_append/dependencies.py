"""Who must come before whom, by what the transactions read and when they ran.

Snapshot isolation gives each transaction two instants: its snapshot, and its commit if it wrote.
Every dependency orders two of these instants:

    ww, T1's version is the one before T2's     commit of T1 < snapshot of T2 (else T2 had failed)
    wr, T2 read T1's version                    commit of T1 < snapshot of T2
    rw, T1 read the version before T2's         snapshot of T1 < commit of T2
    own, of every transaction                   its snapshot < its commit
    real time                                   what returned before the other was called
    timestamps                                  as the store numbered them

A history is impossible if these contradict each other, which is a cycle. An rw leads from a
snapshot to a commit, and from there only another kind leads on to a snapshot: a cycle of
transactions with two rw one after another, which is write skew, is no cycle of instants. That is
the theorem of Cerone and Gotsman on which Elle's G-SI stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.chaos.list_append.transactions import Transaction
from tests.chaos.list_append.versions import Versions

WW, WR, RW, OWN, REAL_TIME, TIMESTAMPS = "ww", "wr", "rw", "own", "real time", "timestamps"


@dataclass(frozen=True)
class Instant:
    """An instant of a transaction, or with an empty name one on the clock of the machine."""

    transaction: str
    what: str


@dataclass(frozen=True)
class Edge:
    """`before` must come before `after`."""

    before: Instant
    after: Instant
    kind: str
    why: str = ""


def snapshot_of(transaction: Transaction) -> Instant:
    return Instant(transaction.name, "snapshot")


def commit_of(transaction: Transaction) -> Instant:
    return Instant(transaction.name, "commit")


def dependencies(versions: Versions) -> Iterator[Edge]:
    """What the values prove."""
    for key, order in versions.orders.items():
        for first, second in pairwise(order):
            yield from _ww(versions, key, first, second)
    unseen = _unseen(versions)
    for read in versions.reads:
        order = versions.orders.get(read.key, ())
        later = [order[len(read.version)]] if len(read.version) < len(order) else unseen[read.key]
        if read.version and (writer := versions.writers.get(read.version[-1])) is not None:
            why = f"read {read.version[-1]} of {read.key}"
            yield Edge(commit_of(writer), snapshot_of(read.reader), WR, why)
        for element in later:
            overwriter = versions.writers.get(element)
            if overwriter is not None and overwriter is not read.reader:
                why = f"did not read {element} of {read.key}"
                yield Edge(snapshot_of(read.reader), commit_of(overwriter), RW, why)
    for key, elements in unseen.items():
        for element in elements:
            if seen := versions.orders.get(key):
                yield from _ww(versions, key, seen[-1], element)


def _ww(versions: Versions, key: str, first: str, second: str) -> Iterator[Edge]:
    before, after = versions.writers.get(first), versions.writers.get(second)
    if before is not None and after is not None and before is not after:
        why = f"appended {second} to {key} behind {first}"
        yield Edge(commit_of(before), snapshot_of(after), WW, why)


def _unseen(versions: Versions) -> dict[str, list[str]]:
    """Elements that were committed and never read, by list: they come behind all that were."""
    unseen: dict[str, list[str]] = {}
    seen = {(key, element) for key, order in versions.orders.items() for element in order}
    for (name, key), elements in versions.appended.items():
        unseen.setdefault(key, [])
        if name in versions.committed:
            unseen[key] += [one for one in elements if (key, one) not in seen]
    for read in versions.reads:
        unseen.setdefault(read.key, [])
    return unseen


def own_order(transactions: Iterable[Transaction], committed: set[str]) -> Iterator[Edge]:
    for one in transactions:
        if one.name in committed:
            yield Edge(snapshot_of(one), commit_of(one), OWN)


def real_time(transactions: Iterable[Transaction], committed: set[str]) -> Iterator[Edge]:
    """What had returned before something else was called comes before it.

    The instants of the clock are a chain, so that n events need only some 3n edges.
    """
    spans = []
    for one in transactions:
        spans.append((snapshot_of(one), one.begin_called, one.begin_returned))
        if one.name in committed:
            spans.append((commit_of(one), one.commit_called, one.commit_returned))
    called = [(at, 0, event) for event, at, _ in spans if at is not None]
    returned = [(at, 1, event) for event, _, at in spans if at is not None]
    clock: Instant | None = None
    # At equal readings of the clock, neither came surely first: calls are looked at before returns.
    for at, is_return, event in sorted(called + returned, key=lambda one: one[:2]):
        if not is_return:
            if clock is not None:
                yield Edge(clock, event, REAL_TIME, f"was called after {clock.what}")
            continue
        now = Instant("", repr(at))
        if clock is not None and now != clock:
            yield Edge(clock, now, REAL_TIME)
        clock = now
        yield Edge(event, now, REAL_TIME, f"had returned at {now.what}")


def timestamps(transactions: Sequence[Transaction]) -> Iterator[Edge]:
    """The store numbers all instants; an unknown number orders nothing."""
    numbered = [(one.start_ts, snapshot_of(one)) for one in transactions if one.start_ts]
    numbered += [(one.commit_ts, commit_of(one)) for one in transactions if one.commit_ts]
    numbered.sort(key=lambda one: one[0])
    for (lower, before), (higher, after) in pairwise(numbered):
        if lower < higher:
            yield Edge(before, after, TIMESTAMPS, f"{lower} < {higher}")
