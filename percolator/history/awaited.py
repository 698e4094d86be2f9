"""From when on observers still have to see deletions; and intents for which nobody will ever ask.

A transaction may announce its cells for an observer that is being removed, or in a table that is
being dropped. Such intents may come long after the removal, and no worker looks for them. If they
counted, deletions would never be collected again. So they do not count, and are cleared here.

**Which.** Those whose table or observer is not registered, and whose transactions began below the
safe point. They are looked at in their order, up to the first one that somebody waits for: only
what is in front of that one could hold up anything.

**Why no change is lost**, even if an observer of the same name is registered again: an intent is
cleared only if it is final what became of its transaction (percolator/history/fates.py), or if its
table is gone for good, and if
whoever collects has led *after* that was seen, with a catalogue in which the observer was not
registered. So every later registration is above that transaction's commit, and finds the change by
backfilling, if it wants it. A call that deletes may thus arrive as late as it likes.

Tests of these rules: tests/unit/history/test_awaited_intents.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain

from percolator.history.fates import Fates
from percolator.protocol.environment import Environment
from percolator.routing.table_info import TableSchema
from percolator.rowstore.intents import BUCKETS, Intent, Intents, key_from

Registered = Mapping[int, TableSchema]
"""All tables that are not being dropped."""
_ALL_COLUMNS = ((b"", b""),)


class AwaitedIntents:
    """The intents of one store, for whoever collects it."""

    def __init__(
        self,
        env: Environment,
        intents: Intents,
        registered: Callable[[], Awaitable[Registered]],
    ) -> None:
        """`registered` returns what is registered at some moment after it was called, and raises
        `NotReady` unless the caller led at that moment."""
        self._env = env
        self._intents = intents
        self._registered = registered
        self._fates = Fates(env)
        self.cleared = 0
        """How many intents were cleared for which nobody asks."""

    async def oldest(self, below: int) -> int:
        """The least timestamp of all intents below this for which somebody asks, and that are there
        from now on, of transactions that have announced their cells by now; 0 if there is none."""
        registered = await self._registered()
        found = await asyncio.gather(*(self._oldest_in(one, below, registered) for one in BUCKETS))
        return min((one for one in found if one), default=0)

    async def _oldest_in(self, bucket: int, below: int, registered: Registered) -> int:
        at, end = key_from(bucket), key_from(bucket, below)
        while at:
            found, at = await self._intents.page(at, end, _ALL_COLUMNS, self._deadline())
            unasked: list[Intent] = []
            for intent in found:
                if _is_asked_for(intent, registered):
                    await self._clear(unasked)
                    return intent.timestamp
                unasked.append(intent)
            await self._clear(unasked)
        return 0

    async def _clear(self, unasked: Sequence[Intent]) -> None:
        """Those whose transactions may still be about to commit stay for the next round."""
        if not unasked:
            return
        judged = await self._fates.judge(unasked)
        await self._fates.put_markers(judged.without_trace, judged)
        registered = await self._registered()
        committed = chain.from_iterable(
            intents for by_commit in judged.committed.values() for intents in by_commit.values()
        )
        final = [one for one in committed if not _is_asked_for(one, registered)]
        final += judged.rolled_back
        final += [one for one in judged.without_table if one.table_id not in registered]
        await self._intents.delete(final, self._deadline())
        self.cleared += len(final)

    def _deadline(self) -> float:
        return self._env.now() + self._env.limits.call_seconds


def _is_asked_for(intent: Intent, registered: Registered) -> bool:
    schema = registered.get(intent.table_id)
    if schema is None:
        return False
    by_column = chain(schema.observers.values(), schema.weak_observers.values())
    return any(intent.observer in observers for observers in by_column)
