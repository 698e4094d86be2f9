"""Observers: functions that run when a column they watch has changed.

    @observes(contents)
    async def index(tx, row): ...           # the row whose `contents` changed

    @observes(title, contents, name="index", attempts=3)
    def index(tx, row, column): ...         # a third parameter: which of the columns it was

    @observes(contents, batch=32)
    async def index(tx, rows): ...          # a list of rows, in one transaction

A function should have no effects except through its transaction: it may run again after a conflict
or a crash, and only one run for a change commits.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from percolator.arguments import require_bool, require_function, require_seconds, require_whole
from percolator.errors import InvalidArgument, UsageError
from percolator.schema import OBSERVER_BYTES_MAX, Column, Table

CONCURRENCY = 128
"""Most of a run is messages, which runs share: a change costs least if many are in progress. Runs
for several rows at once share them anyway, and conflict more often: together, they have as many
rows."""
BATCH_MAX = 1_000
BLOCKING_THREADS = 16
"""Half of a worker's threads, so that a slow observer leaves some for others."""
DEADLINE_SECONDS = 30.0
ATTEMPTS = 5
PAUSE_SECONDS_MAX = 60.0

_WITHOUT_COLUMN, _WITH_COLUMN = 2, 3
"""The number of parameters of an observer's function."""


BlockingTransactions = Callable[[asyncio.AbstractEventLoop, int | None], Callable[[Any], Any]]
"""Given an event loop and the ident of its thread, returns a function that wraps a transaction of
that loop in the blocking API. The decorator passes it in, because `percolator.blocking` imports
this package."""


@dataclass(frozen=True, eq=False)
class Observer:
    """A function, and when and how it runs. Calling an observer calls the function, for tests."""

    function: Callable[..., Any]
    columns: tuple[Column[Any], ...]
    """The columns whose changes trigger it, all of one table."""
    name: str
    """The name by which the store knows it, and under which it keeps what the observer has seen."""
    weak: bool
    """It runs only on `tx.notify`, and maybe more than once."""
    deletes: bool
    """Deletes wake it, too. If not, it never runs for a cell without a value."""
    backfill: bool
    """Once it is registered, it also handles the cells that are there already."""
    batch: int | None
    """The most rows in one run. If None, each run is for one row, and the function takes that
    instead of a list."""
    concurrency: int
    """The most runs at a time in one worker."""
    threads: int
    """The most runs that are inside a blocking function, while others begin and commit."""
    deadline_seconds: float
    """How long the function may take, not counting calls that the cluster leaves unanswered. A run
    that takes longer is given up, and counts as failed."""
    attempts: int
    """After this many failed runs, a change is put aside as a dead letter."""
    pause_seconds: float
    """How long a worker waits after a run before the next one for the same cell, so that one run
    handles many changes."""
    is_async: bool
    wants_column: bool
    blocking_transactions: BlockingTransactions
    """Makes the transactions that a blocking function is called with."""

    @property
    def table(self) -> Table[Any]:
        """The table of its columns."""
        return self.columns[0].table

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - the function's
        return self.function(*arguments, **keywords)

    def call_blocking(self, *arguments: Any) -> None:  # noqa: ANN401 - the function's
        """Calls a blocking function.

        Raises `UsageError` if the call ran nothing: a `def` around an `async def` only creates a
        coroutine, and the change would count as handled.
        """
        made = self.function(*arguments)
        if inspect.isawaitable(made) or inspect.isgenerator(made) or inspect.isasyncgen(made):
            if inspect.iscoroutine(made):
                made.close()
            raise UsageError(
                f"observer {self.name!r} returned a {type(made).__name__} and ran nothing: "
                "declare it with async def if it awaits, and do not use yield"
            )

    def __repr__(self) -> str:
        return f"Observer({self.name!r}, {list(self.columns)!r})"


