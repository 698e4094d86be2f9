"""Where the cells of the transaction layer lie in the rows of a row store.

    family   time       value             what it is
    l        start      lock record       a lock: at its start, so that deleting one's own lock is
                                          deleting one version, and another's lock is another one
    w        commit     write record      puts and deletions
    o        commit     write record      lock-only commits: apart from `w`, so that "the newest put
                                          or deletion at or below s" is a filter of the store
    d        start      value             values too long for their record
    r        start      nothing           rollback markers, and proofs (proofs.py)
    g        safe point nothing           notes: history was collected here (collected.py)

Every table of the cluster is a table of the store. A row's key is its name; only rows of nothing
but zero bytes get one more of these, since a store has no row with an empty name. A column's name
begins with `c`, or with `h` if it is hidden (percolator/formats/hidden_cells.py), so that all
columns but the hidden ones are one range; or, for the proof about a cell, with `p`.
"""

from __future__ import annotations

from typing import Final

from percolator.errors import InvariantViolation
from percolator.row_text import quoted

LOCKS: Final = "l"
WRITES: Final = "w"
LOCK_ONLY: Final = "o"
DATA: Final = "d"
ROLLBACKS: Final = "r"
COLLECTED: Final = "g"
FAMILIES: Final = (LOCKS, WRITES, LOCK_ONLY, DATA, ROLLBACKS, COLLECTED)

KEY_BYTES_MAX: Final = 4_096
"""The longest key that a store of rows has to accept: Bigtable's limit."""

_COLUMN = b"c"
_HIDDEN = b"h"
_PROOF = b"p"
_ZERO = b"\0"

ALL_COLUMNS: Final = (_COLUMN, b"d")
"""The first stored name of the columns that are not hidden, and the first one behind them."""
EVERY_COLUMN: Final = (b"", b"")
"""The same for all columns, with the hidden ones."""


def row_key(row: bytes) -> bytes:
    """The key of a row. Keys have the order of rows."""
    return row if row.strip(_ZERO) else row + _ZERO


def row_of(key: bytes) -> bytes:
    """The row of a key."""
    return key if key.strip(_ZERO) else key[:-1]


def stored_column(column: bytes) -> bytes:
    return (_HIDDEN if column.startswith(_ZERO) else _COLUMN) + column


def column_of(stored: bytes) -> bytes:
    if stored[:1] not in (_COLUMN, _HIDDEN):
        raise InvariantViolation(f"the row store has a column {quoted(stored)}, which nobody wrote")
    return stored[1:]


def written_by_others(row: bytes, error: Exception) -> InvariantViolation:
    """The error for a row with a cell that makes no sense: a store has other users, too."""
    return InvariantViolation(
        f"row {quoted(row)} has a cell that no transaction writes ({error}): another program has "
        "changed the table in the store"
    )


def proof_column(column: bytes) -> bytes:
    """The stored name of the column that has the proofs about a column."""
    return _PROOF + column


def is_proof_column(stored: bytes) -> bool:
    return stored.startswith(_PROOF)


def column_bounds(column: bytes) -> tuple[bytes, bytes]:
    """The stored name of a column, and the first name behind it."""
    stored = stored_column(column)
    return stored, stored + _ZERO


def after_prefix(prefix: bytes) -> bytes:
    """The first name or value behind all that begin with the prefix; empty if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b""
