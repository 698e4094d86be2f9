"""A job whose commit got no answer has either committed or failed: nobody has to guess."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import percolator
from percolator import ConflictError, OutcomeUnknown, Receipt, Table, Timestamp, codecs
from percolator.aio import SharedTransaction
from percolator.spark.atomic_writer import commit_or_roll_back

pages = Table("pages")
size = pages.column("size", codecs.integer)


@pytest.mark.parametrize("is_committed", [True, False])
def test_an_unknown_outcome_is_settled(
    percolator_db: percolator.Database, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    db, commit = percolator_db, SharedTransaction.commit
    db.create_table(pages)

    async def unanswered(
        self: SharedTransaction, receipts: Sequence[Receipt], **_: object
    ) -> Timestamp | None:
        if is_committed:
            # As if the answer had been lost: only the store knows.
            await commit(self, receipts)
            self._ended, self.commit_timestamp = "", None
        raise OutcomeUnknown("no answer", start_timestamp=1)

    monkeypatch.setattr(SharedTransaction, "commit", unanswered)
    with db.shared_transaction() as whole:
        with db.share(whole.ticket, task="1") as share:
            share.set("page", size, 1)
            receipt = share.finish()
        if is_committed:
            assert whole.call_inside(commit_or_roll_back, [receipt], "the job")
        else:
            with pytest.raises(ConflictError, match="the job was rolled back: no answer"):
                whole.call_inside(commit_or_roll_back, [receipt], "the job")
    with db.snapshot() as snapshot:
        assert snapshot.get("page", size) == (1 if is_committed else None)
