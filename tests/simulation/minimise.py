"""Makes a failing scenario small: fewer strikes, a better network, fewer sessions, less work.

Everything that can be left out while the run still fails is left out, one thing after another,
until nothing more can. The result may fail in a different way, but it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.network import PERFECT
from tests.simulation.scenario import Scenario

RUNS_MAX = 120

Fails = Callable[[Scenario], bool]


def minimised(scenario: Scenario, fails: Fails, *, runs_max: int = RUNS_MAX) -> Scenario:
    """The smallest scenario that was found within so many runs; `scenario` itself fails."""
    runs = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(scenario):
            if runs >= runs_max:
                return scenario
            runs += 1
            if fails(candidate):
                scenario, smaller = candidate, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios to try, starting with the smallest."""
    if scenario.strikes:
        yield replace(scenario, strikes=())
    if scenario.network is not PERFECT:
        yield replace(scenario, network=PERFECT)
    if scenario.with_master:
        yield replace(scenario, with_master=False)
    strikes = scenario.strikes
    middle = len(strikes) // 2
    if middle > 1:
        yield replace(scenario, strikes=strikes[:middle])
        yield replace(scenario, strikes=strikes[middle:])
    for place in range(len(strikes)):
        yield replace(scenario, strikes=strikes[:place] + strikes[place + 1 :])
    for name in ("slow", "duplicate", "drop_request", "drop_reply", "break_connection"):
        if getattr(scenario.network, name):
            yield replace(scenario, network=replace(scenario.network, **{name: 0.0}))
    if scenario.transactions_per_session > 1:
        yield replace(scenario, transactions=scenario.transactions // 2)
    if scenario.burst_seconds:
        yield replace(scenario, burst_seconds=0.0)
    yield from _fewer_sessions(scenario)


def _fewer_sessions(scenario: Scenario) -> Iterator[Scenario]:
    """Half of them, and then all but one."""
    sessions = scenario.sessions
    middle = len(sessions) // 2
    parts = [sessions[:middle], sessions[middle:]] if middle > 1 else []
    if len(sessions) > 1:
        parts += [(session,) for session in sessions]
    for without in parts:
        yield replace(scenario, without_sessions=scenario.without_sessions | set(without))
