"""Which cluster a store root belongs to: the file `cluster.json` in it.

    {"cluster_id": "9f…", "format": 1, "created_by": "0.1.0"}

Format 2 says that values expire somewhere: older releases would show them, and their masters would
forget which. All other clusters keep format 1, so that one can go back to the release before.

Invariants:
- The file appears at once with its whole, durable content, or not at all. If several masters start
  at once on an empty root, exactly one writes it; all read the same. After that, only its format is
  ever changed, and only raised.
- A root that holds anything but has no identity is refused: it is used for something else, or its
  file was lost, and data of two clusters in one root could never be told apart again.
- A root of a newer format is refused: an old release would damage what it does not understand.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from percolator.errors import InvalidArgument, StoreFault, StoreUnusable, WrongCluster
from percolator.services.chassis.store.files import Files
from percolator.services.chassis.version import version
from percolator.world import Random

FILE_NAME = "cluster.json"
FIRST_FORMAT = 1
"""That of a new store."""
EXPIRING_FORMAT = 2
"""That of a store in which values expire."""
STORE_FORMAT = EXPIRING_FORMAT
"""The highest one that this release opens; it opens all older ones, too."""

_BYTES_MAX = 4_096
_CLUSTER_ID = re.compile(r"[\x21-\x7e]{1,128}")
_UNFINISHED = FILE_NAME + ".new-"
_IN_NEW_FILE_SYSTEMS = frozenset({"lost+found"})
"""Names that do not make a store root foreign: a new file system is not empty."""


@dataclass(frozen=True)
class ClusterIdentity:
    """What a store root says about itself."""

    cluster_id: str
    format: int


async def establish_identity(files: Files, root: Path, random: Random) -> ClusterIdentity:
    """The identity of the root, created if the root is empty. Also finds out if it is writable."""
    names = await _names(files, root)
    found = FILE_NAME in names
    if not found:
        _refuse_foreign(root, names)
    unfinished = root / f"{_UNFINISHED}{random.getrandbits(64):016x}"
    content = {
        "cluster_id": f"{random.getrandbits(128):032x}",
        "format": FIRST_FORMAT,
        "created_by": version(),
    }
    await _write(files, unfinished, content)
    if not found:
        # Another master may have been faster: then its identity counts.
        with suppress(FileExistsError):
            # Creates exclusively, like O_EXCL, but never shows half a file.
            await files.link(unfinished, root / FILE_NAME)
    await files.unlink(unfinished)
    await files.fsync_directory(root)
    return await read_identity(files, root)


async def raise_format(files: Files, root: Path, number: int, random: Random) -> None:
    """Has releases that do not know this format refuse the store. Several may do so at once."""
    known = await read_identity(files, root)
    if known.format >= number:
        return
    unfinished = root / f"{_UNFINISHED}{random.getrandbits(64):016x}"
    # `created_by` is what the refusal advises to use.
    content = {"cluster_id": known.cluster_id, "format": number, "created_by": version()}
    await _write(files, unfinished, content)
    await files.rename(unfinished, root / FILE_NAME)
    await files.fsync_directory(root)


async def read_identity(files: Files, root: Path) -> ClusterIdentity:
    """The identity of a root that has one."""
    path = root / FILE_NAME
    try:
        data = await files.read(path, bytes_max=_BYTES_MAX)
    except FileNotFoundError:
        raise InvalidArgument(
            "store", f"{root} belongs to no cluster yet: start a master on it first"
        ) from None
    return parse_identity(data, str(path), f"store: {root}")


def parse_identity(data: bytes, where: str, store: str) -> ClusterIdentity:
    """The identity in these bytes. `where` names them in errors, and `store` the whole store."""
    try:
        content = json.loads(data)
        cluster_id, number = content["cluster_id"], content["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(where, str(error)) from None
    if not isinstance(cluster_id, str) or not _CLUSTER_ID.fullmatch(cluster_id):
        raise _damaged(where, f"cluster_id is {str(cluster_id)[:64]!r}")
    if type(number) is not int or number < 1:
        raise _damaged(where, f"format is {number!r}")
    if number > STORE_FORMAT:
        raise WrongCluster(
            f"{store} has format {number}, written by release "
            f"{content.get('created_by', 'unknown')}; this release, {version()}, knows formats up "
            f"to {STORE_FORMAT}: use that release or a later one",
            expected=f"format {STORE_FORMAT}",
            found=f"format {number}",
        )
    return ClusterIdentity(cluster_id, number)


async def check_identity(files: Files, root: Path, cluster_id: str) -> None:
    """Refuses a root of a cluster other than the one to which this process belongs."""
    require_same_cluster(await read_identity(files, root), str(root), cluster_id)


def require_same_cluster(found: ClusterIdentity, store: str, cluster_id: str) -> None:
    """Refuses a store of a cluster other than the one to which this process belongs."""
    if found.cluster_id != cluster_id:
        raise WrongCluster(
            f"store: {store} belongs to cluster {found.cluster_id}, the masters to cluster "
            f"{cluster_id}",
            expected=cluster_id,
            found=found.cluster_id,
        )


async def refuse_other_cluster(files: Files, root: Path, cluster_id: str) -> None:
    """Refuses a root whose identity names another cluster or a newer format.

    For a service that may have its own disk, where no master ever wrote an identity.
    """
    try:
        await files.stat(root / FILE_NAME)
    except FileNotFoundError:
        return
    if cluster_id:
        await check_identity(files, root, cluster_id)
    else:
        await read_identity(files, root)


async def _write(files: Files, path: Path, content: dict[str, object]) -> None:
    async with await files.create(path) as file:
        await file.append((json.dumps(content) + "\n").encode())
        await file.fsync()


async def _names(files: Files, root: Path) -> list[str]:
    try:
        return await files.list(root)
    except FileNotFoundError:
        # Create only the last directory: a missing parent is often a disk that is not mounted, and
        # a new cluster in its place would be a surprise.
        await files.make_directory(root)
        await files.fsync_directory(root.parent)
        return []


def _refuse_foreign(root: Path, names: list[str]) -> None:
    foreign = [
        name
        for name in names
        if name not in _IN_NEW_FILE_SYSTEMS and not name.startswith(_UNFINISHED)
    ]
    if foreign:
        raise InvalidArgument(
            "store",
            f"{root} is not empty (it holds {foreign[0]!r}), but has no {FILE_NAME}: a cluster "
            "begins in an empty directory",
        )


def _damaged(where: str, reason: str) -> StoreUnusable:
    return StoreUnusable(f"store: {where} is damaged: {reason}", fault=StoreFault.DAMAGED)
