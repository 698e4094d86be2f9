"""Judges a history of growing lists by Elle's method: which anomalies does it prove?

It reports only what no execution under snapshot isolation could have produced, as long as
transactions read a list before they append to it. Aborted transactions must have read a
consistent snapshot, too. Weaker evidence is looked at only if stronger evidence shows nothing:
values first, then the order in real time, then the store's own timestamps.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Protocol

from percolator import Table, aio, codecs
from percolator.world import Random

# The lists that clients append to: where they are stored, and which are in use.

lists = Table("lists", key=codecs.raw)
elements = lists.column("elements", codecs.raw)
SPLITS = (b"list-04", b"list-08")

_AT_ONCE = 12
_IN_USE_SECONDS = 4.0
"""A list grows for so long, and is only read afterwards: reading it must not become expensive."""
_OPERATIONS_MAX = 4


def plan(random: Random, now: float) -> list[tuple[str, bool]]:
    """The lists of one transaction, and whether it appends to each. `now` is the machine's
    monotonic time, by which all clients use the same lists."""
    generation = int(now / _IN_USE_SECONDS)
    steps = []
    for _ in range(random.randint(1, _OPERATIONS_MAX)):
        # An old list is read now and then: it must not have lost anything since.
        age = random.randint(1, 3) if random.random() < 0.1 else 0
        name = f"list-{random.randrange(_AT_ONCE):02d}-{generation - age}"
        steps.append((name, age == 0 and random.random() < 0.6))
    return steps


def row_of(key: str) -> bytes:
    return key.encode()


def stored(found: tuple[str, ...]) -> bytes:
    return " ".join(found).encode()


def loaded(value: bytes | None) -> tuple[str, ...]:
    return tuple((value or b"").decode().split())


def to_json(operation: Operation) -> list[object]:
    match operation:
        case Append(key, element):
            return ["append", key, element]
        case Read(key, found):
            return ["read", key, list(found)]


def from_json(line: list[object]) -> Operation:
    match line:
        case ["append", str(key), str(element)]:
            return Append(sys.intern(key), sys.intern(element))
        case ["read", str(key), [*found]]:
            # Each element is in hundreds of reads: once in memory is enough.
            return Read(sys.intern(key), tuple(sys.intern(str(one)) for one in found))
    raise ValueError(f"not an operation: {line}")


# Transactions on lists that only grow: what each appended, what it read, and how it ended.
#
# This is the input of the judge in this folder. It shares nothing with the checker of the library
# (`tests/isolation`), so that a mistake in one of them does not hide in the other.


class Outcome(Enum):
    """How a transaction ended, as far as its client was told."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Append:
    """An element was appended. No element is ever appended twice to any list."""

    key: str
    element: str


@dataclass(frozen=True)
class Read:
    """A list was read; it includes what the same transaction had appended by then."""

    key: str
    elements: tuple[str, ...]


Operation = Append | Read


@dataclass(frozen=True)
class Transaction:
    """One transaction, with the instants between which its two timestamps were fetched."""

    name: str
    operations: tuple[Operation, ...]
    outcome: Outcome
    start_ts: int = 0
    commit_ts: int = 0
    """Timestamps are 0 if the client was not told, or if there is none."""
    begin_called: float | None = None
    begin_returned: float | None = None
    commit_called: float | None = None
    commit_returned: float | None = None

    def appends(self) -> Iterator[Append]:
        return (one for one in self.operations if isinstance(one, Append))

    def reads(self) -> Iterator[Read]:
        return (one for one in self.operations if isinstance(one, Read))

    def __str__(self) -> str:
        return f"{self.name} (start {self.start_ts}, commit {self.commit_ts})"


