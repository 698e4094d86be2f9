"""A part of the sessions is not mistaken for all of them."""

from __future__ import annotations

from typing import Any

import pytest

from percolator.cli import top
from percolator.cli.sessions import list_sessions
from percolator.errors import Unavailable
from percolator.v1.cluster_pb2 import DescribeResponse, ServiceKind
from tests.unit.wire.lock_services import A, B, LockServices, client, lock_services


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
