"""What has to strike now and then: a run of many seeds that never hit something proved less."""

from __future__ import annotations

from collections import Counter

from percolator.testing.network_faults import Fault
from tests.simulation.disks import DISK_FULL, FSYNC_FAILED
from tests.simulation.scenario import Kind
from tests.simulation.tablet_log import TORN

SEEDS_FOR_EVERYTHING = 200
CLIENT_STEPS = (
    "read",
    "timestamp",
    "prewrite",
    "commit of the primary",
    "commit of others",
    "mutation answered",
)

EXPECTED = (
    *(kind.value for kind in Kind),
    *(fault.value for fault in Fault),
    DISK_FULL,
    FSYNC_FAILED,
    TORN,
    *(f"client killed at: {step}" for step in CLIENT_STEPS),
)


def missing(struck: Counter[str], seeds: int) -> list[str]:
    """What never struck, if there were enough seeds for it."""
    if seeds < SEEDS_FOR_EVERYTHING:
        return []
    return [name for name in EXPECTED if not struck[name]]
