"""The certificate of a server, renewed in operation: read once for everything that presents it.

Each handshake checks whether the files have changed; open connections are not checked again.
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
    """The certificate of one server. `InvalidArgument` names the setting of a file that is wrong at
    the start."""

    def __init__(self, files: Tls) -> None:
        self._renewal = Renewal(
            lambda: Credentials(tls.load(files, "tls_{}".format, serves=True)),
            [files.ca, files.certificate, files.key],
        )
        self._shown = self.material()

    def material(self) -> TlsMaterial:
        """What the files hold now, or what they held when they were last valid."""
        material = self._renewal.current().tls
        if material is None:
            raise InvariantViolation("a server with TLS has lost its certificate")
        return material

    def as_caller(self) -> Credentials:
        """The credentials with which this server identifies itself to others."""
        return replace(self._renewal.current(), renewal=self._renewal)

    def expires_seconds(self) -> float:
        """When the certificate expires, for the metrics."""
        return self.material().expires_seconds

    def http_context(self) -> ssl.SSLContext:
        """The TLS context for an HTTP connection."""
        context = self.material().server_context
        if context is None:
            raise InvariantViolation("certificate files were not validated")
        return context

    def stream_context(self) -> ssl.SSLContext:
        """The TLS context for a port that has one for all its connections: each handshake uses the
        certificate that is valid then."""
        context = self.http_context()

        def renewed(connection: ssl.SSLObject, name: str, of: ssl.SSLContext) -> None:
            connection.context = self.http_context()

        context.sni_callback = renewed
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The credentials for the gRPC port."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._shown), self._changed, require_client_authentication=True
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before every handshake, in one of its threads; None means no change."""
        material = self.material()
        if material is self._shown:
            return None
        self._shown = material
        return _configuration(material)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificate)], root_certificates=material.ca
    )
