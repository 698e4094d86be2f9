"""Who may call what: one role for every remote procedure. A test holds this against the protos.

Each role may do what the ones before it may.
"""

from __future__ import annotations

from enum import IntEnum

from percolator.wire import methods


class Role(IntEnum):
    """What a caller was recognised as."""

    CLIENT = 1
    """A program that reads and writes: recognised by its token."""
    ADMIN = 2
    """An operator, who changes tables and moves tablets: by a token, too."""
    SERVER = 3
    """A part of the cluster: by the certificate that its servers share."""


_CALLERS = {
    Role.CLIENT: (
        methods.GET_TIMESTAMPS,
        methods.OPEN_SESSION,
        methods.RENEW_SESSION,
        methods.END_SESSION,
        methods.CHECK_SESSIONS,
        methods.DESCRIBE,
        methods.MUTATE,
        methods.READ,
        methods.SCAN,
        methods.PROPOSE_PARTS,
        methods.LIST_TABLES,
        methods.DESCRIBE_TABLE,
        methods.LOCATE_TABLETS,
        # Whoever sets a pin looks whether it came too late.
        methods.DESCRIBE_COLLECTION,
        # Workers that are started as programs of the library: `db.run_observers`.
        methods.TRY_LOCK,
        methods.RENEW_LOCKS,
        methods.UNLOCK,
        methods.SCAN_NOTIFICATIONS,
        methods.WATCH_NOTIFICATIONS,
        methods.BEGIN,
        methods.GET,
        methods.SCAN_TABLE,
        methods.COMMIT,
        methods.RESOLVE,
    ),
    Role.ADMIN: (
        methods.LIST_SESSIONS,
        methods.SCAN_CELLS,
        methods.DESCRIBE_TABLETS,
        # They keep others from rows, and delete what was loaded.
        methods.FENCE,
        methods.LOAD,
        methods.CREATE_TABLE,
        methods.DELETE_TABLE,
        methods.CHANGE_OBSERVERS,
        methods.LIST_TABLETS,
        methods.SPLIT_TABLET,
        methods.MOVE_TABLET,
        methods.LIST_SERVERS,
        methods.DRAIN_SERVER,
    ),
    Role.SERVER: (
        methods.REGISTER,
        methods.REPORT,
        methods.PROPOSE_SPLIT,
        methods.OPEN_TABLET,
        methods.CLOSE_TABLET,
        methods.RAISE_SAFE_POINTS,
    ),
}

REQUIRED = {method.path: role for role, called in _CALLERS.items() for method in called}
"""By path. A procedure that is not here is refused to everybody."""
