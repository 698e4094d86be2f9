"""Cloning a LevelDB directory whose former owner may still be writing into it.

The former owner was cut off by a rename, but its process may live: its open log and its open
compaction output still grow. Contract: the clone holds everything that it wrote before the rename,
and shares no file that either side may still write.

CURRENT, MANIFEST and the logs are copied first, so that every table the copied MANIFEST names is
still there when its turn comes. Tables numbered below the smallest log are finished, and are
hard-linked; later ones are copied, because the new owner restores its counter of file numbers from
the same MANIFEST and would truncate, through a link, a table under which the former owner still
writes. LOCK and the information logs are left behind.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from services.chassis.files import Files

FILE_BYTES_MAX = 1 << 30
"""Larger files are not copied: LevelDB's logs and tables are a few MiB, its MANIFEST less."""

_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})
"""The file system has no hard links, or no more, between these two places."""

_MANIFEST = re.compile(r"MANIFEST-[0-9]+")
_LOG = re.compile(r"([0-9]+)\.log")
_TABLE = re.compile(r"([0-9]+)\.(?:ldb|sst)")


@dataclass(frozen=True)
class ClonePlan:
    """What becomes of the files of a LevelDB directory."""

    copied_first: tuple[str, ...]
    linked: tuple[str, ...]
    copied_last: tuple[str, ...]


def plan_clone(names: Iterable[str]) -> ClonePlan:
    """Decides by the names alone. Without any log, no table counts as finished."""
    present = sorted(names)
    logs = {name: int(match[1]) for name in present if (match := _LOG.fullmatch(name))}
    smallest_log = min(logs.values(), default=0)
    tables = {name: int(match[1]) for name in present if (match := _TABLE.fullmatch(name))}
    current = [name for name in present if name == "CURRENT"]
    manifests = [name for name in present if _MANIFEST.fullmatch(name)]
    return ClonePlan(
        copied_first=(*current, *manifests, *logs),
        linked=tuple(name for name, number in tables.items() if number < smallest_log),
        copied_last=tuple(name for name, number in tables.items() if number >= smallest_log),
    )


def lacks_current(names: Iterable[str]) -> bool:
    """Whether data is there that LevelDB would not find: damage, never a crash at creation."""
    present = set(names)
    return "CURRENT" not in present and any(
        _LOG.fullmatch(name) or _TABLE.fullmatch(name) for name in present
    )


async def clone_leveldb(files: Files, source: Path, target: Path) -> None:
    """Clones `source` into the empty directory `target`, with every copy durable.

    `FileNotFoundError` when `source` changed meanwhile: then `target` is to be emptied, and all is
    to be done again. The caller makes the names durable.
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
        # The names are made durable by whoever publishes the clone; the content is made so here.
        await file.fsync()
