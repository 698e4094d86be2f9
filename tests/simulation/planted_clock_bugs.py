"""Bugs in trusting clocks, which a simulation has to find when one clock is far off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from percolator.errors import InvalidArgument
from percolator.services.oracle import candidate
from percolator.services.oracle.candidate import Candidate, OtherClocks, Site
from percolator.tablet.memory.timestamp_guard import TimestampGuard, UnheardTimestamp
from percolator.timestamps import SEQUENCE_BITS
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def guard_by_the_servers_own_clock(patch: Patch) -> None:
    """Every server refuses the timestamps of an oracle with another clock until real time has
    caught up."""

    async def wrong(self: TimestampGuard, unheard: UnheardTimestamp) -> None:
        self.heard(self._clock.wall_milliseconds() << SEQUENCE_BITS)
        if unheard.timestamp > self.admitted_to:
            raise InvalidArgument(unheard.field, "lies ahead of this server's clock")

    patch.setattr(TimestampGuard, "settle", wrong)


def oracle_believes_its_own_clock(patch: Patch) -> None:
    """A standby on a machine with a wrong clock takes the cluster into the future."""

    async def wrong(self: OtherClocks, mark_milliseconds: int, *, jump_seconds_max: float) -> int:
        return max(self._world.clock.wall_milliseconds(), mark_milliseconds)

    patch.setattr(OtherClocks, "beginning", wrong)


def most_of_the_known_clocks_are_most_clocks(patch: Patch) -> None:
    """A master that has just begun to lead knows no clock but that of its own host, where the
    oracle is as wrong as it is."""
    patch.setattr(candidate, "_require_most", lambda told: None)


def oracle_begins_before_the_epoch_of_the_store(patch: Patch) -> None:
    """The first oracle's clock is years slow: nothing can be committed until it is corrected."""
    correct = Candidate.__init__

    def wrong(self: Candidate, site: Site, *rest: Any, **more: Any) -> None:
        correct(self, replace(site, first_milliseconds=0), *rest, **more)

    patch.setattr(Candidate, "__init__", wrong)


ALL = (
    # Without a master no oracle can ask for other clocks, and timestamps do run ahead.
    (guard_by_the_servers_own_clock, (Kind.CLOCK_FAR,), False, True),
    (oracle_believes_its_own_clock, (Kind.CLOCK_FAR,), True, True),
    (most_of_the_known_clocks_are_most_clocks, (Kind.CLOCK_FAR,), True, False),
)
