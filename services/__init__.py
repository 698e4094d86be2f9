"""The programs of a cluster, `python -m services.X`; what they decide with is in `percolator`."""

import os

from services.chassis.collector import collect_seldom

# gRPC writes lines of its own about connections that end, in the middle of logs that are JSON. It
# looks at this once, when it is first imported: so it is set before any program's imports.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# pydantic would look through every installed distribution for plugins, at each start.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# Whatever a program imports stays: to look through it again and again took an eighth of its start.
collect_seldom()
