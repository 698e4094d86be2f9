"""Every kind of fault in a chaos run, by the stream in which it occurs.

Streams run at the same time; the faults of one stream occur one after another.
"""

from __future__ import annotations

from tests.chaos.faults import (
    AHEAD,
    BACK,
    Cut,
    CutCaller,
    CutFromMasters,
    Drain,
    Fault,
    FullDisk,
    Kill,
    KillClient,
    KillTogether,
    Loss,
    Move,
    OracleWithWrongClock,
    Pause,
    PauseClient,
    PauseInCompaction,
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
