"""The loader writes each change, whatever becomes of the answers."""

from __future__ import annotations

from typing import Any

import pytest

import percolator.testing
from examples.webindex import tables
from examples.webindex.load import Crawling, write
from percolator import OutcomeUnknown, aio


@pytest.mark.parametrize("committed", [True, False])
async def test_a_change_of_unknown_outcome_is_written_again(
    monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    async with percolator.testing.connect_async() as db:
        await tables.create_tables_async(db)
        run, unanswered = db.run, 2

        async def run_unanswered(*arguments: Any) -> None:
            nonlocal unanswered
            if committed or not unanswered:
                await run(*arguments)
            if unanswered:
                unanswered -= 1
                raise OutcomeUnknown("no answer")

        async def resolve(error: OutcomeUnknown) -> aio.Outcome:
            raise OutcomeUnknown("still unknown") from error

        monkeypatch.setattr(db, "run", run_unanswered)
        monkeypatch.setattr(db, "resolve", resolve)
        await write(db, "http://a", "text")
        async with db.snapshot() as snapshot:
            assert await snapshot.get("http://a", tables.body) == "text"


async def test_a_document_that_cannot_be_stored_is_named() -> None:
    async with percolator.testing.connect_async() as db:
        await tables.create_tables_async(db)
        crawling = Crawling(db, None, progress=lambda _: None)
        too_much = ("http://huge", "x" * (5 << 20))
        with pytest.raises(ValueError, match="'http://huge': value: has 5242880 bytes"):
            await crawling.write_all(iter([("http://a", "A"), too_much]))
