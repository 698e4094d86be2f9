"""Sessions and pins, and the figures that clients and workers report with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from percolator import codecs
from percolator.cli import sessions as command
from percolator.cli import top
from percolator.cli.app import app
from percolator.cli.pins import released
from percolator.cli.sessions import list_sessions
from percolator.cli.status import Overview
from percolator.cli.top import Activities, LostCell, Sample, cell_data, cell_text
from percolator.cli.values import UNKNOWN, Forms, NamedTable
from percolator.codecs.names import CodecNames
from percolator.errors import CellAddress, InvalidArgument, SchemaError, Unavailable
from percolator.formats.records import (
    LockRecord,
    RecordKind,
    acknowledgement_column,
    read_lock_column,
)
from percolator.timestamps import Timestamp
from percolator.v1.cells_pb2 import Cell, Space
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind
from percolator.v1.lockservice_pb2 import Activity, ContendedCell, ObserverActivity, Session
from percolator.v1.master_pb2 import ListTablesResponse
from percolator.wire.lock_service import LockServiceCalls
from percolator.wire.sessions import SessionSettings
from tests.command_line import CliRunner
from tests.unit.wire.lock_services import A, B, LockServices, client, lock_services

TEA = LostCell(1, b"tea", b"stock")


def _session(who: str, runs: int, conflicts: int, *, observers: bool = True) -> Session:
    session = Session(session_id=who.encode())
    session.info.description = who
    cell = ContendedCell(table_id=1, row=b"tea", column=b"stock", conflicts=conflicts)
    its = ObserverActivity(
        table="orders",
        observer="count",
        runs=runs,
        commits=runs - conflicts,
        conflicts=conflicts,
        latency_milliseconds=10 * runs,
        backlog=3,
        cells=[cell],
    )
    activity = Activity(commits=runs, conflicts=conflicts, cells=[cell])
    if observers:
        activity.observers.append(its)
    session.info.activity.CopyFrom(activity)
    return session


def test_what_several_workers_did_is_added_up_by_observer_and_cell() -> None:
    silent = Session(session_id=b"old")
    found = Activities.of([_session("a", 10, 2), _session("b", 5, 5), silent])
    [(name, figures)] = found.observers.items()
    assert name == ("orders", "count")
    assert (figures.workers, figures.counts["runs"], figures.backlog) == (2, 15, 6)
    assert figures.cells == found.cells == {TEA: 7}
    assert figures.latency_seconds() == 150 / 8 / 1000
    assert [one.who for one in found.clients.values()] == ["a", "b"]


def test_rates_are_of_the_time_since_the_refresh_before() -> None:
    before = Activities.of([_session("a", 10, 2), _session("gone", 1_000, 0)])
    now = Activities.of([_session("a", 30, 6), _session("new", 50, 50)])
    moment = Sample(now, {1: NamedTable("goods", UNKNOWN)}, before, 2.0)
    [(client, commits, conflicts), (new, *_)] = moment.clients()
    assert (client.who, commits, conflicts) == ("a", 10.0, 2.0)
    assert new.who == "new"
    assert moment.cells() == [(TEA, 27.0)]
    [(_, _, rates)] = moment.observers()
    assert rates["runs"] == 0.0, "of a worker that has gone, no negative rate is left"


def test_a_cell_with_conflicts_is_shown_by_the_key_of_its_row() -> None:
    key = codecs.tuple_of(codecs.text, codecs.ordered_integer)
    forms = Forms(CodecNames(key="tuple_of(text, ordered_integer)"))
    tables = {1: NamedTable("orders", forms)}
    cell = LostCell(1, key.encode(("eu", 17)), b"state")
    assert cell_text(cell, tables) == 'orders, row ["eu", 17], column state'
    assert cell_data(cell, tables) == {"table": "orders", "row": ["eu", 17], "column": "state"}
    assert cell_text(TEA, {}) == "table 1, row tea, column stock"


def test_a_conflict_at_an_acknowledgement_names_the_observer_and_its_column() -> None:
    """The name of such a cell is not text: two workers have run the same change at once."""
    acknowledged = TEA._replace(column=acknowledgement_column(b"count", b"stock"))
    assert cell_text(acknowledged, {}) == "table 1, row tea, column stock, acknowledged by count"
    locked = TEA._replace(column=read_lock_column(b"stock", 7))
    assert cell_text(locked, {}) == "table 1, row tea, column stock"
    assert cell_text(TEA._replace(column=b"\0ack"), {}) == "table 1, row tea, column hex:0061636b"


def test_workers_of_the_library_are_those_that_are_no_servers() -> None:
    cluster = DescribeResponse(
        servers=[Server(kind=ServiceKind.SERVICE_KIND_WORKER, address="h:1")]
    )
    sessions = [
        _session("worker h:1", 1, 0),
        _session("shop.py on h, pid 7", 1, 0),
        _session("a client", 1, 0, observers=False),
    ]
    found = Overview(cluster, sessions=sessions).library_workers()
    assert [one.info.description for one in found] == ["shop.py on h, pid 7"]


def test_dead_letters_and_servers_that_are_gone_are_problems() -> None:
    gone = Server(
        kind=ServiceKind.SERVICE_KIND_TABLET_SERVER, address="h:1", silence_milliseconds=65_000
    )
    dead = {("orders", "count"): 2, ("orders", "settle"): 1}
    found = Overview(DescribeResponse(gone=[gone]), dead_letters=dead)
    assert [one for one in found.problems() if not one.startswith("no ")] == [
        "tablet server h:1 was there until 0:01:05 ago, and is gone: start it again",
        "observer count of table orders has 2 dead letters: see `percolator dead-letters list`",
        "observer settle of table orders has 1 dead letter: see `percolator dead-letters list`",
    ]


def test_the_first_refresh_of_top_has_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a single look has none, the command looks twice before it shows anything."""
    looks = iter([[_session("a", 10, 2)], [_session("a", 30, 6)]])
    slept: list[float] = []

    async def sessions(*_: object, **__: object) -> list[Session]:
        return next(looks)

    async def tables(*_: object) -> ListTablesResponse:
        return ListTablesResponse()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(top, "list_sessions", sessions)
    monkeypatch.setattr(top, "answer_of_leader", tables)
    monkeypatch.setattr("percolator.cli.top.asyncio.sleep", sleep)
    result = CliRunner().invoke(app, ["--json", "top", "--times", "1", "--every", "3600"])
    assert result.exit_code == 0, result.output
    (program,) = json.loads(result.output)["programs"]
    assert program["commits_per_second"] > 0
    assert program["conflicts_per_second"] > 0
    assert slept == [2.0]


