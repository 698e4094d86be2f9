"""Bugs of secondary indexes: one for each way to lose an entry, or to keep one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import pytest

from percolator.aio import find
from percolator.aio.bulk_load import BulkLoad
from percolator.errors import CellAddress
from percolator.formats.records import KIND_LOCK_ONLY
from percolator.protocol import announcing, commit, indexes
from percolator.protocol.shared.attempt import Attempt
from percolator.protocol.shared.entries import Entries
from percolator.protocol.write_set import Write, WriteSteps
from percolator.routing.cells import ANY_SCHEMA, CellMutation, FoundCell
from percolator.services.master.row_term import RowTables
from tests.patching import in_place_of

Patch = pytest.MonkeyPatch


def locks_are_set_under_any_schema(patch: Patch) -> None:
    """A client that does not know the index commits a row without its entry."""
    correct = WriteSteps.prewrite_step

    @in_place_of(patch, WriteSteps, "prewrite_step")
    def wrong(self: WriteSteps, *arguments: Any) -> CellMutation:
        return correct(self, *arguments)._replace(schema_version=ANY_SCHEMA)


def schemas_are_as_young_as_any_epoch(patch: Patch) -> None:
    """As `locks_are_set_under_any_schema`, where a row store has the cells."""
    patch.setattr(announcing, "is_current", lambda env, table_id: True)


def the_epoch_is_not_raised_for_indexes(patch: Patch) -> None:
    """In a row store, nobody else tells a commit of an index."""

    async def wrong(*_: object) -> None:
        return

    patch.setattr(RowTables, "_until_registered", wrong)


def a_commit_goes_on_under_another_schema(patch: Patch) -> None:
    """It has learned of the index, and not added its entries."""
    patch.setattr(commit, "require_same_schemas", lambda write, schema_of: None)


def other_columns_of_an_index_are_not_locked(patch: Patch) -> None:
    """Two transactions that complete a row, each with one column, add no entry."""
    patch.setattr(indexes.Changes, "_lock", lambda self, cells: None)


def an_index_is_built_past_older_locks(patch: Patch) -> None:
    """They were set without entries, and are committed above the snapshot of the build."""

    async def wrong(*_: object) -> None:
        return

    patch.setattr(indexes, "until_unlocked", wrong)


def readers_do_not_ask_whether_an_index_is_complete(patch: Patch) -> None:
    """They miss the rows that are not in it yet, or no longer kept in it."""

    async def wrong(*_: object) -> None:
        return

    patch.setattr(find, "require_ready", wrong)


def unique_values_are_not_looked_up(patch: Patch) -> None:
    """The entry then leads to the last row that was given the value."""
    patch.setattr(indexes.Changes, "require_unclaimed", lambda self, found: None)


def an_index_counts_as_complete_while_rows_are_loaded(patch: Patch) -> None:
    """Loaded rows appear without entries."""

    async def wrong(_: BulkLoad) -> None:
        return

    patch.setattr(BulkLoad, "_mark_indexes", wrong)


def entries_that_stay_are_never_written_again(patch: Patch) -> None:
    """The entry of a value that was written again is gone before the value."""
    patch.setattr(indexes, "is_kept", lambda index, old, new: old == new)


def entries_are_found_after_their_values_have_expired(patch: Patch) -> None:
    """Another transaction wrote an entry later than one of its values."""
    patch.setattr(find._Lookup, "_is_entry_of", lambda *_: True)


def others_are_taken_to_have_expired(patch: Patch) -> None:
    """A row takes a unique value that another one has."""

    async def wrong(owners: Mapping[CellAddress, indexes.Owner], *_: object) -> set[CellAddress]:
        return set(owners)

    patch.setattr(indexes, "expired", wrong)


def former_values_are_those_of_an_older_participant(patch: Patch) -> None:
    """Others have committed another value before the attempt has locked the cell."""
    correct = Attempt.former

    @in_place_of(patch, Attempt, "former")
    async def wrong(
        self: Attempt, cells: Iterable[CellAddress], deadline: float, *passing: Any
    ) -> dict[CellAddress, FoundCell]:
        newest, self._current = self._current, self.participants[0]
        try:
            return await correct(self, cells, deadline, *passing)
        finally:
            self._current = newest


def entries_of_jobs_are_added_under_unlocked_columns(patch: Patch) -> None:
    """Others change what the job does not write, and entries have the old values."""
    correct = Attempt.lock

    @in_place_of(patch, Attempt, "lock")
    async def wrong(
        self: Attempt, writes: Mapping[CellAddress, Write], *arguments: Any, **named: Any
    ) -> None:
        left = {cell: write for cell, write in writes.items() if write[0] != KIND_LOCK_ONLY}
        await correct(self, left, *arguments, **named)


def owners_in_other_tasks_are_not_judged(patch: Patch) -> None:
    """Two rows have one unique value."""

    async def wrong(*_: object) -> None:
        return

    patch.setattr(Entries, "_require_unclaimed", wrong)


def entries_that_jobs_give_up_stay(patch: Patch) -> None:
    """The value leads to a row that does not have it any more."""

    async def wrong(*_: object) -> None:
        return

    patch.setattr(Entries, "_delete", wrong)


def unique_entries_of_jobs_are_locked_after_their_owners_are_asked(patch: Patch) -> None:
    """Another transaction gives the value to a row in between."""
    correct = Entries._take

    @in_place_of(patch, Entries, "_take")
    async def wrong(self: Entries, changes: indexes.Changes, tables: Set[int]) -> None:
        found = await self._attempt.former(changes.claimed, self._deadline())
        await correct(self, changes, tables)
        for cell in changes.claimed:
            self._contested.pop(cell, None)
        self._contested |= changes.others(found)


def entries_of_jobs_are_given_up_with_their_rows(patch: Patch) -> None:
    """A row later in the scan cannot get the value, which the job has deleted."""
    correct = Entries._take

    @in_place_of(patch, Entries, "_take")
    async def wrong(self: Entries, changes: indexes.Changes, tables: Set[int]) -> None:
        await correct(self, changes, tables)
        left = [cell for cell in changes.given_up if cell not in self._claimed]
        if left:
            await self._delete(left)


INDEX_BUGS = (
    (a_commit_goes_on_under_another_schema, (), False),
    (other_columns_of_an_index_are_not_locked, (), True),
    (readers_do_not_ask_whether_an_index_is_complete, (), True),
    (unique_values_are_not_looked_up, (), True),
    (an_index_counts_as_complete_while_rows_are_loaded, (), True),
)
"""Each with the disruptions that reveal it, and whether it is caught in seconds. The other two are
planted in tests/unit/aio/test_index_changes.py: few seeds have what shows them."""

TASK_BUGS = (
    entries_of_jobs_are_added_under_unlocked_columns,
    owners_in_other_tasks_are_not_judged,
    entries_that_jobs_give_up_stay,
    unique_entries_of_jobs_are_locked_after_their_owners_are_asked,
    entries_of_jobs_are_given_up_with_their_rows,
)
"""Bugs of what the driver of a job adds. All of them are caught in seconds."""

EXPIRING_INDEX_BUGS = (
    entries_that_stay_are_never_written_again,
    entries_are_found_after_their_values_have_expired,
    others_are_taken_to_have_expired,
)
"""All of them are caught in seconds."""

ROW_INDEX_BUGS = (
    schemas_are_as_young_as_any_epoch,
    the_epoch_is_not_raised_for_indexes,
)
"""In a row store. Both are caught in seconds."""
