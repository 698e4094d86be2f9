"""Options that say which part is meant: if one is given without a value, the command is refused.

`percolator dead-letters clear --table "$TABLE" --yes` with a variable that is not set would
otherwise mean all tables, and `--at "$MOMENT"` the present.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import typer

from percolator.errors import InvalidArgument

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


TableOption = Annotated[
    str, typer.Option("--table", help="Only this table.", callback=not_empty, show_default=False)
]
ObserverOption = Annotated[
    str,
    typer.Option("--observer", help="Only this observer.", callback=not_empty, show_default=False),
]
