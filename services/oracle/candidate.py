"""An oracle: a candidate until it leads, and again a candidate when it no longer does.

Any number of them wait while one leads; the coordinator decides. What the leader may not do when
it has a successor, it cannot do: each answer is preceded by a look at its directory, and each mark
is followed by one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import structlog

from percolator.errors import NotReady, PercolatorError, StoreUnusable, UsageError
from percolator.world import Clock
from services.chassis.coordinator.interface import Coordinator, Leadership
from services.chassis.files import Files
from services.oracle.ledger import ROLE, Ledger
from services.oracle.oracle import Oracle, OracleCounts, OracleLimits
from services.oracle.probe import Probe

_RETRY_SECONDS = 0.5
_LOOK_SECONDS = 0.25
_POLL_SECONDS = 0.02
_REFUSED_RETRY_SECONDS = 0.1

_log = structlog.get_logger("percolator.oracle")


@dataclass(frozen=True)
class Site:
    """Where an oracle runs, and with what."""

    clock: Clock
    files: Files
    store: Path
    address: str
    """How others call it."""
    cluster_id: str
    limits: OracleLimits


@dataclass(frozen=True)
class _Term:
    leadership: Leadership
    oracle: Oracle


class Candidate:
    """`run` has to run beside it."""

    def __init__(self, site: Site, coordinator: Coordinator, probe: Probe | None = None) -> None:
        self._site = site
        self._coordinator = coordinator
        self._probe = probe
        self._term: _Term | None = None
        self._leader_address = ""
        self._highest_mark = 0
        self.counts = OracleCounts()
        """Of all terms together."""

    @property
    def oracle(self) -> Oracle | None:
        """None while this process does not lead."""
        return None if self._term is None else self._term.oracle

    def serving(self) -> Oracle:
        """The oracle, or `NotReady` with the address of the one that leads."""
        if self._term is None:
            other = self._leader_address
            at = f", the one at {other} does" if other and other != self._site.address else ""
            raise NotReady(
                f"this oracle does not lead{at}", retry_after_seconds=_REFUSED_RETRY_SECONDS
            )
        return self._term.oracle

    async def lead_within(self, seconds: float) -> None:
        """Leads, or raises: `UsageError` when somebody else does."""
        try:
            async with asyncio.timeout(seconds):
                await self._begin()
        except TimeoutError:
            leader = await self._coordinator.leader(ROLE)
            where = f", the one at {leader.holder}" if leader else ""
            raise UsageError(
                f"{self._site.store} is in use by another oracle{where}; with --standby this one "
                "waits for its end"
            ) from None

    async def until_decided(self, seconds: float) -> None:
        """Returns when somebody leads, for a start without needless refusals, or after a while."""
        clock = self._site.clock
        deadline = clock.monotonic_seconds() + seconds
        while self._term is None and not self._leader_address:
            if clock.monotonic_seconds() >= deadline:
                return
            await clock.sleep(_POLL_SECONDS)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                term = self._term or await self._begin()
                await term.oracle.keep_extended()
            except NotReady as error:
                _log.warning("this oracle leads no more", reason=str(error))
                if self._probe is not None:
                    self._probe.deposed()
            except (OSError, StoreUnusable) as error:
                _log.error("this oracle cannot lead", error=str(error))
                await self._site.clock.sleep(_RETRY_SECONDS)
            finally:
                await self._end()

    async def _begin(self) -> _Term:
        site = self._site
        beside = [asyncio.create_task(self._look(), name="look who leads")]
        if self._probe is not None:
            probing = self._probe.run(lambda: self._leader_address)
            beside.append(asyncio.create_task(probing, name="call the oracle that leads"))
        try:
            leadership = await self._coordinator.campaign(ROLE, site.address, self._lost)
        finally:
            for task in beside:
                task.cancel()
        try:
            ledger = await Ledger.open(
                leadership, site.files, site.store, cluster_id=site.cluster_id
            )
            if ledger.mark_milliseconds < self._highest_mark:
                # Somebody took the store away and made another one: this process knows better.
                await ledger.write(self._highest_mark)
            oracle = Oracle(site.clock, ledger, ledger.is_still_ours, site.limits, self.counts)
            await oracle.extend()
        except BaseException:
            await asyncio.shield(leadership.resign())
            raise
        self._term = _Term(leadership, oracle)
        return self._term

    def _lost(self) -> str:
        return "" if self._probe is None else self._probe.lost

    async def _end(self) -> None:
        term, self._term = self._term, None
        if term is not None:
            self._highest_mark = max(self._highest_mark, term.oracle.mark_milliseconds)
            await asyncio.shield(term.leadership.resign())

    async def _look(self) -> None:
        """Who it is that leads, for those who ask here."""
        while True:
            try:
                leader = await self._coordinator.leader(ROLE)
            except (OSError, PercolatorError) as error:
                _log.warning("the coordinator does not answer", error=str(error))
            else:
                self._leader_address = leader.holder if leader else ""
            await self._site.clock.sleep(_LOOK_SECONDS)
