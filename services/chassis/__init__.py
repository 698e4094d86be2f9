"""Everything that services have in common: their life from settings to a clean end.

    lifecycle.py            starts a service, registers it, drains it, ends it; open this first
    settings.py             how it is configured
    host.py                 what a service gets to work with: a world, files, its server
    frames.py               connections for frames
    rpc.py                  how a call is admitted, counted, decoded and answered, also over gRPC
    access.py               who calls, and in which role
    server.py, metrics.py   the server, its health and certificates; its metrics and their endpoint
    membership.py           the cluster that it joins
    cluster_store.py        where a cluster keeps what must last, and which cluster that is
    files.py                files, and threads that wait for the disk
    epoch_directory.py      directories with one owner
    store_watch.py          notices that a store hangs or is gone
    coordinator.py          who leads, and what a leader has recorded: in a directory
                            (directory_coordinator.py) or in records (record_coordinator.py)
    records.py              records in a row store, or in a bucket

The chassis knows no service. What is useful outside of services belongs in the library.
"""

import importlib
import sys


def _import_structlog() -> None:
    """Imports structlog without rich, which it would use for tracebacks that must not be shown
    (`lifecycle.py`). Importing rich took an eighth of a service's start.
    """
    if "structlog" in sys.modules:
        return
    rich = sys.modules.get("rich")
    sys.modules["rich"] = None  # type: ignore[assignment] # documented: importing it fails
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]
        if rich is not None:
            sys.modules["rich"] = rich


_import_structlog()
