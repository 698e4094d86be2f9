"""Ownership of a directory: one below it per epoch, taken over by renaming the former one away.

What is owned is a tablet, or a role of the coordinator.

A claimant at epoch M looks, claims (`eM.tmp`), looks again, seals every live epoch below, clones
the highest sealed one, publishes (`eM`), looks once more, and only then serves. An owner that still
finds its own directory after it did something knows that no later owner had read anything before
it was done; that one `stat` is the whole fence, and needs no clock.

Invariants: of two claimants at least one sees the other, because each looks after it became
visible; the highest sealed directory is never deleted, and no sealed one is ever written; nothing
that could be cloned is ever half deleted (a published epoch is renamed before it is removed).
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from percolator.errors import (
    InvalidArgument,
    NotReady,
    PercolatorError,
    StoreFault,
    StoreUnusable,
    TabletMoved,
)
from services.chassis import epoch_names
from services.chassis.epoch_names import EpochName, Stage
from services.chassis.files import Files, FileStatus

LOOKS_MAX = 100
"""Rounds of look, seal and clone. Each repetition takes a step of another claimant, so that many
mean that something else than takeovers is at work in the directory."""

Clone = Callable[[Files, Path, Path], Awaitable[None]]
"""Fills the second directory from the first; `FileNotFoundError` when that one changed."""


@dataclass(frozen=True)
class EpochDirectory:
    """The directory of one owner, while it stands and when it no longer does."""

    files: Files
    path: Path
    identity: FileStatus

    def stands(self) -> bool:
        """Whether no later owner had sealed it when this was asked.

        Asked after the work and before its answer leaves: then whatever was read or written came
        before anything that a later owner did. Compares inode and device, not just the name.
        """
        try:
            found = self.files.stat_now(self.path)
        except OSError:
            # Sealed, or a disk that cannot even tell: what is not known to stand does not.
            return False
        return (found.inode, found.device) == (self.identity.inode, self.identity.device)


@dataclass(frozen=True)
class Inheritance:
    """What a first owner, who finds no former epoch, begins with. By default with nothing."""

    origin: Path | None = None
    """The epoch directory of a tablet that was split, under its live name. It is sealed first, if
    nobody has done so yet: whatever its last owner acknowledged is in what is cloned then."""

    must_exist: bool = False
    """There were former owners: finding none means that data was lost."""


async def take_over(
    files: Files,
    tablet: Path,
    epoch: int,
    clone: Clone,
    inheritance: Inheritance = Inheritance(),
) -> EpochDirectory:
    """Becomes the owner of the directory `tablet` at `epoch`, or raises `TabletMoved`.

    The directory exists. Whoever failed here, or crashed, needs a new epoch: this one counts as
    used. `StoreUnusable` when there is nothing to inherit and there should be.
    """
    if epoch < 1:
        raise InvalidArgument("epoch", f"expected 1 or more, found {epoch}")
    return await _Takeover(files, tablet, epoch, clone, inheritance).run()


class _Takeover:
    """One claimant, from its first look to its last."""

    def __init__(
        self, files: Files, tablet: Path, epoch: int, clone: Clone, inheritance: Inheritance
    ) -> None:
        self._files = files
        self._tablet = tablet
        self._epoch = epoch
        self._clone = clone
        self._inheritance = inheritance
        self._claim = tablet / str(EpochName(epoch, Stage.CLAIM))
        self._live = tablet / str(EpochName(epoch, Stage.LIVE))

    async def run(self) -> EpochDirectory:
        self._refuse_if_surpassed(await self._look(), own=None)
        try:
            await self._files.make_directory(self._claim)
        except FileExistsError:
            raise self._moved("somebody else claimed this epoch") from None
        try:
            identity = await self._files.stat(self._claim)
            await self._inherit()
            await self._files.rename(self._claim, self._live)
        except FileNotFoundError:
            # Only a later owner removes claims, as waste.
            raise self._moved("a later owner removed the claim") from None
        except (PercolatorError, OSError):
            # Given up, or the disk is full: half a clone would only keep it full.
            await remove_tree(self._files, self._claim)
            raise
        # The seals and the new name reach the disk before anything is served from it.
        await self._files.fsync_directory(self._tablet)
        await self._look_last()
        return EpochDirectory(self._files, self._live, identity)

    async def _inherit(self) -> None:
        """Seals what is live, and copies the newest state into the claim."""
        for _ in range(LOOKS_MAX):
            names = await self._look()
            self._refuse_if_surpassed(names, own=EpochName(self._epoch, Stage.CLAIM))
            live = [name for name in names if name.stage is Stage.LIVE and name.epoch < self._epoch]
            if live:
                # Another may have appeared meanwhile: nothing is cloned until a look finds none.
                await self._seal(live)
                continue
            former = epoch_names.highest_sealed(names, self._epoch)
            source = self._tablet / str(former) if former else await self._first_source()
            if source is None or await self._cloned(source):
                await self._files.fsync_directory(self._claim)
                return
        raise NotReady(f"{self._tablet}: the directory does not come to rest", where="takeover")

    async def _seal(self, live: list[EpochName]) -> None:
        for name in live:
            sealed = EpochName(name.epoch, Stage.SEALED)
            try:
                await self._files.rename(self._tablet / str(name), self._tablet / str(sealed))
            except FileNotFoundError:
                # Another claimant was faster, or this one withdrew.
                continue

    async def _first_source(self) -> Path | None:
        """Where a first owner's content is; None when it begins with nothing."""
        origin = self._inheritance.origin
        if origin is None:
            if self._inheritance.must_exist:
                raise StoreUnusable(
                    f"{self._tablet} is missing or empty, though it was served before",
                    fault=StoreFault.DAMAGED,
                )
            return None
        sealed = origin.with_name(origin.name + Stage.SEALED.value)
        try:
            await self._files.rename(origin, sealed)
            await self._files.fsync_directory(origin.parent)
        except FileNotFoundError:
            # The owner of the other half was faster, or the data is gone.
            if sealed.name not in await self._names_beside(sealed):
                raise StoreUnusable(
                    f"{sealed}, from which {self._tablet} is to be cloned, is missing",
                    fault=StoreFault.DAMAGED,
                ) from None
        return sealed

    async def _names_beside(self, path: Path) -> list[str]:
        try:
            return await self._files.list(path.parent)
        except FileNotFoundError:
            return []

    async def _cloned(self, source: Path) -> bool:
        """False when the source changed meanwhile, and everything is to be looked at again."""
        try:
            await self._clone(self._files, source, self._claim)
        except FileNotFoundError:
            await _remove_files(self._files, self._claim)
            return False
        return True

    async def _look_last(self) -> None:
        names = await self._look()
        own = EpochName(self._epoch, Stage.LIVE)
        try:
            self._refuse_if_surpassed(names, own=own)
        except TabletMoved:
            # Renamed first: a directory that is half deleted under a live name would be sealed
            # and cloned by the next claimant.
            withdrawn = self._tablet / str(EpochName(self._epoch, Stage.WITHDRAWN))
            try:
                await self._files.rename(self._live, withdrawn)
            except FileNotFoundError:
                # Sealed already: it is the next owner's source, and complete.
                raise self._moved("sealed by a later claimant") from None
            # Durably, before anything in it goes: a power cut may keep what happened in the
            # directory and forget its new name, and an empty epoch would be live again.
            await self._files.fsync_directory(self._tablet)
            await remove_tree(self._files, withdrawn)
            raise

    async def _look(self) -> list[EpochName]:
        return epoch_names.parse_all(await self._files.list(self._tablet))

    def _refuse_if_surpassed(self, names: list[EpochName], *, own: EpochName | None) -> None:
        for name in names:
            if name.epoch >= self._epoch and name != own:
                raise self._moved(f"{name} is there")

    def _moved(self, reason: str) -> TabletMoved:
        return TabletMoved(
            f"cannot own {self._tablet} at epoch {self._epoch}: {reason}",
            tablet_id=int(self._tablet.name) if self._tablet.name.isdigit() else 0,
            epoch=self._epoch,
        )


