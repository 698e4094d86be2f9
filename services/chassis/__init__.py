"""What every service has in common: its life from settings to a clean end.

    lifecycle.py    starts a service, registers it, drains it, ends it; open this first
    host.py         what a service gets to work with: a world, files, its server
    serving/        how a service is called
    settings/       how it is configured
    store_kinds/    where a cluster keeps what must last: `--store`
    store/          a directory as that place: files, and directories with one owner
    records/        a row store as that place: what a cluster keeps about itself there
    coordinator/    who leads, and what a leader has recorded

The chassis knows no service. What is useful outside of services belongs in the library.
"""

import importlib
import sys


def _import_structlog() -> None:
    """Imports structlog without rich, which it would use for tracebacks that must not be shown
    (`logs.py`). Importing rich took an eighth of a service's start.
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
