"""`percolator`: the command line. Human output by default, `--json` for programs.

Exit codes: 0 done; 1 the cluster refused or did not answer; 2 the command was wrong; 3 something is
wrong with the cluster (`status --check`).
"""

import os

# gRPC writes lines of its own to standard error, for instance when a server shuts down; it reads
# this when it is first imported. Whatever fails is reported by the command itself.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from percolator.cli.app import main

__all__ = ["main"]
