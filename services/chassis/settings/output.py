"""Settings for humans: the text of --help, and the TOML of --print-config."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import typing
from functools import cache
from itertools import pairwise

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from percolator.services.chassis.settings.service_settings import ServiceSettings

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
