"""Who may call what: one role for every remote procedure. A test compares this with the protos.

Each role may do everything that the roles before it may.
"""

from __future__ import annotations

from enum import IntEnum

from percolator.wire import methods


class Role(IntEnum):
    """The role of an authenticated caller."""

    CLIENT = 1
    """A program that reads and writes; its token proves it."""
    ADMIN = 2
    """An operator, who changes tables and moves tablets; their token proves it."""
    SERVER = 3
    """A part of the cluster; the certificate that its servers share proves it."""


NO_ROLE = "no role may call it"
"""How a server with tokens refuses a procedure that its release does not know; a gateway of any
release says it in these words."""

_CALLERS = {
    Role.CLIENT: (
        methods.GET_TIMESTAMPS,
        methods.OPEN_SESSION,
        methods.RENEW_SESSION,
        methods.END_SESSION,
        methods.CHECK_SESSIONS,
        methods.DESCRIBE,
        methods.OFFER_FRAMES,
        methods.MUTATE,
        methods.COMMIT_TRANSACTIONS,
        methods.MUTATE_TOGETHER,
        methods.ROLL_FORWARD,
        methods.RESOLVE_LOCKS,
        methods.READ,
        methods.AWAIT_TURN,
        methods.END_TURN,
        methods.SCAN,
        methods.SCAN_CHANGES,
        methods.LOOK_FOR_CHANGES,
        methods.PROPOSE_PARTS,
        methods.LIST_TABLES,
        methods.DESCRIBE_TABLE,
        methods.LOCATE_TABLETS,
        # Before it first writes a column.
        methods.DECLARE_CODECS,
        # A client that sets a pin checks whether it came too late.
        methods.DESCRIBE_COLLECTION,
        # Workers may run inside a program that uses the library: `db.run_observers`.
        methods.TRY_LOCK,
        methods.RENEW_LOCKS,
        methods.UNLOCK,
        methods.REPORT_BACKFILL,
        methods.SCAN_NOTIFICATIONS,
        methods.WATCH_NOTIFICATIONS,
        methods.BEGIN,
        methods.GET,
        methods.SCAN_TABLE,
        methods.FIND_ROWS,
        methods.FOLLOW_CHANGES,
        methods.COMMIT,
        methods.RESOLVE,
        # As MUTATE, READ and SCAN, where a row store has the cells.
        methods.CHECK_AND_MUTATE_ROW,
        methods.MUTATE_ROWS,
        methods.READ_ROWS,
        methods.SAMPLE_ROW_KEYS,
    ),
    Role.ADMIN: (
        methods.LIST_SESSIONS,
        methods.SCAN_CELLS,
        methods.DESCRIBE_TABLETS,
        # These block other writers from rows, and delete what was loaded.
        methods.FENCE,
        methods.LOAD,
        methods.BEGIN_LOAD,
        methods.PUBLISH_LOADS,
        methods.ABANDON_LOAD,
        methods.CREATE_TABLE,
        methods.DELETE_TABLE,
        methods.CHANGE_OBSERVERS,
        methods.SET_CHANGE_FEED,
        methods.SET_TTLS,
        methods.CHANGE_INDEXES,
        methods.CHANGE_CODECS,
        methods.LIST_TABLETS,
        methods.SPLIT_TABLET,
        methods.MOVE_TABLET,
        methods.LIST_SERVERS,
        methods.DRAIN_SERVER,
    ),
    Role.SERVER: (
        methods.ADVANCE_EPOCH,
        methods.CHECK_TIMESTAMPS,
        methods.REGISTER,
        methods.REPORT,
        methods.PROPOSE_SPLIT,
        methods.OPEN_TABLET,
        methods.CLOSE_TABLET,
        methods.RAISE_SAFE_POINTS,
    ),
}

REQUIRED = {method.path: role for role, called in _CALLERS.items() for method in called}
"""The required role by path. A procedure that is not listed here is refused to all callers."""

CHECKS_RIGHTS = frozenset(
    method.path
    for method in (
        methods.BEGIN,
        methods.GET,
        methods.SCAN_TABLE,
        methods.FIND_ROWS,
        methods.FOLLOW_CHANGES,
        methods.COMMIT,
        methods.RESOLVE,
        # All clients of the library need these three, which are about no table:
        methods.DESCRIBE,
        methods.OFFER_FRAMES,
        methods.GET_TIMESTAMPS,
        # A session is ended and renewed by the token that has opened it.
        methods.OPEN_SESSION,
        methods.RENEW_SESSION,
        methods.END_SESSION,
        methods.LIST_TABLES,
        methods.DESCRIBE_TABLE,
        methods.LOCATE_TABLETS,
        methods.DESCRIBE_COLLECTION,
        methods.READ,
        methods.SCAN,
        methods.SCAN_CHANGES,
        methods.LOOK_FOR_CHANGES,
        methods.PROPOSE_PARTS,
        methods.RESOLVE_LOCKS,
        methods.MUTATE,
        methods.COMMIT_TRANSACTIONS,
        methods.DECLARE_CODECS,
    )
)
"""Procedures for tokens that have rights to some tables only. Each checks them."""

ADMINISTERS_TABLE = frozenset(
    method.path
    for method in (
        methods.CREATE_TABLE,
        methods.DELETE_TABLE,
        methods.CHANGE_OBSERVERS,
        methods.SET_CHANGE_FEED,
        methods.SET_TTLS,
        methods.CHANGE_INDEXES,
        methods.CHANGE_CODECS,
    )
)
"""Procedures for such a token that may administer a table. Each checks which one it is about."""
