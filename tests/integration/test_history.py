"""History in a real cluster that keeps it for two seconds: pins, refused reads, shown versions."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import percolator
from percolator import InvalidArgument, SnapshotTooOld, Table, Timestamp, codecs, observes
from percolator.errors import SchemaError, SessionExpired
from percolator.formats.records import acknowledgement_column
from percolator.services.local.authority import files_in, make_all
from percolator.services.local.cluster import LocalCluster
from percolator.timestamps import SEQUENCE_BITS
from tests.integration.command_line import CommandLine

pytestmark = pytest.mark.integration

SETTINGS = {
    # After a start, the lock service's grace period is as long as its longest time to live.
    "PERCOLATOR_LOCKSERVICE_TTL_MILLISECONDS_MAX": "4000",
    "PERCOLATOR_MASTER_COLLECTION_SECONDS": "0.3",
    "PERCOLATOR_MASTER_RETENTION_SECONDS": "2",
    "PERCOLATOR_MASTER_RETENTION_MIN_SECONDS": "1",
}
SECONDS = 30.0
PIN_TTL = 3.0
accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)


@pytest.fixture(scope="module", name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=1) as started:
            with percolator.connect(started.address) as db:
                db.create_table(accounts, splits=["m"])
            yield started


@pytest.fixture(name="db")
def _db(cluster: LocalCluster) -> Iterator[percolator.Database]:
    with percolator.connect(cluster.address, description="a test") as db:
        yield db


def command_line(cluster: LocalCluster, *arguments: str) -> list[str]:
    """A command to run in a separate process."""
    command = [sys.executable, "-m", "percolator.cli", "--address", cluster.address, "--json"]
    return [*command, *arguments]


@pytest.fixture(name="command")
def _command(cluster: LocalCluster) -> CommandLine:
    return CommandLine(cluster.address)


def put(db: percolator.Database, row: str, value: int) -> None:
    with db.transaction() as tx:
        tx.set(row, balance, value)


def until_refused(db: percolator.Database, row: str, at: Timestamp) -> SnapshotTooOld:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            with db.snapshot(at) as snapshot:
                snapshot.get(row, balance)
        except SnapshotTooOld as error:
            return error
        threading.Event().wait(0.1)
    raise AssertionError("history was never collected")


def test_a_snapshot_older_than_the_retention_says_how_far_history_goes_back(
    db: percolator.Database,
) -> None:
    put(db, "bob", 1)
    error = until_refused(db, "bob", at := db.timestamp())
    assert error.timestamp == at < error.safe_point
    assert Timestamp(error.safe_point).describe() in str(error)
    with pytest.raises(SnapshotTooOld, match="history of table 'accounts', which goes back to"):
        db.pin(at, ttl=PIN_TTL).__enter__()
    with db.snapshot(db.timestamp()) as snapshot:
        assert snapshot.get("bob", balance) == 1


def test_a_pin_keeps_history_and_collection_continues_once_it_ends(
    command: CommandLine, db: percolator.Database
) -> None:
    put(db, "joe", 1)
    with db.pin(ttl=PIN_TTL, description="a report") as pin:
        for value in range(2, 30):
            put(db, "joe", value)
        # By the end of this, the pin is older than the retention.
        until_refused(db, "joe", Timestamp(pin.at - (1 << SEQUENCE_BITS)))
        deadline = time.monotonic() + SECONDS
        while (found := command.data("gc", "status"))["held_by"] != "a report":
            assert time.monotonic() < deadline, found
        assert found["held_at"] == str(int(pin.at))
        assert {table["safe_point"] for table in found["tables"]} == {str(int(pin.at))}
        assert [one["description"] for one in command.data("pins", "list")] == ["a report"]
        with db.snapshot(pin.at) as snapshot:
            assert snapshot.get("joe", balance) == 1
        at = pin.at
    until_refused(db, "joe", at)
    deadline = time.monotonic() + SECONDS
    while len(versions := command.data("history", "accounts", "joe", "--as", "integer")) > 1:
        assert time.monotonic() < deadline, versions
    assert [one["value"] for one in versions] == [29]


def test_a_pin_of_the_future_is_refused(db: percolator.Database) -> None:
    later = Timestamp(db.timestamp() + (3_600_000 << SEQUENCE_BITS))
    with pytest.raises(InvalidArgument, match="is in the future: the oracle is at"):
        db.pin(later).__enter__()


def test_a_datetime_shows_commits_before_its_millisecond_and_none_of_it(
    db: percolator.Database,
) -> None:
    with db.pin(ttl=PIN_TTL):
        put(db, "ann", 1)
        first = db.timestamp()
        # A later millisecond, by the oracle's clock.
        while (second := db.timestamp()).physical_milliseconds == first.physical_milliseconds:
            pass
        put(db, "ann", 2)
        moment = second.to_datetime()
        assert Timestamp.from_datetime(moment) == second.physical_milliseconds << SEQUENCE_BITS
        with db.snapshot(moment) as snapshot:
            assert snapshot.get("ann", balance) == 1
        # In the same millisecond as the second write, but before it.
        with db.snapshot(second) as snapshot:
            assert snapshot.get("ann", balance) == 1
        with db.snapshot() as snapshot:
            assert snapshot.get("ann", balance) == 2


def test_the_versions_of_a_row_are_shown_with_their_times_and_kinds(
    command: CommandLine, db: percolator.Database
) -> None:
    with db.pin(ttl=PIN_TTL):
        put(db, "zoe", 1)
        with db.transaction() as tx:
            tx.delete("zoe", balance)
        put(db, "zoe", 3)
        shown = command.data("history", "accounts", "zoe", "balance", "--as", "integer")
    assert [(one["kind"], one["value"]) for one in shown] == [
        ("put", 3),
        ("delete", None),
        ("put", 1),
    ]
    times = [one["commit_timestamp"] for one in shown]
    assert times == sorted(times, reverse=True)
    assert command.data("history", "accounts", "unwritten", code=1) == []


def test_a_pin_created_by_the_command_line_lasts_as_long_as_the_command_after_it(
    cluster: LocalCluster, command: CommandLine
) -> None:
    # The output of the inner command follows that of the outer one.
    done = subprocess.run(
        [
            *command_line(cluster, "pins", "create", "--ttl", str(PIN_TTL)),
            *("--description", "of the command line", "--"),
            *command_line(cluster, "pins", "list"),
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    decoder = json.JSONDecoder()
    made, end = decoder.raw_decode(done.stdout)
    listed, _ = decoder.raw_decode(done.stdout[end:].lstrip())
    assert [one["session_id"] for one in listed] == [made["session_id"]]
    assert command.data("pins", "list") == []


def test_a_pin_whose_holder_is_killed_ends_with_its_time_to_live(
    cluster: LocalCluster, command: CommandLine, db: percolator.Database
) -> None:
    holder = subprocess.Popen(
        command_line(cluster, "pins", "create", "--ttl", "1", "--description", "killed"),
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline()
    assert [one["description"] for one in command.data("pins", "list")] == ["killed"]
    at = db.timestamp()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    # What it held is collected like everything else.
    until_refused(db, "kim", at)
    assert command.data("pins", "list") == []


def test_a_pin_that_would_outlive_its_holder_for_too_long_is_refused(
    command: CommandLine, db: percolator.Database
) -> None:
    with pytest.raises(InvalidArgument, match=r"^ttl: 5000 ms is outside 500 to 4000 ms"):
        db.pin(ttl=5.0).__enter__()
    assert command.data("pins", "list") == []


def test_by_default_a_pin_outlives_its_holder_as_long_as_the_lock_service_allows(
    command: CommandLine, db: percolator.Database
) -> None:
    with db.pin() as pin:
        (listed,) = command.data("pins", "list")
        assert listed["ttl_seconds"] == 4.0
        pin.check()


def test_a_pin_for_an_unknown_table_is_refused_and_holds_nothing(
    command: CommandLine, db: percolator.Database
) -> None:
    with pytest.raises(SchemaError, match="no table 'nothing'"):
        db.pin(tables=[Table("nothing")], ttl=PIN_TTL).__enter__()
    assert command.data("pins", "list") == []


def test_acknowledgements_are_not_part_of_a_rows_history_unless_they_are_named(
    command: CommandLine, db: percolator.Database
) -> None:
    @observes(balance)
    def observer(_tx: percolator.Transaction, _row: str) -> None:
        return

    db.register_observers([observer])
    with db.pin(ttl=PIN_TTL):
        put(db, "oma", 1)
        with db.run_observers([observer]):
            db.wait_for_observers(timeout=SECONDS)
        noted = "hex:" + acknowledgement_column(observer.name.encode(), b"balance").hex()
        assert len(command.data("history", "accounts", "oma", noted)) == 1
        shown = command.data("history", "accounts", "oma", "--as", "integer")
    assert [one["column"] for one in shown] == ["balance"]


@pytest.mark.spark
def test_a_spark_read_is_pinned_or_refused_if_its_history_is_gone(
    cluster: LocalCluster,
    command: CommandLine,
    db: percolator.Database,
) -> None:
    from percolator.spark.options import ReadOptions
    from percolator.spark.reader import pinned_timestamp

    before = db.timestamp()
    until_refused(db, "sue", before)

    def pinned(**options: str) -> Timestamp:
        given = {"address": cluster.address, "table": "accounts", **options}
        return pinned_timestamp(ReadOptions.parse(given))

    with pytest.raises(SnapshotTooOld, match="history of table 'accounts', which goes back to"):
        pinned(snapshot_ts=str(int(before)))
    later = int(db.timestamp()) + (1 << 50)
    with pytest.raises(InvalidArgument, match=r"snapshot_ts: .* is in the future"):
        pinned(snapshot_ts=str(later))
    at = pinned(pin_seconds="4")
    (listed,) = command.data("pins", "list")
    assert listed["oldest_start_timestamp"] == str(int(at))
    assert listed["description"].startswith("Spark read on ")
    until_refused(db, "sue", at)
    assert command.data("pins", "list") == []


def test_a_released_pin_ends_and_its_holder_gets_an_error(
    command: CommandLine, db: percolator.Database
) -> None:
    with db.pin(ttl=PIN_TTL) as pin:
        (listed,) = command.data("pins", "list")
        assert "no pin" in command.error("pins", "release", "00" * 16, code=2)
        command.run("pins", "release", listed["session_id"])
        deadline = time.monotonic() + SECONDS
        while not pin.is_lost:
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)
        with pytest.raises(SessionExpired, match="was released or lost"):
            pin.check()
        assert command.data("pins", "list") == []


def test_a_retention_below_the_minimum_is_refused(db: percolator.Database) -> None:
    with pytest.raises(InvalidArgument, match="below 1000"):
        db.create_table(Table("brief"), retention=timedelta(milliseconds=999))


def test_a_pin_of_a_client_ends_when_it_is_too_old_and_that_of_an_administrator_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (*SETTINGS.items(), ("PERCOLATOR_MASTER_CLIENT_HELD_SECONDS_MAX", "3")):
        monkeypatch.setenv(name, value)
    certificates = tmp_path / "certificates"
    make_all(certificates)
    files = files_in(certificates / "client")
    client, admin = (
        (certificates / "client" / f"{role}.token").read_text().strip()
        for role in ("client", "admin")
    )
    with (
        LocalCluster(tmp_path / "data", tablet_servers=1, certificates=certificates) as cluster,
        percolator.connect(cluster.address, tls=files, token=admin) as boss,
        percolator.connect(cluster.address, tls=files, token=client) as db,
    ):
        boss.create_table(accounts)
        put(db, "joe", 1)
        with db.pin(ttl=PIN_TTL) as pin:
            put(db, "joe", 2)
            error = until_refused(db, "joe", pin.at)
            assert "client_held_seconds_max" in str(error)
            deadline = time.monotonic() + SECONDS
            while not pin.is_lost:
                assert time.monotonic() < deadline
                threading.Event().wait(0.1)
            with pytest.raises(SessionExpired, match=r"too old.*client_held_seconds_max"):
                pin.check()
            with pytest.raises(SnapshotTooOld, match=r"pins of clients.*client_held_seconds_max"):
                db.pin(pin.at, ttl=PIN_TTL).__enter__()
        with boss.pin(ttl=PIN_TTL, description="an archive") as kept:
            put(db, "joe", 3)
            with db.pin(ttl=PIN_TTL) as pin:
                deadline = time.monotonic() + SECONDS
                while not pin.is_lost:
                    assert time.monotonic() < deadline
                    threading.Event().wait(0.1)
            kept.check()
            with db.snapshot(kept.at) as snapshot:
                assert snapshot.get("joe", balance) == 2
