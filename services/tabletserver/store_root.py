"""The store root as a tablet server finds it at start: usable, coherent, of the right cluster."""

from __future__ import annotations

import os
from pathlib import Path

from structlog.stdlib import BoundLogger

from percolator.errors import InvalidArgument
from services.chassis.cluster_identity import FILE_NAME, check_identity, read_identity
from services.chassis.files import Files
from services.tabletserver.host_limits import network_file_system
from services.tabletserver.settings import TabletServerSettings


async def open_store_root(
    files: Files, settings: TabletServerSettings, cluster_id: str, log: BoundLogger
) -> Path:
    """The path of the store root; `InvalidArgument` names what is wrong with it."""
    root = settings.store_root
    try:
        status = await files.stat(root)
    except FileNotFoundError:
        raise InvalidArgument("store", f"{root} is not there") from None
    if not status.is_directory:
        raise InvalidArgument("store", f"{root} is not a directory")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidArgument("store", f"{root} is not writable")
    _refuse_network(root, settings, log)
    if settings.masters:
        await check_identity(files, root, cluster_id)
    else:
        if FILE_NAME in await files.list(root):
            await read_identity(files, root)  # refuses a format that this release does not know
        log.warning("standalone: no masters are configured, tablets are opened by hand")
    return root


def _refuse_network(root: Path, settings: TabletServerSettings, log: BoundLogger) -> None:
    kind = network_file_system(root)
    if kind is None:
        return
    if not settings.store_unsafe:
        raise InvalidArgument(
            "store",
            f"{root} is on a network file system ({kind}), whose stale metadata can lose "
            "acknowledged writes; use a local one, or give --store-unsafe",
        )
    log.warning("the store root is on a network file system", kind=kind, store=str(root))
