"""Arguments and options that several commands take, refused before anything is called.

Options that select something are refused if they are given without a value: `percolator
dead-letters clear --table "$TABLE" --yes` with a variable that is not set would otherwise mean all
tables, and `--at "$AT"` the present.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import Annotated, TypeVar

import typer

from percolator.cli.connection import fail
from percolator.cli.values import ValueType
from percolator.codecs.readable import row_bytes
from percolator.errors import InvalidArgument
from percolator.timestamps import Timestamp

T = TypeVar("T")

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def not_empty(context: typer.Context, parameter: typer.CallbackParam, value: T) -> T:
    """The callback of such an option or argument. The default may be empty."""
    source = context.get_parameter_source(parameter.name or "")
    given: list[object] = value if isinstance(value, list) else [value]
    if "" in given and source is not None and source.name != "DEFAULT":
        is_option = parameter.param_type_name == "option"
        name = parameter.opts[0] if is_option else parameter.name
        raise InvalidArgument(str(name), "is empty: give a value, or leave it out")
    return value


TableName = Annotated[str, typer.Argument(help="The table.", show_default=False)]
RowName = Annotated[
    str,
    typer.Argument(
        help='The row, as the table\'s keys are written: text, 17, ["a", 17], or hex:00ff.',
        show_default=False,
    ),
]
PinTtl = Annotated[
    float | None,
    typer.Option(
        help="Seconds that the pin outlives this process [default: 60, or the limit if lower].",
        min=0.1,
        max=3600,
    ),
]
At = Annotated[
    str,
    typer.Option(
        help="A timestamp, an ISO 8601 time with its zone, or a time ago: -5m [default: now].",
        metavar="TIME",
        callback=not_empty,
    ),
]
As = Annotated[
    ValueType | None,
    typer.Option("--as", help="Type of the values [default: the codec of each column, or text]."),
]
TableOption = Annotated[
    str, typer.Option("--table", help="Only this table.", callback=not_empty, show_default=False)
]
ObserverOption = Annotated[
    str,
    typer.Option("--observer", help="Only this observer.", callback=not_empty, show_default=False),
]


def bytes_of(field: str, text: str | None) -> bytes:
    """The row or column that is meant. Ends the command, before it calls anything, if none can be
    written like this."""
    try:
        return row_bytes(field, text or "")
    except InvalidArgument as error:
        fail(error)


def duration_seconds(field: str, text: str) -> float:
    """Parses "90", "90s", "15m", "2h" or "1d"."""
    unit = _UNITS.get(text[-1:])
    try:
        seconds = float(text if unit is None else text[:-1]) * (unit or 1)
    except ValueError:
        seconds = 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise InvalidArgument(field, f"expected a time such as 90s, 15m or 2h, found {text!r}")
    return seconds


def timestamp_of(text: str, option: str = "--at") -> Timestamp | None:
    """The timestamp that an option names; None for the present. "-5m" is five minutes ago, by the
    clock of this machine."""
    if not text:
        return None
    try:
        if text.startswith("-"):
            ago = timedelta(seconds=duration_seconds(option, text[1:]))
            return Timestamp.before(datetime.now(UTC) - ago)
        return Timestamp.parse_to_read(text)
    except OverflowError:
        fail(InvalidArgument(option, f"{text!r} is before every commit"))
    except InvalidArgument as error:
        fail(InvalidArgument(option, error.reason))