@dataclass(frozen=True)
class Anomaly:
    """One thing that snapshot isolation does not allow."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


# A client's log of its transactions: one JSON object per line, in the kernel before it goes on.
#
# A transaction is written when its commit is called, as unknown, and again when it has ended. The
# last line about it counts; a line that a kill has cut off counts as not written.


@dataclass
class Entry:
    """One transaction while it runs."""

    log: IO[str]
    session: str
    number: int
    operations: list[Operation] = field(default_factory=list)
    start_ts: int = 0
    instants: list[float | None] = field(
        default_factory=lambda: [time.monotonic(), None, None, None]
    )

    def began(self, start_ts: int) -> None:
        self.start_ts = start_ts
        self.instants[1] = time.monotonic()

    def commit_called(self) -> None:
        self.instants[2] = time.monotonic()
        self._write(Outcome.UNKNOWN, 0)

    def ended(self, outcome: Outcome, commit_ts: int = 0) -> None:
        self.instants[3] = time.monotonic()
        self._write(outcome, commit_ts)

    def _write(self, outcome: Outcome, commit_ts: int) -> None:
        line = {
            "session": self.session,
            "number": self.number,
            "outcome": outcome.value,
            "start_ts": self.start_ts,
            "commit_ts": commit_ts,
            "instants": self.instants,
            "operations": [to_json(one) for one in self.operations],
        }
        self.log.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.log.flush()


def read_logs(paths: Iterable[Path]) -> list[Transaction]:
    """The transactions of all clients."""
    return [one for path in paths for one in _read(path)]


def _read(path: Path) -> Iterator[Transaction]:
    last: dict[tuple[str, int], Transaction] = {}
    for line in path.read_text().split("\n")[:-1]:
        one: dict[str, Any] = json.loads(line)
        last[one["session"], one["number"]] = Transaction(
            f"{one['session']} #{one['number']}",
            tuple(from_json(operation) for operation in one["operations"]),
            Outcome(one["outcome"]),
            one["start_ts"],
            one["commit_ts"],
            *one["instants"],
        )
    yield from last.values()


# What single reads prove: the order of each list's versions, and reads that fit no order.
#
# A list that only grows carries its own history: a reader of [a, b, c] knows that the list was
# [a, b] and [a] before. So the longest read of a key gives the order of all its versions, and every
# other read must be a prefix of it. (Kingsbury and Alvaro, "Elle", sections 4 and 5.)

Version = tuple[str, ...]


@dataclass(frozen=True)
class ExternalRead:
    """Elements of others that a transaction has read: the list without the elements that it had
    appended."""

    reader: Transaction
    key: str
    version: Version


class Versions:
    """The versions of every list, as far as reads prove them."""

    def __init__(self, transactions: Sequence[Transaction]) -> None:
        self.anomalies: list[Anomaly] = []
        self.writers: dict[str, Transaction] = {}
        """The transaction that appended an element."""
        self.appended: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        """The elements of one transaction in one list, by the transaction's name and the key."""
        for one in transactions:
            for append in one.appends():
                if append.element in self.writers:
                    raise ValueError(f"{append.element} is appended twice: nothing can be inferred")
                self.writers[append.element] = one
                self.appended[one.name, append.key].append(append.element)
        self._keys = {
            append.element: append.key for one in transactions for append in one.appends()
        }
        self.reads = [read for one in transactions for read in self._external(one)]
        self.orders = self._ordered()
        for read in self.reads:
            self._judge(read)
        self.committed = self._known_committed(transactions)
        """Names of the transactions that committed: their clients were told, or others saw it."""
        self._judge_updates()

    def _external(self, transaction: Transaction) -> Iterator[ExternalRead]:
        """Takes its own elements off each read. A transaction must see one version of a list, and
        its own elements behind it."""
        own: defaultdict[str, list[str]] = defaultdict(list)
        seen: dict[str, Version] = {}
        for operation in transaction.operations:
            if isinstance(operation, Append):
                own[operation.key].append(operation.element)
                continue
            key, mine = operation.key, tuple(own[operation.key])
            others = len(operation.elements) - len(mine)
            version = operation.elements[: max(others, 0)]
            if operation.elements[len(version) :] != mine:
                text = f"{transaction} appended {mine} to {key} and read {operation.elements}"
                self._found("internal", text)
            elif seen.setdefault(key, version) != version:
                self._found("internal", f"{transaction} read {seen[key]} of {key}, then {version}")
            else:
                yield ExternalRead(transaction, key, version)

    def _ordered(self) -> dict[str, Version]:
        longest: dict[str, Version] = {}
        for read in self.reads:
            if len(read.version) > len(longest.get(read.key, ())):
                longest[read.key] = read.version
        return longest

    def _judge(self, read: ExternalRead) -> None:
        key, version = read.key, read.version
        if version != self.orders.get(key, ())[: len(version)]:
            text = f"{read.reader} read {version} of {key}, which was {self.orders[key]}"
            self._found("incompatible order", text)
        if len(set(version)) < len(version):
            self._found("duplicate element", f"{read.reader} read {version} of {key}")
        for element in version:
            if self._keys.get(element) != key:
                text = f"{read.reader} read {element} in {key}, which was never appended to it"
                self._found("garbage read", text)
            elif self.writers[element].outcome is Outcome.ABORTED:
                text = f"{read.reader} read {element} of {self.writers[element]}, which aborted"
                self._found("G1a", text)
        self._judge_whole(read)

    def _judge_whole(self, read: ExternalRead) -> None:
        """No other transaction may see some of the elements that one appends, and not all."""
        if not read.version or read.version[-1] not in self.writers:
            return
        writer = self.writers[read.version[-1]]
        elements = self.appended[writer.name, read.key]
        if elements and tuple(elements) != read.version[-len(elements) :]:
            text = f"{read.reader} read {read.version} of {read.key}: {writer} appended {elements}"
            self._found("G1b", text)

    def _known_committed(self, transactions: Sequence[Transaction]) -> set[str]:
        committed = {one.name for one in transactions if one.outcome is Outcome.COMMITTED}
        for version in self.orders.values():
            for element in version:
                writer = self.writers.get(element)
                if writer is not None and writer.outcome is Outcome.UNKNOWN:
                    committed.add(writer.name)
        return committed

    def _judge_updates(self) -> None:
        """If two transactions read the same version of a list and append to it, one must fail."""
        updates: dict[tuple[str, Version], Transaction] = {}
        for read in self.reads:
            name = read.reader.name
            if name not in self.committed or (name, read.key) not in self.appended:
                continue
            other = updates.setdefault((read.key, read.version), read.reader)
            if other.name != name:
                text = f"{other} and {read.reader} both appended to {read.version} of {read.key}"
                self._found("lost update", text)

    def _found(self, kind: str, text: str) -> None:
        self.anomalies.append(Anomaly(kind, text))


