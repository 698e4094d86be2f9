"""Every kind of fault in a chaos run, by the stream in which it occurs.

Streams run at the same time; the faults of one stream occur one after another.
"""

from __future__ import annotations

from tests.chaos.faults import (
    AHEAD,
    BACK,
    CEPH_GATEWAY,
    OSD,
    Cut,
    CutCaller,
    CutFromMasters,
    Drain,
    Fault,
    FullDisk,
    Kill,
    KillClient,
    KillOfStore,
    KillTogether,
    LoseCache,
    LoseEverything,
    Loss,
    Move,
    OracleWithWrongClock,
    Pause,
    PauseClient,
    PauseInCompaction,
    PauseOfStore,
    PowerCut,
    RollingRestart,
    Split,
    StopTwice,
    WrongClock,
)


def streams(*, full_disk: bool) -> dict[str, list[Fault]]:
    """All faults; each is shown to have had an effect."""
    return {
        "tablet servers": [
            Kill("tabletserver", replaced=True),
            KillTogether("tabletserver"),
            Pause("tabletserver"),
            PauseInCompaction("tabletserver"),
            Cut("tabletserver", answers_only=False),
            Cut("tabletserver", answers_only=True),
            CutFromMasters("tabletserver"),
            Loss("tabletserver"),
            StopTwice("tabletserver"),
            RollingRestart("tabletserver"),
        ],
        "oracles": [
            Kill("oracle", replaced=True),
            Pause("oracle"),
            Cut("oracle", answers_only=False),
            CutCaller("oracle"),
            Loss("oracle"),
            StopTwice("oracle"),
            RollingRestart("oracle"),
        ],
        "masters": [
            Kill("master", replaced=True),
            Pause("master"),
            Cut("master", answers_only=True),
            Loss("master"),
            StopTwice("master"),
            RollingRestart("master"),
        ],
        "lock service": [
            Kill("lockservice", replaced=False),
            Pause("lockservice"),
            Cut("lockservice", answers_only=False),
            Loss("lockservice"),
            StopTwice("lockservice"),
            RollingRestart("lockservice"),
        ],
        "gateways": [
            Kill("gateway", replaced=True),
            Pause("gateway"),
            Cut("gateway", answers_only=False),
            CutCaller("gateway"),
            Loss("gateway"),
            StopTwice("gateway"),
            RollingRestart("gateway"),
        ],
        "workers": [
            Kill("worker", replaced=True),
            KillTogether("worker"),
            Pause("worker"),
            CutCaller("worker"),
            Loss("worker"),
            StopTwice("worker"),
            RollingRestart("worker"),
        ],
        "clients": [KillClient(), PauseClient()],
        "clocks": [
            WrongClock("a clock is set back by up to a day", BACK),
            WrongClock("a clock is set ahead by up to 400 days", AHEAD),
            OracleWithWrongClock(),
        ],
        "disk and power": [PowerCut(), *([FullDisk()] if full_disk else [])],
        "operator": [Split(), Move(), Drain()],
    }


def bucket_streams() -> dict[str, list[Fault]]:
    """All faults that a cluster in a bucket may have: there is no shared disk under its tablets."""
    kinds = streams(full_disk=False)
    servers = "tablet servers"
    kinds[servers] = [one for one in kinds[servers] if not isinstance(one, PauseInCompaction)]
    kinds[servers].append(LoseCache())
    kinds["disk and power"] = [LoseEverything()]
    return kinds | {
        "OSDs": [KillOfStore(OSD)],
        "gateways of Ceph": [KillOfStore(CEPH_GATEWAY), PauseOfStore()],
    }


def kills() -> dict[str, list[Fault]]:
    """The faults of a short run of a cluster in a bucket."""
    return {
        "tablet servers": [Kill("tabletserver", replaced=True), LoseCache(), Pause("tabletserver")],
        "oracles": [Kill("oracle", replaced=True)],
        "masters": [Kill("master", replaced=True)],
        "workers": [Kill("worker", replaced=True)],
        "OSDs": [KillOfStore(OSD)],
        "gateways of Ceph": [KillOfStore(CEPH_GATEWAY), PauseOfStore()],
    }
