"""Settings of a service: one frozen, validated object, fed by four layers.

Defaults < TOML file (`--config`) < environment (`PERCOLATOR_ORACLE_LISTEN`) < flags (`--listen`).
A value that cannot be right stops the process before it does anything: one line that names the
field and where the value came from, exit code 2. Unknown keys and flags are refused, with the
nearest one that exists. Unknown environment variables are not: container platforms invent some
with any prefix (`PERCOLATOR_ORACLE_PORT`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from percolator.errors import InvalidArgument
from percolator.wire.addresses import HostPort, parse_host_port
from percolator.wire.tls import Tls

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
"""host:port of somebody else."""

_DerivedAddress = Annotated[
    str,
    AfterValidator(lambda text: text if text == AUTO else _checked(text, port_needed=False)),
]
_OptionalListenAddress = Annotated[
    str,
    AfterValidator(lambda text: text if text in ("", AUTO) else _checked(text, port_needed=False)),
]

Seconds = Annotated[float, Field(gt=0, le=86_400)]
"""A duration above nothing, and below a day."""


class ServiceSettings(BaseModel):
    """What every service can be told. A service adds its own fields in a subclass.

    A subclass sets `service` and a default for `listen`; each field has a type that validates, a
    docstring, and its unit in its name.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
    )

    service: ClassVar[str]
    """Names the program: "oracle". The environment's prefix is PERCOLATOR_ORACLE_."""

    listen: ListenAddress
    """host:port to serve on; port 0 is any free one."""

    advertise: _DerivedAddress = AUTO
    """host:port that others dial; port 0 is the one listened on. auto: what `listen` became, with
    this machine's host name in place of "every interface"."""

    masters: tuple[DialAddress, ...] = ()
    """Addresses of the cluster's masters, separated by commas. Empty: serve alone, unregistered."""

    metrics_listen: _OptionalListenAddress = AUTO
    """host:port of the Prometheus metrics; port 0 is any free one; empty is none. auto: the port
    of `listen` + 1000."""

    tls_ca: str = ""
    """PEM file: the authority that the certificates of servers and clients have to be from. With
    it, tls_certificate and tls_key, every connection is mutual TLS, metrics included."""

    tls_certificate: str = ""
    """PEM file: this server's certificate, under the name percolator.cluster that all share."""

    tls_key: str = ""
    """PEM file: the private key of that certificate, without a password."""

    tokens: str = ""
    """TOML file: what clients prove their role by. Empty: whoever has a certificate of the
    authority may do everything that clients and operators do."""

    insecure: bool = False
    """Allow an address that other machines can reach, although without TLS calls are neither
    encrypted nor authenticated."""

    drain_seconds: Seconds = 20.0
    """At shutdown: how long calls in progress may take before they are cut off."""

    concurrency_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Calls in progress at once; any further one is refused, and told when to come back."""

    request_bytes_max: Annotated[int, Field(ge=1024, le=1 << 30)] = 16 << 20
    """The largest request that is accepted."""

    log_format: Literal["auto", "human", "json"] = "auto"
    """How log lines look. auto: for humans on a terminal, JSON otherwise."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important log lines that are written."""

    ready_file: str = ""
    """A file that is written, as JSON, once the service is ready: its addresses, id and pid."""

    stop_with_stdin: bool = False
    """Shut down when standard input closes: for processes that must not outlive their launcher."""

    @field_validator("*")
    @classmethod
    def _no_nul(cls, value: object) -> object:
        # No path can hold it, and the system's calls break instead of failing.
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
            raise ValueError("tokens: needs TLS: they would travel in plain text")
        if not given and not self.insecure:
            self._require_loopback("listen", self.listen_address)
            if self.metrics_address is not None:
                self._require_loopback("metrics_listen", self.metrics_address)
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
        """The files of this server; None when it speaks plain text."""
        if not self.tls_ca:
            return None
        return Tls(self.tls_ca, self.tls_certificate, self.tls_key)

    @property
    def listen_address(self) -> HostPort:
        return parse_host_port(self.listen, "listen")

    @property
    def metrics_address(self) -> HostPort | None:
        """Where metrics are to be served; None when they are not."""
        if not self.metrics_listen:
            return None
        if self.metrics_listen != AUTO:
            return parse_host_port(self.metrics_listen, "metrics_listen")
        own = self.listen_address
        # Above the last port there is none at + 1000: any free one is better than not starting.
        return own.with_port(own.port + 1000 if 0 < own.port <= 64_535 else 0)

    def advertised(self, bound: HostPort) -> HostPort:
        """What others dial, once `listen` has become `bound`."""
        if self.advertise == AUTO:
            return bound.dialable()
        address = parse_host_port(self.advertise, "advertise")
        return address.with_port(bound.port) if address.port == 0 else address
