"""Small cases, all of them or very many: the verdict is that of the definition.

If a checker has a hole, some small case shows it.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import permutations, product
from random import Random

import pytest

from percolator.errors import InvalidArgument
from tests.isolation.checker import check, settled
from tests.isolation.history import Found, History, Operation, Outcome, Scan, TransactionRecord
from tests.unit.isolation.definition import is_snapshot_isolated
from tests.unit.isolation.histories import (
    delete,
    history,
    lock,
    put,
    read,
    read_lock,
    scan,
    transaction,
)

_CELLS = [Found(b"a", b"v", b"1"), Found(b"b", b"v", b"1"), Found(b"b", b"w", b"1")]
_CELLS += [Found(b"c", b"v", b"1")]
_OWN: list[list[Operation]] = [[delete("b.v")], [put("bb", "2"), delete("c")]]


@pytest.mark.parametrize("own", _OWN, ids=["a deletion", "a write and a deletion"])
def test_every_answer_of_every_scan_of_three_rows(own: list[Operation]) -> None:
    """Bounds, order, limits, both directions, stopped early or not, over own writes."""
    cells = [*_CELLS, Found(b"bb", b"v", b"2")]
    answers = [found for length in range(3) for found in product(cells, repeat=length)]
    answers += permutations(cells, 3)
    questions = product((b"", b"b"), (b"", b"c"), (False, True), (0, 1, 2), (True, False))
    verdicts: Counter[bool] = Counter()
    for start, stop, reverse, limit, complete in questions:
        for found in answers:
            asked = Scan("t", start, stop, tuple(found), None, reverse, limit, complete)
            one = history(
                transaction(3, *own, asked, commit=4 if own else 0),
                **{"a": "1", "b": "1", "b.w": "1", "c": "1"},
            )
            right = is_snapshot_isolated(one)
            assert bool(check(one)) is right, f"{asked}: {check(one)}"
            verdicts[right] += 1
    assert verdicts[True] > 50


def test_any_small_history() -> None:
    """Random timestamps, outcomes, reads and scans: equal timestamps, commits below starts,
    overlapping writers, reads of own deletions, snapshots of the past, unknown outcomes."""
    verdicts: Counter[bool] = Counter()
    for seed in range(2_500):
        chance = Random(seed)
        found = _any_history(chance)
        ended = {record.start_ts: chance.choice((None, chance.randint(1, 9))) for record in found}
        resolve = partial(_resolved, ended)
        right = is_snapshot_isolated(settled(found, resolve))
        report = check(found, resolve=resolve)
        assert bool(report) is right, f"seed {seed}: {report}"
        verdicts[right] += 1
    assert min(verdicts[True], verdicts[False]) > 200, verdicts


def _resolved(ended: dict[int, int | None], record: TransactionRecord) -> int | None:
    return ended[record.start_ts]


def _any_history(chance: Random) -> History:
    records: list[TransactionRecord] = []
    for number in range(1, chance.randint(2, 4) + 1):
        start = chance.randint(1, 7)
        operations = [_any_operation(chance) for _ in range(chance.randint(0, 3))]
        records.append(
            transaction(
                start,
                *operations,
                commit=chance.choice((start + 1, start + 2, chance.randint(1, 9))),
                outcome=chance.choice((*Outcome, Outcome.COMMITTED, Outcome.ABORTED)),
                session=f"session {chance.randint(1, 3)}",
                number=number,
                historic=chance.random() < 0.1,
            )
        )
    return history(*records)


def _any_operation(chance: Random) -> Operation:
    name, value = chance.choice("xy"), chance.choice("12")
    match chance.randrange(10):
        case 0 | 1 | 2:
            return read(name, chance.choice((None, None, value)))
        case 3 | 4:
            return put(name, value)
        case 5:
            return delete(name)
        case 6:
            return lock(name)
        case 7:
            return read_lock(name)
        case _:
            found = [(row, chance.choice("12")) for row in "xy" if chance.random() < 0.3]
            return scan("", chance.choice(("", "y")), *found, limit=chance.choice((0, 1)))


def test_reads_without_a_snapshot_are_refused() -> None:
    """There would be nothing to compare them with."""
    with pytest.raises(InvalidArgument, match="without a start timestamp"):
        check(history(transaction(0, read("x", "1"))))