class _Connection:
    """What the commands use of a connection to a cluster with two lock services."""

    timeout_seconds = 5.0

    async def reach(self, network: LockServices) -> tuple[DescribeResponse, LockServices]:
        cluster = DescribeResponse()
        for address in (A, B):
            cluster.servers.add(kind=ServiceKind.SERVICE_KIND_LOCK_SERVICE, address=address)
        return cluster, network


async def test_a_command_says_which_lock_service_has_not_told_its_sessions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here: Any = _Connection()
    async with lock_services(A, B) as services:
        network: Any = services
        sessions = client(services, B)
        session_id = await sessions.current()
        await list_sessions(here, network)
        assert capsys.readouterr().err == ""
        services.refusing.add(A)
        assert [one.session_id for one in await list_sessions(here, network)] == [session_id]
        told = capsys.readouterr().err
        assert told.startswith(f"sessions of the lock service at {A} cannot be shown: ")
        problems: list[str] = []
        await list_sessions(here, network, tell=problems.append)
        assert [told] == [f"{one}\n" for one in problems]
        with pytest.raises(Unavailable, match=A):
            await list_sessions(here, network, tell=top._refuse)
        services.refusing.add(B)
        with pytest.raises(Unavailable, match="connection refused"):
            await list_sessions(here, network)
        await sessions.close()


async def test_a_pin_is_released_at_the_lock_service_that_knows_it() -> None:
    async with lock_services(A, B) as services:
        await asyncio.sleep(61)  # their grace periods are over
        pin = client(services, B, settings=SessionSettings(pin_at=42))
        session = await pin.current()
        assert session is not None
        calls = LockServiceCalls(services, [A, B])
        await released(calls, session, 5.0)
        assert services.alive(B) == []
        with pytest.raises(InvalidArgument, match="there is no pin"):
            await released(calls, session, 5.0)
        services.refusing.add(A)
        with pytest.raises(Unavailable):
            await released(calls, session, 5.0)
        await pin.close()


@pytest.mark.parametrize("named", [False, True])
async def test_locks_of_all_tables_leave_out_a_table_that_is_dropped_meanwhile(
    named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = LockRecord(1 << 18, 0, 3000, RecordKind.PUT, b"", CellAddress(1, b"r", b"c"), b"")
    cell = Cell(row=b"r", column=b"c", space=Space.SPACE_LOCK, value=lock.encode())

    async def cells(_: object, table: Any, *__: object) -> AsyncIterator[Cell]:
        yield cell
        if table.name == "gone":
            raise SchemaError("there is no table 'gone'", table="gone")

    monkeypatch.setattr(command, "stored_cells", cells)
    infos = [Mock(codecs=Mock(names=CodecNames())) for _ in range(2)]
    infos[0].name, infos[1].name = "gone", "kept"
    catalog = Mock(tables=AsyncMock(return_value=infos), table=AsyncMock(return_value=infos[0]))
    engine = Mock(catalog=catalog, now=lambda: 0.0)
    database: Any = Mock(
        internal=Mock(engine=engine), timestamp=AsyncMock(return_value=Timestamp(2 << 18))
    )
    here: Any = _Connection()
    if named:
        with pytest.raises(SchemaError, match="gone"):
            await command._held(here, database, "gone", None, 10)
    else:
        found = await command._held(here, database, None, None, 10)
        assert [one.table for one in found] == ["kept"]
