"""A bug to be planted, and the scenarios that have to bring it to light."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tests.simulation.ambush import aimed
from tests.simulation.network import NetworkFaults
from tests.simulation.scenario import PAGE_ROWS_MAX, Kind, Scenario, harsh, in_bursts, scenario_of

Patch = pytest.MonkeyPatch

_LONG_TRANSACTIONS = 500
_LONE_STRIKE = 11
"""Which of a seed's strikes it is: by then, observers are at work."""


@dataclass(frozen=True)
class Bug:
    """A bug, and where it has to be looked for."""

    plant: Callable[[Patch], None]
    kinds: tuple[Kind, ...] = ()
    """Kinds of strikes that bring it to light, many of them; if empty, those of each seed."""
    workload: str | None = None
    doubled_share: float = 0.04
    """The share of transactions with two committers."""
    one_round_share: float = 0.0
    """The share of transactions that try to commit in one round. Most bugs are in two phases."""
    joined_share: float = 0.0
    """The share of scans that are made with joined pages, too."""
    page_rows_max: int = PAGE_ROWS_MAX
    seconds_max: float = 1.0
    """How long a strike lasts."""
    seeds_max: int = 100
    with_master: bool = False
    on_rows: bool = False
    """Whether it is a bug of the way to a row store."""
    after_seconds: float = 0.0
    """Strikes wait this long, and there is work for as long: history has to be collected first. If
    it is negative, they come so much earlier."""
    network: NetworkFaults | None = None
    """If given, the one of each seed. A message that is lost keeps a collector from work for 30 s,
    and some bugs need copies of messages more often than a seed has them."""
    lone_strike_seconds: float = 0.0
    """If not 0, there is only one strike, and it lasts this long: others would end it early."""
    aim: str | None = None
    """If given, all clients that are killed are killed at this step."""
    in_bursts: bool = False
    """Whether each client has many sessions that begin together: then its death leaves many
    transactions at the same step."""
    sessions_per_client: int = 0
    """If not 0, each client has so many, and they begin at their own times: they form lines."""
    is_quickly_caught: bool = False
    """Whether it is caught in seconds: then it is part of every test run."""

    @property
    def name(self) -> str:
        return self.plant.__name__.replace("_", " ")

    def scenario(self, seed: int) -> Scenario:
        if self.kinds:
            found = harsh(seed, self.kinds, workload=self.workload, seconds_max=self.seconds_max)
        else:
            found = scenario_of(seed, workload=self.workload, with_master=False)
        if self.lone_strike_seconds:
            lone = replace(found.strikes[_LONE_STRIKE], seconds=self.lone_strike_seconds)
            found = replace(found, strikes=(lone,))
        if self.after_seconds:
            late = (
                replace(strike, at_seconds=strike.at_seconds + self.after_seconds)
                for strike in found.strikes
            )
            found = replace(found, strikes=tuple(late), transactions=_LONG_TRANSACTIONS)
        if self.network is not None:
            found = replace(found, network=self.network)
        if self.sessions_per_client:
            found = replace(found, sessions_per_client=self.sessions_per_client, burst_seconds=0.0)
        if self.aim is not None:
            found = replace(found, strikes=tuple(aimed(one, self.aim) for one in found.strikes))
        if self.in_bursts:
            found = in_bursts(found)
        return replace(
            found,
            on_rows=self.on_rows,
            doubled_share=self.doubled_share,
            one_round_share=self.one_round_share,
            joined_share=self.joined_share,
            page_rows_max=self.page_rows_max,
            # Some workloads need the real master: without it they fail, with a bug or without.
            with_master=self.with_master or found.with_master,
        )
