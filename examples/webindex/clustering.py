"""Keeps track of which documents are one page, by the three passes of `definition.py`.

For each pass and each key there is a *group*. In the first pass, its members are the documents with
that key; in a later pass, they are the representatives of groups of the previous pass that have
that key in this pass. The best member represents the group, and is in turn a member of one group of
the next pass. So groups form trees of height three, with documents as leaves. What a group knows is
its `State` (`group.py`):

    upwards     its representative and the number of documents below it, sent to the next pass
    downwards   the canonical URL, which is the representative of the tree's root

How work stays small, whatever the size of a group:

- Up to `TOGETHER_MAX` members are in the state's own cell, so that a small group is read and
  written as one cell. If there were ever more, each is a row, until the group is empty. The rows
  are ordered so that the best one comes first. Nothing reads all of them at once.
- While groups are small, a change goes up within the transaction that makes it. In a group of `HOT`
  documents or more, or one that is being changed, the state would be a cell that all transactions
  write. So the change is left as a *message* in a separate row, and the group is weakly notified.
  It handles `MESSAGES_MAX` at once.
- A new canonical URL goes down to `WALK_MAX` members at once. `State.cursor` says who is next, and
  the group notifies itself until it has reached all. A few of these members are visited in the
  same transaction, and the others are notified.

Why this ends in the right state, although transactions see snapshots:

- Every step of a group writes its `state` cell, or locks it if there was nothing to do. So steps
  come one after another, and a step that has seen too little is retried.
- A step that has read the group above is repeated when that group changes: a new member of a group
  is visited once it has been added, and members are visited whenever the canonical URL changes.
- A member is also known by its group of the previous pass. A document that changes its key may
  represent both its old and its new group for a while, and they must not overwrite each other's
  news.
- News of a member outdates a message of the same member, and removes it. All that tell of it come
  one after another, as steps of its document or of its group, so each sees the message of the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from examples.webindex import tables
from examples.webindex.documents import KEYS
from examples.webindex.group import ROOT, Child, Group, GroupRow, Member, State
from examples.webindex.tables import MEMBER, MESSAGE, groups
from percolator import Row, aio

TOGETHER_MAX = 16
HOT = 64
MESSAGES_MAX = 256
WALK_MAX = 256
VISITS_MAX = 16
"""Members to visit within the transaction that has news for them, for each of its documents."""

changing: WeakValueDictionary[Group, aio.Transaction] = WeakValueDictionary()
"""The transaction in this process that is changing a group. Only a hint: of many at once, all but
one would have to be retried, so the others leave messages."""


class Groups:
    """Groups as one transaction sees and changes them.

    First all news goes up, pass by pass, and then down. Afterwards, `unserved` has representatives
    of roots with news, and `visited` has documents whose canonical URL may be new.
    """

    def __init__(self, tx: aio.Transaction, documents: int = 1) -> None:
        self._tx = tx
        self._visits_max = VISITS_MAX * documents
        self._stored: dict[Group, State] = {}
        self._states: dict[Group, State] = {}
        self._mail: dict[Group, dict[Child, Member]] = {}
        self._following: list[set[Group]] = [set() for _ in range(KEYS)]
        self._visits = 0
        self.unserved: set[str] = set()
        self.visited: set[str] = set()

    async def state(self, group: Group) -> State:
        await self.know([group])
        return self._states[group]

    async def know(self, wanted: Iterable[Group]) -> None:
        """Reads the states of these groups, in one round trip, so that `state` has them."""
        unknown = sorted({group for group in wanted if group not in self._states})
        rows = [group.row() for group in unknown]
        for row in await self._tx.get_many(groups, rows, [tables.state]) if rows else ():
            self._learn(Group(*row.key[:2]), row.get(tables.state))

    def _learn(self, group: Group, stored: list[Any] | None) -> None:
        """Takes note of a stored state, unless another task of this transaction has read it, and
        perhaps changed it, meanwhile."""
        if group not in self._states:
            self._stored[group] = self._states[group] = State.decode(stored)

    def tell(self, group: Group, child: Child, member: Member) -> None:
        """Sends a group the news of a member."""
        self._mail.setdefault(group, {})[child] = member

    def look_at(self, group: Group) -> None:
        """Handles a notified group: it has messages, or has something to learn."""
        self._mail.setdefault(group, {})

    async def handle_news(self) -> None:
        for level in range(KEYS):
            here = {group: self._mail[group] for group in self._mail if group.level == level}
            self._mail = {group: self._mail[group] for group in self._mail if group not in here}
            quiet = [group for group in here if await self._is_quiet(group, here[group])]
            outdated = await self._messages_outdated({group: here[group] for group in quiet})
            await asyncio.gather(
                *(self._gather(group, here[group], outdated.get(group)) for group in quiet)
            )
        for level in reversed(range(KEYS)):
            following = sorted(self._following[level])
            await self.know(following)
            above = (self._states[group].parent(group) for group in following)
            await self.know(group for group in above if group)
            await asyncio.gather(*map(self._follow, following))
        for group in sorted(group for level in self._following for group in level):
            await self._write(group)

    # ------------------------------------------------------------------ upwards

    async def _is_quiet(self, group: Group, mail: Mapping[Child, Member]) -> bool:
        """Returns False if another transaction is changing the group: it is left the news."""
        other = changing.get(group)
        is_busy = other is not None and other is not self._tx and other.outcome is aio.Outcome.OPEN
        if mail and is_busy:
            await self._leave(group, mail)
            return False
        if not is_busy:
            changing[group] = self._tx  # set before any read, since many may begin at once
        return True

    async def _gather(
        self, group: Group, mail: Mapping[Child, Member], stored: list[Row[Any]] | None
    ) -> None:
        """Adds up the news of the members. `stored`: the messages that it outdates, if any came."""
        tx = self._tx
        if stored is None:
            stored = await self._messages(group)
        known = await self.state(group)
        if mail and known.documents >= HOT:
            await self._leave(group, mail)
            return
        news_by_child = {
            Child(*row.key[4:]): Member.decode(row[tables.message]) for row in stored
        } | dict(mail)
        for row in stored:
            tx.delete(row.key, tables.message)
        if not mail and len(stored) == MESSAGES_MAX:
            tx.notify(group.row(), tables.state)
        self._following[group.level].add(group)
        if news_by_child:
            await self._elect(group, await self._add_up(group, known, news_by_child))

    async def _leave(self, group: Group, mail: Mapping[Child, Member]) -> None:
        """Leaves messages, without reading anything of the group."""
        for child, news in mail.items():
            await self._tx.set(child.row(group, MESSAGE), tables.message, news)
        await self._tx.notify(group.row(), tables.state)

    async def _messages_outdated(
        self, news: Mapping[Group, Mapping[Child, Member]]
    ) -> dict[Group, list[Row[Any]]]:
        """The messages that news of members outdates. `update_group` has been notified of all
        others. They are read together with the states, of all groups in one round trip."""
        rows = [
            row
            for group, mail in news.items()
            if mail
            for row in (group.row(), *(child.row(group, MESSAGE) for child in mail))
        ]
        found: dict[Group, list[Row[Any]]] = {group: [] for group, mail in news.items() if mail}
        columns = [tables.state, tables.message]
        for row in await self._tx.get_many(groups, rows, columns) if rows else ():
            group = Group(*row.key[:2])
            if row.key == group.row():
                self._learn(group, row.get(tables.state))
            elif row:
                found[group].append(row)
        return found

    async def _messages(self, group: Group) -> list[Row[Any]]:
        """Messages to a notified group."""
        scan = self._tx.scan(
            groups, prefix=(*group, MESSAGE), columns=[tables.message], limit=MESSAGES_MAX
        )
        return [row async for row in scan]

    async def _add_up(self, group: Group, known: State, news: Mapping[Child, Member]) -> State:
        """Returns the state with the new members."""
        documents, cause = known.documents, known.cause
        before = known.members
        if before is None:
            before = await self._members_in_rows(group, news)
        for child, new in news.items():
            old = before.get(child)
            documents += new.documents - (old.documents if old else 0)
            cause = max(cause, new.cause)
            if new.documents and old is None:
                await self._visit(group, child)
        members = None
        if known.members is None:
            await self._write_rows(group, news)
        else:
            now = {**known.members, **news}
            members = {child: one for child, one in now.items() if one.documents}
            if len(members) > TOGETHER_MAX:
                await self._write_rows(group, members)
                members = None
        return replace(known, documents=documents, cause=cause, members=members)

    async def _members_in_rows(
        self, group: Group, children: Iterable[Child]
    ) -> Mapping[Child, Member]:
        rows = [child.row(group, MEMBER) for child in children]
        found = await self._tx.get_many(groups, rows, [tables.member])
        return {Child(*row.key[4:]): Member.decode(row[tables.member]) for row in found if row}

    async def _write_rows(self, group: Group, members: Mapping[Child, Member]) -> None:
        for child, member in members.items():
            row = child.row(group, MEMBER)
            if member.documents:
                await self._tx.set(row, tables.member, member)
            else:
                await self._tx.delete(row, tables.member)

    async def _best(self, group: Group, now: State) -> tuple[Child | None, tuple[str, ...]]:
        """The best member, and its keys."""
        if now.members is not None:
            best = min(now.members, key=Child.order, default=None)
            return best, () if best is None else now.members[best].keys
        first = self._tx.scan(groups, prefix=(*group, MEMBER), columns=[tables.member], limit=1)
        async for row in first:
            return Child(*row.key[4:]), Member.decode(row[tables.member]).keys
        return None, ()

    async def _elect(self, group: Group, now: State) -> None:
        """Finds the best member, and sends news to the next pass."""
        before = self._states[group]
        best, keys = await self._best(group, now)
        now = self._states[group] = replace(now, best=best, keys=keys)
        if (before.best, before.keys, before.documents) == (best, keys, now.documents):
            return
        if group.level == ROOT:
            self.unserved |= {one.url for one in (before.best, best) if one is not None}
            return
        old, new = before.parent(group), now.parent(group)
        if before.best and old and (old, before.best.url) != (new, best and best.url):
            self.tell(old, Child(before.best.url, group.key), Member((), 0, now.cause))
        if best and new:
            self.tell(new, Child(best.url, group.key), Member(keys, now.documents, now.cause))

    # ------------------------------------------------------------------ downwards

    async def _follow(self, group: Group) -> None:
        """Learns the canonical URL, and passes it on."""
        now = await self.state(group)
        if now.best is None:
            return
        parent = now.parent(group)
        above = await self.state(parent) if parent else replace(now, canonical=now.best.url)
        # If the group above knows none yet, it will visit this group once it has read its messages.
        if above.canonical is not None and above.canonical != now.canonical:
            cause = max(now.cause, above.cause)
            now = replace(now, canonical=above.canonical, cause=cause, cursor=group.row(MEMBER))
        if now.cursor is not None:
            now = replace(now, cursor=await self._walk(group, now))
        self._states[group] = now

    async def _walk(self, group: Group, now: State) -> GroupRow | None:
        """Visits some members, and returns the next one."""
        if now.members is not None:
            for child in sorted(now.members, key=Child.order):
                await self._visit(group, child)
            return None
        scan = self._tx.scan(
            groups,
            start=now.cursor,
            end=group.row(MESSAGE),
            columns=[tables.member],
            limit=WALK_MAX + 1,
        )
        rows = [row async for row in scan]
        for row in rows[:WALK_MAX]:
            await self._visit(group, Child(*row.key[4:]))
        if len(rows) <= WALK_MAX:
            return None
        await self._tx.notify(group.row(), tables.state)
        following: GroupRow = rows[WALK_MAX].key
        return following

    async def _visit(self, group: Group, child: Child) -> None:
        """Lets a member learn the canonical URL, in this transaction or soon after."""
        self._visits += 1
        is_soon = self._visits > self._visits_max
        if group.level == 0:
            if is_soon:
                await self._tx.notify(child.url, tables.canonical)
            else:
                self.visited.add(child.url)
            return
        below = Group(group.level - 1, child.key)
        if is_soon:
            await self._tx.notify(below.row(), tables.state)
        else:
            self._following[below.level].add(below)

    async def _write(self, group: Group) -> None:
        now, before = self._states[group], self._stored[group]
        if now.best is None:
            if before.best is not None:
                await self._tx.delete(group.row(), tables.state)
        elif now != before:
            await self._tx.set(group.row(), tables.state, now.encode())
        else:
            await self._tx.lock(group.row(), tables.state)
