"""Bugs of change feeds that a simulation has to find."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from percolator.aio.following import Following
from percolator.changes import Change
from percolator.protocol.change_reader import ChangeReader
from percolator.routing.cells import ChangesSeen, StoredChange
from percolator.tablet.collection import trimming
from percolator.tablet.keys import F
from percolator.tablet.memory.change_feed import note_change
from percolator.tablet.memory.state import TabletState
from percolator.tablet.reading import change_scan
from percolator.tablet.reading.change_scan import ChangePlan, Settled
from percolator.tablet.writing import judged_batch
from percolator.tablet.writing.judged_batch import JudgedBatch
from tests.simulation.per_seed import PerSeed
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def entries_of_the_feed_are_written_with_the_next_batch(patch: Patch) -> None:
    """A reader comes between, or there is no next batch."""
    correct_begin = JudgedBatch.begin
    by_storage = PerSeed(dict[int, list[tuple[bytes, int, bytes]]])
    noted: list[tuple[bytes, int, bytes]] = []

    def note(batch: Any, cell: bytes, timestamp: int, record: bytes) -> int:
        noted.append((cell, timestamp, record))
        return 0

    def begin(self: JudgedBatch, *memory: Any) -> None:
        held = by_storage.now()
        before = held.pop(id(self._get.__self__), [])  # type: ignore[attr-defined]
        held[id(self._get.__self__)] = list(noted)  # type: ignore[attr-defined]
        noted.clear()
        for entry in before:
            note_change(self.writes, *entry)
        correct_begin(self, *memory)

    patch.setattr(judged_batch, "note_change", note)
    patch.setattr(JudgedBatch, "begin", begin)


def readers_of_changes_ignore_locks(patch: Patch) -> None:
    """What is committed below them later is never read."""
    correct = change_scan.find_settled

    async def wrong(state: TabletState, plan: ChangePlan) -> Settled:
        found = await correct(state, plan)
        return found if not found.locks else Settled(plan.until)

    patch.setattr(change_scan, "find_settled", wrong)


def readers_of_changes_ignore_locks_behind_those_that_are_reported(patch: Patch) -> None:
    """One of them may be of an earlier transaction."""
    correct = change_scan.find_settled

    async def wrong(state: TabletState, plan: ChangePlan) -> Settled:
        found = await correct(state, plan)
        if not found.locks:
            return found
        until = change_scan._last_before(found.locks[0][2])
        return Settled(max(plan.after, min(plan.until, until)), found.locks[:1])

    patch.setattr(change_scan, "find_settled", wrong)


def readers_of_changes_ignore_loads(patch: Patch) -> None:
    """The rows of a load that becomes visible below them are never read."""
    correct = change_scan.find_settled

    async def wrong(state: TabletState, plan: ChangePlan) -> Settled:
        fences, state.load_fences = state.load_fences, type(state.load_fences)()
        try:
            return await correct(state, plan)
        finally:
            state.load_fences = fences

    patch.setattr(change_scan, "find_settled", wrong)


def a_tablet_says_how_far_all_are_settled(patch: Patch) -> None:
    """Others may have locks below that."""
    correct = ChangeReader._look

    async def wrong(self: ChangeReader, until: int, deadline: float) -> ChangesSeen:
        seen = await correct(self, until, deadline)
        return seen._replace(reached=max(seen.reached, min(until, seen.newest)))

    patch.setattr(ChangeReader, "_look", wrong)


def a_page_that_ends_inside_a_commit_is_taken_for_whole(patch: Patch) -> None:
    """Who goes on from there loses the rest of the commit."""
    correct = ChangeReader.between

    async def wrong(
        self: ChangeReader, seen: ChangesSeen, timeout_seconds: float
    ) -> AsyncGenerator[list[StoredChange], None]:
        async for page in correct(self, seen, timeout_seconds):
            self.position = max(self.position, page[-1].commit_timestamp)
            yield page

    patch.setattr(ChangeReader, "between", wrong)


def a_follower_has_come_as_far_as_the_commit_that_it_reads(patch: Patch) -> None:
    """If it fails there and goes on from there, it loses the rest of the commit."""

    def wrong(self: Following[Any], change: Change[Any]) -> None:
        self._reached = change.commit_timestamp

    patch.setattr(Following, "has_handled", wrong)


def a_half_of_a_split_loses_what_was_in_the_feed(patch: Patch) -> None:
    """Its own rows are taken for the other half's."""

    def wrong(state: TabletState, sweep: Any, first: bytes) -> bytes | None:
        for key, value in state.storage.iterate(first, F + b"\xff" * 9):
            sweep.delete(key, len(key) + len(value))
        return None

    patch.setattr(trimming, "_slice_of_feed", wrong)


def readers_of_changes_are_let_in_below_the_safe_point(patch: Patch) -> None:
    """What they ask for was collected."""
    correct = change_scan.require_complete

    def wrong(state: TabletState, after: int) -> None:
        correct(state, max(after, state.safe_points.reads))

    patch.setattr(change_scan, "require_complete", wrong)


def a_former_owner_says_that_a_table_has_no_feed(patch: Patch) -> None:
    """The feed was switched on after the takeover: its readers end with an error."""

    async def wrong(state: TabletState) -> None:
        if not state.feed.on:
            raise change_scan._no_feed(state)

    patch.setattr(change_scan, "require_feed", wrong)


ALL: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool, bool], ...] = (
    (entries_of_the_feed_are_written_with_the_next_batch, (), False, True),
    (readers_of_changes_ignore_locks, (), False, True),
    (readers_of_changes_ignore_locks_behind_those_that_are_reported, (), False, False),
    (readers_of_changes_ignore_loads, (), False, False),
    (a_tablet_says_how_far_all_are_settled, (), False, False),
    (a_page_that_ends_inside_a_commit_is_taken_for_whole, (), False, False),
    (a_follower_has_come_as_far_as_the_commit_that_it_reads, (), False, True),
    (a_half_of_a_split_loses_what_was_in_the_feed, (Kind.SPLIT,), True, False),
    (readers_of_changes_are_let_in_below_the_safe_point, (), True, False),
)
"""Each with the strikes that bring it to light, whether it needs the real master, and whether it is
caught in seconds."""
