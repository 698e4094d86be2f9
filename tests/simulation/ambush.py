"""Killing a client at a step of the protocol: which message is sent at which step."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from percolator.bigtable.messages import CHECK_AND_MUTATE_ROW, READ_ROWS
from percolator.v1 import cells_pb2
from percolator.v1.tabletserver_pb2 import Change, MutateRequest, Mutation, StepList
from percolator.wire import methods
from tests.simulation.expected import CLIENT_STEPS
from tests.simulation.network import Envelope
from tests.simulation.rows import row_step
from tests.simulation.scenario import Strike

AIMED_AFTER_MAX = 4
AIMS = (None, "read", *CLIENT_STEPS, "commit of the primary", "commit of others")
"""What an ambush waits for. None is any message: that is rarely one of the few that matter."""
_TARGETS_PER_AIM = 3


class Ambush:
    """Waits for a message of a client's commit, and then for a given number of further ones."""

    def __init__(
        self, client: str, countdown: int, *, is_reply: bool, aim: str | None = None
    ) -> None:
        """With `aim`, only messages of that step count."""
        self.client = client
        self._countdown = countdown
        self._is_reply = is_reply
        self._aim = aim

    def step(self, envelope: Envelope) -> str | None:
        """The step at which it strikes, or None."""
        if envelope.is_reply is not self._is_reply:
            return None
        if (envelope.target if envelope.is_reply else envelope.source) != self.client:
            return None
        name = _STEPS.get(envelope.path)
        if name is None:
            return None
        if self._aim is not None and _step_of(envelope, name) != self._aim:
            return None
        self._countdown -= 1
        return None if self._countdown > 0 else _step_of(envelope, name)


def aim_of(target: int) -> str | None:
    """What an ambush waits for, by the number of its target."""
    return AIMS[target // _TARGETS_PER_AIM % len(AIMS)]


def aimed(strike: Strike, aim: str) -> Strike:
    """A strike like this one that kills a client at this step."""
    return replace(strike, target=next(n for n in count(strike.target) if aim_of(n) == aim))


def _step_of(envelope: Envelope, name: str) -> str:
    if envelope.is_reply:
        return f"{name} answered"
    if envelope.path == CHECK_AND_MUTATE_ROW.path:
        return row_step(envelope.payload)
    return _mutation_step(envelope.payload) if name == "mutation" else name


_STEPS = {
    methods.MUTATE.path: "mutation",
    methods.COMMIT_TRANSACTIONS.path: "commit in one round",
    methods.MUTATE_TOGETHER.path: "commit of all parts",
    methods.ROLL_FORWARD.path: "order to roll forward",
    methods.GET_TIMESTAMPS.path: "timestamp",
    methods.READ.path: "read",
    CHECK_AND_MUTATE_ROW.path: "mutation",
    READ_ROWS.path: "read",
}


_IN_ORDER = (
    "status",
    "heartbeat or push",
    "prewrite",
    "rollback",
    "commit of the primary",
    "commit of others",
    "notification deleted",
)
"""Every step of a mutation."""

_LISTED: dict[int, str] = {
    StepList.KIND_PREWRITE: "prewrite",
    StepList.KIND_COMMIT_PRIMARY: "commit of the primary",
    StepList.KIND_COMMIT_SECONDARY: "commit of others",
}
"""Those that travel in lists."""


def _mutation_step(payload: bytes) -> str:
    """The furthest step of the protocol among the mutations of a request."""
    batches = MutateRequest.FromString(payload).batches
    steps = [_step(mutation) for batch in batches for mutation in batch.mutations]
    steps += [_LISTED[kind] for batch in batches for kind in batch.steps.kinds]
    return max(steps, default="mutation", key=_IN_ORDER.index)


def _step(mutation: Mutation) -> str:
    for change in mutation.changes:
        match change.space:
            case cells_pb2.SPACE_WRITE:
                # Only the commit point checks whether it was rolled back; other commits follow it.
                asks = any(one.space == cells_pb2.SPACE_ROLLBACK for one in mutation.conditions)
                return "commit of the primary" if asks else "commit of others"
            case cells_pb2.SPACE_ROLLBACK:
                return "rollback"
            case cells_pb2.SPACE_NOTIFY if change.kind == Change.KIND_DELETE:
                return "notification deleted"
            case cells_pb2.SPACE_LOCK if change.kind == Change.KIND_PUT:
                return "prewrite" if mutation.not_below else "heartbeat or push"
            case _:
                continue
    return "status"
