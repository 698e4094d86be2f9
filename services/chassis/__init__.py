"""What every service of a cluster has in common."""

import importlib
import sys


def _import_structlog() -> None:
    """Without rich, which it would import for tracebacks that nobody may see (`logs.py`).

    That took an eighth of a service's start.
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
