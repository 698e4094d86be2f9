"""Changes of tables at random, on masters that die and take over, and on disks that fail.

Whatever happens: no id is given twice, no version of a schema says two things, nothing vanishes
that was acknowledged or that any master has told of, and a request that is repeated is carried out
once. Mistakes against each of these rules are planted, and have to be found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from percolator.services.master import cluster_map, map_store
from percolator.services.master.cluster_map import Catalogue, ClusterMap
from percolator.services.master.map_store import StoredMap
from percolator.services.master.table_changes import Creation, TableChanges
from percolator.v1 import master_pb2 as pb
from tests.unit.master.random_changes import EXPECTED, POWER_CUT, run_seed

Patch = pytest.MonkeyPatch
SEEDS = 4
SEEDS_WITH_POWER_CUTS = 2
SEEDS_MAX = 10
"""How many seeds may be needed to find a planted mistake."""


async def test_whatever_fails_while_tables_change_all_promises_are_kept() -> None:
    occurred: Counter[str] = Counter()
    for seed in range(SEEDS):
        await run_seed(seed, occurred)
    for seed in range(SEEDS_WITH_POWER_CUTS):
        await run_seed(seed, occurred, power=True)
    missing = [name for name in (*EXPECTED, POWER_CUT) if not occurred[name]]
    assert not missing, "these never happened"


# ---------------------------------------------------------------------- planted mistakes


def the_leader_goes_on_with_its_own_map(patch: Patch) -> None:
    async def wrong(self: StoredMap[ClusterMap]) -> None:
        self._is_stored = True

    patch.setattr(StoredMap, "_take_over", wrong)


def what_is_stored_becomes_the_map_with_the_next_change_only(patch: Patch) -> None:
    async def wrong(self: StoredMap[ClusterMap]) -> None:
        pass

    patch.setattr(StoredMap, "settle", wrong)


def a_change_takes_effect_before_it_is_durable(patch: Patch) -> None:
    correct = StoredMap._put

    async def wrong(self: StoredMap[ClusterMap], changed: ClusterMap) -> None:
        self.current = changed
        await correct(self, changed)

    patch.setattr(StoredMap, "_put", wrong)


def creations_are_known_to_their_leader_only(patch: Patch) -> None:
    correct = cluster_map._table

    def wrong(table: pb.Table) -> Any:
        return replace(correct(table), created_by=b"")

    patch.setattr(cluster_map, "_table", wrong)


def deletions_are_known_to_their_leader_only(patch: Patch) -> None:
    correct = map_store.decoded

    def wrong(stored: bytes | None) -> ClusterMap:
        return replace(correct(stored), deletions=())

    patch.setattr(map_store, "decoded", wrong)


def a_deletion_that_is_repeated_is_another_one(patch: Patch) -> None:
    patch.setattr(Catalogue, "with_deletion", lambda self, request_id: self)


def every_creation_with_an_id_is_ones_own(patch: Patch) -> None:
    correct: Any = TableChanges._decide_creation

    def wrong(self: Any, creation: Creation, current: ClusterMap) -> Any:
        known = current.named(creation.request.name)
        if known is not None and creation.request.request_id:
            return current, (known, True)
        return correct(self, creation, current)

    patch.setattr(TableChanges, "_decide_creation", wrong)


MISTAKES: tuple[tuple[Callable[[Patch], None], int], ...] = (
    (the_leader_goes_on_with_its_own_map, 0),
    (what_is_stored_becomes_the_map_with_the_next_change_only, 0),
    (a_change_takes_effect_before_it_is_durable, 10),
    (creations_are_known_to_their_leader_only, 0),
    (deletions_are_known_to_their_leader_only, 0),
    (a_deletion_that_is_repeated_is_another_one, 0),
    (every_creation_with_an_id_is_ones_own, 0),
)
"""Each with a seed that shows it, and takes little time."""


@pytest.mark.parametrize(
    ("plant", "first_seed"), MISTAKES, ids=[plant.__name__ for plant, _ in MISTAKES]
)
async def test_a_planted_mistake_is_found(
    plant: Callable[[Patch], None], first_seed: int, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    for seed in range(first_seed, first_seed + SEEDS_MAX):
        try:
            await run_seed(seed, Counter())
        except AssertionError:
            return
    pytest.fail(f"not found in {SEEDS_MAX} seeds")
