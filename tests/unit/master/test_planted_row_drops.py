"""Mistakes in dropping tables of a row store, which the simulation finds, too: each makes the test
of the rule that it breaks fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.simulation import planted_row_bugs as bugs
from tests.unit.master import test_row_drops as drops

_STAYS_AT_FIRST = drops.test_a_dropped_table_goes_after_a_round_above_its_last_commits
_STAYS_IF_LESS = drops.test_a_round_that_resolved_less_does_not_finish

FOUND_BY: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], Awaitable[None]]] = {
    bugs.dropped_table_deleted_at_once: _STAYS_AT_FIRST,
    bugs.locks_resolved_below_any_timestamp_are_enough: _STAYS_IF_LESS,
}


@pytest.mark.parametrize("plant", FOUND_BY, ids=lambda plant: plant.__name__)
async def test_it_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    test = FOUND_BY[plant]
    await test()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        await test()


async def test_what_was_committed_elsewhere_is_lost_with_a_table_that_goes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bugs.dropped_table_deleted_at_once(monkeypatch)
    with pytest.raises(AssertionError):
        await drops.test_a_table_goes_after_what_was_committed_there_is_settled_elsewhere()
