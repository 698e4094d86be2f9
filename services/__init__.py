"""The programs of a cluster: `percolator serve SERVICE` starts one, `serve.py` finds it.

Each folder is one program; `chassis` is what they share, and `local` starts all of them on one
machine. A program's `service.py` puts it together.

Services import the library and the chassis, and nothing of each other. What can be decided without
a socket and a disk is in `percolator`, where a simulation can run it.
"""

import os

# gRPC writes lines of its own about connections that end, in the middle of logs that are JSON. It
# looks at this once, when it is first imported: so it is set before any program's imports.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# pydantic would look through every installed distribution for plugins, at each start.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
