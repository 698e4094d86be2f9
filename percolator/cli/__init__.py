"""`percolator`: the command line. Human output by default, `--json` for programs.

Exit codes: 0 done; 1 the cluster refused or did not answer; 2 the command was wrong.
"""

from percolator.cli.app import main

__all__ = ["main"]
