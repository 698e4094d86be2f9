"""The programs of a cluster, `python -m services.X`.

Each folder is one program; `chassis` is what they share, and `local` starts all of them on one
machine. A program's `__main__.py` only wires parts together; its sign says which file to open
first.

Services import the library and the chassis, and nothing of each other. What can be decided without
a socket and a disk is in `percolator`, where a simulation can run it.
"""

import atexit
import gc
import os
import sys
from importlib.util import find_spec

_NEEDED = (
    "grpc_health",
    "grpc_reflection",
    "plyvel",
    "prometheus_client",
    "pydantic",
    "structlog",
)
"""What the extra `server` installs, but uvloop: services are only slower without that. `percolator
dev` asks the distribution for it, which would make each service's start 20 ms longer."""

_IMPORTED_OBJECTS_MAX = 200_000
"""More than any program imports: to look through that again and again took a tenth of its start."""

if sys.argv[:1] == ["-m"]:  # one of them is being started
    gc.set_threshold(_IMPORTED_OBJECTS_MAX)
    # The interpreter would look through everything once more at its end.
    atexit.register(gc.freeze)
    _missing = [name for name in _NEEDED if find_spec(name) is None]
    if _missing:
        sys.stderr.write(
            f"error: the services need {', '.join(_missing)}: "
            "pip install 'percolator-store[server]'\n"
        )
        sys.exit(2)

# gRPC writes lines of its own about connections that end, in the middle of logs that are JSON. It
# looks at this once, when it is first imported: so it is set before any program's imports.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# pydantic would look through every installed distribution for plugins, at each start.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
