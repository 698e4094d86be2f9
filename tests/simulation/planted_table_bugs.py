"""Bugs of tables that are dropped and created again, which a simulation has to find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from percolator.aio.reader import Reader
from percolator.routing.table_info import TableInfo
from percolator.services.chassis.epoch_directory import EpochDirectory
from percolator.services.master.assignment import Assignment
from percolator.services.master.cluster_map import Tablet
from percolator.services.master.leader import Tables
from percolator.services.master.table_changes import TableChanges
from percolator.services.tabletserver.tablet_store import Ancestry
from percolator.tablet.identity import TabletIdentity
from percolator.v1 import master_pb2 as pb
from tests.simulation.tablet_store import SimulatedTabletStore

Patch = pytest.MonkeyPatch


def name_looked_up_at_each_call(patch: Patch) -> None:
    """A transaction that has read a table finds nothing in the next one, and writes into it."""

    patch.setattr(Reader, "bound", lambda self, name: self.engine.catalog.known(name))
    patch.setattr(Reader, "bind", lambda self, info: info)


def table_younger_than_the_snapshot_is_read(patch: Patch) -> None:
    """It looks empty to a snapshot in whose time another table of that name had rows."""

    patch.setattr(TableInfo, "require_older_than", lambda self, snapshot: None)


def drop_does_not_wait(patch: Patch) -> None:
    """Others read the table until its servers have heard that it was dropped."""

    async def wrong(self: Tables, name: str, deadline: float) -> None:
        pass

    patch.setattr(Tables, "_until_out_of_use", wrong)


def drop_waits_once(patch: Patch) -> None:
    """When it is repeated after a time-out, it returns at once; so does the next creation."""
    correct = Tables._until_out_of_use

    async def wrong(self: Any, name: str, deadline: float) -> None:
        if getattr(self, "_waited_for", 0) < self._deletions:
            self._waited_for = self._deletions
            await correct(self, name, deadline)

    patch.setattr(Tables, "_until_out_of_use", wrong)


def creation_does_not_wait_for_the_former_table(patch: Patch) -> None:
    """Its drop has run out of time, and others still use it."""
    is_creating = ContextVar("is_creating", default=False)
    create, wait = TableChanges.create, Tables._until_out_of_use

    async def created(self: Any, request: pb.CreateTableRequest, deadline: float) -> Any:
        token = is_creating.set(True)
        try:
            return await create(self, request, deadline)
        finally:
            is_creating.reset(token)

    async def wrong(self: Tables, name: str, deadline: float) -> None:
        if not is_creating.get():
            await wait(self, name, deadline)

    patch.setattr(TableChanges, "create", created)
    patch.setattr(Tables, "_until_out_of_use", wrong)


def a_silent_owner_is_taken_for_gone(patch: Patch) -> None:
    """Its lease has expired, but nobody has taken its tablets over yet: it may be only cut off from
    the master."""
    correct = Assignment.is_taken_over

    def wrong(self: Assignment, tablet: Tablet) -> bool:
        alive = self._watch.alive()
        return correct(self, tablet) or not any(tablet.tablet_id in one.reported for one in alive)

    patch.setattr(Assignment, "is_taken_over", wrong)
    take_over_slowly(patch)


def take_over_slowly(patch: Patch) -> None:
    """The next owner waits for the store, and the former one serves until then. Otherwise there is
    hardly any time in which it could be used."""
    correct = SimulatedTabletStore.take_over

    async def slowly(
        self: SimulatedTabletStore, tablet: TabletIdentity, ancestry: Ancestry
    ) -> EpochDirectory:
        await asyncio.sleep(1.5)
        return await correct(self, tablet, ancestry)

    patch.setattr(SimulatedTabletStore, "take_over", slowly)


def report_of_an_earlier_epoch_confirms_a_drop(patch: Patch) -> None:
    """It says that the tablet is still served as before."""

    def wrong(self: Assignment, tablet: Tablet) -> bool:
        server = self._watch.servers.get(tablet.server_id)
        return server is not None and tablet.tablet_id in server.reported

    patch.setattr(Assignment, "is_taken_over", wrong)


DROPS: tuple[Callable[[Patch], None], ...] = (
    drop_does_not_wait,
    drop_waits_once,
    creation_does_not_wait_for_the_former_table,
    report_of_an_earlier_epoch_confirms_a_drop,
)

ALL: tuple[Callable[[Patch], None], ...] = (
    name_looked_up_at_each_call,
    table_younger_than_the_snapshot_is_read,
)
