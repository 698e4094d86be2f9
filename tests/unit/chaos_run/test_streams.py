"""Strikes of different roles overlap, those of one role do not; what never struck is named."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from percolator.world import Random
from tests.chaos.faults import Fault
from tests.chaos.pulse import now
from tests.chaos.scene import Roles
from tests.chaos.standing_still import DidNotStrike
from tests.chaos.streams import Streams


class Counted(Fault):
    """Takes a while, and notes what else was in effect."""

    def __init__(self, role: str, name: str, log: Log, *also: str) -> None:
        super().__init__(role)
        self._name = name
        self._log = log
        self._also = also

    @property
    def name(self) -> str:
        return self._name

    @property
    def roles(self) -> tuple[str, ...]:
        return (self._role, *self._also)

    async def strike(self, scene: Any, chance: Random) -> float:
        self._log.order.append(self.name)
        self._log.begin(self.roles)
        await asyncio.sleep(1.0 + chance.random())
        self._log.end(self.roles)
        return 1.0


class Missing(Counted):
    async def strike(self, scene: Any, chance: Random) -> float:
        raise DidNotStrike("there was nothing to strike")


class Log:
    """What was in effect at the same time."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.most = 0
        self._struck: Counter[str] = Counter()

    def begin(self, roles: tuple[str, ...]) -> None:
        self._struck.update(roles)
        assert max(self._struck.values()) == 1, "a role was struck twice at once"
        self.most = max(self.most, sum(self._struck.values()))

    def end(self, roles: tuple[str, ...]) -> None:
        self._struck.subtract(roles)


def made(kinds: dict[str, list[Fault]], *, seed: int = 1, together: int = 100) -> Streams:
    scene: Any = SimpleNamespace(roles=Roles())
    return Streams(scene, kinds, seed=seed, together=together)


def kinds(log: Log) -> dict[str, list[Fault]]:
    roles = ("a", "b", "c", "d")
    found: dict[str, list[Fault]] = {
        role: [Counted(role, f"{what} {role}", log) for what in ("kill", "pause", "cut")]
        for role in roles
    }
    found["everything"] = [Counted("everything", "power cut", log, *roles)]
    return found


async def test_streams_strike_at_the_same_time_and_no_role_is_struck_twice_at_once() -> None:
    log = Log()
    streams = made(kinds(log))
    await streams.run(60.0)
    assert log.most >= 3
    assert streams.never_struck() == []
    assert len(streams.struck) > 30


async def test_with_a_limit_of_one_no_two_strikes_meet() -> None:
    log = Log()
    streams = made(kinds(log), together=1)
    await streams.run(60.0)
    spans = sorted((one.began, one.ended) for one in streams.struck)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


async def test_each_kind_of_a_stream_strikes_before_any_strikes_again() -> None:
    log = Log()
    streams = made({"a": kinds(log)["a"]})
    await streams.run(60.0)
    assert len(set(log.order[:3])) == len(set(log.order[3:6])) == 3


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_seed_decides_the_order_of_a_stream(seed: int) -> None:
    orders = []
    for _ in range(2):
        log = Log()
        await made({"a": kinds(log)["a"]}, seed=seed).run(60.0)
        orders.append(log.order)
    assert orders[0] == orders[1]


async def test_a_kind_that_cannot_strike_is_tried_for_long_and_then_named() -> None:
    log = Log()
    found = kinds(log)
    found["a"].append(Missing("a", "full disk", log))
    streams = made(found)
    began = now()
    await streams.run(10.0)
    assert streams.never_struck() == ["full disk"]
    assert now() - began > 60.0
    assert streams.missed[0] == "full disk: there was nothing to strike"
