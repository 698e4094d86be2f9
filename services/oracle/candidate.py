"""An oracle: a candidate until it leads, and a candidate again when it no longer does.

Any number of oracles wait while one leads; the coordinator decides which. The leader cannot do what
would be wrong once it has a successor: it looks at its directory before each answer, and after each
mark that it writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

import structlog

from percolator.errors import (
    DeadlineExceeded,
    NotReady,
    PercolatorError,
    StoreUnusable,
    Unavailable,
    UsageError,
)
from percolator.services.chassis.coordinator import Candidacy, Coordinator, Leadership
from percolator.services.oracle.oracle import ROLE, DurableMark, Oracle, OracleCounts, OracleLimits
from percolator.v1.cluster_pb2 import DescribeRequest, DescribeResponse
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.wire.addresses import parse_host_port
from percolator.wire.cluster import describe
from percolator.wire.cluster_clock import clocks_of, hosts_of, majority
from percolator.wire.methods import DESCRIBE, GET_TIMESTAMPS
from percolator.world import Clock, World

CALL_SECONDS = 0.5
PROBE_SECONDS = 0.75
"""From one call to the next, at least. Unanswered calls are counted rather than time: a standby
that was paused has made no calls, so it draws no conclusion about the leader."""
_PROBES = 4
"""How many calls the grace period has room for, at most: each costs the leader a look."""
PEACE_SECONDS_MIN = 5.0
PEACE_SECONDS_MAX = 20.0
"""How long an oracle that was deposed does not depose another one, at first and at most."""


class Probe:
    """Finds out whether the leading oracle can be reached, which its writes to the store do not
    show.

    `run` has to run while this process is a candidate.

    A leader that is cut off from the network but not from the store would lead forever without
    answering a single client. So a standby calls it. If the leader has not answered for the grace
    period and a master does answer, it is not the standby that is cut off, and the leader counts as
    lost.

    Two oracles that reach a master but not each other would depose each other alternately. So an
    oracle that was deposed does not depose another one in this way for a while, twice as long each
    time.
    """

    def __init__(self, world: World, masters: Sequence[str], *, grace_seconds: float) -> None:
        """Without masters no leader ever counts as lost."""
        self._world = world
        self._masters = masters
        self._pause_seconds = max(PROBE_SECONDS, grace_seconds / _PROBES)
        self._failures_max = ceil(grace_seconds / self._pause_seconds)
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
            due = clock.monotonic_seconds() + self._pause_seconds
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


_ANSWER_SECONDS = 1.0

_log = structlog.get_logger("percolator.oracle")


class ClockUnconfirmed(Exception):
    """Too few other clocks are known, so this oracle cannot tell whether its own is right."""


@dataclass
class _Told:
    """Answers of the masters."""

    clocks: dict[str, int] = field(default_factory=dict)
    """By address. If several masters report the same server, the last answer counts."""
    hosts: set[str] = field(default_factory=set)
    """Hosts that have clocks, whether or not the masters know them."""


class OtherClocks:
    """The clocks of the cluster, as its masters know them.

    They decide where an oracle's time begins: its own clock is believed only as far as the others
    agree.

    Timestamps never go back. An oracle that begins with a clock that is two hours fast takes the
    whole cluster two hours into the future, for good: every lock expires, and history that was to
    be kept for an hour is gone. A standby on a host with a wrong clock is enough, once it leads.

    So an oracle whose clock is far above the mark, as after a long stop, or with a wrong clock,
    asks the masters what the clocks of the other machines say. It begins at the earlier of its own
    time and the majority's, and never below the mark.

    It does not begin while no master answers, or while the clocks of half of the hosts are unknown.
    A master that has just begun to lead, or that is cut off, may know only the clock of its own
    host; if the oracle runs there as well, both are wrong together. The hosts that count are those
    that the masters list, and those of masters that do not answer. A server that stays silent
    leaves the list after a few seconds.
    """

    def __init__(self, world: World, masters: Sequence[str], own_address: str) -> None:
        """Without masters, this machine's own clock is believed."""
        self._world = world
        self._masters = masters
        self._own_address = own_address

    async def beginning(self, mark_milliseconds: int, *, jump_seconds_max: float) -> int:
        """The physical part with which to begin. Raises `ClockUnconfirmed`."""
        own = self._world.clock.wall_milliseconds()
        if not self._masters or own <= mark_milliseconds + jump_seconds_max * 1000:
            return max(own, mark_milliseconds)
        told = await self._ask_masters()
        own = told.clocks[self._own_address] = self._world.clock.wall_milliseconds()
        _require_most(told)
        agreed = majority(told.clocks)
        if agreed is None or own <= agreed + jump_seconds_max * 1000:
            return max(own, mark_milliseconds)
        _log.error(
            "the wall clock of this machine is ahead of most others: not followed, correct it",
            ahead_seconds=round((own - agreed) / 1000, 3),
            clocks={address: one - own for address, one in sorted(told.clocks.items())},
        )
        return max(agreed, mark_milliseconds)

    async def _ask_masters(self) -> _Told:
        answers = await asyncio.gather(*map(self._told_by, self._masters))
        told = _Told()
        silent, answering = set(), set()
        for master, answer in zip(self._masters, answers, strict=True):
            if answer is None:
                silent.add(parse_host_port(master, "master").host)
                continue
            answering.add(parse_host_port(master, "master").host)
            if answer.wall_milliseconds:
                told.hosts |= hosts_of(server.address for server in answer.servers)
                told.clocks |= clocks_of(answer)
        if not answering:
            raise ClockUnconfirmed(
                "the wall clock of this machine is far above the oracle's mark, and no master "
                f"answers that could report the other clocks: {', '.join(self._masters)}"
            )
        # A master may be known here by another name than it uses itself. So a silent one counts
        # only if no other answers at the same name.
        told.hosts |= silent - answering
        return told

    async def _told_by(self, master: str) -> DescribeResponse | None:
        try:
            describe = self._world.network.unary(master, DESCRIBE)
            return await describe(DescribeRequest(), _ANSWER_SECONDS)
        except PercolatorError as error:
            _log.info("a master did not report the clocks", master=master, error=str(error))
            return None


def _require_most(told: _Told) -> None:
    """Raises `ClockUnconfirmed` unless the clocks of most hosts are known, this one included."""
    known = hosts_of(told.clocks)
    unknown = told.hosts - known
    if len(unknown) >= len(known):
        raise ClockUnconfirmed(
            "the wall clock of this machine is far above the oracle's mark, and too few other "
            f"clocks are known: those of {', '.join(sorted(known))}, but not yet those of "
            f"{', '.join(sorted(unknown))}. If some of them are gone for good, leave them out of "
            "--masters; if this clock is right, start once with --follow-clock-jumps"
        )


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
    """An oracle, leading or on standby. A task has to run `run` as long as it serves."""

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
        mark = await DurableMark.open(leadership, cluster_id=site.cluster_id)
        if mark.mark_milliseconds < self._highest_mark:
            # The store was replaced by another one. This process knows what it has handed out.
            await mark.write(self._highest_mark)
        oracle = Oracle(
            site.clock,
            mark,
            leadership.is_held,
            site.limits,
            self.counts,
            may_extend=leadership.was_held,
            begin_milliseconds=await self._beginning(mark.mark_milliseconds),
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
