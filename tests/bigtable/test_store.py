"""The emulator as a store: the commands that prepare and check it, and changes made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest

from percolator import Table, codecs
from percolator.bigtable.connection import BigtableNetwork
from percolator.bigtable.place import Place
from percolator.errors import InvariantViolation, SchemaError
from percolator.testing.row_database import connect_over
from percolator.v1.bigtable_pb2 import BigtableDeleteTableRequest
from tests.bigtable.emulator_process import emulator

pytestmark = [pytest.mark.bigtable, pytest.mark.timeout(120)]

STORE = "bigtable://some-project/some-instance"


def _store(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "percolator.cli", "--json", "store", *arguments],
        env={**os.environ, "BIGTABLE_EMULATOR_HOST": address},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_emulator_is_prepared_and_passes_the_check() -> None:
    with emulator() as address:
        for _ in range(2):
            prepared = _store(address, "init", STORE)
            assert prepared.returncode == 0, prepared.stderr
        checked = _store(address, "check", STORE, "--seconds", "0.5", "--in-flight", "8")
    assert checked.returncode == 0, checked.stderr
    shown = json.loads(checked.stdout)
    assert shown["not_kept"] == {}
    assert shown["check_and_mutates_per_second"] > 0
    assert checked.stderr.count("kept: ") == 8
    assert "not tried: scans backwards" in checked.stderr


def test_a_silent_store_is_reported_without_a_traceback() -> None:
    for verb in ("init", "check"):
        result = _store("127.0.0.1:1", verb, STORE)
        assert result.returncode == 1
        assert "Traceback" not in result.stderr


ADMIN = "/google.bigtable.admin.v2.BigtableTableAdmin/"
NOTES = Table("notes")
TEXT = NOTES.column("text", codecs.text)
PATIENT = 600.0
SOON = 30.0
SECONDS = 10.0


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with emulator() as address:
        yield Place(address, "changed", "by-hand", scans_backwards=False)


def _change(place: Place, method: str, request: bytes) -> None:
    with grpc.insecure_channel(place.address) as channel:
        channel.unary_unary(ADMIN + method)(request, timeout=SECONDS)


def _family(place: Place, table: str, family: bytes, change: bytes) -> None:
    """`ModifyColumnFamilies`, with one modification."""
    name, one = table.encode(), b"\x0a" + bytes([len(family)]) + family + change
    request = b"\x0a" + bytes([len(name)]) + name + b"\x12" + bytes([len(one)]) + one
    _change(place, "ModifyColumnFamilies", request)


_DROP, _CREATE = b"\x20\x01", b"\x12\x00"


def test_a_removed_family_and_a_deleted_table_are_named_at_once(place: Place) -> None:
    with connect_over(BigtableNetwork, place) as db:
        db.create_table(NOTES)
        table = place.table(1)

        def write(key: str) -> None:
            with db.transaction(timeout=PATIENT) as tx:
                tx.set(key, TEXT, "text")

        write("before")
        for family in (b"l", b"w"):
            _family(place, table, family, _DROP)
            began = time.monotonic()
            says = f"the table percolator-1 lacks the family {family.decode()}: somebody has"
            with pytest.raises(InvariantViolation, match=says):
                write("meanwhile")
            assert time.monotonic() - began < SOON
            _family(place, table, family, _CREATE)
            write("again")
        _change(place, "DeleteTable", BigtableDeleteTableRequest(name=table).SerializeToString())
        began = time.monotonic()
        with pytest.raises(
            SchemaError, match=r"percolator-1.*somebody has deleted it in the store"
        ):
            write("after")
        assert time.monotonic() - began < SOON
