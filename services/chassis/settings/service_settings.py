"""Settings of a service: one frozen, validated object, fed by four layers.

Defaults < TOML file (`--config`) < environment (`PERCOLATOR_ORACLE_LISTEN`) < flags (`--listen`).
A value that cannot be right stops the process before it does anything: one line that names the
field and where the value came from, exit code 2. Unknown keys and flags are refused, and the
nearest one that exists is suggested. Unknown environment variables are only logged
(`environment.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from percolator.bigtable.place import SCHEME, Place, parse_place
from percolator.errors import InvalidArgument
from percolator.wire.addresses import HostPort, parse_host_port
from percolator.wire.tls import Tls

CLIENT_QUOTA_PERCENT = 50
CLIENTS_QUOTA_PERCENT = 90

AUTO = "auto"
"""The value of an address that is derived from another one."""


def _checked(text: str, *, port_needed: bool) -> str:
    try:
        address = parse_host_port(text, "")
    except InvalidArgument as error:
        raise ValueError(error.reason) from None
    if port_needed and address.port == 0:
        raise ValueError("port 0 can be listened on, but not dialled")
    return str(address)


ListenAddress = Annotated[str, AfterValidator(lambda text: _checked(text, port_needed=False))]
"""host:port to listen on; port 0 means any free one."""

DialAddress = Annotated[str, AfterValidator(lambda text: _checked(text, port_needed=True))]
"""host:port of another process."""

_DerivedAddress = Annotated[
    str,
    AfterValidator(lambda text: text if text == AUTO else _checked(text, port_needed=False)),
]
_OptionalListenAddress = Annotated[
    str,
    AfterValidator(lambda text: text if text in ("", AUTO) else _checked(text, port_needed=False)),
]

Seconds = Annotated[float, Field(gt=0, le=86_400)]
"""A duration above zero, and at most a day."""


class ServiceSettings(BaseModel):
    """The settings that every service has. A service adds its own fields in a subclass.

    A subclass sets `service` and a default for `listen`. Each field has a type that validates, a
    docstring, and its unit in its name.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
    )

    service: ClassVar[str]
    """The name of the program: "oracle". The prefix in the environment is PERCOLATOR_ORACLE_."""

    listen: ListenAddress
    """host:port to serve on; port 0 is any free one."""

    advertise: _DerivedAddress = AUTO
    """host:port that others dial; port 0 is the one listened on. auto: the address listened on,
    with this machine's host name in place of "every interface"."""

    masters: tuple[DialAddress, ...] = ()
    """Addresses of the cluster's masters, separated by commas. Empty: serve alone, unregistered."""

    metrics_listen: _OptionalListenAddress = AUTO
    """host:port of the Prometheus metrics; port 0 is any free one; empty is none. auto: the port
    of `listen` + 1000."""

    tls_ca: str = ""
    """PEM file: the authority that must have signed the certificates of servers and clients. With
    it, tls_certificate and tls_key, every connection uses mutual TLS, including metrics."""

    tls_certificate: str = ""
    """PEM file: this server's certificate, for the name percolator.cluster that all share."""

    tls_key: str = ""
    """PEM file: the private key of that certificate, without a password."""

    tokens: str = ""
    """TOML file: the tokens with which clients prove their role. Empty: every client with a
    certificate of the authority may do everything that clients and operators do."""

    insecure: bool = False
    """Allow an address that other machines can reach without TLS, although calls are then neither
    encrypted nor authenticated."""

    drain_seconds: Seconds = 20.0
    """At shutdown: how long calls in progress may take before they are cut off."""

    concurrency_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Calls in progress at once, without streams; any further one is refused, with the time after
    which to retry."""

    streams_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Streams at once, such as scans and watches; any further one is refused."""

    client_quota_percent: Annotated[int, Field(ge=1, le=100)] = CLIENT_QUOTA_PERCENT
    """How much of each limit one client may use: of calls, of streams, and of what else this
    service limits for all callers together. A client is a token at an address."""

    clients_quota_percent: Annotated[int, Field(ge=1, le=100)] = CLIENTS_QUOTA_PERCENT
    """How much of each limit all clients together may use. The rest is kept for administrators
    and servers."""

    request_bytes_max: Annotated[int, Field(ge=1024, le=1 << 30)] = 16 << 20
    """The size of the largest request that is accepted."""

    request_bytes_total_max: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 256 << 20
    """The memory for requests that arrive or are being answered. One connection may use a quarter
    of it, one client half; administrators and servers have as much of their own."""

    request_seconds_max: Seconds = 60.0
    """How long a request may take to arrive, and how long it may wait before it does until other
    requests of its connection have arrived."""

    connection_streams_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Calls in progress on one gRPC connection. gRPC refuses further ones without a reason, and
    sometimes a few below the limit, so it should be as high as concurrency_max."""

    connections_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """gRPC connections at once; further ones are closed."""

    open_streams_max: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    """Streams of health and reflection at once, which need no token. One connection may have 16."""

    log_format: Literal["auto", "human", "json"] = "auto"
    """The format of log lines. auto: for humans on a terminal, JSON otherwise."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important log lines that are written."""

    ready_file: str = ""
    """A file that is written, as JSON, once the service is ready: its addresses, id and pid."""

    stop_with_stdin: bool = False
    """Shut down when standard input closes: for processes that must not outlive their launcher."""

    @model_validator(mode="after")
    def _one_client_is_below_all(self) -> ServiceSettings:
        if self.client_quota_percent > self.clients_quota_percent:
            raise ValueError(
                f"client_quota_percent: {self.client_quota_percent} is above "
                f"clients_quota_percent, {self.clients_quota_percent}"
            )
        return self

    @field_validator("*")
    @classmethod
    def _no_nul(cls, value: object) -> object:
        # No path can contain it, and system calls raise a different error for it.
        if isinstance(value, str) and "\0" in value:
            raise ValueError("contains a NUL character")
        return value

    @model_validator(mode="after")
    def _only_loopback_is_safe(self) -> ServiceSettings:
        files = {name: getattr(self, name) for name in ("tls_ca", "tls_certificate", "tls_key")}
        given = [name for name, value in files.items() if value]
        if given and len(given) < len(files):
            missing = next(name for name, value in files.items() if not value)
            raise ValueError(f"{missing}: is empty, although {given[0]} is given")
        if self.tokens and not given:
            raise ValueError("tokens: needs TLS, since tokens would travel in plain text")
        if not given and not self.insecure:
            self._require_loopback("listen", self.listen_address)
            if self.metrics_address is not None:
                self._require_loopback("metrics_listen", self.metrics_address)
            if self.frames_address is not None:
                self._require_loopback("frames_listen", self.frames_address)
        return self

    @model_validator(mode="after")
    def _requests_fit(self) -> ServiceSettings:
        if self.request_bytes_total_max < 4 * self.request_bytes_max:
            raise ValueError(
                f"request_bytes_total_max: {self.request_bytes_total_max} is below four times "
                f"request_bytes_max, {self.request_bytes_max}: a quarter is what one connection "
                "may use"
            )
        return self

    @staticmethod
    def _require_loopback(field: str, address: HostPort) -> None:
        if not address.is_loopback():
            raise ValueError(
                f"{field}: {address} can be reached from other machines, and without TLS calls are "
                "neither encrypted nor authenticated; listen on loopback, give --tls-ca, "
                "--tls-certificate and --tls-key, or --insecure"
            )

    @property
    def tls(self) -> Tls | None:
        """The certificate files of this server; None if it does not use TLS."""
        if not self.tls_ca:
            return None
        return Tls(self.tls_ca, self.tls_certificate, self.tls_key)

    @property
    def listen_address(self) -> HostPort:
        return parse_host_port(self.listen, "listen")

    @property
    def metrics_address(self) -> HostPort | None:
        """Where to serve metrics; None if they are not served."""
        if not self.metrics_listen:
            return None
        if self.metrics_listen != AUTO:
            return parse_host_port(self.metrics_listen, "metrics_listen")
        own = self.listen_address
        # If the port + 1000 is above the last one, any free port is better than not starting.
        return own.with_port(own.port + 1000 if 0 < own.port <= 64_535 else 0)

    @property
    def frames_address(self) -> HostPort | None:
        """Where to listen for frames; None if this service does not."""
        return None

    def advertised(self, bound: HostPort) -> HostPort:
        """The address that others dial, once `listen` has become `bound`."""
        if self.advertise == AUTO:
            return bound.dialable()
        address = parse_host_port(self.advertise, "advertise")
        return address.with_port(bound.port) if address.port == 0 else address


