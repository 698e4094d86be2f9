"""A dropped table is gone for everybody, also where its tablet's server has not heard of it yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

import percolator
from percolator import Database, Table, codecs
from percolator.errors import DeadlineExceeded, SchemaError
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from tests.integration.command_line import CommandLine

pytestmark = pytest.mark.integration

ROUNDS = 8
SECONDS_AFTER = 0.016
"""For so long after a drop, other clients could read the table, without any fault."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2) as started:
        yield started


@pytest.fixture
def near(cluster: LocalCluster) -> Iterator[Database]:
    """The client that drops tables."""
    with percolator.connect(cluster.address) as database:
        yield database


@pytest.fixture
def other(cluster: LocalCluster) -> Iterator[Database]:
    """A client that knows the tables and their servers from before."""
    with percolator.connect(cluster.address) as database:
        yield database


def owner(cluster: LocalCluster, table: Table[str]) -> ServiceProcess:
    """The server that has the only tablet of a table."""
    (tablet,) = CommandLine(cluster.address).data("tablets", "--table", table.name)
    (server,) = [one for one in cluster.processes.values() if one.address == tablet["address"]]
    return server


def test_no_other_client_reads_or_writes_a_table_after_it_was_dropped(
    near: Database, other: Database
) -> None:
    for number in range(ROUNDS):
        table = Table(f"at-once-{number}")
        value = table.column("v", codecs.integer)
        near.create_table(table)
        with other.transaction() as tx:
            tx.set("a", value, 1)
        assert other.get("a", value) == 1
        near.drop_table(table)
        until = time.monotonic() + SECONDS_AFTER
        while True:
            with pytest.raises(SchemaError):
                other.get("a", value)
            with pytest.raises(SchemaError), other.transaction() as tx:
                tx.set("a", value, 2)
            if time.monotonic() > until:
                break


def at_the_same_time(*calls: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call) for call in calls]
    for one in threads:
        one.start()
    return threads


def test_a_table_that_is_dropped_and_created_again_while_its_server_is_stopped(
    cluster: LocalCluster, near: Database, other: Database
) -> None:
    """The other client's calls wait at the stopped server, which goes on when the next table is
    there: they use that one, all by themselves."""
    table = Table("recreated")
    value = table.column("v", codecs.integer)
    near.create_table(table)
    with other.transaction() as tx:
        tx.set("a", value, 1)
    stopped = owner(cluster, table)
    found: dict[str, object] = {}
    stopped.pause()
    try:
        near.drop_table(table, timeout=30)
        near.create_table(table, timeout=30)
        with near.transaction(timeout=30) as tx:
            tx.set("a", value, 2)

        def read() -> None:
            found["read"] = other.get("a", value)

        def write() -> None:
            other.run(lambda tx: tx.set("w", value, 3))
            found["written"] = near.get("w", value)

        waiting = at_the_same_time(read, write)
    finally:
        stopped.resume()
    for one in waiting:
        one.join()
    assert found == {"read": 2, "written": 3}


def test_a_drop_that_a_stopped_server_holds_up_says_so_and_is_waited_for_when_repeated(
    cluster: LocalCluster, near: Database, other: Database
) -> None:
    command = CommandLine(cluster.address)
    table = Table("held-up")
    value = table.column("v", codecs.integer)
    near.create_table(table)
    with other.transaction() as tx:
        tx.set("a", value, 1)
    servers = [one for name, one in cluster.processes.items() if name.startswith("tabletserver")]
    for one in servers:
        one.pause()
    try:
        with pytest.raises(DeadlineExceeded, match="'held-up' is dropped, but this is not in forc"):
            near.drop_table(table, timeout=2)
        delete = ("--timeout", "2", "tables", "delete", "held-up", "--yes")
        assert "'held-up' is dropped, but this is not in force" in command.error(*delete, code=1)
        with pytest.raises(DeadlineExceeded, match="created, but cannot be used yet"):
            near.create_table(table, timeout=2)
    finally:
        for one in servers:
            one.resume()
    near.drop_table(table, timeout=30)
    with pytest.raises(SchemaError):
        other.get("a", value)
