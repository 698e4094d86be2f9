"""Arguments and options that are refused before anything is called.

Those that say which part is meant are refused if they are given without a value: `percolator
dead-letters clear --table "$TABLE" --yes` with a variable that is not set would otherwise mean all
tables, and `--at "$MOMENT"` the present.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import typer

from percolator.cli.connection import fail
from percolator.errors import InvalidArgument
from percolator.row_text import row_bytes

T = TypeVar("T")


def not_empty(context: typer.Context, parameter: typer.CallbackParam, value: T) -> T:
    """The callback of such an option or argument. The default may be empty."""
    source = context.get_parameter_source(parameter.name or "")
    given: list[object] = value if isinstance(value, list) else [value]
    if "" in given and source is not None and source.name != "DEFAULT":
        is_option = parameter.param_type_name == "option"
        name = parameter.opts[0] if is_option else parameter.name
        raise InvalidArgument(str(name), "is empty: give a value, or leave it out")
    return value


def require_row(field: str, text: str | None) -> None:
    """Ends the command, before it calls anything, if no table can have a row written like this."""
    try:
        row_bytes(field, text or "")
    except InvalidArgument as error:
        fail(error)


TableOption = Annotated[
    str, typer.Option("--table", help="Only this table.", callback=not_empty, show_default=False)
]
ObserverOption = Annotated[
    str,
    typer.Option("--observer", help="Only this observer.", callback=not_empty, show_default=False),
]
