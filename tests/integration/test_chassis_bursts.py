"""More simultaneous calls than a server can process."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from percolator.services.chassis.gate import Gate
from percolator.services.chassis.server import Server
from percolator.world import MachineClock
from tests.integration.chassis_service import WaiterSettings

pytestmark = pytest.mark.integration

BURST = 6_000
"""Twice as many as gRPC itself queues by default."""


async def test_a_burst_of_calls_is_answered_and_none_is_reported_cancelled() -> None:
    """A client that sees CANCELLED has to assume that its call may have been executed."""
    server = Server(WaiterSettings(), Gate(10, 16 << 20), CollectorRegistry(), MachineClock())
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(str(address)) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            await check(health_pb2.HealthCheckRequest())

            async def code() -> str:
                try:
                    await check(health_pb2.HealthCheckRequest())
                except grpc.aio.AioRpcError as error:
                    return str(error.code().name)
                return "OK"

            codes = Counter(await asyncio.gather(*(code() for _ in range(BURST))))
    finally:
        await server.stop(0.0)
    assert codes == {"OK": BURST}
