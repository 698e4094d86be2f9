"""Transactions that the collection of old versions has overtaken."""

from __future__ import annotations

import pytest

from percolator.errors import OutcomeUnknown
from percolator.wire.questions import Step

from .cells_and_steps import A, B, address, put, puts, settled, world
from .naive_cells import WRITE


async def test_a_commit_whose_record_may_be_collected_is_never_said_to_be_aborted() -> None:
    """Its answer was lost; when it is asked about, nothing is left of it on the primary."""
    here = world()
    client = here.client()
    client.network.loses_answer = lambda step: puts(step, WRITE)
    commit = client.commit(await client.start_timestamp(), {A: put(b"1")})
    with pytest.raises(OutcomeUnknown):
        await commit.run(client.deadline(1.0))
    client.network.loses_answer = lambda step: False
    await settled(client)
    here.store.cells[A].clear()
    here.store.safe_point = await client.start_timestamp()
    with pytest.raises(OutcomeUnknown, match="too old"):
        await commit.settle(client.deadline())
    assert not here.store.cells[A], "nor is it given a marker"


async def test_a_secondary_that_was_committed_and_collected_meanwhile_is_no_torn_commit() -> None:
    here = world()
    client = here.client()

    async def overtaken(step: Step) -> None:
        if address(step) == B and puts(step, WRITE):
            here.store.cells[B].clear()
            here.store.safe_point = await client.start_timestamp()

    client.network.before_send = overtaken
    commit = client.commit(await client.start_timestamp(), {A: put(b"1"), B: put(b"2")})
    assert await commit.run(client.deadline())
    await settled(client)
    assert not here.store.cells[B]
