"""An oracle: a candidate until it leads, and a candidate again when it no longer does.

Any number of oracles wait while one leads; the coordinator decides which. The leader cannot do what
would be wrong once it has a successor: it looks at its directory before each answer, and after each
mark that it writes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from percolator.errors import NotReady, StoreUnusable, UsageError
from percolator.services.chassis.coordinator.candidacy import Candidacy
from percolator.services.chassis.coordinator.interface import Coordinator, Leadership
from percolator.services.oracle.ledger import ROLE, Ledger
from percolator.services.oracle.oracle import Oracle, OracleCounts, OracleLimits
from percolator.services.oracle.other_clocks import ClockUnconfirmed, OtherClocks
from percolator.services.oracle.probe import Probe
from percolator.world import Clock

_log = structlog.get_logger("percolator.oracle")

_RETRY_SECONDS = 0.5
_CLOCKS_SECONDS = 10.0
"""How long to wait for other clocks: twice as long as a master lists a silent server."""


@dataclass(frozen=True)
class Site:
    """Where an oracle runs, and with what."""

    clock: Clock
    store: str
    """As errors name it."""
    address: str
    """How others reach it."""
    cluster_id: str
    limits: OracleLimits
    first_milliseconds: int = 0
    """Nothing older can be stored."""


class Candidate:
    """`run` has to run beside it."""

    def __init__(
        self,
        site: Site,
        coordinator: Coordinator,
        probe: Probe | None = None,
        clocks: OtherClocks | None = None,
    ) -> None:
        """Without `clocks`, this machine's own clock is believed."""
        self._site = site
        self._clocks = clocks
        self._probe = probe
        self._highest_mark = 0
        self.candidacy: Candidacy[Oracle] = Candidacy(
            coordinator, site.clock, role=ROLE, address=site.address
        )
        self.counts = OracleCounts()
        """The totals of all terms."""

    @property
    def oracle(self) -> Oracle | None:
        """None while this process does not lead."""
        return self.candidacy.term

    async def lead_within(self, seconds: float) -> None:
        """Begins to lead, or raises `UsageError` if another oracle does, and `NotReady` if no
        master can say whether the clock is right."""
        unconfirmed: ClockUnconfirmed | None = None
        try:
            async with asyncio.timeout(seconds) as limit:
                while self.oracle is None:
                    try:
                        await self._begin()
                    except ClockUnconfirmed as error:
                        if unconfirmed is None:
                            limit.reschedule(asyncio.get_running_loop().time() + _CLOCKS_SECONDS)
                        unconfirmed = error
                        await self._site.clock.sleep(_RETRY_SECONDS)
        except TimeoutError:
            if unconfirmed is not None:
                raise NotReady(str(unconfirmed)) from None
            leader = self.candidacy.leader_address
            where = f", the one at {leader}" if leader else ""
            raise UsageError(
                f"{self._site.store} is in use by another oracle{where}; with --standby this one "
                "waits until it ends"
            ) from None

    async def run(self) -> None:
        """Runs until cancelled."""
        await self.candidacy.run(
            self._serve_a_term, cannot_lead=(OSError, StoreUnusable, ClockUnconfirmed, UsageError)
        )

    async def _serve_a_term(self) -> None:
        try:
            oracle = self.oracle or await self._begin()
            await oracle.keep_extended()
        except NotReady:
            if self._probe is not None:
                self._probe.deposed()
            raise
        finally:
            if self.oracle is not None:
                self._highest_mark = max(self._highest_mark, self.oracle.mark_milliseconds)

    async def _begin(self) -> Oracle:
        if self._probe is None:
            return await self.candidacy.begin(self._open)
        probe, candidacy = self._probe, self.candidacy
        probing = asyncio.create_task(
            probe.run(lambda: candidacy.leader_address), name="call the oracle that leads"
        )
        try:
            return await candidacy.begin(self._open, lambda: probe.lost)
        finally:
            probing.cancel()

    async def _open(self, leadership: Leadership) -> Oracle:
        site = self._site
        ledger = await Ledger.open(leadership, cluster_id=site.cluster_id)
        if ledger.mark_milliseconds < self._highest_mark:
            # The store was replaced by another one. This process knows what it has handed out.
            await ledger.write(self._highest_mark)
        oracle = Oracle(
            site.clock,
            ledger,
            ledger.is_still_ours,
            site.limits,
            self.counts,
            begin_milliseconds=await self._beginning(ledger.mark_milliseconds),
        )
        await oracle.extend()
        return oracle

    async def _beginning(self, mark_milliseconds: int) -> int:
        site, limits = self._site, self._site.limits
        if self._clocks is None or limits.follow_jumps:
            begin = max(site.clock.wall_milliseconds(), mark_milliseconds)
        else:
            jump = limits.jump_seconds_max
            begin = await self._clocks.beginning(mark_milliseconds, jump_seconds_max=jump)
        if begin < site.first_milliseconds:
            _log.error(
                "the wall clock of this machine is behind the epoch of the store, at which "
                "timestamps begin now: correct it, and start this oracle again",
                behind_seconds=(site.first_milliseconds - begin) / 1000,
            )
        # Otherwise, every commit would be refused until the clock is right.
        return max(begin, site.first_milliseconds)
