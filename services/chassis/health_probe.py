"""`health_probe READY_FILE`: asks a container's service whether it is healthy.

Exit code 0 if the service that wrote the ready file says that it is SERVING; otherwise one line,
and exit code 1. With TLS, PERCOLATOR_TLS_CA, _CERTIFICATE and _KEY name the files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from percolator.errors import InvalidArgument
from percolator.wire.addresses import HostPort, parse_host_port
from percolator.wire.credentials import client_credentials
from percolator.wire.tls import CLUSTER_NAME

_SECONDS = 10.0


class NotHealthy(Exception):
    """The service is not healthy; the text says why."""


def probe(ready_file: Path) -> None:
    """Raises `NotHealthy` unless the service is healthy."""
    try:
        listen = json.loads(ready_file.read_text(encoding="utf-8"))["listen"]
    except FileNotFoundError:
        raise NotHealthy(f"not ready: {ready_file} does not exist") from None
    status = _status(parse_host_port(listen, "listen"))
    if status != health_pb2.HealthCheckResponse.SERVING:
        raise NotHealthy(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


def _status(listen: HostPort) -> int:
    here = str(HostPort("127.0.0.1", listen.port) if listen.is_wildcard() else listen)
    with _channel(here) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_SECONDS
            )
        except grpc.RpcError as error:
            raise NotHealthy(f"{here}: {error.code().name}: {error.details()}") from None
    return int(answer.status)


def _channel(address: str) -> grpc.Channel:
    tls = client_credentials().tls
    # The service is right here, whatever proxy the environment names for the outside.
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", CLUSTER_NAME))
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.secure_channel(address, credentials, options=options)


if __name__ == "__main__":
    try:
        probe(Path(sys.argv[1]))
    except (NotHealthy, InvalidArgument) as problem:
        sys.exit(str(problem))
