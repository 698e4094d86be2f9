"""Cloning a LevelDB directory whose former owner may still be writing into it.

The former owner was cut off by a rename, but its process may still run: its open log and its open
compaction output keep growing. Contract: the clone holds everything that was written before the
rename, and shares no file that either side may still write.

CURRENT, MANIFEST and the logs are copied first, so that every table that the copied MANIFEST names
still exists when its turn comes. Tables numbered below the smallest log are finished, and are
hard-linked. Later ones are copied: the new owner restores its counter of file numbers from the same
MANIFEST, so through a link it would truncate a table that the former owner is still writing. LOCK
and the information logs are left behind.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from percolator.services.chassis.files import Files

FILE_BYTES_MAX = 1 << 30
"""Larger files are not copied: LevelDB's logs and tables are a few MiB, its MANIFEST less."""

_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})
"""The file system has no hard links between these two places, or allows no more of them."""

CURRENT = "CURRENT"
"""Every database has this file, from its creation on."""

_MANIFEST = re.compile(r"MANIFEST-[0-9]+")
_LOG = re.compile(r"([0-9]+)\.log")
_TABLE = re.compile(r"([0-9]+)\.(?:ldb|sst)")


@dataclass(frozen=True)
class ClonePlan:
    """What to do with the files of a LevelDB directory."""

    copied_first: tuple[str, ...]
    linked: tuple[str, ...]
    copied_last: tuple[str, ...]


def plan_clone(names: Iterable[str]) -> ClonePlan:
    """Decides by the names alone. If there is no log, no table counts as finished."""
    present = sorted(names)
    logs = {name: int(match[1]) for name in present if (match := _LOG.fullmatch(name))}
    smallest_log = min(logs.values(), default=0)
    tables = {name: int(match[1]) for name in present if (match := _TABLE.fullmatch(name))}
    current = [name for name in present if name == CURRENT]
    manifests = [name for name in present if _MANIFEST.fullmatch(name)]
    return ClonePlan(
        copied_first=(*current, *manifests, *logs),
        linked=tuple(name for name, number in tables.items() if number < smallest_log),
        copied_last=tuple(name for name, number in tables.items() if number >= smallest_log),
    )


def lacks_current(names: Iterable[str]) -> bool:
    """Whether there is data that LevelDB would not find: that is damage, never the result of a
    crash during creation."""
    present = set(names)
    return CURRENT not in present and any(
        _LOG.fullmatch(name) or _TABLE.fullmatch(name) for name in present
    )


async def clone_leveldb(files: Files, source: Path, target: Path) -> None:
    """Clones `source` into the empty directory `target`, with every copy durable.

    `FileNotFoundError` if `source` changed meanwhile: then `target` has to be emptied, and
    everything done again. The caller makes the names durable.
    """
    plan = plan_clone(await files.list(source))
    for name in plan.copied_first:
        await _copy(files, source / name, target / name)
    for name in plan.linked:
        try:
            await files.link(source / name, target / name)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            await _copy(files, source / name, target / name)
    for name in plan.copied_last:
        await _copy(files, source / name, target / name)


async def _copy(files: Files, source: Path, target: Path) -> None:
    data = await files.read(source, bytes_max=FILE_BYTES_MAX)
    async with await files.create(target) as file:
        await file.append(data)
        # Make the content durable here; publishing the clone makes the names durable.
        await file.fsync()
