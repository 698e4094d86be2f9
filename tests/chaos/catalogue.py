"""Every kind of fault that a chaos run strikes with."""

from __future__ import annotations

from tests.chaos.faults import Cut, Fault, Kill, KillClient, Pause, PauseClient, RollingRestart
from tests.chaos.store_faults import CutFromMasters, KillTogether, PauseInCompaction, PowerCut


def all_faults() -> list[Fault]:
    """In any order; each is shown to have struck."""
    return [
        Kill("tabletserver", replaced=True),
        KillTogether("tabletserver"),
        Pause("tabletserver", replaced=True),
        PauseInCompaction("tabletserver"),
        Cut("tabletserver", answers_only=False, replaced=True),
        Cut("tabletserver", answers_only=True, replaced=True),
        CutFromMasters("tabletserver"),
        RollingRestart("tabletserver"),
        PowerCut(),
        Kill("oracle", replaced=True),
        Pause("oracle", replaced=True),
        Cut("oracle", answers_only=False, replaced=True),
        Kill("master", replaced=True),
        Pause("master", replaced=True),
        Cut("master", answers_only=True, replaced=True),
        RollingRestart("master"),
        Kill("lockservice", replaced=False),
        Pause("lockservice", replaced=True),
        Cut("lockservice", answers_only=False, replaced=True),
        RollingRestart("lockservice"),
        KillClient(),
        PauseClient(),
    ]
