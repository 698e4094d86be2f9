"""A stored group of documents: its members, messages about them, and its state.

`clustering.py` explains groups, and changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from examples.webindex.documents import KEYS
from examples.webindex.tables import GROUP

ROOT = KEYS - 1
"""The last pass, whose groups have nothing above them."""


class Group(NamedTuple):
    """A group of one pass."""

    level: int
    key: str

    def row(self, kind: int = GROUP, length: int = 0, url: str = "", child: str = "") -> GroupRow:
        """The row key of the group, of one of its members, or of a message to it."""
        return (self.level, self.key, kind, length, url, child)


GroupRow = tuple[int, str, int, int, str, str]


class Child(NamedTuple):
    """A member: a document and, unless it is a leaf, the key of the group that it represents."""

    url: str
    key: str = ""

    def row(self, group: Group, kind: int) -> GroupRow:
        return group.row(kind, len(self.url), self.url, self.key)

    def order(self) -> tuple[int, str, str]:
        """The best member of a group comes first, as among the rows of members."""
        return len(self.url), self.url, self.key


class Member(NamedTuple):
    """A group's knowledge of a member."""

    keys: tuple[str, ...]
    documents: int
    """The number of documents below it. With none, it is no longer a member."""
    cause: int

    @classmethod
    def decode(cls, stored: list[Any]) -> Member:
        return cls(tuple(stored[0]), stored[1], stored[2])


@dataclass(frozen=True)
class State:
    """The knowledge of a group."""

    best: Child | None = None
    keys: tuple[str, ...] = ()
    """The keys of the best member."""
    documents: int = 0
    cause: int = 0
    canonical: str | None = None
    cursor: GroupRow | None = None
    """The next member to learn of the canonical URL."""
    members: Mapping[Child, Member] | None = field(default_factory=dict)
    """All members; None once they were too many for one cell, and each has a row."""

    def encode(self) -> list[Any]:
        members = self.members
        return [
            self.best,
            self.keys,
            self.documents,
            self.cause,
            self.canonical,
            self.cursor,
            None if members is None else [(*one, *members[one]) for one in sorted(members)],
        ]

    @classmethod
    def decode(cls, stored: list[Any] | None) -> State:
        if stored is None:
            return cls()
        best, keys, documents, cause, canonical, cursor, members = stored
        return cls(
            Child(*best),
            tuple(keys),
            documents,
            cause,
            canonical,
            None if cursor is None else tuple(cursor),
            None
            if members is None
            else {Child(*one[:2]): Member.decode(one[2:]) for one in members},
        )

    def parent(self, group: Group) -> Group | None:
        """The group of the next pass that this group's representative belongs to."""
        if self.best is None or group.level == ROOT:
            return None
        return Group(group.level + 1, self.keys[group.level + 1])
