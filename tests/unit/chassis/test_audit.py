"""The audit file: which calls get a line, what it says, and how large the file becomes."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from percolator.errors import InvalidArgument, NotReady, PercolatorError, PermissionDenied
from percolator.services.chassis.access import Access, Tokens
from percolator.services.chassis.audit import DIFFERENT_REFUSALS_MAX, Audit
from percolator.services.chassis.frames import Caller, FrameCallContext, FrameCallFailed
from percolator.services.chassis.rpc import Exposed, Gate, RpcEdge, RpcMetrics
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from percolator.wire.credentials import SCHEME
from percolator.wire.roles import Role
from percolator.wire.status import from_status
from percolator.wire.tls import CLUSTER_NAME
from percolator.wire.tokens import token_entry
from tests.simulation.virtual_time import VirtualClock

SERVICE = pb.DESCRIPTOR.services_by_name["MasterService"]
BYTES_MAX = 10_000
FILES_MAX = 3


class OneTable:
    """A master that creates and deletes nothing, and knows one table."""

    async def delete_table(self, request: pb.DeleteTableRequest) -> pb.DeleteTableResponse:
        if request.name != "orders":
            raise InvalidArgument("name", "no such table")
        return pb.DeleteTableResponse()

    async def split_tablet(self, request: pb.SplitTabletRequest) -> pb.SplitTabletResponse:
        return pb.SplitTabletResponse()

    async def list_tables(self, request: pb.ListTablesRequest) -> pb.ListTablesResponse:
        return pb.ListTablesResponse()

    async def describe_table(self, request: pb.DescribeTableRequest) -> pb.DescribeTableResponse:
        raise PermissionDenied("the token 'shop' may not read it")

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return lambda _: NotReady(name)


class Audited:
    """A server with tokens and an audit file."""

    def __init__(self, directory: Path, clock: VirtualClock, *, has_tls: bool = True) -> None:
        self.path = directory / "audit.jsonl"
        self.clock = clock
        tokens = directory / "tokens.toml"
        tokens.write_text(
            token_entry("shop", Role.CLIENT, "s3cret") + token_entry("boss", Role.ADMIN, "b0ss")
        )
        self.audit = Audit(self.path, clock, BYTES_MAX, FILES_MAX)
        access = Access(Tokens(tokens), clock, audit=self.audit) if has_tls else None
        self._edge = RpcEdge(Gate(10, 1 << 20), RpcMetrics(), clock, access, self.audit)
        self._edge.expose([Exposed(SERVICE, OneTable())])

    async def call(
        self, method: Any, request: Any, token: str = "", names: tuple[bytes, ...] = ()
    ) -> PercolatorError | None:
        caller = Caller(SCHEME + token if token else "", names, "ipv4:192.0.2.1:5000")
        context = FrameCallContext(caller, 1e12, self.clock.monotonic_seconds)
        try:
            await self._edge.unary[method.path](request.SerializeToString(), context)
        except FrameCallFailed as failed:
            return from_status(failed.status)
        return None

    def lines(self, suffix: str = "") -> list[dict[str, Any]]:
        """The lines without their times."""
        text = Path(f"{self.path}{suffix}").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        assert all(line.pop("time").endswith("Z") for line in found)
        return found


def server(directory: Path, *, has_tls: bool = True) -> Audited:
    return Audited(directory, VirtualClock(asyncio.get_running_loop()), has_tls=has_tls)


DROP = pb.DeleteTableRequest(name="orders", request_id=b"\x07")
BY_BOSS = {"who": "boss", "from": "192.0.2.1", "rpc": methods.DELETE_TABLE.path}


@pytest.mark.parametrize(("name", "outcome"), [("orders", "OK"), ("other", "INVALID_ARGUMENT")])
async def test_an_administrative_call_has_a_line_with_its_outcome_before_it_is_answered(
    tmp_path: Path, name: str, outcome: str
) -> None:
    audited = server(tmp_path)
    request = pb.DeleteTableRequest(name=name, request_id=b"\x07")
    await audited.call(methods.DELETE_TABLE, request, "b0ss")
    assert audited.lines() == [BY_BOSS | {"request": {"name": name}, "outcome": outcome}]
    assert stat.S_IMODE(audited.path.stat().st_mode) == 0o600


async def test_calls_of_clients_and_servers_have_no_line(tmp_path: Path) -> None:
    audited = server(tmp_path)
    await audited.call(methods.LIST_TABLES, pb.ListTablesRequest(), "s3cret")
    await audited.call(methods.LIST_TABLES, pb.ListTablesRequest(), "b0ss")
    await audited.call(methods.DELETE_TABLE, DROP, names=(CLUSTER_NAME.encode(),))
    audited.audit.flush()
    assert audited.lines() == []


async def test_without_tls_the_line_says_where_the_caller_is(tmp_path: Path) -> None:
    audited = server(tmp_path, has_tls=False)
    await audited.call(methods.DELETE_TABLE, DROP)
    (line,) = audited.lines()
    assert (line["who"], line["from"]) == ("", "192.0.2.1")


async def test_every_refusal_is_counted_in_a_line(tmp_path: Path) -> None:
    audited = server(tmp_path)
    for token in ("s3cret", "s3cret", "wr0ng", ""):
        assert await audited.call(methods.DELETE_TABLE, DROP, token) is not None
    keeping = asyncio.create_task(audited.audit.keep())
    await audited.clock.sleep(2)
    keeping.cancel()
    common = {"from": "192.0.2.1", "rpc": methods.DELETE_TABLE.path}
    denied = common | {"who": "shop", "outcome": "PERMISSION_DENIED", "times": 2}
    unknown = common | {"who": "", "outcome": "UNAUTHENTICATED", "times": 1}
    lines = audited.lines()
    reasons = [line.pop("reason") for line in lines]
    assert lines == [denied, unknown, unknown]
    assert "has the role CLIENT, but it needs ADMIN" in reasons[0]
    assert ("does not know the token" in reasons[1], "no token" in reasons[2]) == (True, True)


async def test_a_refusal_that_took_a_look_at_the_request_has_a_line(tmp_path: Path) -> None:
    audited = server(tmp_path)
    await audited.call(methods.DESCRIBE_TABLE, pb.DescribeTableRequest(), "s3cret")
    audited.audit.flush()
    (line,) = audited.lines()
    assert (line["who"], line["outcome"], line["times"]) == ("shop", "PERMISSION_DENIED", 1)
    assert line["reason"] == "the token 'shop' may not read it"


async def test_no_line_holds_a_row_or_a_token(tmp_path: Path) -> None:
    audited = server(tmp_path)
    await audited.call(methods.SPLIT_TABLET, pb.SplitTabletRequest(tablet_id=7, row=b"r0w"), "b0ss")
    await audited.call(methods.DELETE_TABLE, DROP, "wr0ng")
    audited.audit.flush()
    text = audited.path.read_text()
    assert not any(secret in text for secret in ("r0w", "b0ss", "wr0ng"))
    assert audited.lines()[0]["request"] == {"tablet_id": 7}


async def test_a_flood_of_refusals_takes_a_bounded_number_of_lines(tmp_path: Path) -> None:
    audited = server(tmp_path)
    for number in range(3 * DIFFERENT_REFUSALS_MAX):
        audited.audit.refused("", f"machine {number}", "/p", "UNAUTHENTICATED", "no token")
    assert len(audited.audit._refusals) == DIFFERENT_REFUSALS_MAX + 1
    audited.audit.flush()
    assert audited.lines()[-1]["from"] == "others"
    assert audited.lines()[-1]["times"] >= DIFFERENT_REFUSALS_MAX


async def test_a_request_with_much_in_it_has_a_short_line(tmp_path: Path) -> None:
    audited = server(tmp_path)
    request = pb.ChangeObserversRequest(table="orders" * 1_000, pause=["p" * 500] * 500)
    request.add.add(name="n" * 10_000)
    await audited.call(methods.CHANGE_OBSERVERS, request, "b0ss")
    (line,) = audited.lines()
    assert line["request"]["table"] == ("orders" * 1_000)[:200]
    assert len(audited.path.read_text()) < 6_000


async def test_full_files_are_kept_up_to_a_number(tmp_path: Path) -> None:
    audited = server(tmp_path)
    for number in range(300):
        request = pb.DeleteTableRequest(name=f"table-{number:03}")
        await audited.call(methods.DELETE_TABLE, request, "b0ss")
    files = sorted(audited.path.parent.glob("audit.jsonl*"))
    assert [file.name for file in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(file.stat().st_size <= BYTES_MAX for file in files)
    names = [line["request"]["name"] for end in (".2", ".1", "") for line in audited.lines(end)]
    assert names == [f"table-{number:03}" for number in range(300 - len(names), 300)]


async def test_a_second_run_appends_and_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    audited = server(tmp_path)
    await audited.call(methods.DELETE_TABLE, DROP, "b0ss")
    audited.audit.close()
    with audited.path.open("a") as file:
        file.write('{"time": "20')
    again = Audited(tmp_path, audited.clock)
    await again.call(methods.DELETE_TABLE, DROP, "b0ss")
    first, torn, last = again.path.read_text().splitlines()
    assert json.loads(first)["who"] == json.loads(last)["who"] == "boss"
    assert torn == '{"time": "20'


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


async def test_while_the_file_cannot_be_written_calls_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = server(tmp_path)
    with structlog.testing.capture_logs() as log:
        with monkeypatch.context() as broken:
            broken.setattr(os, "write", full)
            for _ in range(3):
                assert await audited.call(methods.DELETE_TABLE, DROP, "b0ss") is None
        assert await audited.call(methods.DELETE_TABLE, DROP, "b0ss") is None
    assert [entry["log_level"] for entry in log] == ["error", "info"]
    assert len(audited.lines()) == 1


async def test_a_full_disk_at_a_rotation_costs_no_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = server(tmp_path)

    async def delete(count: int) -> None:
        for _ in range(count):
            await audited.call(methods.DELETE_TABLE, DROP, "b0ss")

    while not (tmp_path / "audit.jsonl.2").exists():
        await delete(1)
    before = {end: audited.lines(end) for end in (".1", ".2")}
    with monkeypatch.context() as broken:
        broken.setattr("percolator.services.chassis.audit.private_opener", full)
        await delete(200)
        assert {end: audited.lines(end) for end in (".1", ".2")} == before
    kept = audited.lines()
    await delete(1)
    assert audited.lines(".1") == kept


def test_a_file_that_another_process_writes_to_is_refused(tmp_path: Path) -> None:
    clock: Any = None
    first = Audit(tmp_path / "audit", clock, BYTES_MAX, FILES_MAX)
    with pytest.raises(InvalidArgument, match="audit: another process writes to it"):
        Audit(tmp_path / "audit", clock, BYTES_MAX, FILES_MAX)
    first.close()
    Audit(tmp_path / "audit", clock, BYTES_MAX, FILES_MAX).close()


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_file_that_was_taken_away_is_begun_again(tmp_path: Path, *, is_moved: bool) -> None:
    audited = server(tmp_path)
    await audited.call(methods.DELETE_TABLE, DROP, "b0ss")
    if is_moved:
        audited.path.rename(tmp_path / "taken")
    else:
        audited.path.unlink()
    for _ in range(2):
        await audited.call(methods.DELETE_TABLE, DROP, "b0ss")
    assert len(audited.lines()) == 2
    with pytest.raises(InvalidArgument, match="another process writes to it"):
        Audit(audited.path, audited.clock, BYTES_MAX, FILES_MAX)


async def test_while_a_file_cannot_be_begun_again_calls_go_on(tmp_path: Path) -> None:
    audited = server(tmp_path)
    audited.path.unlink()
    audited.path.mkdir()
    with structlog.testing.capture_logs() as log:
        assert await audited.call(methods.DELETE_TABLE, DROP, "b0ss") is None
        audited.path.rmdir()
        assert await audited.call(methods.DELETE_TABLE, DROP, "b0ss") is None
    assert [entry["log_level"] for entry in log] == ["error", "info"]
    assert len(audited.lines()) == 1


def test_no_device_is_replaced_by_an_audit_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "audit")
    with pytest.raises(InvalidArgument, match="audit: not a regular file"):
        Audit(tmp_path / "audit", None, BYTES_MAX, FILES_MAX)  # type: ignore[arg-type]


def test_a_place_that_cannot_be_written_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"audit: .*none/audit: No such file"):
        Audit(tmp_path / "none" / "audit", None, BYTES_MAX, FILES_MAX)  # type: ignore[arg-type]
