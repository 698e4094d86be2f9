"""The simulation finds planted bugs: on tablet servers, on a row store, and in takeovers.

`make planted-bugs` plants the slower ones, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from percolator.errors import StoreUnusable
from percolator.services.chassis.epoch_directory import (
    EpochName,
    Inheritance,
    Stage,
    _Takeover,
    take_over,
)
from percolator.services.tabletserver import storage
from percolator.services.tabletserver.storage import ClonePlan, clone_leveldb
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.simulation.bug import FIRST_SEEDS, Bug
from tests.simulation.planted_bugs import BUGS, seeds_until_caught
from tests.unit.tabletserver.interleavings import Explorer

# It only ends what hangs: virtual time takes as long as the machine needs for it.
pytestmark = pytest.mark.timeout(300)

_QUICKLY_CAUGHT = [bug for bug in BUGS if bug.is_quickly_caught]


@pytest.mark.parametrize("bug", _QUICKLY_CAUGHT, ids=lambda bug: bug.name)
def test_the_simulation_finds(bug: Bug) -> None:
    _, verdict = seeds_until_caught(bug)
    assert verdict is not None


def test_every_first_seed_is_that_of_a_bug() -> None:
    """A bug that was renamed would be searched from seed 0 again."""
    assert FIRST_SEEDS.keys() <= {bug.name for bug in BUGS}


# Bugs in takeovers that show only in few orders of system calls among many: all are tried.
#
# Tablets, and the roles of the coordinator, are taken over by the same procedure.

_TABLET = Path("/tablet")
_UNFINISHED = "000004.ldb"
"""File that the former owner's compaction writes when it is cut off: no MANIFEST names it yet."""
_NEW = b"what the new owner found in the logs"


def test_reading_before_sealing_loses_what_was_acknowledged_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader that reads the mark before it seals hands out timestamps twice."""

    async def read_first(self: _Takeover) -> None:
        names = [name for name in await self._look() if name.epoch < self._epoch]
        newest = max(names, key=lambda name: name.epoch)
        await self._cloned(self._tablet / str(newest))
        await self._seal([name for name in names if name.stage is Stage.LIVE], names)

    monkeypatch.setattr(_Takeover, "_inherit", read_first)
    assert Explorer((2,)).violations()


def test_without_looking_again_after_the_claim_a_write_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither of two claimants sees the other if both look only before they are visible."""

    def see_no_other(self: _Takeover, names: list[EpochName], *, own: EpochName | None) -> None:
        """After the claim, it does not look for others."""
        if own is None:
            correct(self, names, own=own)

    correct = _Takeover._refuse_if_surpassed
    monkeypatch.setattr(_Takeover, "_refuse_if_surpassed", see_no_other)
    assert Explorer((2, 3)).violations()


async def _served_after_epoch_2_was_lost() -> list[str]:
    disk = MemoryDisk()
    disk.make_durable_directory(_TABLET)
    files = MemoryFiles(disk)
    for epoch, name in enumerate(("CURRENT", "000003.log"), 1):
        own = (await take_over(files, _TABLET, epoch, clone_leveldb)).path
        async with await files.create(own / name) as file:
            await file.append(b"acknowledged")
    await files.rename(_TABLET / "e2", _TABLET / "lost")
    inheritance = Inheritance(must_exist=True, served_epoch=2)
    return await files.list((await take_over(files, _TABLET, 3, clone_leveldb, inheritance)).path)


async def test_without_the_last_served_epoch_a_tablet_goes_back_to_an_older_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(StoreUnusable):
        await _served_after_epoch_2_was_lost()
    monkeypatch.setattr(_Takeover, "_refuse_if_older", lambda self, former: None)
    assert await _served_after_epoch_2_was_lost() == ["CURRENT"], "the log was acknowledged"


async def _table_of_the_new_owner() -> bytes:
    """The new owner's table, after a takeover in the middle of a compaction that then continues."""
    disk = MemoryDisk()
    disk.make_durable_directory(_TABLET)
    former, new = MemoryFiles(disk), MemoryFiles(disk)
    own = (await take_over(former, _TABLET, 1, clone_leveldb)).path
    for name in ("CURRENT", "MANIFEST-000002", "000001.ldb", "000003.log"):
        async with await former.create(own / name) as file:
            await file.append(b"written")
    output = await former.create(own / _UNFINISHED)
    await output.append(b"half of a table")
    directory = (await take_over(new, _TABLET, 2, clone_leveldb)).path
    # Its counter comes from the same MANIFEST, so its first table gets the same number.
    async with await new.create(directory / _UNFINISHED, exclusive=False) as table:
        await table.append(_NEW)
        await table.fsync()
    await output.append(b", and the other half")
    return await new.read(directory / _UNFINISHED, bytes_max=1_000)


async def test_no_compaction_goes_on_writing_into_a_table_of_the_new_owner() -> None:
    assert await _table_of_the_new_owner() == _NEW


async def test_with_every_table_linked_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The former owner's process still runs behind its sealed directory, with its files open."""
    correct = storage.plan_clone

    def link_all(names: Iterable[str]) -> ClonePlan:
        plan = correct(names)
        return replace(plan, linked=plan.linked + plan.copied_last, copied_last=())

    monkeypatch.setattr(storage, "plan_clone", link_all)
    assert await _table_of_the_new_owner() != _NEW
