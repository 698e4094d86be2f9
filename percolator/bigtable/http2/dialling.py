"""Opens connections: which addresses a name has, TLS, and a server that speaks HTTP/2."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Final

from percolator.bigtable.http2.connection import Connection
from percolator.wire.addresses import parse_host_port

CONNECT_SECONDS: Final = 20.0
"""For all addresses of a name together."""
_ADDRESS_SECONDS_MAX: Final = 5.0
"""For one address, if there are others: of some machines, the newer kind leads nowhere."""
_HTTP_2: Final = "h2"
_ROOTS_VARIABLE: Final = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"


class NoConnection(Exception):
    """Why there is none."""


def secure(
    roots: bytes | None = None, environment: Mapping[str, str] | None = None
) -> ssl.SSLContext:
    """TLS as the service wants it. `roots` are the authorities that may vouch for a server, in PEM.
    By default: those in the file that gRPC's variable names, or else the machine's and, if it is
    installed, those of `certifi`, which `google-auth` trusts, too."""
    environment = os.environ if environment is None else environment
    named = environment.get(_ROOTS_VARIABLE)
    if roots is not None or named:
        context = ssl.create_default_context(
            cafile=None if roots is not None else named,
            cadata=None if roots is None else roots.decode("ascii"),
        )
    else:
        context = ssl.create_default_context()
        with suppress(ImportError):  # the machine's are what there is then
            context.load_verify_locations(import_module("certifi").where())
    context.set_alpn_protocols([_HTTP_2])
    return context


async def dial(address: str, tls: ssl.SSLContext | None) -> Connection:
    """A connection on which the server has announced its settings. Raises `NoConnection`."""
    where = parse_host_port(address, "address")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            found = await loop.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
            problem = "the name has no address"
            for number, (family, *_, to) in enumerate(found, start=1):
                last = number == len(found)
                try:
                    async with asyncio.timeout(None if last else _ADDRESS_SECONDS_MAX):
                        return await _connected(str(to[0]), where.port, family, where.host, tls)
                except TimeoutError:
                    if last:
                        raise
                    problem = f"{to[0]} does not answer"
                except NoConnection as error:
                    problem = str(error)
            raise NoConnection(problem)
    except TimeoutError:
        raise NoConnection(f"no connection within {CONNECT_SECONDS:g} s") from None
    except OSError as error:  # of the name
        raise NoConnection(_said(error)) from None


async def _connected(
    to: str, port: int, family: int, name: str, tls: ssl.SSLContext | None
) -> Connection:
    connection = Connection()
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.create_connection(
            lambda: connection,
            to,
            port,
            family=family,
            ssl=tls,
            server_hostname=name if tls is not None else None,
        )
        if tls is not None:
            _require_http_2(transport)
        problem = await connection.ready
    except OSError as error:
        raise NoConnection(_said(error)) from None
    except BaseException:
        await connection.close()
        raise
    if problem:
        raise NoConnection(problem)
    return connection


def _require_http_2(transport: asyncio.BaseTransport) -> None:
    """TLS agrees on what is spoken before anything is said."""
    spoken = transport.get_extra_info("ssl_object").selected_alpn_protocol()
    if spoken != _HTTP_2:
        raise NoConnection(f"the server does not speak HTTP/2 ({spoken or 'no ALPN'})")


def _said(error: OSError) -> str:
    """Some errors of sockets have no text."""
    return str(error) or type(error).__name__
