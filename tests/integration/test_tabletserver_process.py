"""The tablet server process: failing disks, full disks, draining, dumping, refusing to start."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.errors_pb2 import StoreUnusable
from percolator.wire import methods
from tests.integration.tabletserver_client import acknowledged, puts, tablet_server

pytestmark = pytest.mark.integration

TABLET = 7
UNLIMITED = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)


async def test_after_an_input_output_error_the_log_decides_and_the_tablet_serves_again(
    tmp_path: Path,
) -> None:
    async with tablet_server(tmp_path) as server:
        await server.open(TABLET, 1)
        await server.put(TABLET, 1, {b"before": b"1"})
        limited = psutil.Process(server.process.pid)
        log_bytes = max((tmp_path / "store" / "3" / "7" / "e1").glob("*.log")).stat().st_size
        limited.rlimit(psutil.RLIMIT_FSIZE, (log_bytes + 20, psutil.RLIM_INFINITY))
        (result,) = await server.mutate(puts(TABLET, 1, {b"failed": b"2"}))
        assert [one.result.outcome for one in result.unapplied] == [pb.OUTCOME_UNKNOWN]
        limited.rlimit(psutil.RLIMIT_FSIZE, UNLIMITED)
        for _ in range(200):
            (again,) = await server.mutate(puts(TABLET, 1, {b"after": b"3"}))
            if acknowledged(again):
                break
            assert again.error.HasField("store_unusable") or again.error.HasField("not_ready")
            await asyncio.sleep(0.05)
        rows = await server.rows(TABLET, 1)
        assert rows[b"before"] == b"1"
        assert rows.keys() - {b"failed"} == {b"before", b"after"}


async def test_a_full_disk_refuses_writes_of_every_tablet_and_serves_reads(tmp_path: Path) -> None:
    async with tablet_server(tmp_path) as server:
        await server.open(TABLET, 1)
        await server.put(TABLET, 1, {b"row": b"value"})
    reserve = str(1 << 49)
    async with tablet_server(tmp_path, "--disk-reserve-bytes", reserve) as server:
        await server.open(TABLET, 2)
        (refused,) = await server.mutate(puts(TABLET, 2, {b"row": b"other"}))
        assert refused.error.store_unusable.reason == StoreUnusable.REASON_DISK_FULL
        assert await server.rows(TABLET, 2) == {b"row": b"value"}


def dump(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "percolator.cli",
        "serve",
        "tabletserver",
        "dump",
        str(path),
        *flags,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


async def test_dump_refuses_an_open_tablet_and_shows_a_closed_one_unchanged(
    tmp_path: Path,
) -> None:
    tablet = tmp_path / "store" / "3" / str(TABLET)
    async with tablet_server(tmp_path) as server:
        await server.open(TABLET, 1)
        await server.put(TABLET, 1, {b"row\x00": b'say "hi"'})
        refused = dump(tablet)
        assert refused.returncode == 2
        assert "is open" in refused.stderr
    before = {path.name: path.read_bytes() for path in (tablet / "e1").iterdir()}
    shown = dump(tablet, "--json")
    assert shown.returncode == 0, shown.stderr
    cells = [json.loads(line) for line in shown.stdout.splitlines()]
    (write,) = [cell for cell in cells if cell["space"] == "W"]
    assert write["row"] == "row\\x00"
    assert write["value"] == "say \\x22hi\\x22"
    assert write["kind"] == "PUT"
    # Text, as in all JSON of this project: many programs round numbers above 2^53.
    assert f"timestamp={int(write['timestamp'])}" in dump(tablet).stdout
    assert write["timestamp"] == str(int(write["timestamp"]))
    assert isinstance(write["start"], str)
    assert 'row="row\\x00"' in dump(tablet / "e1").stdout
    assert {path.name: path.read_bytes() for path in (tablet / "e1").iterdir()} == before


async def test_a_drained_server_exits_with_0_and_leaves_no_log_to_replay(tmp_path: Path) -> None:
    async with tablet_server(tmp_path) as server:
        await server.open(TABLET, 1)
        await server.put(TABLET, 1, {b"row": b"value"})
        assert await server.stop() == 0
    logs = (tmp_path / "store" / "3" / str(TABLET) / "e1").glob("*.log")
    assert sum(log.stat().st_size for log in logs) == 0


async def test_streams_of_notifications_end_at_the_drain_and_do_not_delay_it(
    tmp_path: Path,
) -> None:
    async with tablet_server(tmp_path) as server:
        await server.open(TABLET, 1)
        watched = [{"table_id": 3, "observers": [b"f"]}]
        request = pb.WatchNotificationsRequest(watched=watched)
        watch = server.network.stream(server.process.address, methods.WATCH_NOTIFICATIONS)
        stream = watch(request, 60)
        assert not (await anext(stream)).notifications
        server.process.ask_to_stop()
        assert [answer async for answer in stream] == []
        assert server.process.wait_stopped() == 0


def test_a_missing_store_root_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "percolator.cli",
        "serve",
        "tabletserver",
        "--store",
        str(tmp_path / "none"),
    ]
    refused = subprocess.run(
        [*command, "--listen", "127.0.0.1:0", "--metrics-listen", ""],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    expected = f"tabletserver: store: {tmp_path / 'none'} does not exist"
    assert refused.stderr.splitlines() == [expected]