# Who must come before whom, by what the transactions read and when they ran.
#
# Snapshot isolation gives each transaction two instants: its snapshot, and its commit if it wrote.
# Every dependency orders two of these instants:
#
#     ww, T1's version is the one before T2's     commit of T1 < snapshot of T2 (else T2 had failed)
#     wr, T2 read T1's version                    commit of T1 < snapshot of T2
#     rw, T1 read the version before T2's         snapshot of T1 < commit of T2
#     own, of every transaction                   its snapshot < its commit
#     real time                                   what returned before the other was called
#     timestamps                                  as the store numbered them
#
# A history is impossible if these contradict each other, which is a cycle. An rw leads from a
# snapshot to a commit, and from there only another kind leads on to a snapshot: a cycle of
# transactions with two rw one after another, which is write skew, is no cycle of instants. That is
# the theorem of Cerone and Gotsman on which Elle's G-SI stands.

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
    """Dependencies that the values prove."""
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
    for key, appended in unseen.items():
        for element in appended:
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
    for (name, key), appended in versions.appended.items():
        unseen.setdefault(key, [])
        if name in versions.committed:
            unseen[key] += [one for one in appended if (key, one) not in seen]
    for read in versions.reads:
        unseen.setdefault(read.key, [])
    return unseen


def own_order(transactions: Iterable[Transaction], committed: set[str]) -> Iterator[Edge]:
    for one in transactions:
        if one.name in committed:
            yield Edge(snapshot_of(one), commit_of(one), OWN)


