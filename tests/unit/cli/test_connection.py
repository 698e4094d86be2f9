"""Calls to the leading master, and questions before a command destroys something."""

from __future__ import annotations

import asyncio
import io
from typing import cast
from unittest.mock import AsyncMock, Mock

import pytest
from typer import Exit

from percolator.cli.connection import Connection, answer_of_leader, confirm
from percolator.cli.worker import connected
from percolator.errors import DeadlineExceeded, NotReady, PermissionDenied, Unavailable
from percolator.v1 import cluster_pb2
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from tests.simulation.virtual_time import VirtualClock
from tests.unit.unary_timeouts import UnaryTimeouts


class _Leader:
    def __init__(self) -> None:
        self.moved = 0

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        kind = cluster_pb2.SERVICE_KIND_MASTER
        servers = [cluster_pb2.Server(kind=kind, address=one) for one in ("standby:1", "leader:1")]
        return cluster_pb2.DescribeResponse(servers=servers)

    async def list_tablets(self, request: pb.ListTabletsRequest) -> pb.ListTabletsResponse:
        return pb.ListTabletsResponse(more=True)

    async def move_tablet(self, request: pb.MoveTabletRequest) -> pb.MoveTabletResponse:
        self.moved += 1
        return pb.MoveTabletResponse()


class _Standby(_Leader):
    async def list_tablets(self, request: pb.ListTabletsRequest) -> pb.ListTabletsResponse:
        raise NotReady("this master does not lead")

    async def move_tablet(self, request: pb.MoveTabletRequest) -> pb.MoveTabletResponse:
        raise NotReady("this master does not lead")


class _Silent(_Leader):
    async def _never(self, request: object) -> None:
        await asyncio.get_running_loop().create_future()

    list_tablets = describe = move_tablet = _never  # type: ignore[assignment]


def _network() -> tuple[GrpcNetwork, _Leader]:
    leader = _Leader()
    handlers: dict[str, object] = {
        "leader:1": leader,
        "standby:1": _Standby(),
        "silent:1": _Silent(),
    }
    return cast(GrpcNetwork, UnaryTimeouts(handlers)), leader


@pytest.mark.parametrize(
    "addresses",
    [
        ["leader:1"],
        ["standby:1"],
        ["gone:1", "standby:1"],
        ["standby:1", "gone:1"],
        ["silent:1", "leader:1"],
        ["silent:1", "standby:1"],
        ["standby:1", "silent:1"],
    ],
)
async def test_the_leader_answers_whoever_else_is_named(addresses: list[str]) -> None:
    network, _ = _network()
    here = Connection(addresses, 10.0, as_json=False)
    request = pb.ListTabletsRequest()
    assert (await answer_of_leader(here, network, methods.LIST_TABLETS, request)).more
    assert VirtualClock(asyncio.get_running_loop()).monotonic_seconds() <= 10.0


async def test_a_change_that_may_have_been_made_is_not_asked_of_another_master() -> None:
    network, leader = _network()
    here = Connection(["silent:1", "leader:1"], 10.0, as_json=False)
    with pytest.raises(DeadlineExceeded):
        await answer_of_leader(here, network, methods.MOVE_TABLET, pb.MoveTabletRequest())
    assert not leader.moved


@pytest.mark.parametrize("answer", ["", "n\n"])
def test_a_question_that_no_terminal_answers_names_the_option(
    answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    with pytest.raises(Exit):
        confirm("Clear 3 dead letters?")
    assert "Without a terminal, answer with --yes" in capsys.readouterr().err


async def test_a_worker_waits_for_a_master_and_tells_each_reason_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    database = object()
    answers = [Unavailable("refused"), Unavailable("refused"), NotReady("none leads"), database]
    here = cast(Connection, Mock(database=AsyncMock(side_effect=answers)))
    assert await connected(here) is database
    assert capsys.readouterr().err == "waiting: refused\nwaiting: none leads\n"


async def test_a_worker_that_may_not_connect_does_not_wait() -> None:
    here = cast(Connection, Mock(database=AsyncMock(side_effect=PermissionDenied("no token"))))
    with pytest.raises(PermissionDenied, match="no token"):
        await connected(here)
