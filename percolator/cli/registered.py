"""Whether an observer that a command names is registered: a mistyped name must not look like "none
are waiting"."""

from __future__ import annotations

from percolator.aio.engine import Engine
from percolator.errors import SchemaError


async def require_observer(engine: Engine, table: str, observer: str) -> None:
    """Raises `SchemaError` if an observer is named, and none of that name is registered.

    For commands that have found nothing: what a removed observer has left is shown before.
    """
    if not observer:
        return
    described = await engine.catalog.describe_all(engine.now() + engine.limits.call_seconds)
    tables = [one for one in described if not one.deleting and table in ("", one.name)]
    if observer not in {its.name for one in tables for its in one.observers}:
        raise no_observer(table, observer)


def no_observer(table: str, observer: str) -> SchemaError:
    """The error for names of which none matches; at least one of them is given."""
    name = f" {observer!r}" if observer else ""
    return SchemaError(f"no observer{name}{f' of table {table!r}' if table else ''} is registered")