async def make_tablet_directory(files: Files, root: Path, table_id: int, tablet_id: int) -> Path:
    """The directory of a tablet below the store root, made durably if it was not there."""
    table = root / str(table_id)
    tablet = table / str(tablet_id)
    for directory in (table, tablet):
        try:
            await files.make_directory(directory)
        except FileExistsError:
            continue
        await files.fsync_directory(directory.parent)
    return tablet


async def remove_superseded(files: Files, tablet: Path, epoch: int) -> None:
    """Deletes what the owner at `epoch` no longer needs; called by an owner that serves.

    Claims and withdrawn epochs below its own, and all sealed ones but the highest.
    """
    names = epoch_names.parse_all(await files.list(tablet))
    kept = epoch_names.highest_sealed(names, epoch)
    for name in names:
        if name.epoch < epoch and name.stage is not Stage.LIVE and name != kept:
            await remove_tree(files, tablet / str(name))


async def remove_tree(files: Files, directory: Path) -> None:
    """Removes a directory of files; if somebody else is at it too, that is fine.

    A deposed owner may just have added a file: then the directory stays until the next time.
    """
    try:
        await _remove_files(files, directory)
        await files.remove_directory(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


async def _remove_files(files: Files, directory: Path) -> None:
    for name in await files.list(directory):
        try:
            await files.unlink(directory / name)
        except FileNotFoundError:
            continue
