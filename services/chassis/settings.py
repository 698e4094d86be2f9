"""Settings of a service: one frozen, validated object, fed by four layers.

Defaults < TOML file (`--config`) < environment (`PERCOLATOR_ORACLE_LISTEN`) < flags (`--listen`).
A value that cannot be right stops the process before it does anything: one line that names the
field and where the value came from, exit code 2. Unknown keys and flags are refused, and the
nearest one that exists is suggested. Unknown environment variables are only logged
(`lifecycle.py`).
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import json
import os
import sys
import textwrap
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from percolator.bigtable.place import SCHEME, Place, parse_place
from percolator.bucket.place import BucketPlace, parse_cluster_bucket
from percolator.errors import InvalidArgument
from percolator.wire.addresses import HostPort, parse_host_port
from percolator.wire.tls import Tls

_ERROR = 2


def occupy_standard_streams() -> None:
    """Puts the null device in place of standard streams that are closed (`2>&-`). Call it first.

    Their numbers go to the next files that are opened. Any code that then writes an error message
    to "standard error", such as the C library of gRPC, could write it into the oracle's mark.
    """
    for number in range(_ERROR + 1):
        try:
            os.fstat(number)
        except OSError:
            # Opening takes the lowest free number, which is this very one.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)


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
    """TOML file: the tokens with which clients prove their role. Empty: only servers may call this
    one, unless any_certificate_is_admin says otherwise."""

    any_certificate_is_admin: bool = False
    """Without tokens: let every client with a certificate of the authority do everything that
    clients and operators do."""

    audit: str = ""
    """File to which a line of JSON is written for every administrative call and every refusal of a
    caller; empty is none. Each process needs a file of its own."""

    audit_bytes_max: Annotated[int, Field(ge=64 << 10, le=1 << 40)] = 64 << 20
    """The size above which the audit file is renamed, and a new one begun."""

    audit_files_max: Annotated[int, Field(ge=2, le=1_000)] = 10
    """How many audit files are kept, with the current one."""

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
    """Streams of health and reflection at once, which need no token. One connection may have 16,
    and one machine half of them."""

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
        if self.any_certificate_is_admin and not given:
            raise ValueError("any_certificate_is_admin: needs TLS; without it, anybody is")
        if self.any_certificate_is_admin and self.tokens:
            raise ValueError("any_certificate_is_admin: tokens are given, which it makes void")
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
        try:
            if parse_cluster_bucket(store) is None and store.startswith(SCHEME):
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
    def bucket(self) -> BucketPlace | None:
        """The bucket that is named; None if it is none."""
        return parse_cluster_bucket(self.store)

    @property
    def directory(self) -> Path | None:
        """The directory that is named; None if it is a row store or a bucket."""
        return self.store_root if self.place is None and self.bucket is None else None


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


_UNITS = ("seconds", "milliseconds", "microseconds", "bytes", "rows", "cells", "percent")


def help_text(kind: type[ServiceSettings]) -> str:
    """The text of --help: every setting with its meaning, unit and default."""
    prefix = f"PERCOLATOR_{kind.service.upper()}_"
    lines = [
        f"usage: percolator serve {kind.service} [--SETTING VALUE ...]",
        "",
        f"Each setting is a flag, an environment variable ({prefix}LISTEN) or a key of the TOML",
        "file; a flag wins over the environment, the environment over the file.",
        "",
        "  --config FILE",
        f"      Settings as TOML. Also {prefix}CONFIG.",
        "  --print-config",
        "      Print the settings in force, as such a file, and exit.",
        "  -h, --help",
        "      Print this and exit.",
    ]
    for name, info in kind.model_fields.items():
        lines.append("")
        lines.append("  --" + name.replace("_", "-") + _value_shown(name, info))
        lines.extend("      " + line for line in _description(kind, name).splitlines())
        lines.append(f"      Default: {_default(info)}")
    return "\n".join(lines) + "\n"


def to_toml(settings: ServiceSettings) -> str:
    """The settings as a file that --config accepts; those that are None are comments."""
    lines: list[str] = []
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        lines.extend("# " + line for line in _description(type(settings), name).splitlines())
        lines.append(f"# {name} is not set" if value is None else f"{name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _value_shown(name: str, info: FieldInfo) -> str:
    if info.annotation is bool:
        return ""
    if typing.get_origin(info.annotation) is typing.Literal:
        return " " + "|".join(map(str, typing.get_args(info.annotation)))
    unit = next((unit for unit in _UNITS if unit in name.split("_")), None)
    return f" {(unit or 'value').upper()}"


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "none; required"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "(empty)"
    return "(empty)" if value in ("", None) else str(value)


def _description(kind: type[ServiceSettings], name: str) -> str:
    """The docstring of the field or of the one it overrides: a new default needs no new text."""
    owners = (owner for owner in kind.__mro__ if issubclass(owner, ServiceSettings))
    return next((text for owner in owners if (text := _docstrings(owner).get(name))), "")


@cache
def _docstrings(owner: type[ServiceSettings]) -> dict[str, str]:
    """The docstring below each field of a class, from its source.

    Only --help pays for reading it: `use_attribute_docstrings` takes a tenth of each start.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    found: dict[str, str] = {}
    for field, below in pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
    return found


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # A JSON string is a TOML string, except for DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


