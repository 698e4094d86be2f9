"""A claimant that dies, or whose disk fails, at any of its system calls."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import pytest

from percolator.errors import InvalidArgument, TabletMoved
from percolator.services.chassis import epoch_directory
from percolator.services.chassis.epoch_directory import (
    Clone,
    EpochDirectory,
    EpochName,
    Stage,
    make_tablet_directory,
    remove_superseded,
    take_over,
)
from percolator.services.chassis.files import Files
from percolator.services.tabletserver.storage import clone_leveldb
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.unit.tabletserver.interleavings import Explorer

ROOT = Path("/store")
TABLET = ROOT / "1" / "7"
FORMER = {
    "000004.ldb": b"an old table",
    "000005.log": b"acknowledged",
    "000006.ldb": b"a young table",
    "CURRENT": b"MANIFEST-000002\n",
    "MANIFEST-000002": b"a manifest",
}


async def owned_before() -> MemoryDisk:
    """A disk with the tablet as an owner at epoch 1 left it, all durable."""
    disk = MemoryDisk()
    disk.make_durable_directory(ROOT)
    files = MemoryFiles(disk)
    await make_tablet_directory(files, ROOT, 1, 7)
    owner = await take_over(files, TABLET, 1, clone_leveldb)
    for name, content in FORMER.items():
        async with await files.create(owner.path / name) as file:
            await file.append(content)
            await file.fsync()
    await files.fsync_directory(owner.path)
    return disk


@pytest.fixture
@asynccontextmanager
async def left() -> AsyncIterator[MemoryFiles]:
    """The files that the owner at epoch 1 has left."""
    yield MemoryFiles(await owned_before())


async def content(disk: MemoryDisk, directory: EpochDirectory) -> dict[str, bytes]:
    files = MemoryFiles(disk)
    names = await files.list(directory.path)
    return {name: await files.read(directory.path / name, bytes_max=1000) for name in names}


async def system_calls_of_a_takeover() -> int:
    files = MemoryFiles(await owned_before())
    await take_over(files, TABLET, 2, clone_leveldb)
    return files.faults.calls


async def run_until_killed(files: MemoryFiles, epoch: int, clone: Clone = clone_leveldb) -> None:
    claim = asyncio.create_task(take_over(files, TABLET, epoch, clone))
    killed = asyncio.create_task(files.killed.wait())
    await asyncio.wait({claim, killed}, return_when=asyncio.FIRST_COMPLETED)
    for task in (claim, killed):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await claim


@pytest.mark.parametrize("power", ["stays", "fails", "fails and some survives"])
async def test_after_a_claimant_died_anywhere_the_next_one_has_everything(power: str) -> None:
    random = Random(11)
    for call in range(await system_calls_of_a_takeover() + 1):
        disk = await owned_before()
        dying = MemoryFiles(disk)
        dying.faults.kill_at(call)
        await run_until_killed(dying, 2)
        if power != "stays":
            disk.cut_power(random if power == "fails and some survives" else None)
        owner = await take_over(MemoryFiles(disk), TABLET, 3, clone_leveldb)
        assert await content(disk, owner) == FORMER, f"killed at call {call}"


async def test_an_epoch_that_was_withdrawn_is_no_source_after_a_power_cut() -> None:
    """Files deleted under the live name may stay deleted, and the live name may come back."""

    async def meet_another(files: Files, source: Path, target: Path) -> None:
        await clone_leveldb(files, source, target)
        await files.make_directory(TABLET / "e3.tmp")

    withdrawn = 0
    for call in range(60):
        for seed in range(8):
            disk = await owned_before()
            dying = MemoryFiles(disk)
            dying.faults.kill_at(call)
            with contextlib.suppress(TabletMoved):
                await run_until_killed(dying, 2, meet_another)
            names = await MemoryFiles(disk).list(TABLET)
            withdrawn += "e2.withdrawn" in names
            disk.cut_power(Random(seed))
            owner = await take_over(MemoryFiles(disk), TABLET, 4, clone_leveldb)
            assert await content(disk, owner) == FORMER, f"killed at call {call}, seed {seed}"
    assert withdrawn


async def test_a_claimant_whose_disk_fails_anywhere_leaves_the_tablet_to_the_next_one() -> None:
    operations = ("make_directory", "rename", "link", "create", "append", "fsync", "list", "read")
    for operation in (*operations, "fsync_directory"):
        for nth in range(1, 12):
            disk = await owned_before()
            failing = MemoryFiles(disk)
            failing.faults.fail(operation, nth=nth, number=errno.ENOSPC)
            with contextlib.suppress(OSError):
                await take_over(failing, TABLET, 2, clone_leveldb)
            owner = await take_over(MemoryFiles(disk), TABLET, 3, clone_leveldb)
            assert await content(disk, owner) == FORMER, f"{operation} {nth}"


async def test_a_full_disk_is_not_kept_full_by_half_a_clone(left: MemoryFiles) -> None:
    left.faults.fail("append", nth=3, number=errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        await take_over(left, TABLET, 2, clone_leveldb)
    assert await left.list(TABLET) == ["e1.sealed"]


async def test_a_published_epoch_survives_a_power_cut() -> None:
    disk = await owned_before()
    owner = await take_over(MemoryFiles(disk), TABLET, 2, clone_leveldb)
    disk.cut_power()
    assert await MemoryFiles(disk).list(TABLET) == ["e1.sealed", "e2"]
    assert await content(disk, owner) == FORMER


async def test_a_used_epoch_is_refused_in_whatever_state_it_is() -> None:
    for name in ("e5", "e5.sealed", "e5.tmp", "e5.withdrawn", "e6"):
        disk = await owned_before()
        files = MemoryFiles(disk)
        await files.make_directory(TABLET / name)
        with pytest.raises(TabletMoved):
            await take_over(files, TABLET, 5, clone_leveldb)
        assert await files.list(TABLET) == ["e1", name]


async def test_epoch_zero_is_no_epoch() -> None:
    disk = await owned_before()
    with pytest.raises(InvalidArgument, match="epoch"):
        await take_over(MemoryFiles(disk), TABLET, 0, clone_leveldb)


async def test_an_owner_knows_another_directory_of_the_same_name(left: MemoryFiles) -> None:
    owner = await take_over(left, TABLET, 2, clone_leveldb)
    assert await owner.is_held()
    await left.rename(TABLET / "e2", TABLET / "e2.sealed")
    assert not await owner.is_held()
    await left.make_directory(TABLET / "e2")
    assert not await owner.is_held()


async def test_an_owner_whose_disk_cannot_tell_does_not_say_that_it_still_owns(
    left: MemoryFiles,
) -> None:
    owner = await take_over(left, TABLET, 2, clone_leveldb)
    left.faults.fail("stat", number=errno.EIO)
    assert not await owner.is_held()
    assert await owner.is_held()


async def test_clearing_up_keeps_the_newest_sealed_epoch_and_strangers(left: MemoryFiles) -> None:
    for epoch in (2, 4):
        await take_over(left, TABLET, epoch, clone_leveldb)
    for name in ("e3.tmp", "e3.withdrawn", "notes", "e9.tmp"):
        await left.make_directory(TABLET / name)
    await remove_superseded(left, TABLET, 4)
    assert await left.list(TABLET) == ["e2.sealed", "e4", "e9.tmp", "notes"]


# Takeovers of one tablet, with their system calls in every order.

WALKS = 2_000


@pytest.mark.parametrize("epochs", [(2,), (2, 3), (2, 2)])
def test_no_order_of_system_calls_loses_an_acknowledged_write(epochs: tuple[int, ...]) -> None:
    """Every state is a crash too: a process that goes no further was killed or paused there."""
    explorer = Explorer(epochs)
    assert explorer.violations() == []
    # Not vacuous: each acknowledges in some order, and the first owner does not in every one.
    assert {process for outcome in explorer.outcomes for process in outcome} == set(
        range(len(epochs) + 1)
    )
    assert any(0 not in outcome for outcome in explorer.outcomes)
    if len(set(epochs)) == len(epochs):
        # Nor do all of them withdraw forever: the one with the highest epoch gets the tablet.
        assert all(len(epochs) in outcome for outcome in explorer.outcomes)


@pytest.mark.parametrize("epochs", [(2, 3, 4), (2, 2, 3)])
def test_three_claimants_lose_no_acknowledged_write(epochs: tuple[int, ...]) -> None:
    explorer = Explorer(epochs)
    random = Random(7)
    for _ in range(WALKS):
        assert explorer.walk(random) == []
    assert len(explorer.outcomes) > 3


def test_a_directory_recreated_by_a_deposed_owner_does_not_prevent_a_takeover() -> None:
    """An owner that is deposed before it opens its database leaves a ghost under its live name,
    beside what was sealed. The next claimant serves all the same, in every order."""
    explorer = Explorer((2,), recreating=True)
    assert explorer.violations() == []
    assert all(1 in outcome for outcome in explorer.outcomes)


@pytest.mark.parametrize("epochs", [(2, 3), (2, 3, 4)])
def test_several_ghosts_do_not_prevent_a_takeover(epochs: tuple[int, ...]) -> None:
    explorer = Explorer(epochs, recreating=True)
    random = Random(11)
    for _ in range(WALKS):
        assert explorer.walk(random) == []
    assert all(len(epochs) in outcome for outcome in explorer.outcomes)


def test_when_a_ghost_is_sealed_like_an_epoch_no_takeover_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted bug: the ghost cannot be renamed over what was sealed under its epoch."""

    async def seal(
        self: epoch_directory._Takeover, live: list[EpochName], names: list[EpochName]
    ) -> None:
        for name in live:
            sealed = EpochName(name.epoch, Stage.SEALED)
            with suppress(FileNotFoundError):
                await self._files.rename(self._tablet / str(name), self._tablet / str(sealed))

    monkeypatch.setattr(epoch_directory._Takeover, "_seal", seal)
    explorer = Explorer((2,), recreating=True)
    assert explorer.violations() == []
    assert frozenset() in explorer.outcomes


async def _nothing(self: object) -> None:
    """Takes the place of a step that is left out."""


def test_without_the_last_look_a_write_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_directory._Takeover, "_look_last", _nothing)
    assert Explorer((2, 3)).violations()


def test_without_the_check_of_the_directory_a_write_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def always(self: object) -> bool:
        return True

    monkeypatch.setattr(epoch_directory.EpochDirectory, "_look", always)
    assert Explorer((2,)).violations()


def test_removing_a_published_epoch_under_its_live_name_loses_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def remove_in_place(self: epoch_directory._Takeover) -> None:
        names = await self._look()
        try:
            self._refuse_if_surpassed(names, own=EpochName(self._epoch, Stage.LIVE))
        except TabletMoved:
            await epoch_directory.remove_tree(self._files, self._live)
            raise

    monkeypatch.setattr(epoch_directory._Takeover, "_look_last", remove_in_place)
    assert Explorer((2, 3)).violations()
