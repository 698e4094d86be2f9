"""The programs of a cluster, `python -m services.X`.

Each folder is one program; `chassis` is what they share, and `local` starts all of them on one
machine. A program's `__main__.py` only wires parts together; its sign says which file to open
first.

Services import the library and the chassis, and nothing of each other. What can be decided without
a socket and a disk is in `percolator`, where a simulation can run it.
"""

import os

from services.chassis.collector import collect_seldom

# gRPC writes lines of its own about connections that end, in the middle of logs that are JSON. It
# looks at this once, when it is first imported: so it is set before any program's imports.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# pydantic would look through every installed distribution for plugins, at each start.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# Whatever a program imports stays: to look through it again and again took an eighth of its start.
collect_seldom()
