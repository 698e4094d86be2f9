"""Ownership of a directory: one subdirectory per epoch, taken over by renaming the former one.

What is owned is a tablet, or a role of the coordinator.

To take over at epoch M, a claimant lists the epochs, claims M (`eM.tmp`), lists them again, seals
every live epoch below, clones the highest sealed one, publishes the clone (`eM`), lists the epochs
once more, and only then serves. After each piece of work, an owner checks that its own directory is
still there. If it is, no later owner had read anything before the work was done. That single `stat`
is the whole fence, and needs no clock.

Invariants:
- Of two claimants, at least one sees the other, because each lists the epochs after its claim.
- The highest sealed directory is never deleted, and no sealed one is ever written.
- Nothing that could be cloned is ever half deleted: a published epoch is renamed before it is
  removed.
- An epoch that was served stays, live or sealed, until a later one is published. So a caller that
  knows which one was served (`Inheritance.served_epoch`) can tell if it was lost.
- A live name next to the sealed directory of the same epoch is a ghost, made by something that
  knows only paths. It is never read.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

from percolator.errors import (
    InvalidArgument,
    NotReady,
    PercolatorError,
    StoreFault,
    StoreUnusable,
    TabletMoved,
)
from percolator.services.chassis.files import Files, FileStatus

T = TypeVar("T")

_PATTERN = re.compile(r"e([1-9][0-9]{0,19})(\.sealed|\.tmp|\.withdrawn)?")


class Stage(Enum):
    """The stage of a directory in the life of its epoch; the value is the suffix of its name."""

    LIVE = ""
    SEALED = ".sealed"
    CLAIM = ".tmp"
    WITHDRAWN = ".withdrawn"


@dataclass(frozen=True)
class EpochName:
    """The name of one epoch directory: one subdirectory per ownership, with its stage.

        e7            live: the owner at epoch 7 serves from it
        e7.sealed     a later owner took the name away; never written again
        e7.tmp        the claim of a process that is taking over at epoch 7
        e7.withdrawn  published, then given up before anything was served; or a ghost: created under
                      the live name after that was sealed. Only ever deleted

    An epoch is never used twice, so each name is created at most once, except for ghosts. Other
    names are not epochs and are left alone.
    """

    epoch: int
    stage: Stage

    def __str__(self) -> str:
        return f"e{self.epoch}{self.stage.value}"


@lru_cache(maxsize=1024)  # the few names in a directory, which are listed again and again
def parse(name: str) -> EpochName | None:
    """The epoch that a directory entry names; None for any other entry."""
    match = _PATTERN.fullmatch(name)
    return EpochName(int(match[1]), Stage(match[2] or "")) if match else None


def parse_all(names: Iterable[str]) -> list[EpochName]:
    """The epochs among directory entries, lowest first."""
    found = [parsed for parsed in map(parse, names) if parsed is not None]
    return sorted(found, key=lambda name: (name.epoch, name.stage.value))


def highest_sealed(names: Iterable[EpochName], below: int) -> EpochName | None:
    """The newest state that an owner before epoch `below` left behind."""
    sealed = [name for name in names if name.stage is Stage.SEALED and name.epoch < below]
    return max(sealed, key=lambda name: name.epoch, default=None)


_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST})
"""The target of a rename is a directory with content; file systems report different errors."""

EPOCH_MAX = 2**63 - 1
"""No master assigns a higher one. An epoch above this is never reported as one to overtake."""

LOOKS_MAX = 100
"""Rounds of look, seal and clone. Each repetition is caused by a step of another claimant, so this
many mean that something other than takeovers is changing the directory."""

Clone = Callable[[Files, Path, Path], Awaitable[None]]
"""Fills the second directory from the first; `FileNotFoundError` if the first one changed."""


@dataclass(frozen=True)
class Inheritance:
    """The former epoch that an owner starts with; nothing, by default, if there is none."""

    origin: Path | None = None
    """The epoch directory of a tablet that was split, under its live name. It is sealed first,
    unless it already is: then the clone holds everything that its last owner acknowledged."""

    must_exist: bool = False
    """True if there were former owners: then finding none means that data was lost."""

    served_epoch: int = 0
    """The last epoch that is known to have been served: finding only older ones means that what was
    acknowledged since then was lost. 0 if none is known."""


class SharedLook(Generic[T]):
    """One look at something slow, shared by all callers that came before it began.

    Belongs to one event loop. At most one look is under way.

    A response may leave only after a look that began when its work was done. Joining a look in
    progress would show an earlier state, so callers that come meanwhile share the next one.
    """

    def __init__(self, look: Callable[[], Awaitable[T]]) -> None:
        self._look = look
        self._waiting: list[asyncio.Future[T]] = []
        self._looking: asyncio.Task[None] | None = None

    def __call__(self) -> asyncio.Future[T]:
        """Resolves to the result of a look that begins after this call."""
        # A future for each caller: cancelling one does not affect the others.
        found: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(found)
        if self._looking is None:
            # It begins in the loop's next round, so that all callers in this one share it.
            self._looking = asyncio.create_task(self._run())
        return found

    async def _run(self) -> None:
        asked: list[asyncio.Future[T]] = []
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, []
                found = await self._look()
                for future in asked:
                    if not future.done():
                        future.set_result(found)
        except BaseException as error:
            # No caller may be left waiting, whatever ended it.
            for future in (*asked, *self._waiting):
                if not future.done():
                    _end(future, error)
            self._waiting.clear()
            if not isinstance(error, Exception):
                raise
        finally:
            self._looking = None


def _end(future: asyncio.Future[T], error: BaseException) -> None:
    if isinstance(error, Exception):
        future.set_exception(error)
    else:
        future.cancel()


class EpochDirectory:
    """The directory of one owner, which holds it until a later owner has sealed it.

    Asked after the work and before its answer leaves: then whatever was read or written came before
    anything that a later owner did. Inode and device are compared, not just the name.
    """

    def __init__(
        self,
        files: Files,
        path: Path,
        identity: FileStatus,
        *,
        must_exist: bool = False,
        waits: bool = True,
    ) -> None:
        """`files` is asked whether it is held. `must_exist`: something was inherited, and finding
        nothing means that data was lost. Unless a `stat` there `waits`, it needs no thread."""
        self.path = path
        self._owned: tuple[int, int] | None = identity.inode, identity.device
        self.must_exist = must_exist
        self._files = files
        self._waits = waits
        self._shared = SharedLook(self._look)

    def is_held_blocking(self) -> bool:
        """True if it is held. This blocks: it is for a thread that waits for the disk anyway."""
        try:
            return self._is(self._files.stat_now(self.path))
        except OSError:
            # Sealed, or a disk that cannot even tell: what is not known to be held is not.
            return False

    async def is_held(self) -> bool:
        """True if it is held, without blocking. Callers that came before a look began share it."""
        return await self._shared() if self._waits else self.is_held_blocking()

    async def _look(self) -> bool:
        try:
            return self._is(await self._files.stat(self.path))
        except OSError:
            return False

    def _is(self, found: FileStatus) -> bool:
        return (found.inode, found.device) == self._owned

    def give_up(self) -> None:
        """From now on it is not held, whatever is found there."""
        self._owned = None


async def take_over(
    files: Files,
    tablet: Path,
    epoch: int,
    clone: Clone,
    inheritance: Inheritance = Inheritance(),
    *,
    owner: Files | None = None,
) -> EpochDirectory:
    """Becomes the owner of the directory `tablet` at `epoch`, or raises `TabletMoved`.

    `owner` is what the owner asks whether it still is one; by default `files`.

    The directory has to exist. After a failure or a crash here, a new epoch is needed: this one
    counts as used. `StoreUnusable` if there is nothing to inherit, or only what is too old.
    """
    if epoch < 1:
        raise InvalidArgument("epoch", f"expected 1 or more, found {epoch}")
    return await _Takeover(files, tablet, epoch, clone, inheritance, owner or files).run()


class _Takeover:
    """One claimant, from its first look to its last."""

    def __init__(
        self,
        files: Files,
        tablet: Path,
        epoch: int,
        clone: Clone,
        inheritance: Inheritance,
        owner: Files,
    ) -> None:
        self._files = files
        self._tablet = tablet
        self._epoch = epoch
        self._clone = clone
        self._inheritance = inheritance
        self._owner = owner
        self._claim = tablet / str(EpochName(epoch, Stage.CLAIM))
        self._live = tablet / str(EpochName(epoch, Stage.LIVE))

    async def run(self) -> EpochDirectory:
        self._refuse_if_surpassed(await self._look(), own=None)
        try:
            await self._files.make_directory(self._claim)
        except FileExistsError:
            raise self._moved("another process claimed this epoch") from None
        try:
            identity = await self._files.stat(self._claim)
            await self._inherit()
            await self._files.rename(self._claim, self._live)
        except FileNotFoundError:
            # Only a later owner removes claims, when it cleans up.
            raise self._moved("a later owner removed the claim") from None
        except (PercolatorError, OSError):
            # Cancelled, or the disk is full: half a clone would only keep it full.
            await remove_tree(self._files, self._claim)
            raise
        # The seals and the new name reach the disk before anything is served from it.
        await self._files.fsync_directory(self._tablet)
        await self._look_last()
        inheritance = self._inheritance
        must_exist = inheritance.must_exist or inheritance.origin is not None
        waits = await self._owner.stat_waits(identity.device)
        return EpochDirectory(self._owner, self._live, identity, must_exist=must_exist, waits=waits)

    async def _inherit(self) -> None:
        """Seals what is live, and copies the newest state into the claim."""
        for _ in range(LOOKS_MAX):
            names = await self._look()
            self._refuse_if_surpassed(names, own=EpochName(self._epoch, Stage.CLAIM))
            live = [name for name in names if name.stage is Stage.LIVE and name.epoch < self._epoch]
            if live:
                # Another one may have appeared: nothing is cloned until a look finds none.
                await self._seal(live, names)
                continue
            former = highest_sealed(names, self._epoch)
            self._refuse_if_older(former)
            source = self._tablet / str(former) if former else await self._first_source()
            if source is None or await self._cloned(source):
                await self._files.fsync_directory(self._claim)
                return
        raise NotReady(f"{self._tablet}: the directory keeps changing", where="takeover")

    def _refuse_if_older(self, former: EpochName | None) -> None:
        """The directory of an owner stays until that of a later one was published. If both are
        gone, they were deleted by hand, or a restored copy never had them."""
        served = self._inheritance.served_epoch
        if served > (former.epoch if former else 0):
            left = f"{former} lacks what was acknowledged since then" if former else "none is left"
            raise StoreUnusable(
                f"{self._tablet / f'e{served}'} was in use, but it and every later epoch are "
                f"missing; {left}",
                fault=StoreFault.DAMAGED,
            )

    async def _seal(self, live: list[EpochName], names: list[EpochName]) -> None:
        for name in live:
            sealed = EpochName(name.epoch, Stage.SEALED)
            if sealed in names:
                await self._withdraw_ghost(name, names)
            else:
                await self._rename_away(name, sealed)

    async def _withdraw_ghost(self, name: EpochName, names: list[EpochName]) -> None:
        """An epoch is used once, so a live name next to its sealed one holds nothing that was ever
        acknowledged. If it stayed, it could not be sealed, and every takeover would fail."""
        withdrawn = EpochName(name.epoch, Stage.WITHDRAWN)
        if withdrawn in names:
            # An earlier ghost has the name. It is only ever deleted, and its deletion broke off.
            await remove_tree(self._files, self._tablet / str(withdrawn))
        await self._rename_away(name, withdrawn)

    async def _rename_away(self, name: EpochName, to: EpochName) -> None:
        try:
            await self._files.rename(self._tablet / str(name), self._tablet / str(to))
        except FileNotFoundError:
            # Another claimant was faster, or this one withdrew.
            return
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
            # Another claimant was faster, and a ghost has appeared since: the next look shows it.

    async def _first_source(self) -> Path | None:
        """Where a first owner's content is; None if it starts with nothing."""
        origin = self._inheritance.origin
        if origin is None:
            if self._inheritance.must_exist:
                raise StoreUnusable(
                    f"{self._tablet} is missing or empty, though it was served before",
                    fault=StoreFault.DAMAGED,
                )
            return None
        sealed = origin.with_name(origin.name + Stage.SEALED.value)
        if sealed.name in await self._names_beside(sealed):
            # The owner of the other half was faster. If anything has the live name now, it is a
            # ghost, and will be deleted with the directory of the tablet that was split.
            return sealed
        try:
            await self._files.rename(origin, sealed)
        except OSError as error:
            if error.errno in _OCCUPIED:
                return sealed
            if not isinstance(error, FileNotFoundError):
                raise
            # The owner of the other half was faster, or the data is gone.
            if sealed.name not in await self._names_beside(sealed):
                raise StoreUnusable(
                    f"{sealed}, from which {self._tablet} is to be cloned, is missing",
                    fault=StoreFault.DAMAGED,
                ) from None
            return sealed
        await self._files.fsync_directory(origin.parent)
        return sealed

    async def _names_beside(self, path: Path) -> list[str]:
        try:
            return await self._files.list(path.parent)
        except FileNotFoundError:
            return []

    async def _cloned(self, source: Path) -> bool:
        """False if the source changed meanwhile, so that everything has to be checked again."""
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
            # Make the name durable before deleting anything in it: a power cut may keep the
            # deletions and forget the new name, and an empty epoch would be live again.
            await self._files.fsync_directory(self._tablet)
            await remove_tree(self._files, withdrawn)
            raise

    async def _look(self) -> list[EpochName]:
        return parse_all(await self._files.list(self._tablet))

    def _refuse_if_surpassed(self, names: list[EpochName], *, own: EpochName | None) -> None:
        for name in names:
            if name.epoch >= self._epoch and name != own:
                # Tell the master the highest one, so that it overtakes all of them at once.
                highest = max(name.epoch for name in names)
                reason = f"{name} exists, and {highest} is the highest epoch"
                raise self._moved(reason, highest if highest <= EPOCH_MAX else 0)

    def _moved(self, reason: str, highest_epoch: int = 0) -> TabletMoved:
        return TabletMoved(
            f"cannot own {self._tablet} at epoch {self._epoch}: {reason}",
            tablet_id=int(self._tablet.name) if self._tablet.name.isdigit() else 0,
            epoch=self._epoch,
            highest_epoch=highest_epoch,
        )


async def make_tablet_directory(files: Files, root: Path, table_id: int, tablet_id: int) -> Path:
    """The directory of a tablet below the store root, durably created if it did not exist."""
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

    That is: claims and withdrawn epochs below its own, and all sealed ones but the highest. One
    that cannot be deleted does not keep the others: its error is raised when they are gone.
    """
    names = parse_all(await files.list(tablet))
    kept = highest_sealed(names, epoch)
    problem: OSError | None = None
    for name in names:
        if name.epoch < epoch and name.stage is not Stage.LIVE and name != kept:
            try:
                await remove_tree(files, tablet / str(name))
            except OSError as error:
                problem = problem or error
    if problem is not None:
        raise problem


async def remove_tree(files: Files, directory: Path) -> None:
    """Removes a directory with all that is in it; another process may do the same concurrently.

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
        except IsADirectoryError:
            # LevelDB's repair keeps what it has replaced in one.
            await remove_tree(files, directory / name)
        except FileNotFoundError:
            continue
