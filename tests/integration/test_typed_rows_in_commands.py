"""Commands take and show rows as the codec of the table's keys says, on a running cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import percolator
from percolator import Database, Table, Ticket, Transaction, codecs, observes
from percolator.services.local.cluster import LocalCluster
from tests.integration.command_line import CommandLine

pytestmark = pytest.mark.integration

orders = Table("orders", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
state = orders.column("state", codecs.text)


@observes(state)
def count(tx: Transaction, row: tuple[str, int]) -> None:
    """It never runs here: its notifications wait."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=1) as started:
        yield started


@pytest.fixture(scope="module")
def db(cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(cluster.address) as connected:
        connected.create_table(orders)
        connected.set_many((("ann", number), {state: "open"}) for number in (1, 2, 3))
        yield connected


@pytest.fixture
def command(cluster: LocalCluster) -> CommandLine:
    return CommandLine(cluster.address)


def test_the_lock_of_a_row_is_found_by_the_row_as_it_is_shown(
    db: Database, command: CommandLine
) -> None:
    with db.shared_transaction() as whole:
        lock(db, whole.ticket)
        (held,) = command.data("locks", "orders", '["ann", 2]')
        assert (held["row"], held["column"]) == (["ann", 2], "state")
        assert '["ann", 2]' in command.text("locks", "orders")
        assert command.data("locks", "orders", '["ann", 3]') == []
        whole.abort()
    assert "expected tuple_of(text" in command.error("locks", "orders", "ann", code=2)


def lock(db: Database, ticket: Ticket) -> None:
    with db.share(ticket, task="1") as share:
        share.set(("ann", 2), state, "held")
        share.finish()


def test_a_backfill_begins_and_ends_at_the_rows_that_are_named(
    db: Database, command: CommandLine
) -> None:
    db.register_observers([count])
    chosen = ("--from", '["ann", 2]', "--to", '["ann", 3]')
    done = command.data("observers", "backfill", "orders", "count", *chosen)
    assert done["cells"] == 1
    (waiting,) = command.data("notifications", "--table", "orders")
    assert waiting["row"] == ["ann", 2]
    assert '["ann", 2]' in command.text("notifications")
    wrong = ("observers", "backfill", "orders", "count", "--from", "ann")
    assert "--from: expected tuple_of(text" in command.error(*wrong, code=2)


def test_a_tablet_is_split_at_the_key_that_is_named(db: Database, command: CommandLine) -> None:
    (whole,) = command.data("tablets", "--table", "orders")
    assert (whole["start"], whole["end"]) == ("", None)
    split = ("tablets", "split", str(whole["tablet_id"]), "--row")
    assert "--row: expected tuple_of(text" in command.error(*split, "ann", code=2)
    made = command.data(*split, '["ann", 2]')
    assert (made["lower"]["end"], made["upper"]["start"]) == (["ann", 2], ["ann", 2])
    shown = command.data("tablets", "--table", "orders")
    assert [one["start"] for one in shown] == ["", ["ann", 2]]
    assert '["ann", 2]' in command.text("tablets", "--table", "orders")


def test_no_command_writes_a_row_that_programs_cannot_read(
    db: Database, command: CommandLine
) -> None:
    for row in ("", "ann", '["ann"]', '["ann", 1, 2]'):
        assert "row: expected tuple_of" in command.error("set", "orders", row, "state=x", code=2)
    with db.snapshot() as snapshot:
        assert [row.key for row in snapshot.scan(orders)] == [("ann", 1), ("ann", 2), ("ann", 3)]
    assert len(command.data("scan", "orders", "--start", "", "--end", "")) == 3
