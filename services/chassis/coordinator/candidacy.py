"""One process's candidacy for a role: it waits, leads for a term, and waits again.

What a service does while it leads is its *term*, an object that the service provides and `begin`
creates. A process without a term serves nothing that only the leader may serve: it refuses, and
names the leader if it knows one.

Invariants:
- There is a term only while this process holds the leadership from which the term was created.
  Holding it does not prove that this process leads: one that was paused may have a successor. So
  every response is preceded by `Leadership.check` or `stands`.
- If a term cannot be created, the process resigns at once. Otherwise it would hold the role for as
  long as it lives, and serve nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, NoReturn, TypeVar

import structlog

from percolator.errors import NotReady, PercolatorError
from percolator.services.chassis.coordinator.interface import (
    Coordinator,
    Leadership,
    no_lost_leader,
)
from percolator.services.chassis.trouble import Trouble
from percolator.world import Clock

LOOK_SECONDS = 0.25
"""The interval at which a waiting process checks who leads."""
_POLL_SECONDS = 0.02
_REFUSED_RETRY_SECONDS = 0.1
_CANNOT_LEAD_SECONDS = 0.5
"""How long a process that cannot lead leaves the role to other candidates."""

TermT = TypeVar("TermT")

_log = structlog.get_logger("percolator.coordinator")


class Candidacy(Generic[TermT]):
    """The candidacy of one process for one role."""

    def __init__(self, coordinator: Coordinator, clock: Clock, *, role: str, address: str) -> None:
        """`address` is how other processes reach this one."""
        self._coordinator = coordinator
        self._clock = clock
        self._role = role
        self._address = address
        self._leadership: Leadership | None = None
        self.term: TermT | None = None
        """None while this process does not lead."""
        self.leader_address = ""
        """The leader at this process's last check, while it was waiting. Empty if unknown."""
        self._not_leading = Trouble(_log, f"this {role} cannot lead", level=logging.ERROR)
        self._unseen = Trouble(
            _log, "the coordinator does not answer", "the coordinator answers again", role=role
        )

    def serving(self) -> TermT:
        """The term, or `NotReady` with the address of the process that leads."""
        if self.term is None:
            other = self.leader_address
            at = f"; the one at {other} does" if other and other != self._address else ""
            raise NotReady(
                f"this {self._role} does not lead{at}", retry_after_seconds=_REFUSED_RETRY_SECONDS
            )
        return self.term

    async def until_decided(self, seconds: float) -> None:
        """Returns when some process leads, or after `seconds`.

        A service that waits for this before it accepts calls does not refuse its first callers
        merely because it has not looked yet.
        """
        deadline = self._clock.monotonic_seconds() + seconds
        while self.term is None and not self.leader_address:
            if self._clock.monotonic_seconds() >= deadline:
                return
            await self._clock.sleep(_POLL_SECONDS)

    async def run(
        self, serve: Callable[[], Awaitable[None]], cannot_lead: tuple[type[Exception], ...]
    ) -> NoReturn:
        """Serves one term after another, until cancelled or until `serve` raises another error.

        `serve` calls `begin`, and raises `NotReady` when the term is over, or one of `cannot_lead`
        if this process could not lead: another one may have a better disk, or a better clock.
        """
        while True:
            try:
                await self._serve_a_term(serve)
            except cannot_lead as error:
                self._not_leading.lasts(error)
                await self._clock.sleep(_CANNOT_LEAD_SECONDS)

    async def _serve_a_term(self, serve: Callable[[], Awaitable[None]]) -> None:
        try:
            await serve()
        except NotReady as error:
            _log.warning(f"this {self._role} no longer leads", reason=str(error))
        finally:
            await self.end()

    async def begin(
        self,
        make_term: Callable[[Leadership], Awaitable[TermT]],
        lost: Callable[[], str] = no_lost_leader,
    ) -> TermT:
        """Waits until this process leads, and creates its term.

        `lost` is passed to `Coordinator.campaign`.
        """
        looking = asyncio.create_task(self._keep_looking(), name=f"look which {self._role} leads")
        try:
            leadership = await self._coordinator.campaign(self._role, self._address, lost)
        finally:
            looking.cancel()
        try:
            self.term = await make_term(leadership)
        except BaseException:
            await asyncio.shield(leadership.resign())
            raise
        self._leadership = leadership
        self._not_leading.is_over()
        # What was seen before this term will be out of date when the term ends.
        self.leader_address = ""
        return self.term

    async def end(self) -> None:
        """Ends the term, if there is one, and lets the next candidate lead at once."""
        self.term = None
        leadership, self._leadership = self._leadership, None
        if leadership is not None:
            await asyncio.shield(leadership.resign())

    async def _keep_looking(self) -> None:
        while True:
            try:
                leader = await self._coordinator.leader(self._role)
            except (OSError, PercolatorError) as error:
                self._unseen.lasts(error)
            else:
                self._unseen.is_over()
                self.leader_address = leader.holder if leader is not None else ""
            await self._clock.sleep(LOOK_SECONDS)
