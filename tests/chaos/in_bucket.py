"""A service of a cluster in a bucket that makes checkpoints and sweeps all the time, with leases.

    python -m tests.chaos.in_bucket --service=SERVICE --store s3://...

With the settings of the product, a run would end before the first of them.
"""

from __future__ import annotations

import sys
from functools import partial

from percolator.bucket.sweep import Sweep
from percolator.services.master import tablet_data
from percolator.services.serve import main
from percolator.services.tabletserver import service as tabletserver
from percolator.services.tabletserver.bucket_store import LogSettings
from tests.chaos.host_clock import taken

MODULE = "tests.chaos.in_bucket"
_OFTEN = partial(LogSettings, bytes_max=128 << 10, entries_max=40, entries_at_close_max=10)
_GRACE_SECONDS = 3.0
_MORE = {
    "master": ("--sweep-seconds", "10"),
    "oracle": ("--lease-seconds", "1"),
    "tabletserver": ("--lease-seconds", "1"),
}
"""Arguments, by service."""


def swept(logs: dict[str, str]) -> int:
    """How many sweeps have deleted anything, by the logs of a cluster's processes."""
    return sum(log.count('"swept"') for log in logs.values())


if __name__ == "__main__":
    service = taken("service")
    tabletserver.LogSettings = _OFTEN  # type: ignore[assignment, attr-defined]
    tablet_data.Sweep = partial(Sweep, grace_seconds=_GRACE_SECONDS)  # type: ignore[assignment, attr-defined]
    sys.exit(main([service, *sys.argv[1:], *_MORE.get(service, ())]))
