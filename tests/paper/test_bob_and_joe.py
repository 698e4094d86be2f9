"""Figure 4: "The transaction transfers 7 dollars from Bob to Joe." """

from __future__ import annotations

from .small_cluster import Cells, SmallCluster, balances, put, transfer


async def test_the_cells_after_each_step_of_figure_4() -> None:
    cluster = SmallCluster()
    client = await cluster.opened()
    cluster.next_timestamp = 5
    assert await put(client, Bob=10, Joe=2) == 6
    await client.db._engine.env.background.drain(1.0)
    cluster.next_timestamp = 7

    steps: list[Cells] = [await cluster.cells()]

    async def look() -> None:
        steps.append(await cluster.cells())

    cluster.after_batch = look
    await transfer(client, 7)
    await client.db._engine.env.background.drain(1.0)
    initial, bob_locked, joe_locked, commit_point, completed = steps

    # The first picture is the initial state. "Joe's account contains $2 dollars, Bob's $10."
    assert initial == {
        "Bob": {"data": {5: 10}, "lock": {}, "write": {6: "data @ 5"}},
        "Joe": {"data": {5: 2}, "lock": {}, "write": {6: "data @ 5"}},
    }
    # "The transfer transaction begins by locking Bob's account balance by writing the lock column.
    # This lock is the primary for the transaction. The transaction also writes data at its start
    # timestamp, 7."
    assert bob_locked["Bob"] == {
        "data": {5: 10, 7: 3},
        "lock": {7: "primary"},
        "write": {6: "data @ 5"},
    }
    assert bob_locked["Joe"] == initial["Joe"]
    # "The transaction now locks Joe's account and writes Joe's new balance (again, at the start
    # timestamp). The lock is a secondary for the transaction and contains a reference to the
    # primary lock".
    assert joe_locked["Joe"] == {
        "data": {5: 2, 7: 9},
        "lock": {7: "primary @ Bob.bal"},
        "write": {6: "data @ 5"},
    }
    assert joe_locked["Bob"] == bob_locked["Bob"]
    # "The transaction has now reached the commit point: it erases the primary lock and replaces it
    # with a write record at a new timestamp (called the commit timestamp): 8. The write record
    # contains a pointer to the timestamp where the data is stored."
    assert commit_point["Bob"] == {
        "data": {5: 10, 7: 3},
        "lock": {},
        "write": {6: "data @ 5", 8: "data @ 7"},
    }
    assert commit_point["Joe"] == joe_locked["Joe"]
    # "The transaction completes by adding write records and deleting locks at the secondary cells."
    assert completed["Joe"] == {
        "data": {5: 2, 7: 9},
        "lock": {},
        "write": {6: "data @ 5", 8: "data @ 7"},
    }
    assert completed["Bob"] == commit_point["Bob"]

    # "Future readers of the column "bal" in row "Bob" will now see the value $3."
    assert await balances(client) == {"Bob": 3, "Joe": 9}
