"""Where in Bigtable a cluster's tables are: `bigtable://PROJECT/INSTANCE?profile=NAME`.

The address names no host. Calls go to Google, or to an emulator if BIGTABLE_EMULATOR_HOST names
one, as Google's own clients do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl

from percolator.errors import InvalidArgument
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.wire.addresses import parse_host_port

SCHEME = "bigtable://"
EMULATOR_VARIABLE = "BIGTABLE_EMULATOR_HOST"
DATA_ADDRESS = "bigtable.googleapis.com:443"
ADMIN_ADDRESS = "bigtableadmin.googleapis.com:443"
_FORM = "expected bigtable://PROJECT/INSTANCE?profile=NAME"
_PROFILE = "profile"

# As Google's documentation describes them. A project may also be named by its number, and one of
# an organization's domain is named "example.com:project".
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]|[0-9]{6,20}")
_INSTANCE = re.compile(r"[a-z][a-z0-9-]{4,31}[a-z0-9]")
_APP_PROFILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,49}")


@dataclass(frozen=True)
class Place:
    """An instance, and how it is reached. `InvalidArgument` names the part that is malformed."""

    address: str
    """`host:port` of the service, or of an emulator."""
    project: str
    instance: str
    app_profile: str = ""
    """Must route to a single cluster; empty for the instance's default."""
    scans_backwards: bool = True
    """False for emulators of older releases, which ignore the direction of a scan."""
    admin_address: str = ""
    """Where tables are created, if that is not `address`."""
    is_emulated: bool = True
    """True if calls go without TLS and credentials."""

    def __post_init__(self) -> None:
        _require(
            _PROJECT,
            "project",
            self.project,
            "6 to 30 lower-case letters, digits and hyphens, which begin with a letter and do not "
            "end with a hyphen; or a project's number",
        )
        _require(
            _INSTANCE,
            "instance",
            self.instance,
            "6 to 33 lower-case letters, digits and hyphens, which begin with a letter and do not "
            "end with a hyphen",
        )
        if self.app_profile:
            _require(
                _APP_PROFILE,
                _PROFILE,
                self.app_profile,
                "1 to 50 letters, digits, dots, hyphens and underscores, which begin with a "
                "letter, a digit or an underscore",
            )

    def __str__(self) -> str:
        """The address that `parse_place` understands."""
        query = f"?{_PROFILE}={self.app_profile}" if self.app_profile else ""
        return f"{SCHEME}{self.project}/{self.instance}{query}"

    @property
    def parent(self) -> str:
        """The full name of the instance."""
        return f"projects/{self.project}/instances/{self.instance}"

    @property
    def tables_address(self) -> str:
        """`host:port` of what creates tables."""
        return self.admin_address or self.address

    def table_name(self, table_id: int) -> str:
        """The name, within the instance, of a table of the cluster."""
        return table_name(table_id)

    def table(self, table_id: int) -> str:
        """The full name of a table of the cluster."""
        return f"{self.parent}/tables/{self.table_name(table_id)}"


def table_name(table_id: int) -> str:
    """The name of a table of a cluster, which does not depend on the instance."""
    return f"percolator-{'intents' if table_id == INTENTS_TABLE else table_id}"


def parse_place(
    text: str, *, field: str = "store", environment: Mapping[str, str] | None = None
) -> Place:
    """The place of an address. `InvalidArgument` names `field`, and the part that is malformed."""
    if not text.startswith(SCHEME):
        raise InvalidArgument(field, f"{_FORM}, found {text!r}")
    if "#" in text:
        raise InvalidArgument(field, f"{_FORM}, without a fragment, found {text!r}")
    path, question, query = text.removeprefix(SCHEME).partition("?")
    project, slash, instance = path.partition("/")
    if not slash or not instance:
        raise InvalidArgument(field, f"the instance is missing in {text!r}; {_FORM}")
    if "/" in instance:
        raise InvalidArgument(field, f"{_FORM}, and nothing after the instance, found {text!r}")
    profile = _profile(query, text, field) if question else ""
    environment = os.environ if environment is None else environment
    emulator = environment.get(EMULATOR_VARIABLE, "")
    try:
        place = Place(DATA_ADDRESS, project, instance, profile, True, ADMIN_ADDRESS, False)
    except InvalidArgument as error:
        raise InvalidArgument(field, f"{error.message}, in {text!r}") from None
    if not emulator:
        return place
    address = parse_host_port(emulator, EMULATOR_VARIABLE)
    if not address.port:
        raise InvalidArgument(EMULATOR_VARIABLE, f"port 0 cannot be dialled, in {emulator!r}")
    # Not every emulator scans backwards, and one that does not ignores the direction.
    return replace(
        place, address=str(address), scans_backwards=False, admin_address="", is_emulated=True
    )


def _profile(query: str, text: str, field: str) -> str:
    if not query:
        raise InvalidArgument(field, f"nothing follows the question mark in {text!r}; {_FORM}")
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        raise InvalidArgument(field, f"{_FORM}, found {text!r}") from None
    for name, _ in given:
        if name != _PROFILE:
            raise InvalidArgument(
                field, f"{name!r} is not known in {text!r}: the only setting is {_PROFILE}"
            )
    if len(given) > 1:
        raise InvalidArgument(field, f"{_PROFILE} is given twice in {text!r}")
    profile = given[0][1]
    if not profile:
        raise InvalidArgument(field, f"{_PROFILE} is empty in {text!r}")
    return profile


def _require(pattern: re.Pattern[str], part: str, value: str, expected: str) -> None:
    if not pattern.fullmatch(value):
        raise InvalidArgument(part, f"expected {expected}; found {value!r}")
