"""The lock service against a model that fits on a page, on a clock that the test moves.

Times to live are odd multiples of 50 ms and time moves by multiples of 100 ms, so the ticks in
which the service counts never decide a result here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from percolator.errors import NotReady, Overloaded, SessionExpired
from percolator.services.chassis.access import OWN
from percolator.services.chassis.coordinator import GAP_SECONDS_MAX, LivedTime
from percolator.services.chassis.rpc import Quotas
from percolator.services.lockservice.handler import HeldLocks
from percolator.services.lockservice.sessions import LockServiceLimits, OpenSessions, SessionInfo
from percolator.wire.liveness import Liveness

LIMITS = LockServiceLimits(
    ttl_milliseconds_min=450, ttl_milliseconds_max=2_050, sessions_max=4, locks_max=5
)
PICKS = st.integers(0, 3)
TTLS = st.sampled_from([450, 1_050, 2_050])
NAMES = st.lists(
    st.sampled_from([bytes([letter]) for letter in b"abcdef"]),
    min_size=1,
    max_size=4,
    unique=True,
)


class HandMovedClock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def wall_milliseconds(self) -> int:
        raise AssertionError("the lock service must not look at the wall clock")

    def monotonic_seconds(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("the cores never wait")


@dataclass
class ModelLock:
    session_id: bytes
    deadline: int


class LockServiceMachine(RuleBasedStateMachine):
    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.clock = HandMovedClock()
        self.random = random.Random(7)
        self.now = 0
        self.seen: list[bytes] = [b"never seen here!"]
        self.start()

    def start(self) -> None:
        self.time = LivedTime(self.clock)
        self.sessions = OpenSessions(self.time, self.random, LIMITS, Quotas())
        self.locks = HeldLocks(self.time, LIMITS, Quotas())
        self.collected = True
        self.started = self.now
        self.alive: dict[bytes, int] = {}
        self.ended: set[bytes] = set()
        self.held: dict[bytes, ModelLock] = {}

    # What is expected

    def in_grace(self, ttl: int) -> bool:
        return self.now < self.started + ttl

    def note_end(self, session_id: bytes) -> None:
        self.alive.pop(session_id, None)
        self.ended.add(session_id)

    def may_report(self, session_id: bytes, ttl: int) -> bool:
        return session_id not in self.ended and self.in_grace(ttl)

    def holder(self, name: bytes) -> bytes | None:
        lock = self.held.get(name)
        return lock.session_id if lock is not None and lock.session_id in self.alive else None

    def pick_living(self, pick: int) -> bytes:
        return list(self.alive)[pick % len(self.alive)]

    def expected_refusal(self, session_id: bytes) -> type[Exception]:
        reports = self.may_report(session_id, LIMITS.ttl_milliseconds_max)
        return NotReady if reports else SessionExpired

    # What happens

    @rule(target=ids, ttl=TTLS)
    def open(self, ttl: int) -> bytes:
        info = SessionInfo("", ttl, 0, pin=False)
        if len(self.alive) >= LIMITS.sessions_max:
            with pytest.raises(Overloaded):
                self.sessions.open(info, OWN)
            return self.seen[0]
        session_id = self.sessions.open(info, OWN).session_id
        assert session_id not in self.seen
        self.seen.append(session_id)
        self.alive[session_id] = self.now + ttl
        return session_id

    @rule(session_id=ids, ttl=TTLS)
    def renew(self, session_id: bytes, ttl: int) -> None:
        info = SessionInfo("", ttl, 0, pin=False)
        if session_id in self.alive:
            assert not self.sessions.renew(session_id, info, OWN)
        elif not self.may_report(session_id, ttl):
            with pytest.raises(SessionExpired):
                self.sessions.renew(session_id, info, OWN)
            self.note_end(session_id)
            return
        elif len(self.alive) >= LIMITS.sessions_max:
            with pytest.raises(Overloaded):
                self.sessions.renew(session_id, info, OWN)
            return
        else:
            assert self.sessions.renew(session_id, info, OWN)
        self.alive.pop(session_id, None)
        self.alive[session_id] = self.now + ttl

    @rule(session_id=ids)
    def end(self, session_id: bytes) -> None:
        unheard = session_id not in self.alive
        if unheard and self.may_report(session_id, LIMITS.ttl_milliseconds_max):
            with pytest.raises(NotReady):
                self.sessions.end(session_id)
            return
        self.sessions.end(session_id)
        self.note_end(session_id)

    @rule(session_id=ids)
    def act_in_the_name_of(self, session_id: bytes) -> None:
        if session_id in self.alive:
            assert self.sessions.find(session_id).session_id == session_id
        else:
            with pytest.raises(self.expected_refusal(session_id)):
                self.sessions.find(session_id)

    @precondition(lambda self: self.alive)
    @rule(pick=PICKS)
    def end_a_living_one(self, pick: int) -> None:
        self.end(self.pick_living(pick))

    @precondition(lambda self: self.alive)
    @rule(pick=PICKS, names=NAMES, ttl=TTLS)
    def try_lock(self, pick: int, names: list[bytes], ttl: int) -> None:
        session_id = self.pick_living(pick)
        session = self.sessions.find(session_id)
        for name in names:
            if self.holder(name) is None:
                self.held.pop(name, None)
        fresh = [name for name in names if name not in self.held]
        if len(self.held) + len(fresh) > LIMITS.locks_max:
            with pytest.raises(Overloaded):
                self.locks.try_lock(session, names, ttl)
            return
        expected = [self.holder(name) in (None, session_id) for name in names]
        for name, gets in zip(names, expected, strict=True):
            if gets:
                extended = self.holder(name) == session_id
                floor = self.held[name].deadline if extended else 0
                self.held[name] = ModelLock(session_id, max(self.now + ttl, floor))
        assert self.locks.try_lock(session, names, ttl) == expected

    @precondition(lambda self: self.alive)
    @rule(pick=PICKS, names=NAMES, ttl=TTLS)
    def renew_locks(self, pick: int, names: list[bytes], ttl: int) -> None:
        session_id = self.pick_living(pick)
        expected = [self.holder(name) == session_id for name in names]
        for name, holds in zip(names, expected, strict=True):
            if holds:
                self.held[name].deadline = max(self.held[name].deadline, self.now + ttl)
        assert self.locks.renew(self.sessions.find(session_id), names, ttl) == expected

    @precondition(lambda self: self.alive)
    @rule(pick=PICKS, names=NAMES)
    def unlock(self, pick: int, names: list[bytes]) -> None:
        session_id = self.pick_living(pick)
        for name in names:
            if self.holder(name) == session_id:
                del self.held[name]
        self.locks.unlock(self.sessions.find(session_id), names)

    @rule(steps=st.integers(1, 12), collect=st.booleans())
    def advance(self, steps: int, collect: bool) -> None:
        """When the dead are forgotten can be observed in memory use only."""
        for _ in range(steps * 2):
            self.clock.now += 0.05
            self.pass_time(50)
        self.collect(collect)

    @rule(seconds=st.floats(1.0, 3_600.0), collect=st.booleans())
    def stop_for_a_while(self, seconds: float, collect: bool) -> None:
        """The process is paused: that time does not count against any session."""
        self.clock.now += seconds
        self.pass_time(round(GAP_SECONDS_MAX * 1000))
        self.clock.now += 0.05
        self.pass_time(50)
        self.collect(collect)

    def pass_time(self, milliseconds: int) -> None:
        self.now += milliseconds
        self.time.tick()
        for session_id in [i for i, deadline in self.alive.items() if deadline <= self.now]:
            self.note_end(session_id)
        self.held = {name: lock for name, lock in self.held.items() if lock.deadline > self.now}

    def collect(self, wanted: bool) -> None:
        self.collected = wanted
        while wanted and self.sessions.expire(1) + self.locks.expire(2):
            pass

    @rule()
    def restart(self) -> None:
        self.start()

    # What always holds

    @invariant()
    def liveness_is_as_expected(self) -> None:
        for session_id in self.seen:
            expected = Liveness.DEAD
            if session_id in self.alive:
                expected = Liveness.ALIVE
            elif session_id not in self.ended and self.in_grace(LIMITS.ttl_milliseconds_max):
                expected = Liveness.UNDECIDED
            assert self.sessions.liveness(session_id) is expected

    @invariant()
    def exactly_the_living_are_listed(self) -> None:
        listed: list[bytes] = []
        number, more = 0, True
        while more:
            page, more = self.sessions.page(number, 2)
            listed += [session.session_id for session in page]
            number = page[-1].number if page else 0
        assert sorted(listed) == sorted(self.alive)

    @precondition(lambda self: self.collected)
    @invariant()
    def a_session_counts_its_locks(self) -> None:
        for session_id in self.alive:
            mine = [lock for lock in self.held.values() if lock.session_id == session_id]
            assert self.sessions.find(session_id).locks == len(mine)

    @precondition(lambda self: self.collected)
    @invariant()
    def nothing_else_is_remembered(self) -> None:
        assert (len(self.sessions), len(self.locks)) == (len(self.alive), len(self.held))
        assert self.locks.name_bytes == sum(map(len, self.held))

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.sessions) <= LIMITS.sessions_max
        assert len(self.locks) <= LIMITS.locks_max


TestLockServiceModel: Any = LockServiceMachine.TestCase
TestLockServiceModel.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