def real_time(transactions: Iterable[Transaction], committed: set[str]) -> Iterator[Edge]:
    """Real-time order: an operation that returned before another was called comes first.

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


# Finds a cycle among instants, and names it as the literature does.


class Graph:
    """Edges, by the instant at which they begin."""

    def __init__(self, edges: Iterable[Edge]) -> None:
        self.edges: defaultdict[Instant, list[Edge]] = defaultdict(list)
        for edge in edges:
            self.edges[edge.before].append(edge)

    def knots(self) -> list[set[Instant]]:
        """The strongly connected sets of more than one instant (Tarjan, without recursion)."""
        index: dict[Instant, int] = {}
        low: dict[Instant, int] = {}
        stack: list[Instant] = []
        on_stack: set[Instant] = set()
        found: list[set[Instant]] = []
        for root in list(self.edges):
            if root in index:
                continue
            work = [(root, iter(self.edges.get(root, ())))]
            index[root] = low[root] = len(index)
            stack.append(root)
            on_stack.add(root)
            while work:
                node, following = work[-1]
                for edge in following:
                    after = edge.after
                    if after not in index:
                        index[after] = low[after] = len(index)
                        stack.append(after)
                        on_stack.add(after)
                        work.append((after, iter(self.edges.get(after, ()))))
                        break
                    if after in on_stack:
                        low[node] = min(low[node], index[after])
                else:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[node])
                    if low[node] == index[node]:
                        knot: set[Instant] = set()
                        while not knot or node not in knot:
                            knot.add(stack[-1])
                            on_stack.discard(stack.pop())
                        if len(knot) > 1:
                            found.append(knot)
        return found

    def path(self, start: Instant, end: Instant, within: set[Instant]) -> list[Edge] | None:
        """The shortest path inside a set; None if there is none."""
        came: dict[Instant, Edge] = {}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for edge in self.edges.get(node, ()):
                if edge.after in came or edge.after not in within:
                    continue
                came[edge.after] = edge
                if edge.after == end:
                    return _backwards(came, start, end)
                queue.append(edge.after)
        return None


def _backwards(came: dict[Instant, Edge], start: Instant, end: Instant) -> list[Edge]:
    path = [came[end]]
    while path[-1].before != start:
        path.append(came[path[-1].before])
    return path[::-1]


def anomalies(edges: Sequence[Edge], *, suffix: str = "", order: frozenset[str]) -> list[Anomaly]:
    """The simplest cycle of each knot, looking at few kinds of edges first.

    `order` has the kinds of edges that may take part beside those of the values.
    """
    allowed = {OWN, *order}
    no_values: set[str] = set()
    for name, kinds in (("order", no_values), ("G0", {WW}), ("G1c", {WW, WR})):
        graph = Graph(one for one in edges if one.kind in allowed | kinds)
        if cycles := [_any_cycle(graph, knot) for knot in graph.knots()]:
            return [_shown(name + suffix, cycle) for cycle in cycles]
    whole = Graph(edges)
    without_rw = Graph(one for one in edges if one.kind != RW)
    found = []
    for knot in whole.knots():
        single = _single(edges, without_rw, knot)
        name = "G-single" if single is not None else "G-nonadjacent"
        found.append(_shown(name + suffix, single or _any_cycle(whole, knot)))
    return found


def _any_cycle(graph: Graph, knot: set[Instant]) -> list[Edge]:
    start = min(knot, key=lambda one: (one.transaction == "", one.transaction, one.what))
    cycle = graph.path(start, start, knot)
    if cycle is None:
        raise AssertionError("a knot without a cycle")
    return cycle


def _single(edges: Sequence[Edge], without_rw: Graph, knot: set[Instant]) -> list[Edge] | None:
    """A cycle with exactly one rw: read skew, or a lost update."""
    for edge in edges:
        if edge.kind == RW and edge.before in knot and edge.after in knot:
            rest = without_rw.path(edge.after, edge.before, knot)
            if rest is not None:
                return [edge, *rest]
    return None


def _shown(kind: str, cycle: list[Edge]) -> Anomaly:
    steps = [
        f"{one.before.what} {one.before.transaction} < {one.after.what} {one.after.transaction} "
        f"({one.kind}{': ' + one.why if one.why else ''})"
        for one in cycle
    ]
    return Anomaly(kind, "; ".join(steps))


# The last reading of all lists, and the verdict on everything that clients did with them.

_PROGRAM = "tests.chaos.appender"


class Logs(Protocol):
    def logs_of(self, program: str) -> Sequence[Path]: ...


async def judge_lists(database: aio.Database, clients: Logs, directory: Path) -> list[str]:
    """Lists violations after all clients have stopped, on a healthy cluster. The logs stay."""
    last = await _last_reading(database)
    history = [*read_logs(clients.logs_of(_PROGRAM)), last]
    final = {read.key: read.elements for read in last.reads()}
    committed = sum(one.outcome is Outcome.COMMITTED for one in history)
    if committed < len(final):
        return [f"only {committed} transactions on {len(final)} lists: this proves nothing"]
    found = [*judge(history), *lost_appends(history, final)]
    return [f"lists: {one} (logs: {directory})" for one in found]


async def _last_reading(database: aio.Database) -> Transaction:
    called = time.monotonic()
    async with database.transaction() as tx:
        start = await tx.timestamp()
        returned = time.monotonic()
        found = [Read(row.key.decode(), loaded(row[elements])) async for row in tx.scan(lists)]
    return Transaction(
        "last reading",
        tuple(found),
        Outcome.COMMITTED,
        start,
        begin_called=called,
        begin_returned=returned,
    )


def judge(transactions: Sequence[Transaction]) -> list[Anomaly]:
    """All anomalies of the simplest kind of evidence that shows any."""
    versions = Versions(transactions)
    found = versions.anomalies + _shared_timestamps(transactions)
    if found:
        # Edges drawn from reads that fit no order would blame the wrong transactions.
        return found
    edges = [*dependencies(versions), *own_order(transactions, versions.committed)]
    if found := anomalies(edges, order=frozenset()):
        return found
    edges += real_time(transactions, versions.committed)
    if found := anomalies(edges, suffix="-realtime", order=frozenset({REAL_TIME})):
        return found
    edges += timestamps(transactions)
    order = frozenset({REAL_TIME, TIMESTAMPS})
    return anomalies(edges, suffix="-timestamps", order=order)


def lost_appends(
    transactions: Sequence[Transaction], final: Mapping[str, tuple[str, ...]]
) -> list[Anomaly]:
    """Elements that were acknowledged, and are not in the lists at the end."""
    stored = {(key, element) for key, elements in final.items() for element in elements}
    return [
        Anomaly("lost append", f"{one} appended {append.element} to {append.key}")
        for one in transactions
        if one.outcome is Outcome.COMMITTED
        for append in one.appends()
        if (append.key, append.element) not in stored
    ]


def _shared_timestamps(transactions: Sequence[Transaction]) -> list[Anomaly]:
    """Every start of a writer and every commit has a timestamp of its own."""
    used = Counter(one.commit_ts for one in transactions if one.commit_ts)
    used.update(one.start_ts for one in transactions if one.start_ts and any(one.appends()))
    return [
        Anomaly("shared timestamp", f"{number} was handed out {times} times")
        for number, times in used.items()
        if times > 1
    ]
