"""What single reads prove: the order of each list's versions, and reads that fit no order.

A list that only grows carries its own history: a reader of [a, b, c] knows that the list was
[a, b] and [a] before. So the longest read of a key gives the order of all its versions, and every
other read must be a prefix of it. (Kingsbury and Alvaro, "Elle", sections 4 and 5.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.list_append.transactions import Anomaly, Append, Outcome, Transaction

Version = tuple[str, ...]


@dataclass(frozen=True)
class ExternalRead:
    """What a transaction read of others: the list without the elements that it had appended."""

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