class StoreSettings(ServiceSettings):
    """The settings of every service with a store. A subclass says what it keeps in `store`."""

    store: Annotated[str, Field(min_length=1)]
    """A directory on a local file system, or bigtable://PROJECT/INSTANCE?profile=NAME."""

    store_unsafe: bool = False
    """Accept a store on a network file system, which can lose writes that were acknowledged."""

    @field_validator("store")
    @classmethod
    def _is_a_place(cls, store: str) -> str:
        if store.startswith(SCHEME):
            try:
                parse_place(store)
            except InvalidArgument as error:
                raise ValueError(error.reason) from None
        return store

    @property
    def store_root(self) -> Path:
        return Path(self.store).absolute()

    @property
    def place(self) -> Place | None:
        """The row store that is named; None if it is a directory."""
        return parse_place(self.store) if self.store.startswith(SCHEME) else None

    @property
    def directory(self) -> Path | None:
        """The directory that is named; None if it is a row store."""
        return self.store_root if self.place is None else None


class FramedSettings(StoreSettings):
    """The settings of a service that the library also calls in frames (docs/internals.md)."""

    frame_connections_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Connections for frames at once; any further one is closed, and its calls go over gRPC."""

    frames_listen: _OptionalListenAddress = AUTO
    """host:port for frames, which the Python library uses as a faster path than gRPC; port 0 is any
    free one; empty is none. auto: any free port at the host of `listen`."""

    frames_unknown_max: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    """Connections for frames whose callers have not said yet which server they mean. Above it, the
    one ends that has been silent for longest."""

    @property
    def frames_address(self) -> HostPort | None:
        if not self.frames_listen:
            return None
        if self.frames_listen == AUTO:
            return self.listen_address.with_port(0)
        return parse_host_port(self.frames_listen, "frames_listen")
