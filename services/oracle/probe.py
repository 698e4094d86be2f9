"""Whether the leading oracle can be reached, which its signs of life in the store do not show.

A leader that is cut off from the network but not from the store would lead forever without
answering a single client. So a standby calls it. If the leader has not answered for the grace
period and a master does answer, it is not the standby that is cut off, and the leader counts as
lost.

Two oracles that reach a master but not each other would depose each other in turn. So an oracle
that was deposed does not depose another one in this way for a while, twice as long each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from percolator.errors import DeadlineExceeded, PercolatorError, Unavailable
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.wire.cluster import describe
from percolator.wire.methods import GET_TIMESTAMPS
from percolator.world import World

CALL_SECONDS = 0.5
PROBE_SECONDS = 0.75
"""From one call to the next. Unanswered calls are counted rather than time: a standby that was
paused has made no calls, so it draws no conclusion about the leader."""
PEACE_SECONDS_MIN = 5.0
PEACE_SECONDS_MAX = 20.0
"""How long an oracle that was deposed does not depose another one, at first and at most."""


class Probe:
    """`run` has to run while this process is a candidate."""

    def __init__(self, world: World, masters: Sequence[str], *, grace_seconds: float) -> None:
        """Without masters no leader ever counts as lost."""
        self._world = world
        self._masters = masters
        self._failures_max = ceil(grace_seconds / PROBE_SECONDS)
        self._failures = 0
        """Consecutive calls without an answer."""
        self._address = ""
        self._peace_seconds = PEACE_SECONDS_MIN
        self._peace_until = 0.0
        self.lost = ""
        """The address of a leader that counts as lost; empty if none does."""

    def deposed(self) -> None:
        """To be called when this process led and finds that another one does."""
        now = self._world.clock.monotonic_seconds()
        if now > self._peace_until + 2 * PEACE_SECONDS_MAX:
            self._peace_seconds = PEACE_SECONDS_MIN
        self._peace_until = now + self._peace_seconds
        self._peace_seconds = min(2 * self._peace_seconds, PEACE_SECONDS_MAX)

    async def run(self, leader: Callable[[], str]) -> None:
        """Runs until cancelled."""
        self._failures, self.lost = 0, ""
        clock = self._world.clock
        while self._masters:
            due = clock.monotonic_seconds() + PROBE_SECONDS
            address = leader()
            if address != self._address:
                self._address, self._failures, self.lost = address, 0, ""
            if address:
                await self._look_at(address)
            await clock.sleep(max(due - clock.monotonic_seconds(), 0.0))

    async def _look_at(self, address: str) -> None:
        if await self._answers(address):
            self._failures, self.lost = 0, ""
            return
        self._failures += 1
        at_peace = self._world.clock.monotonic_seconds() < self._peace_until
        if self._failures >= self._failures_max and not at_peace and await self._others_answer():
            self.lost = address

    async def _answers(self, address: str) -> bool:
        ask = self._world.network.unary(address, GET_TIMESTAMPS)
        try:
            await ask(GetTimestampsRequest(count=1), CALL_SECONDS)
        except (Unavailable, DeadlineExceeded):
            return False
        except PercolatorError:
            # An error that says why it does not serve is an answer too.
            return True
        return True

    async def _others_answer(self) -> bool:
        try:
            await describe(self._world.network, self._masters, CALL_SECONDS * len(self._masters))
        except PercolatorError:
            return False
        return True
