"""Clients that have no access to the store, and reach it through gateways only."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import pytest

import percolator
from percolator import OutcomeUnknown, Table, Transaction, codecs, observes
from percolator.bigtable.place import EMULATOR_VARIABLE
from percolator.errors import Unavailable
from percolator.services.local.cluster import LocalCluster
from percolator.v1 import gateway_pb2 as pb
from percolator.v1.master_pb2 import CreateTableRequest
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from tests.bigtable.emulator_process import emulator
from tests.integration.command_line import CommandLine
from tests.integration.test_gateway import (
    ACCOUNTS,
    CALL_SECONDS,
    OPENING_BALANCE,
    PATIENCE_SECONDS,
    TABLE,
    Teller,
    account,
    put,
    total,
)

pytestmark = [pytest.mark.bigtable, pytest.mark.timeout(300)]

NOWHERE = "127.0.0.1:1"
NOTES = Table("notes")
TEXT = NOTES.column("text", codecs.text)
PAGES = Table("pages")
BODY = PAGES.column("body", codecs.text)
LENGTH = PAGES.column("length", codecs.integer)


@pytest.fixture(scope="module", name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster on an emulator that only its services find."""
    data = tmp_path_factory.mktemp("cluster")
    store = f"bigtable://gateways/i{uuid.uuid4().hex[:20]}"
    with emulator() as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv(EMULATOR_VARIABLE, address)
        cluster = LocalCluster(data, store=store, tablet_servers=0, gateways=2, start_seconds=60.0)
        with cluster:
            yield cluster


@pytest.fixture(autouse=True)
def _outside(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EMULATOR_VARIABLE, NOWHERE)


def _restart(cluster: LocalCluster, name: str) -> None:
    """With the address that the masters know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(EMULATOR_VARIABLE)
        cluster.restart(name)


def test_the_store_itself_is_out_of_reach_here(cluster: LocalCluster) -> None:
    with pytest.raises(Unavailable, match="a program without access to it connects to a gateway"):
        percolator.connect(cluster.address, timeout=1.0)


def test_a_program_runs_as_it_is_through_a_gateway(cluster: LocalCluster) -> None:
    with percolator.connect(cluster.gateway_address) as db:
        db.create_table(NOTES)
        with db.transaction() as tx:
            tx.set("one", TEXT, "first")
            tx.set("two", TEXT, "x" * 3_000_000)
        before = db.timestamp()
        with db.transaction() as tx:
            tx.lock("two", TEXT)
            tx.set("one", TEXT, (tx.get("one", TEXT) or "") + ", then second")
            tx.delete("two", TEXT)
        assert db.get("one", TEXT) == "first, then second"
        with db.snapshot(at=before) as snapshot:
            found = {row.key: len(row[TEXT]) for row in snapshot.scan(NOTES)}
        assert found == {"one": 5, "two": 3_000_000}
    command = CommandLine(cluster.gateway_address)
    assert "first, then second" in command.text("get", "notes", "one")
    assert command.text("status").count("gateway") >= 2
    command.run("locks", "notes")


@observes(BODY, name="measure")
def measure(tx: Transaction, row: str) -> None:
    tx.set(row, LENGTH, len(tx.get(row, BODY, "")))


def test_observers_run_in_a_program_behind_a_gateway(cluster: LocalCluster) -> None:
    with percolator.connect(cluster.gateway_address) as db:
        db.create_table(PAGES)
        db.register_observers([measure])
        with db.run_observers([measure]):
            with db.transaction() as tx:
                tx.set("three", BODY, "third")
            db.wait_for_observers(timeout=PATIENCE_SECONDS)
        assert db.get("three", LENGTH) == 5


def test_a_program_continues_at_the_next_gateway_when_its_own_is_killed(
    cluster: LocalCluster,
) -> None:
    table = Table("counted")
    number = table.column("number", codecs.integer)
    with percolator.connect(cluster.gateway_address) as db:
        db.create_table(table)
        made = unknown = 0
        cluster.processes["gateway"].kill()
        try:
            for _ in range(10):
                try:
                    with db.transaction(timeout=PATIENCE_SECONDS) as tx:
                        tx.set("a", number, tx.get("a", number, default=0) + 1)
                    made += 1
                except OutcomeUnknown:
                    unknown += 1
            assert made <= (db.get("a", number) or 0) <= made + unknown
            assert made > 5
        finally:
            _restart(cluster, "gateway")


async def test_callers_in_other_languages_lose_nothing_when_gateways_are_killed(
    cluster: LocalCluster,
) -> None:
    addresses = cluster.gateway_address.split(",")
    network = GrpcNetwork()
    opening = Teller(network, addresses, 0)
    await network.unary(addresses[0], methods.CREATE_TABLE)(
        CreateTableRequest(name=TABLE), CALL_SECONDS
    )
    start = (await opening.anywhere(methods.BEGIN, pb.BeginRequest())).start_timestamp
    writes = [put(account(number), OPENING_BALANCE) for number in range(ACCOUNTS)]
    await opening.anywhere(methods.COMMIT, pb.CommitRequest(start_timestamp=start, writes=writes))
    tellers = [Teller(network, addresses, seed) for seed in range(3)]
    for name in ("gateway", "gateway-2"):
        working = asyncio.gather(*(_transfers(one) for one in tellers))
        await tellers[0].has_committed.wait()
        await asyncio.to_thread(cluster.processes[name].kill)
        await working
        await asyncio.to_thread(_restart, cluster, name)
    assert await total(network, addresses[0]) == ACCOUNTS * OPENING_BALANCE
    # A repeated request gets the same answer from gateways that have forgotten everything.
    for teller in tellers:
        request, commit = list(teller.committed.values())[-1]
        for address in addresses:
            again = await network.unary(address, methods.COMMIT)(request, CALL_SECONDS)
            assert again.commit_timestamp == commit
            asked = pb.ResolveRequest(
                start_timestamp=request.start_timestamp, writes=request.writes
            )
            told = await network.unary(address, methods.RESOLVE)(asked, CALL_SECONDS)
            assert told.commit_timestamp == commit
    assert await total(network, addresses[1]) == ACCOUNTS * OPENING_BALANCE
    await network.close()


async def _transfers(teller: Teller) -> None:
    for _ in range(4):
        await teller.transfer()
