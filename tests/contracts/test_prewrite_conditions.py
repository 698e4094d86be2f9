"""A tablet judges a whole transaction by the conditions of a prewrite, which it cannot import.

The client reads the index of the condition that failed by its own list, so the two have to agree.
"""

from __future__ import annotations

from percolator.protocol import steps
from percolator.tablet import group_commit, requests

START = 7


def test_a_commit_in_one_round_is_judged_by_the_conditions_of_a_prewrite() -> None:
    prewrite = steps.prewrite(b"row", b"column", START, b"lock", None)
    asked = [
        (
            condition.space,
            condition.expectation,
            condition.from_timestamp,
            condition.until_timestamp,
            condition.prefix,
            condition.required,
            condition.qualifier,
        )
        for condition in prewrite.conditions
    ]
    assert requests.prewrite_conditions(START) == asked


def test_client_and_tablet_find_the_own_commit_by_the_same_condition() -> None:
    assert group_commit.OWN_COMMIT == steps.OWN_COMMIT
