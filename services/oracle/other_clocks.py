"""Where an oracle's time begins: its own clock is believed only as far as the others agree.

Timestamps never go back. An oracle that begins with a clock that is two hours fast takes the whole
cluster two hours into the future, for good: every lock expires, and history that was to be kept for
an hour is gone. A standby on a host with a wrong clock is enough, once it leads.

So an oracle whose clock is far above the mark, as after a long stop, or with a wrong clock, asks
the masters what the clocks of the other machines say. It begins at the earlier of its own time and
the majority's, and never below the mark.

It does not begin while no master answers, or while the clocks of half of the hosts are unknown. A
master that has just begun to lead, or that is cut off, may know only the clock of its own host; if
the oracle runs there as well, both are wrong together. The hosts that count are those that the
masters list, and those of masters that do not answer. A server that stays silent leaves the list
after a few seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from percolator.errors import PercolatorError
from percolator.v1.cluster_pb2 import DescribeRequest, DescribeResponse
from percolator.wire.addresses import parse_host_port
from percolator.wire.cluster_clock import clocks_of, hosts_of, majority
from percolator.wire.methods import DESCRIBE
from percolator.world import World

_ANSWER_SECONDS = 1.0

_log = structlog.get_logger("percolator.oracle")


class ClockUnconfirmed(Exception):
    """Too few other clocks are known, so this oracle cannot tell whether its own is right."""


@dataclass
class _Told:
    """What the masters say."""

    clocks: dict[str, int] = field(default_factory=dict)
    """By address. If several masters report the same server, the last answer counts."""
    hosts: set[str] = field(default_factory=set)
    """Those that have clocks, whether or not the masters know them."""


class OtherClocks:
    """The clocks of the cluster, as its masters know them."""

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
