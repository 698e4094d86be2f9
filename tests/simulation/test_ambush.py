"""An ambush recognises the step of the protocol at which a message is sent."""

from __future__ import annotations

from percolator.protocol import steps
from percolator.v1.tabletserver_pb2 import MutateRequest, Mutation, StepList
from percolator.wire.methods import MUTATE
from tests.simulation.ambush import Ambush
from tests.simulation.network import Envelope

_WORKER, _SERVER = "worker-0:1", "tablets-0:1"


def _sent(*mutations: Mutation) -> Envelope:
    request = MutateRequest()
    request.batches.add().mutations.extend(mutations)
    return Envelope(_WORKER, _SERVER, MUTATE.path, False, request.SerializeToString())


def _forgetting() -> Mutation:
    return steps.forget_notifications(b"row", b"column", b"observer", [7])


def test_it_recognises_a_worker_that_deletes_the_notifications_it_has_handled() -> None:
    ambush = Ambush(_WORKER, 1, is_reply=False)
    assert ambush.step(_sent(_forgetting())) == "notification deleted"


def test_it_recognises_steps_in_lists() -> None:
    request = MutateRequest()
    request.batches.add().steps.kinds.extend([StepList.KIND_COMMIT_PRIMARY, StepList.KIND_PREWRITE])
    sent = Envelope(_WORKER, _SERVER, MUTATE.path, False, request.SerializeToString())
    ambush = Ambush(_WORKER, 1, is_reply=False, aim="commit of the primary")
    assert ambush.step(sent) == "commit of the primary"


def test_one_that_waits_for_another_step_lets_that_message_pass() -> None:
    ambush = Ambush(_WORKER, 1, is_reply=False, aim="commit of the primary")
    assert ambush.step(_sent(_forgetting())) is None


def test_a_message_of_many_steps_is_named_after_the_furthest() -> None:
    notifying = steps.notify(b"row", b"column", 7, (b"observer",))
    ambush = Ambush(_WORKER, 1, is_reply=False)
    assert ambush.step(_sent(_forgetting(), notifying)) == "notification deleted"
