"""The certificate of a server, renewed in operation: read once for everything that shows it.

Each handshake looks whether the files have changed; connections that stand are not looked at again.
"""

from __future__ import annotations

import ssl
from dataclasses import replace

import grpc

from percolator.errors import InvariantViolation
from percolator.wire import tls
from percolator.wire.credentials import Credentials
from percolator.wire.renewal import Renewal
from percolator.wire.tls import Tls, TlsMaterial


class ServerTls:
    """`InvalidArgument` names the setting of a file that is wrong at the start."""

    def __init__(self, files: Tls) -> None:
        self._renewal = Renewal(
            lambda: Credentials(tls.load(files, "tls_{}".format, serves=True)),
            [files.ca, files.certificate, files.key],
        )
        self._shown = self.material()

    def material(self) -> TlsMaterial:
        """What the files hold now, or held when they last were of use."""
        material = self._renewal.current().tls
        if material is None:
            raise InvariantViolation("a server with TLS has lost its certificate")
        return material

    def as_caller(self) -> Credentials:
        """By which this server proves to others who it is."""
        return replace(self._renewal.current(), renewal=self._renewal)

    def expires_seconds(self) -> float:
        """For the metrics: when it is time for other files."""
        return self.material().expires_seconds

    def http_context(self) -> ssl.SSLContext:
        """For a connection that is no call."""
        context = self.material().server_context
        if context is None:
            raise InvariantViolation("certificate files were not tried out")
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For the port of calls."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._shown), self._changed, require_client_authentication=True
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC before every handshake, in a thread of its own; None: go on as before."""
        material = self.material()
        if material is self._shown:
            return None
        self._shown = material
        return _configuration(material)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificate)], root_certificates=material.ca
    )
