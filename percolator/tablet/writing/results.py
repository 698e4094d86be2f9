"""The results of mutations and of whole transactions, as answers carry them.

A refusal by a condition is not here: it is made where the condition is judged (judge.py,
exclusion.py).
"""

from __future__ import annotations

from percolator.errors import NotExecuted, PercolatorError
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail

APPLIED = pb.MutationResult(outcome=pb.OUTCOME_APPLIED)


def not_executed(error: PercolatorError) -> pb.MutationResult:
    return pb.MutationResult(outcome=pb.OUTCOME_NOT_EXECUTED, error=to_detail(error))


def unknown(error: PercolatorError) -> pb.MutationResult:
    return pb.MutationResult(outcome=pb.OUTCOME_UNKNOWN, error=to_detail(error))


ANSWER_FULL = not_executed(NotExecuted("the response is full; request the rest again"))
