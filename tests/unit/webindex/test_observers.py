"""Whatever happens to documents: once observers have nothing left to do, the definition holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

import percolator
import percolator.testing
from examples.webindex import clustering, linking, tables
from examples.webindex.definition import Inlink, Served, served
from examples.webindex.documents import Document
from examples.webindex.observers import observers, parse, settle
from examples.webindex.served import served_table, served_table_async

from .pipeline import Crawled, KnowingNothing, clients, document, take_small_steps, write


class Pipeline:
    """A database in this process, in which every step is brought to its end."""

    def __init__(self, db: percolator.Database) -> None:
        tables.create_tables(db)
        db.register_observers(observers)
        self.db = db
        self.crawled: dict[str, Document] = {}

    def crawl(self, *documents: Document) -> dict[str, Served]:
        for one in documents:
            with self.db.transaction() as tx:
                tx.set(one.url, tables.body, one.body)
            self.crawled[one.url] = one
        return self.settle()

    def forget(self, *urls: str) -> dict[str, Served]:
        for url in urls:
            with self.db.transaction() as tx:
                tx.delete(url, tables.body)
            del self.crawled[url]
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
    def write_at(url: str, body: str, crawled: int) -> None:
        with pipeline.db.transaction() as tx:
            tx.set(url, tables.body, body)
            tx.set(url, tables.crawled, crawled)
        percolator.testing.run_observers(pipeline.db, observers)

    write_at("http://a", "T\n\n[x](http://a)", 17)
    write_at("http://bb", "T", 23)
    with pipeline.db.snapshot() as snapshot:
        assert snapshot.get("http://a", tables.cause) == 23
        (row,) = snapshot.scan(tables.links)
        assert row[tables.placed] == ["x", "http://a", 17]


def test_a_link_that_is_moved_tells_what_has_changed_the_canonical_page(pipeline: Pipeline) -> None:
    def write_at(crawled: int, one: Document) -> None:
        with pipeline.db.transaction() as tx:
            tx.set(one.url, tables.body, one.body)
            tx.set(one.url, tables.crawled, crawled)
        percolator.testing.run_observers(pipeline.db, observers)

    write_at(17, document("http://bb", "T", "O", "E", "[x](http://bb)"))
    write_at(23, document("http://a", "other", "O", "F"))
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

    def write_at_17(url: str, one: Document | None) -> None:
        with db.transaction() as tx:
            if one is None:
                tx.delete(url, tables.body)
                del pipeline.crawled[url]
            else:
                tx.set(url, tables.body, one.body)
                pipeline.crawled[url] = one
            tx.set(url, tables.crawled, 17)

    for url, opening in (("http://a", "1"), ("http://bb", "2"), ("http://ccc", "3")):
        title = "L" if opening == "3" else "T"
        write_at_17(url, document(url, title, opening, url))
    percolator.testing.run_observers(db, observers)
    write_at_17("http://bb", document("http://bb", "T", "3", "new"))
    write_at_17("http://a", None)

    async def overlapping() -> None:
        opened = db._database
        member, best = opened.transaction(), opened.transaction()
        await parse.function(member, "http://bb")
        await parse.function(best, "http://a")
        await best.commit()
        try:
            await member.commit()
        except percolator.ConflictError:
            await opened.run(parse.function, "http://bb")

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
    for one in (LINKING, BETTER):
        with db.transaction() as tx:
            tx.set(one.url, tables.body, one.body)
        pipeline.crawled[one.url] = one

    async def overlapping() -> None:
        opened = db._database
        (second,) = {LINKING, BETTER} - {first}
        winner, loser = opened.transaction(), opened.transaction()
        await parse.function(winner, first.url)
        await parse.function(loser, second.url)
        await winner.commit()
        try:
            await loser.commit()
        except percolator.ConflictError:
            await opened.run(parse.function, second.url)

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
    for one in (BETTER, links[3]):
        with db.transaction() as tx:
            tx.set(one.url, tables.body, one.body)
        pipeline.crawled[one.url] = one

    async def overlapping() -> None:
        opened = db._database
        await opened.run(parse.function, "http://a")  # announces it
        moving, placing = opened.transaction(), opened.transaction()
        await settle.function(moving, "http://bb")
        await parse.function(placing, "http://linking/3")
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
    with db.transaction() as tx:
        tx.set(BETTER.url, tables.body, BETTER.body)
    pipeline.crawled[BETTER.url] = BETTER

    async def overlapping() -> None:
        opened = db._database
        await opened.run(parse.function, "http://a")  # notifies http://bb
        writing, announcing = opened.transaction(), opened.transaction()
        await settle.function(writing, "http://bb")
        monkeypatch.setattr(linking, "AT_ONCE_MAX", 0)
        await settle.function(announcing, "http://bb")
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
        for _ in range(chance.randint(1, 6)):
            url, body = crawled.change(chance)
            with pipeline.db.transaction() as tx:
                if body is None:
                    tx.delete(url, tables.body)
                else:
                    tx.set(url, tables.body, body)
        pipeline.crawled = crawled.documents
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
