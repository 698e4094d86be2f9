"""`percolator`: the command line. Output for people by default, with `--json` for programs.

Exit codes: 0 success; 1 the cluster refused or did not answer; 2 the command was wrong; 3 something
is wrong with the cluster (`status --check`).

Open `app.py` first: it lists the commands. A file is one command or a group of related ones.
`connection.py` connects, maps errors to exit codes and prints.

A command that changes something says what it will do, and asks before it does something that cannot
be undone. Only results go to standard output.
"""

import os
import sys
from importlib import import_module

# gRPC writes its own lines to standard error, for instance when a server shuts down. It reads this
# variable when it is first imported. The command itself reports every failure.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def main() -> None:
    """The entry point of the `percolator` script."""
    if sys.argv[1:2] == ["serve"]:
        # Before anything else is imported: a service starts quickly, and needs none of it.
        sys.exit(import_module("percolator.services.serve").main(sys.argv[2:]))
    import_module("percolator.cli.app").main()