__all__ = [
    "DialAddress",
    "FramedSettings",
    "ListenAddress",
    "Seconds",
    "ServiceSettings",
    "SettingsError",
    "StoreSettings",
    "environment_name",
    "flag_name",
    "load",
]

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)

_VALUE_SHOWN_MAX = 80


class SettingsError(Exception):
    """A setting is wrong; the text names it and where it came from, in one line."""


def load(
    kind: type[SettingsT],
    argv: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> SettingsT:
    """The settings of this process. Prints and exits for --help, --print-config and errors."""
    occupy_standard_streams()
    argv = sys.argv[1:] if argv is None else argv
    environment = os.environ if environment is None else environment
    try:
        flags = _parse_flags(kind, argv)
        if flags.help:
            _print_and_exit(help_text(kind))
        settings = _layered(kind, flags, environment)
        if flags.print_config:
            _print_and_exit(to_toml(settings))
    except SettingsError as error:
        sys.stderr.write(f"{kind.service}: {error}\n")
        raise SystemExit(2) from None
    return settings


def _print_and_exit(text: str) -> NoReturn:
    sys.stdout.write(text)
    raise SystemExit(0)


# ------------------------------------------------------------------------------- layers


def environment_name(kind: type[ServiceSettings], field: str) -> str:
    """ "listen" → "PERCOLATOR_ORACLE_LISTEN"."""
    return f"PERCOLATOR_{kind.service}_{field}".upper()


def flag_name(field: str) -> str:
    """ "drain_seconds" → "--drain-seconds"."""
    return "--" + field.replace("_", "-")


def _layered(
    kind: type[SettingsT], flags: argparse.Namespace, environment: Mapping[str, str]
) -> SettingsT:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if flags.config == "":
        raise SettingsError("--config: is empty; expected the name of a file")
    path = flags.config or environment.get(environment_name(kind, "config"))
    if path:
        for field, value in _read_toml(kind, Path(path)).items():
            values[field] = value
            origins[field] = f"in {path}"
    for field in kind.model_fields:
        variable = environment_name(kind, field)
        if variable in environment:
            values[field] = _from_text(kind, field, environment[variable])
            origins[field] = f"from {variable}"
        given = getattr(flags, field)
        if given is not None:
            values[field] = given if isinstance(given, bool) else _from_text(kind, field, given)
            origins[field] = f"from {flag_name(field)}"
    try:
        return kind(**values)
    except ValidationError as error:
        raise SettingsError(_explained(error, values, origins)) from None


def _read_toml(kind: type[ServiceSettings], path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        # Not just TOMLDecodeError: there are also numbers of 5,000 digits and 1,000 nested lists.
        raise SettingsError(f"--config {path}: not TOML: {_one_line(str(error))}") from None
    for key, value in found.items():
        if key not in kind.model_fields:
            nearest = _nearest(key, kind.model_fields)
            raise SettingsError(f"{key} (in {path}): no such setting{nearest}")
        if isinstance(value, bool) and kind.model_fields[key].annotation is not bool:
            # Otherwise `drain_seconds = true` would silently be one second.
            raise SettingsError(f"{key} (in {path}): expected a value, found a boolean")
    return found


def _from_text(kind: type[ServiceSettings], field: str, text: str) -> str | list[str]:
    annotation = kind.model_fields[field].annotation
    if typing.get_origin(annotation) in (tuple, list):
        return [part.strip() for part in text.split(",")] if text.strip() else []
    return text


# -------------------------------------------------------------------------------- flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(_one_line(message))


def _parse_flags(kind: type[ServiceSettings], argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog=kind.service, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("--config", metavar="FILE")
    for field, info in kind.model_fields.items():
        if info.annotation is bool:
            parser.add_argument(flag_name(field), action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag_name(field))
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise SettingsError(f"{flag}: takes no arguments but flags; see --help")
        flags = ["--help", "--config", "--print-config", *map(flag_name, kind.model_fields)]
        raise SettingsError(f"{flag}: no such flag{_nearest(flag, flags)}")
    return known


def _nearest(name: str, among: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(among), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; --help lists all"


# ------------------------------------------------------------------------------- errors


def _explained(
    error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]
) -> str:
    first = error.errors(include_url=False)[0]
    reason = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return _one_line(reason)
    field = str(first["loc"][0])
    if first["type"] == "missing":
        return f"{field}: is required; give {flag_name(field)}"
    if first["type"] == "tuple_type":
        reason = "expected a list"
    origin = f" ({origins[field]})" if field in origins else ""
    shown = repr(first["input"])
    shown = shown if len(shown) <= _VALUE_SHOWN_MAX else shown[:_VALUE_SHOWN_MAX] + "…"
    found = "" if shown in reason else f", found {shown}"
    return _one_line(f"{field}{origin}: {reason[:1].lower()}{reason[1:]}{found}")


def _one_line(text: str) -> str:
    return " ".join(text.split())
