"""Whatever happens to documents: once observers have nothing left to do, the definition holds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import percolator
import percolator.testing
from examples.webindex import clustering, initial, linking, tables
from examples.webindex.crawl import Crawl
from examples.webindex.definition import Inlink, Served, canonical_urls, served
from examples.webindex.documents import Document, Link, read_text
from examples.webindex.documents import parse as parse_document
from examples.webindex.load import Crawling
from examples.webindex.load import write as load_document
from examples.webindex.observers import observers, parse, update_links
from examples.webindex.served import served_table, served_table_async
from percolator import OutcomeUnknown, Table, aio, codecs

from .pipeline import (
    URLS,
    Crawled,
    KnowingNothing,
    any_document,
    clients,
    document,
    take_small_steps,
    write,
)


class Pipeline:
    """A database in this process, in which every step is brought to its end."""

    def __init__(self, db: percolator.Database) -> None:
        tables.create_tables(db)
        db.register_observers(observers)
        self.db = db
        self.crawled: dict[str, Document] = {}

    def write(self, *documents: Document, crawled: int | None = None) -> None:
        for one in documents:
            with self.db.transaction() as tx:
                tx.set(one.url, tables.body, one.body)
                if crawled is not None:
                    tx.set(one.url, tables.crawled, crawled)
            self.crawled[one.url] = one

    def crawl(self, *documents: Document, crawled: int | None = None) -> dict[str, Served]:
        self.write(*documents, crawled=crawled)
        return self.settle()

    def delete(self, *urls: str) -> None:
        for url in urls:
            with self.db.transaction() as tx:
                tx.delete(url, tables.body)
            del self.crawled[url]

    def forget(self, *urls: str) -> dict[str, Served]:
        self.delete(*urls)
        return self.settle()

    def settle(self) -> dict[str, Served]:
        percolator.testing.run_observers(self.db, observers)
        found = served_table(self.db)
        assert found == served(self.crawled.values())
        return found


@pytest.fixture
def db() -> Iterator[percolator.Database]:
    with percolator.testing.connect() as database:
        yield database


@pytest.fixture(params=[False, True], ids=["at once", "in small steps"])
def pipeline(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    db: percolator.Database,
) -> Pipeline:
    if request.param:
        take_small_steps(monkeypatch, random.Random(1))
    return Pipeline(db)


def test_when_the_canonical_page_is_deleted_the_next_best_takes_its_place(
    pipeline: Pipeline,
) -> None:
    one, other = document("http://a", "T", "1", "2"), document("http://bb", "T", "3", "4")
    linking = document("http://linking", "L", "5", "6", "[x](http://a) [y](http://bb)")
    inlinks = (Inlink("http://linking", "x"), Inlink("http://linking", "y"))
    assert pipeline.crawl(one, other, linking)["http://a"] == Served("T", 2, inlinks)
    assert pipeline.forget("http://a")["http://bb"] == Served("T", 1, inlinks[1:])
    assert pipeline.crawl(one)["http://a"] == Served("T", 2, inlinks)


def test_a_canonical_page_with_new_content_leaves_its_cluster(pipeline: Pipeline) -> None:
    one, other = document("http://a", "T", "1", "2"), document("http://bb", "T", "3", "4")
    third = document("http://ccc", "other", "1", "5", "[x](http://bb)")
    assert list(pipeline.crawl(one, other, third)) == ["http://a"]
    found = pipeline.crawl(document("http://a", "new", "new", "new"))
    assert found["http://bb"] == Served("T", 1, (Inlink("http://ccc", "x"),))
    assert sorted(found) == ["http://a", "http://bb", "http://ccc"]


def test_a_link_to_a_duplicate_leads_to_the_canonical_page(pipeline: Pipeline) -> None:
    pipeline.crawl(
        document("http://bb", "T", "1", "2"),
        document("http://ccc", "L", "3", "4", "[x](http://bb)"),
    )
    found = pipeline.crawl(document("http://a", "T", "5", "6"))
    assert found["http://a"].inlinks == (Inlink("http://ccc", "x"),)


def test_a_link_leads_nowhere_until_its_target_is_crawled(pipeline: Pipeline) -> None:
    pipeline.crawl(document("http://ccc", "L", "3", "4", "[x](http://a) [y](http://a)"))
    found = pipeline.crawl(document("http://a", "T", "5", "6"))
    assert found["http://a"].inlinks == (Inlink("http://ccc", "x"), Inlink("http://ccc", "y"))
    assert list(pipeline.forget("http://a")) == ["http://ccc"]


def test_a_link_that_is_there_twice_or_to_two_duplicates_is_shown_once(pipeline: Pipeline) -> None:
    links = "[x](http://a) [x](http://a) [x](http://bb)"
    found = pipeline.crawl(
        document("http://a", "T", "1", "2"),
        document("http://bb", "T", "3", "4"),
        document("http://ccc", "L", "5", "6", links),
    )
    assert found["http://a"].inlinks == (Inlink("http://ccc", "x"),)
    found = pipeline.forget("http://a")
    assert found["http://bb"].inlinks == (Inlink("http://ccc", "x"),)


def test_a_page_may_link_to_itself_and_change_its_mind(pipeline: Pipeline) -> None:
    found = pipeline.crawl(document("http://a", "T", "1", "2", "[me](http://a)"))
    assert found["http://a"].inlinks == (Inlink("http://a", "me"),)
    found = pipeline.crawl(document("http://a", "T", "1", "2", "[it](http://a)"))
    assert found["http://a"].inlinks == (Inlink("http://a", "it"),)
    assert pipeline.crawl(document("http://a", "T", "1", "2"))["http://a"].inlinks == ()


def test_two_documents_swap_their_groups(pipeline: Pipeline) -> None:
    pipeline.crawl(
        document("http://a", "T", "same", "2"),
        document("http://b", "U", "same", "4"),
        document("http://cc", "T", "5", "6"),
        document("http://dd", "U", "7", "8"),
    )
    pipeline.crawl(
        document("http://a", "U", "same", "2"),
        document("http://b", "T", "same", "4"),
    )


def test_a_title_alone_may_change(pipeline: Pipeline) -> None:
    pipeline.crawl(Document("http://a", "Title"), Document("http://b", ""))
    assert pipeline.crawl(Document("http://a", "New"))["http://a"].title == "New"
    assert pipeline.crawl(Document("http://a", ""))["http://a"].title == ""


def test_nothing_is_left_in_any_table_once_all_documents_are_gone(pipeline: Pipeline) -> None:
    links = " ".join(f"[x{number}](http://{number})" for number in range(9))
    documents = [document(f"http://{number}", "T", "O", "E", links) for number in range(9)]
    pipeline.crawl(*documents)
    pipeline.forget(*(one.url for one in documents))
    with pipeline.db.snapshot() as snapshot:
        assert {table.name: list(snapshot.scan(table)) for table in tables.ALL} == {
            table.name: [] for table in tables.ALL
        }


def test_a_document_whose_url_is_too_long_is_refused_and_links_to_it_lead_nowhere(
    pipeline: Pipeline,
) -> None:
    url = "http://" + "x" * tables.URL_BYTES_MAX
    pipeline.crawl(document("http://a", "T", "1", "2", f"[x]({url})"))
    with pytest.raises(ValueError, match="URL has more than"):
        pipeline.crawl(Document(url, "Title"))


def test_what_is_served_tells_which_document_version_has_caused_it(pipeline: Pipeline) -> None:
    pipeline.crawl(Document("http://a", "T\n\n[x](http://a)"), crawled=17)
    pipeline.crawl(Document("http://bb", "T"), crawled=23)
    with pipeline.db.snapshot() as snapshot:
        assert snapshot.get("http://a", tables.cause) == 23
        (row,) = snapshot.scan(tables.links)
        assert row[tables.placed] == ["x", "http://a", 17]


def test_a_link_that_is_moved_tells_what_has_changed_the_canonical_page(pipeline: Pipeline) -> None:
    pipeline.crawl(document("http://bb", "T", "O", "E", "[x](http://bb)"), crawled=17)
    pipeline.crawl(document("http://a", "other", "O", "F"), crawled=23)
    with pipeline.db.snapshot() as snapshot:
        (row,) = snapshot.scan(tables.links)
        assert row[tables.placed] == ["x", "http://a", 23]


def test_a_member_changes_its_keys_while_the_best_member_of_its_group_goes(
    monkeypatch: pytest.MonkeyPatch, db: percolator.Database
) -> None:
    """The group's own state stays as it is for the one, and follows from that member for the other.

    Neither writes what the other one writes; the group is locked by the one that leaves it alone.
    """
    monkeypatch.setattr(clustering, "changing", KnowingNothing())  # as two workers
    monkeypatch.setattr(clustering, "VISITS_MAX", 0)
    pipeline = Pipeline(db)

    for url, opening in (("http://a", "1"), ("http://bb", "2"), ("http://ccc", "3")):
        title = "L" if opening == "3" else "T"
        pipeline.write(document(url, title, opening, url), crawled=17)
    percolator.testing.run_observers(db, observers)
    pipeline.write(document("http://bb", "T", "3", "new"), crawled=17)
    pipeline.delete("http://a")

    async def overlapping() -> None:
        opened = db._asynchronous
        member, best = opened.transaction(), opened.transaction()
        await parse.function(member, ["http://bb"])
        await parse.function(best, ["http://a"])
        await best.commit()
        try:
            await member.commit()
        except percolator.ConflictError:
            await opened.run(parse.function, ["http://bb"])

    db._loop_thread.call(overlapping)
    assert list(pipeline.settle()) == ["http://bb"]


LINKING = document("http://linking", "L", "5", "6", "[x](http://bb)")
BETTER = document("http://a", "T", "7", "8")


@pytest.mark.parametrize("first", [LINKING, BETTER], ids=["the link", "the canonical URL"])
@pytest.mark.parametrize("at_once", [16, 0], ids=["moved at once", "moved later"])
def test_a_link_is_placed_while_another_url_becomes_canonical(
    first: Document, at_once: int, monkeypatch: pytest.MonkeyPatch, db: percolator.Database
) -> None:
    """Neither sees the other: the link is shown with the new canonical URL whoever is first."""
    monkeypatch.setattr(linking, "AT_ONCE_MAX", at_once)
    pipeline = Pipeline(db)
    pipeline.crawl(document("http://bb", "T", "3", "4"))
    pipeline.write(LINKING, BETTER)

    async def overlapping() -> None:
        opened = db._asynchronous
        (second,) = {LINKING, BETTER} - {first}
        winner, loser = opened.transaction(), opened.transaction()
        await parse.function(winner, [first.url])
        await parse.function(loser, [second.url])
        await winner.commit()
        try:
            await loser.commit()
        except percolator.ConflictError:
            await opened.run(parse.function, [second.url])

    db._loop_thread.call(overlapping)
    assert pipeline.settle()["http://a"].inlinks == (Inlink("http://linking", "x"),)


def test_links_to_a_popular_page_do_not_keep_its_canonical_url_from_being_written(
    monkeypatch: pytest.MonkeyPatch, db: percolator.Database
) -> None:
    """Once that is announced, whoever links to the page takes no read lock."""
    monkeypatch.setattr(linking, "AT_ONCE_MAX", 1)
    pipeline = Pipeline(db)
    links = [
        document(f"http://linking/{n}", f"L{n}", f"{n}", f"e{n}", "[x](http://bb)")
        for n in range(4)
    ]
    pipeline.crawl(document("http://bb", "T", "3", "4"), *links[:3])
    pipeline.write(BETTER, links[3])

    async def overlapping() -> None:
        opened = db._asynchronous
        await opened.run(parse.function, ["http://a"])  # announces it
        moving, placing = opened.transaction(), opened.transaction()
        await update_links.function(moving, ["http://bb"])
        await parse.function(placing, ["http://linking/3"])
        await placing.commit()
        await moving.commit()

    db._loop_thread.call(overlapping)
    assert len(pipeline.settle()["http://a"].inlinks) == 4


def test_an_announcement_conflicts_with_whoever_writes_the_canonical_url_without_one(
    monkeypatch: pytest.MonkeyPatch, db: percolator.Database
) -> None:
    """A link could be shown with the old one in between, without a read lock."""
    monkeypatch.setattr(clustering, "VISITS_MAX", 0)
    pipeline = Pipeline(db)
    pipeline.crawl(document("http://bb", "T", "3", "4"), LINKING)
    pipeline.write(BETTER)

    async def overlapping() -> None:
        opened = db._asynchronous
        await opened.run(parse.function, ["http://a"])  # notifies http://bb
        writing, announcing = opened.transaction(), opened.transaction()
        await update_links.function(writing, ["http://bb"])
        monkeypatch.setattr(linking, "AT_ONCE_MAX", 0)
        await update_links.function(announcing, ["http://bb"])
        await announcing.commit()
        with pytest.raises(percolator.ConflictError):
            await writing.commit()

    db._loop_thread.call(overlapping)
    pipeline.settle()


def test_a_group_with_many_members_keeps_each_in_a_row_until_it_is_empty(
    monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline
) -> None:
    monkeypatch.setattr(clustering, "TOGETHER_MAX", 2)

    def members() -> int:
        with pipeline.db.snapshot() as snapshot:
            return sum(1 for _ in snapshot.scan(tables.groups, columns=[tables.member]))

    def alike(number: int) -> Document:
        return document(f"http://{number}", "T", f"O{number}", f"E{number}")

    pipeline.crawl(alike(1), alike(2))
    assert members() == 0
    pipeline.crawl(alike(3))
    assert members() == 3
    pipeline.forget("http://1", "http://2")
    assert members() == 1
    pipeline.forget("http://3")
    pipeline.crawl(alike(1))
    assert members() == 0


@pytest.mark.parametrize("seed", range(12))
def test_documents_come_change_and_go_between_runs_of_observers(
    seed: int, monkeypatch: pytest.MonkeyPatch, db: percolator.Database
) -> None:
    chance = random.Random(seed)
    if seed % 4:
        take_small_steps(monkeypatch, chance)
    pipeline, crawled = Pipeline(db), Crawled()
    for _ in range(6):
        changed = set[str]()
        for _ in range(chance.randint(1, 6)):
            url, body = crawled.change(chance)
            changed.add(url)
            with pipeline.db.transaction() as tx:
                if body is None:
                    tx.delete(url, tables.body)
                else:
                    tx.set(url, tables.body, body)
        pipeline.crawled = crawled.documents
        if chance.random() < 0.5:  # several at once; afterwards, each finds that nothing is left
            together = partial(db._asynchronous.run, parse.function, sorted(changed))
            db._loop_thread.call(together)
        pipeline.settle()


@pytest.mark.parametrize("seed", range(6))
async def test_documents_change_while_two_workers_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, crawled = random.Random(seed), Crawled()
    if seed % 4:
        take_small_steps(monkeypatch, chance)
    async with clients(seed, 3) as (db, one, other):
        async with one.run_observers(observers), other.run_observers(observers):
            for _ in range(40):
                await write(db, *crawled.change(chance))
                await asyncio.sleep(chance.choice([0, 0, 0.01, 0.1]))
            quiet = await db.wait_for_observers()
        assert not quiet.dead_letters
        assert await served_table_async(db) == served(crawled.documents.values())


# What the document pipeline computes: duplicates, canonical pages, links that follow them.


def test_a_document_has_a_title_three_keys_and_links() -> None:
    body = "The title\n\n\nOpening, [see here](http://a/b) \n\nmiddle [](x)\n\n end\n"
    page = parse_document(Document("http://u", body))
    assert page.title == "The title"
    assert page.links == (Link("http://a/b", "see here"), Link("x", ""))
    same = parse_document(Document("http://other", body))
    assert same.keys == page.keys
    assert len(set(page.keys)) == 3


def test_a_document_without_a_paragraph_is_no_duplicate_for_lack_of_it() -> None:
    one, other = (
        parse_document(Document("http://a", "")),
        parse_document(Document("http://b", "\n\n")),
    )
    assert not set(one.keys) & set(other.keys)
    assert one.title == ""


def test_any_of_the_three_keys_makes_a_duplicate_and_the_best_url_is_canonical() -> None:
    documents = [
        document("http://long.example/page", "A", "B", "C"),
        document("http://b", "A", "x", "y"),
        document("http://a", "other", "x", "z"),
        document("http://c", "lone", "some", "last"),
    ]
    pages = {one.url: parse_document(one) for one in documents}
    assert canonical_urls(pages) == {
        "http://long.example/page": "http://a",
        "http://b": "http://a",
        "http://a": "http://a",
        "http://c": "http://c",
    }


def test_links_lead_to_the_canonical_page_and_those_to_nowhere_are_left_out() -> None:
    links = "[one](http://longer) [two](http://a) [three](http://unknown) [one](http://longer)"
    documents = [
        document("http://longer", "A", "B", "C"),
        document("http://a", "A", "D", "E"),
        document("http://c", "F", "G", "H", links),
    ]
    inlinks = (Inlink("http://c", "one"), Inlink("http://c", "two"))
    assert served(documents) == {
        "http://a": Served("A", 2, inlinks),
        "http://c": Served("F", 1, ()),
    }


def test_a_synthetic_crawl_has_the_papers_duplicates() -> None:
    """3.3 documents in a cluster, 93 % of them with a duplicate."""
    crawl = Crawl(5_000, seed=1)
    canonical = canonical_urls({one.url: parse_document(one) for one in crawl})
    sizes = Counter(canonical.values())
    assert len(canonical) == 5_000
    assert 3.2 < 5_000 / len(sizes) < 3.4
    assert 0.92 < 1 - list(sizes.values()).count(1) / 5_000 < 0.94


def test_a_crawl_is_the_same_again_and_another_with_another_seed_or_edition() -> None:
    crawl = Crawl(10, seed=3)
    assert list(crawl) == list(Crawl(10, seed=3))
    assert crawl.document(4) != Crawl(10, seed=4).document(4)
    again = crawl.document(4, edition=1)
    assert again.url == crawl.document(4).url
    assert again.body != crawl.document(4).body


def test_text_files_hold_many_documents() -> None:
    lines = ["\n", "= http://a \n", "One\n", "\n", "two = 2\n", "= http://b\n", "=x\n"]
    assert list(read_text(lines)) == [
        Document("http://a", "One\n\ntwo = 2"),
        Document("http://b", "=x"),
    ]
    assert list(read_text([])) == []


@pytest.mark.parametrize(("lines", "what"), [(["text\n"], "line 1"), (["= \n"], "no URL")])
def test_a_text_file_that_is_none_says_where(lines: list[str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        list(read_text(lines))


# A repository that is loaded at once is what observers would have made of its documents.

ODD = [
    Document("http://empty", ""),
    Document("http://title", "Title"),
    Document(
        "http://long-link", f"T\n\n[x](http://{'y' * tables.URL_BYTES_MAX}) [x](http://title)"
    ),
    Document(
        "http://ü\0/\uffff", "T\n\n[ä](http://title) [ä](http://title) [b](http://ü\0/\uffff)"
    ),
    Document("http://ü\0/\U0001f600", "T\n\n[ä](http://gone) []()"),
]

Cells = dict[tuple[bytes, bytes], bytes]


async def cells_of(db: aio.Database, table: Table[Any]) -> Cells:
    found: Cells = {}
    async with db.snapshot() as snapshot:
        async for page in snapshot.scan_cells(table):
            for row, column, value in zip(page.rows, page.columns, page.values, strict=True):
                found[row, column] = value
    return found


async def crawled_by_observers(documents: list[Document], crawled: int) -> dict[str, Cells]:
    async with percolator.testing.connect_async() as db:
        await tables.create_tables_async(db)
        await db.register_observers(observers)
        for document in documents:
            async with db.transaction() as tx:
                await tx.set(document.url, tables.body, document.body)
                await tx.set(document.url, tables.crawled, crawled)
        await percolator.testing.run_observers_async(db, observers)
        return {table.name: await cells_of(db, table) for table in tables.ALL}


async def test_its_cells_are_those_that_observers_leave() -> None:
    chance = random.Random(4)
    documents = [*ODD, *Crawl(60, seed=2), *(any_document(chance, url) for url in URLS)]
    made = initial.Repository(documents, crawled=17).tables()
    found = {
        table.name: {(row, column): value for row, column, value in cells} for table, cells in made
    }
    assert found == await crawled_by_observers(documents, crawled=17)


async def test_cells_come_in_the_order_of_their_rows() -> None:
    for _, cells in initial.Repository([*ODD, *Crawl(60, seed=2)], crawled=17).tables():
        addresses = [(row, column) for row, column, _ in cells]
        assert addresses == sorted(set(addresses))


async def test_observers_go_on_from_there() -> None:
    crawl = Crawl(60, seed=2)
    async with percolator.testing.connect_async() as db:
        await tables.create_tables_async(db)
        for table, cells in initial.Repository(crawl, crawled=17).tables():
            stored = Table(table.name, key=codecs.stored)
            async with db.transaction() as tx:
                for row, column, value in cells:
                    await tx.set(row, stored.column(column, codecs.stored), value)
        await initial.register(db)
        assert await percolator.testing.run_observers_async(db, observers) == 0
        for number in range(20):
            async with db.transaction() as tx:
                document = crawl.document(number, edition=1)
                await tx.set(document.url, tables.body, document.body)
        for number in range(20, 30):
            async with db.transaction() as tx:
                await tx.delete(crawl.url(number), tables.body)
        await percolator.testing.run_observers_async(db, observers)
        left = [crawl.document(number, edition=int(number < 20)) for number in range(60)]
        assert await served_table_async(db) == served(left[:20] + left[30:])


# The loader writes each change, whatever becomes of the answers.


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
        await load_document(db, "http://a", "text")
        async with db.snapshot() as snapshot:
            assert await snapshot.get("http://a", tables.body) == "text"


async def test_a_document_that_cannot_be_stored_is_named() -> None:
    async with percolator.testing.connect_async() as db:
        await tables.create_tables_async(db)
        crawling = Crawling(db, None, progress=lambda _: None)
        too_much = ("http://huge", "x" * (5 << 20))
        with pytest.raises(ValueError, match="'http://huge': value: has 5242880 bytes"):
            await crawling.write_all(iter([("http://a", "A"), too_much]))
