"""The store root as a tablet server finds it at start: usable, coherent, of the right cluster."""

from __future__ import annotations

import os
from pathlib import Path

from structlog.stdlib import BoundLogger

from percolator.errors import InvalidArgument
from percolator.services.chassis.cluster_store import FILE_NAME, check_identity, read_identity
from percolator.services.chassis.files import Files, refuse_network
from percolator.services.tabletserver.settings import TabletServerSettings


async def open_store_root(
    files: Files, settings: TabletServerSettings, cluster_id: str, log: BoundLogger
) -> Path:
    """The path of the store root; `InvalidArgument` names what is wrong with it."""
    root = settings.store_root
    await refuse_network(files, root, settings, log)
    try:
        status = await files.stat(root)
    except FileNotFoundError:
        raise InvalidArgument("store", f"{root} does not exist") from None
    if not status.is_directory:
        raise InvalidArgument("store", f"{root} is not a directory")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidArgument("store", f"{root} is not writable")
    if settings.masters:
        await check_identity(files, root, cluster_id)
    else:
        if FILE_NAME in await files.list(root):
            await read_identity(files, root)  # refuses a format that this release does not know
        log.warning("standalone: no masters are configured, tablets are opened by hand")
    return root
