"""Programs that a type checker must reject: each marked line, and no other."""

from __future__ import annotations

from percolator import Database, Table, Transaction, aio, both_kinds, codecs, transactional

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)
owner = accounts.column("owner", codecs.text)
edges = accounts.family("edge:", codecs.integer)
events = Table("events", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
clicks = events.column("clicks", codecs.integer)


@transactional
def transfer(tx: Transaction, source: str, amount: int) -> int:
    left: int = tx.get(source, balance)  # rejected: may be None
    tx.set(source, balance, "10")  # rejected: a value of another type
    tx.set(source, owner, None)  # rejected: not a value
    tx.set(7, balance, 1)  # rejected: rows are str
    tx.set(7, {balance: 1})  # rejected: rows are str
    tx.get(7, balance)  # rejected: rows are str
    tx.delete((source, 1), balance)  # rejected: rows are str
    tx.increment(source, clicks)  # rejected: rows are tuples
    text: str = tx.get(source, balance, default=0)  # rejected: an int
    return left + len(text)


@transactional
async def transfer_async(tx: aio.Transaction, source: str) -> int:
    tx.get(source, balance) + 1  # rejected: not awaited
    tx.get(source, balance)  # rejected: not awaited
    tx.get_many(accounts, [source])  # rejected: not awaited
    tx.increment(source, balance)  # rejected: not awaited
    tx.delete_row(accounts, source)  # rejected: not awaited
    tx.timestamp()  # rejected: not awaited
    tx.set(source, balance, "10")  # rejected: a value of another type
    tx.delete(7, balance)  # rejected: rows are str
    await tx.get(7, balance)  # rejected: rows are str
    await tx.set(7, balance, 1)  # rejected: rows are str
    return 1


def use(db: Database, other: aio.Database) -> None:
    transfer(db, "bob", "seven")  # rejected: not an int
    transfer(db)  # rejected: arguments are missing
    transfer("bob", "bob", 7)  # rejected: neither Database nor Transaction
    transfer(other, "bob", 7)  # rejected: a database for asyncio
    text: str = transfer(db, "bob", 7)  # rejected: returns an int
    with db.snapshot() as snapshot:
        snapshot.set("bob", balance, 1)  # rejected: snapshots only read
        snapshot.get(7, balance)  # rejected: rows are str
        number: int = next(snapshot.scan(accounts)).key  # rejected: keys are str
        for row in snapshot.scan(accounts):
            text = row[balance]  # rejected: an int
            names: dict[str, str] = row.family(edges)  # rejected: of int
            print(names, row[edges])  # rejected: not a column
    print(text, number)
    db.get(7, balance)  # rejected: rows are str
    accounts.column("balance")  # rejected: without a codec
    accounts.nonsense()  # rejected: no such method


@both_kinds
async def spend(tx: aio.Transaction, name: str) -> int:
    await tx.delete(name, balance)
    return 1


@both_kinds
async def spent(reads: aio.Transaction | aio.Snapshot) -> int:
    await reads.set("bob", balance, 1)  # rejected: snapshots only read
    return 1


async def use_both(db: Database, other: aio.Database) -> None:
    with db.transaction() as tx:
        spend(tx, "bob") + "1"  # rejected: returns an int
        spend(tx, 7)  # rejected: not a str
        await spend(tx, "bob")  # rejected: nothing to await
    with db.snapshot() as snapshot:
        spend(snapshot, "bob")  # rejected: snapshots only read
    async with other.transaction() as async_tx:
        spend(async_tx, "bob") + 1  # rejected: not awaited
    spend(db, "bob")  # rejected: no transaction
