"""The real tablet server, which also records how much of each log is certainly on the disk.

    python -m tests.chaos.tablet_server --store STORE ...

LevelDB's log may end with data that was appended and not yet synced: a power cut drops that, in
whole or in part. A killed process leaves it in the page cache, where the next owner finds it. So
after each synced write (one at a time in a tablet) the size of the log is recorded. What is behind
the last recorded size was never acknowledged, and `drop_unsynced` removes some of it.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import IO

from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.settings import load
from percolator.services.tabletserver import leveldb
from percolator.services.tabletserver.service import build
from percolator.services.tabletserver.settings import TabletServerSettings
from percolator.services.tabletserver.storage import LevelDBStorage
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.world import Random

_NOTES = ".fsynced"


def note_fsyncs(notes: IO[str]) -> None:
    """Records every fsync of this process from now on."""
    write = LevelDBStorage.write

    async def noting(
        self: LevelDBStorage, batch: leveldb.WriteBatch, then: Callable[[], bool] | None = None
    ) -> bool:
        owned = await write(self, batch, then)
        for path, size in _logs(self._directory):
            notes.write(f"{size} {path}\n")
        return owned

    LevelDBStorage.write = noting  # type: ignore[method-assign]


def _logs(directory: Path) -> list[tuple[str, int]]:
    try:
        with os.scandir(directory) as entries:
            return [(one.path, one.stat().st_size) for one in entries if one.name.endswith(".log")]
    except FileNotFoundError:
        return []  # sealed by a later owner, or a log that was just removed


def notes_of(store: Path, server_id: str) -> Path:
    return store.parent / "run" / f"{server_id}{_NOTES}"


def unsynced(store: Path) -> dict[Path, tuple[int, int]]:
    """Logs that are longer than what is known to be on the disk: the synced and the present size.

    Only logs with a recorded size are included: a log that was copied for a new owner was synced by
    the copy.
    """
    synced: defaultdict[str, int] = defaultdict(int)
    for notes in (store.parent / "run").glob(f"*{_NOTES}"):
        for line in notes.read_text().split("\n")[:-1]:
            size, _, path = line.partition(" ")
            synced[path] = max(synced[path], int(size))
    found = {}
    for name, surely in synced.items():
        log = Path(name)
        if log.exists() and log.stat().st_size > surely:
            found[log] = surely, log.stat().st_size
    return found


def drop_unsynced(store: Path, chance: Random) -> int:
    """Cuts off the end of each log anywhere, like a power cut. Returns how many bytes are gone."""
    dropped = 0
    for path, (synced, present) in unsynced(store).items():
        left = synced + int(chance.random() * (present - synced))
        os.truncate(path, left)
        dropped += present - left
    return dropped


if __name__ == "__main__":
    settings = load(TabletServerSettings)
    with notes_of(settings.store_root, str(os.getpid())).open("w", buffering=1) as notes:
        note_fsyncs(notes)
        code = run(settings, ServiceKind.SERVICE_KIND_TABLET_SERVER, build)
    sys.exit(code)