def observer_of(
    function: Callable[..., Any],
    columns: Sequence[Column[Any]],
    *,
    weak: bool,
    deletes: bool,
    backfill: bool | None,
    name: str | None,
    batch: int | None,
    concurrency: int | None,
    deadline: float,
    attempts: int,
    pause: float,
    blocking_transactions: BlockingTransactions,
) -> Observer:
    """Turns a function into an observer, for `percolator.observes`."""
    if isinstance(function, Observer):
        raise UsageError(
            f"{function!r} is already an observer: name all its columns in one @observes"
        )
    require_function(function)
    is_async = inspect.iscoroutinefunction(function)
    own_name = _checked_name(getattr(function, "__name__", "") if name is None else name)
    return Observer(
        function,
        tuple(columns),
        own_name,
        weak,
        deletes,
        not weak if backfill is None else backfill,
        batch,
        concurrency or max(CONCURRENCY // (batch or 1), 1),
        concurrency or BLOCKING_THREADS,
        deadline,
        attempts,
        pause,
        is_async,
        _wants_column(function, own_name),
        blocking_transactions,
    )


def check_choices(
    columns: Sequence[object],
    *,
    weak: bool,
    deletes: bool,
    backfill: bool | None,
    batch: int | None,
    concurrency: int | None,
    deadline: float,
    attempts: int,
    pause: float,
) -> None:
    """Refuses invalid options, before the decorator is given a function."""
    _check_columns(columns)
    require_bool(weak, "weak")
    require_bool(deletes, "deletes")
    if backfill is not None:
        require_bool(backfill, "backfill")
    if weak and backfill:
        raise InvalidArgument(
            "backfill",
            "a weak observer runs only after tx.notify; db.backfill notifies it of all cells",
        )
    if batch is not None:
        require_whole(batch, "batch", 1)
        if batch > BATCH_MAX:
            raise InvalidArgument("batch", f"expected at most {BATCH_MAX}, got {batch}")
    if concurrency is not None:
        require_whole(concurrency, "concurrency", 1)
    require_seconds(deadline, "deadline")
    require_whole(attempts, "attempts", 1)
    if pause != 0:
        require_seconds(pause, "pause")
        if pause > PAUSE_SECONDS_MAX:
            raise InvalidArgument("pause", f"expected at most {PAUSE_SECONDS_MAX:g}, got {pause:g}")


def _check_columns(columns: Sequence[object]) -> None:
    if not columns:
        raise UsageError("an observer watches at least one column: @observes(column)")
    tables = []
    for column in columns:
        if not isinstance(column, Column):
            raise UsageError(f"an observer watches columns, not {column!r}")
        tables.append(column.table.name)
    if len(set(tables)) > 1:
        raise UsageError(
            f"an observer watches columns of one table, not of several: {sorted(set(tables))}"
        )
    if len(set(columns)) != len(columns):
        raise UsageError(f"an observer watches each column once: {list(columns)!r}")


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidArgument("name", f"expected a str, got {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidArgument("name", f"{name!r} cannot be encoded as UTF-8") from None
    if not 1 <= size <= OBSERVER_BYTES_MAX:
        raise InvalidArgument("name", f"expected 1 to {OBSERVER_BYTES_MAX} bytes, got {name!r}")
    if not name.isprintable() or name != name.strip():
        raise InvalidArgument(
            "name",
            f"{name!r} has invisible characters; use printable ones, without spaces at the ends",
        )
    return name


def _wants_column(function: Callable[..., Any], name: str) -> bool:
    """True if the function takes (tx, row, column), and not just (tx, row)."""
    try:
        signature = inspect.signature(function)
        for arguments in (_WITHOUT_COLUMN, _WITH_COLUMN):
            try:
                signature.bind(*(None,) * arguments)
            except TypeError:
                continue
            return arguments == _WITH_COLUMN
    except (TypeError, ValueError):  # not a function, or one without a signature
        pass
    raise UsageError(f"observer {name!r} must take (tx, row) or (tx, row, column)")


def checked(observers: object, field: str = "observers") -> list[Observer]:
    """The observers as a list, or an error that names which of them cannot be run, and why."""
    if isinstance(observers, Observer) or not isinstance(observers, Sequence):
        raise InvalidArgument(field, f"expected a list of observers, got {observers!r:.80}")
    if not observers:
        raise InvalidArgument(field, "is empty: there is nothing to run")
    found: dict[tuple[str, str], Observer] = {}
    for place, one in enumerate(observers):
        if not isinstance(one, Observer):
            raise InvalidArgument(
                f"{field}[{place}]", f"{one!r:.80} is not an observer: decorate it with @observes"
            )
        if found.setdefault((one.table.name, one.name), one) is not one:
            raise InvalidArgument(
                f"{field}[{place}]",
                f"table {one.table.name!r} already has an observer {one.name!r}",
            )
    if len(found) != len(observers):
        raise InvalidArgument(field, "contains the same observer twice")
    return list(found.values())


def load(reference: str) -> list[Observer]:
    """The list of observers called `name` in `module`, from "module:name"."""
    return checked(named(reference, "observers"), reference)


def named(reference: str, field: str) -> object:
    """The object called `name` in `module`, from "module:name".

    Modules may also be in the working directory. Raises `InvalidArgument`, which says what of
    the reference in this field is wrong, and why.
    """
    module_name, colon, name = reference.partition(":")
    if not colon or not module_name or not name:
        raise InvalidArgument(field, f"expected module:name, got {reference!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # otherwise only the script's own directory is searched
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, name, None)  # may call the module's own __getattr__
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Also SystemExit: a worker whose module calls sys.exit() would end without a word, with
        # an exit code that is not its own.
        raise InvalidArgument(
            field, f"module {module_name!r} cannot be imported: {_cause(error)}"
        ) from error
    if found is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidArgument(field, f"module {module_name!r} has no {name!r}{hint}")
    return found


def _cause(error: BaseException) -> str:
    """The error in one line: what it was, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, ModuleNotFoundError | SyntaxError):
        where = ""  # the error says where itself, or the place is in the import machinery
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 (an error of the module, whose text is an error itself)
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}{where}"
