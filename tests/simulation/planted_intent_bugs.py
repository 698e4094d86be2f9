"""Bugs of intents, the notifications of a row store, that a simulation has to find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import pytest

from percolator.errors import CellAddress, PercolatorError
from percolator.history import fates
from percolator.history.fates import Fates, Judged
from percolator.observers.finding import intent_notifications as finding
from percolator.observers.finding.intent_notifications import IntentNotifications
from percolator.observers.port import Admission
from percolator.protocol import steps
from percolator.protocol.announcing import Announcement
from percolator.rowstore import shared_writes
from percolator.rowstore.intents import Intent, Intents
from percolator.rowstore.port import RowChange
from percolator.rowstore.shared_writes import SharedWrites
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1.tabletserver_pb2 import Mutation
from tests.simulation.per_seed import PerSeed
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch

_LATE_SECONDS = 0.05
_SOON_AFTER = 10_000 << SEQUENCE_BITS


def intents_after_the_commit_point(patch: Patch) -> None:
    """The client dies in between."""
    correct = Announcement.announce

    async def wrong(self: Announcement, cells: Sequence[CellAddress], deadline: float) -> None:
        async def late() -> None:
            await self._env.clock.sleep(_LATE_SECONDS)
            await correct(self, cells, inf)

        self._env.background.start(late())

    patch.setattr(Announcement, "announce", wrong)


def second_committer_announces_nothing(patch: Patch) -> None:
    """The first one has died, or was slower: its intents are not there."""
    correct = Announcement.announce
    announced = PerSeed(set[int])

    async def wrong(self: Announcement, cells: Sequence[CellAddress], deadline: float) -> None:
        if self._write.start not in announced.now():
            announced.now().add(self._write.start)
            await self._env.clock.sleep(_LATE_SECONDS)
            await correct(self, cells, deadline)

    patch.setattr(Announcement, "announce", wrong)


def intents_that_were_not_answered_taken_for_written(patch: Patch) -> None:
    """The call was lost, and nobody repeats it."""
    correct = Intents.announce

    async def wrong(
        self: Intents, start: int, cells: Sequence[tuple[CellAddress, bytes]], deadline: float
    ) -> None:
        try:
            await correct(self, start, cells, self._world.clock.monotonic_seconds())
        except PercolatorError:
            return

    patch.setattr(Intents, "announce", wrong)


def intents_that_join_a_sent_call_taken_for_written(patch: Patch) -> None:
    """It does not have them, and whoever leads it tells the others that all is well."""

    async def wrong(self: SharedWrites, rows: Sequence[RowChange], deadline: float) -> None:
        call = self._open
        if call is not None and call.admits(rows, deadline):
            await call.follow(rows)
            return
        call = self._open = shared_writes._Call(rows, deadline)
        try:
            await self._write(list(call.rows.values()), deadline)
        finally:
            if self._open is call:
                self._open = None
            call.end(True)

    patch.setattr(SharedWrites, "write", wrong)


def intent_cleared_while_its_cell_is_locked(patch: Patch) -> None:
    """Whether its transaction commits is not known yet."""
    _judged(patch, lambda judged: [intent for intent, _ in judged.locked])


def intent_cleared_without_a_trace(patch: Patch) -> None:
    """The prewrite of its cell is on its way, and no marker stops it."""
    _judged(patch, lambda judged: judged.without_trace)


def _judged(patch: Patch, cleared: Callable[[Judged], list[Intent]]) -> None:
    correct = Fates.judge

    async def wrong(self: Fates, found: Sequence[Intent]) -> Judged:
        judged = await correct(self, found)
        judged.rolled_back += cleared(judged)
        return judged

    patch.setattr(Fates, "judge", wrong)


def marker_put_over_a_lock(patch: Patch) -> None:
    """The cell was locked after the worker had looked. Workers do not wait for long, or else hardly
    any transaction would be so slow."""
    patch.setattr(finding, "_NO_TRACE_SECONDS", 0.0)
    patch.setattr(fates, "steps", _MarkersOverLocks())


class _MarkersOverLocks:
    """The steps of the protocol, where a marker removes the lock of its transaction."""

    def __getattr__(self, name: str) -> Any:
        return getattr(steps, name)

    def roll_back_expired(self, row: bytes, column: bytes, start: int, _: bytes) -> Mutation:
        return steps.roll_back(row, column, start)


def intent_cleared_by_the_marker_of_another_start(patch: Patch) -> None:
    """A later transaction was rolled back in the cell."""
    patch.setattr(fates, "steps", _MarkersOfLaterStarts())


class _MarkersOfLaterStarts:
    """The steps of the protocol, where `status` finds them, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(steps, name)

    def status(self, row: bytes, column: bytes, start: int) -> Mutation:
        step = steps.status(row, column, start)
        step.conditions[steps.OWN_ROLLBACK].until_timestamp = start + _SOON_AFTER
        return step


def low_water_mark_moved_too_far(patch: Patch) -> None:
    """What begins early and is announced late is never looked for."""
    correct = IntentNotifications._look_into

    async def wrong(self: IntentNotifications, bucket: int, admission: Admission, now: int) -> int:
        undecided = await correct(self, bucket, admission, now)
        self._from[bucket] = now
        return undecided

    patch.setattr(IntentNotifications, "_look_into", wrong)
    patch.setattr(finding, "_WHOLE_SECONDS", inf)


def commits_without_a_look_at_the_epoch(patch: Patch) -> None:
    """An observer that was registered meanwhile is not notified."""

    async def wrong(self: Announcement, deadline: float) -> None:
        return

    patch.setattr(Announcement, "renew", wrong)


_STOPS = (Kind.PAUSE, Kind.SLOW_LINKS)

AT_THE_COMMIT_POINT: tuple[Callable[[Patch], None], ...] = (
    intents_after_the_commit_point,
    second_committer_announces_nothing,
)
"""They show if a client dies with many transactions at this step."""

AT_ANY_STEP: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (intents_that_were_not_answered_taken_for_written, _STOPS, True),
    (intents_that_join_a_sent_call_taken_for_written, (), True),
    (intent_cleared_while_its_cell_is_locked, (), True),
    (intent_cleared_without_a_trace, _STOPS, False),
    (marker_put_over_a_lock, _STOPS, False),
    (intent_cleared_by_the_marker_of_another_start, _STOPS, False),
    (low_water_mark_moved_too_far, (), True),
    (commits_without_a_look_at_the_epoch, _STOPS, True),
)
"""Each with the kinds of strikes that bring it to light, and whether it is caught within
seconds."""
