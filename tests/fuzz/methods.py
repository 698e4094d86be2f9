"""Every method of every service, from the descriptors: a new method is fuzzed without being named.

Only where a method is served, and whether it may wait, is written here. A service that no line
names stops the run before it begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from percolator.v1 import (
    cluster_pb2,
    frames_pb2,
    gateway_pb2,
    lockservice_pb2,
    master_pb2,
    oracle_pb2,
    row_store_pb2,
    tabletserver_pb2,
)

_FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR
    for module in (
        cluster_pb2,
        frames_pb2,
        gateway_pb2,
        lockservice_pb2,
        master_pb2,
        oracle_pb2,
        row_store_pb2,
        tabletserver_pb2,
        health_pb2,
        reflection_pb2,
    )
)

OWN_PACKAGE = "/percolator.v1."

_EVERYWHERE = ("master", "oracle", "lockservice", "tabletserver", "gateway", "worker")
_SERVED_BY = {
    "percolator.v1.OracleService": ("oracle",),
    "percolator.v1.LockService": ("lockservice",),
    "percolator.v1.ClusterService": ("master", "gateway"),
    "percolator.v1.FrameService": ("oracle", "tabletserver"),
    "percolator.v1.MasterService": ("master", "gateway"),
    "percolator.v1.TabletServerService": ("tabletserver",),
    "percolator.v1.GatewayService": ("gateway",),
    "percolator.v1.RowStoreService": ("gateway",),
    "grpc.health.v1.Health": _EVERYWHERE,
    "grpc.reflection.v1alpha.ServerReflection": _EVERYWHERE,
}

MAY_WAIT = {
    "/percolator.v1.MasterService/CreateTable": "returns when its tablets are served",
    "/percolator.v1.MasterService/DeleteTable": "waits for a change of the map in progress",
    "/percolator.v1.MasterService/ChangeObservers": "returns when every tablet knows them",
    "/percolator.v1.MasterService/ReportBackfill": "returns when every tablet knows the observer",
    "/percolator.v1.MasterService/SetChangeFeed": "returns when every tablet knows",
    "/percolator.v1.MasterService/SetTtls": "returns when every tablet knows",
    "/percolator.v1.MasterService/ChangeCodecs": "returns when every tablet knows",
    "/percolator.v1.MasterService/SplitTablet": "returns when both halves are served",
    "/percolator.v1.MasterService/MoveTablet": "returns when it is served there",
    "/percolator.v1.MasterService/DrainServer": "returns when the server has no tablets",
    "/percolator.v1.TabletServerService/WatchNotifications": "has no end",
    "/percolator.v1.TabletServerService/OpenTablet": "waits for the tablet's directory",
    "/percolator.v1.TabletServerService/CloseTablet": "waits until everything is flushed",
    "/percolator.v1.GatewayService/Get": "waits for transactions in its way",
    "/percolator.v1.GatewayService/ScanTable": "waits for transactions in its way",
    "/percolator.v1.GatewayService/FollowChanges": "may have no end",
    "/percolator.v1.GatewayService/Commit": "waits for transactions in its way",
    "/percolator.v1.GatewayService/Resolve": "waits for the tablet of the primary",
    "/grpc.health.v1.Health/Watch": "has no end",
}
"""Methods that may use up the deadline of their caller, with the reason."""


@dataclass(frozen=True)
class Method:
    """One method, and how to call it."""

    path: str
    request: type[Message]
    response: type[Message]
    client_streaming: bool
    server_streaming: bool
    served_by: tuple[str, ...]

    @property
    def own(self) -> bool:
        """Whether it is ours: the errors of gRPC's own services carry no details."""
        return self.path.startswith(OWN_PACKAGE)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def _method(described: MethodDescriptor) -> Method:
    service = described.containing_service.full_name
    return Method(
        f"/{service}/{described.name}",
        GetMessageClass(described.input_type),
        GetMessageClass(described.output_type),
        described.client_streaming,
        described.server_streaming,
        _SERVED_BY[service],
    )


METHODS: dict[str, Method] = {
    method.path: method
    for file in _FILES
    for service in file.services_by_name.values()
    for method in map(_method, service.methods)
}
