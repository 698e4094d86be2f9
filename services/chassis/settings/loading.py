"""Reads settings: defaults < TOML file < environment < flags, each value with its origin."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from percolator.services.chassis import standard_streams
from percolator.services.chassis.settings.output import help_text, to_toml
from percolator.services.chassis.settings.service_settings import (
    DialAddress,
    FramedSettings,
    ListenAddress,
    Seconds,
    ServiceSettings,
    StoreSettings,
)

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
    standard_streams.occupy()
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
