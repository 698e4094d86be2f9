"""`python -m examples COMMAND ...`: starts a cluster, runs the command, and removes the cluster.

The command finds the cluster's address in PERCOLATOR_ADDRESS, and a gateway's in
PERCOLATOR_GATEWAY; the programs of this project are in its PATH. `python -m examples --observers
module:name COMMAND ...` also starts a worker.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from percolator.errors import InvalidArgument
from percolator.observers.definition import load
from percolator.services.local.cluster import LocalCluster


def main(arguments: list[str]) -> int:
    """Returns the exit code of the command."""
    observers: list[str] = []
    if arguments[:1] == ["--observers"]:
        observers, arguments = arguments[1:2], arguments[2:]
    if not arguments:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    if (
        shutil.which(arguments[0], path=path) is None
    ):  # checked first: starting the cluster takes seconds
        sys.stderr.write(f"error: there is no command {arguments[0]!r}\n")
        return 2
    try:
        for reference in observers:  # a worker that cannot start would only say so in its log
            load(reference)
    except InvalidArgument as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="percolator-example-") as data,
        LocalCluster(
            Path(data),
            tablet_servers=3,
            gateways=1,
            workers=len(observers),
            observers=observers,
        ) as cluster,
    ):
        environment = {
            **os.environ,
            "PERCOLATOR_ADDRESS": cluster.address,
            "PERCOLATOR_GATEWAY": cluster.gateway_address,
            "PATH": path,
        }
        ended = subprocess.run(  # noqa: S603 - the command that the caller chose to run
            arguments, env=environment, check=False
        )
        return ended.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
