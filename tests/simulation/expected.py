"""What has to strike now and then: a run of many seeds proves less if something never struck."""

from __future__ import annotations

from collections import Counter

from tests.simulation.disks import DISK_FULL, FSYNC_FAILED, HELD_UP
from tests.simulation.joined_scans import JOINED
from tests.simulation.network import Fault
from tests.simulation.programs import MASTER, ORACLE, STANDBY_ORACLE
from tests.simulation.row_cluster import MASTERS_REPLACED, ORACLES_REPLACED
from tests.simulation.row_collector import COLLECTED_FROM_ROWS
from tests.simulation.rows import ON_ROWS, WHOLLY_ON_ROWS
from tests.simulation.scenario import Kind
from tests.simulation.tablet_log import TORN
from tests.simulation.workloads.deciders import LOST_TO_ANOTHER
from tests.simulation.workloads.expiring_index import ENTRIES_STAY
from tests.simulation.workloads.recreations import DROP_REPEATED, DROPPED
from tests.simulation.workloads.renewals import RENEWED

SEEDS_FOR_EVERYTHING = 200
IN_ONE_ROUND = "transaction committed in one round"
CLIENT_STEPS = (
    "read",
    "timestamp",
    "prewrite",
    "commit of the primary",
    "commit of others",
    "commit in one round",
    "mutation answered",
)
FAR_AHEAD, FAR_BEHIND = "wall clock far ahead", "wall clock far behind"


def host_of(address: str) -> str:
    """Processes of one host share its clock."""
    return address.partition(":")[0]


def far_off(address: str) -> str:
    """The name under which it is counted that the clock of a process was set hours to years off."""
    role = host_of(address).partition("-")[0]
    return f"wall clock far off: {role}"


EXPECTED = (
    *(kind.value for kind in Kind),
    *(fault.value for fault in Fault),
    DISK_FULL,
    FSYNC_FAILED,
    HELD_UP,
    TORN,
    IN_ONE_ROUND,
    JOINED,
    ENTRIES_STAY,
    RENEWED,
    LOST_TO_ANOTHER,
    DROPPED,
    DROP_REPEATED,
    ON_ROWS,
    WHOLLY_ON_ROWS,
    MASTERS_REPLACED,
    ORACLES_REPLACED,
    COLLECTED_FROM_ROWS,
    *(f"client killed at: {step}" for step in CLIENT_STEPS),
    FAR_AHEAD,
    FAR_BEHIND,
    *map(far_off, (ORACLE, STANDBY_ORACLE, MASTER, "tablets-0:7003")),
)


def missing(struck: Counter[str], seeds: int) -> list[str]:
    """What never struck, if there were enough seeds for it."""
    if seeds < SEEDS_FOR_EVERYTHING:
        return []
    return [name for name in EXPECTED if not struck[name]]
