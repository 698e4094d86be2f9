"""What the document pipeline computes: duplicates, canonical pages, links that follow them."""

from __future__ import annotations

from collections import Counter

import pytest

from examples.webindex.crawl import Crawl
from examples.webindex.definition import Inlink, canonical_urls, served
from examples.webindex.documents import Document, Link, parse, read_text


def _document(url: str, title: str, opening: str, ending: str, links: str = "none") -> Document:
    return Document(url, f"{title}\n\n{opening}\n\n{links}\n\n{ending}\n")


def test_a_document_has_a_title_three_keys_and_links() -> None:
    body = "The title\n\n\nOpening, [see here](http://a/b) \n\nmiddle [](x)\n\n end\n"
    page = parse(Document("http://u", body))
    assert page.title == "The title"
    assert page.links == (Link("http://a/b", "see here"), Link("x", ""))
    same = parse(Document("http://other", body))
    assert same.keys == page.keys
    assert len(set(page.keys)) == 3


def test_a_document_without_a_paragraph_is_no_duplicate_for_lack_of_it() -> None:
    one, other = parse(Document("http://a", "")), parse(Document("http://b", "\n\n"))
    assert not set(one.keys) & set(other.keys)
    assert one.title == ""


def test_any_of_the_three_keys_makes_a_duplicate_and_the_best_url_is_canonical() -> None:
    documents = [
        _document("http://long.example/page", "A", "B", "C"),
        _document("http://b", "A", "x", "y"),
        _document("http://a", "other", "x", "z"),
        _document("http://c", "lone", "some", "last"),
    ]
    pages = {document.url: parse(document) for document in documents}
    assert canonical_urls(pages) == {
        "http://long.example/page": "http://a",
        "http://b": "http://a",
        "http://a": "http://a",
        "http://c": "http://c",
    }


def test_links_lead_to_the_canonical_page_and_those_to_nowhere_are_left_out() -> None:
    links = "[one](http://longer) [two](http://a) [three](http://unknown) [one](http://longer)"
    documents = [
        _document("http://longer", "A", "B", "C"),
        _document("http://a", "A", "D", "E"),
        _document("http://c", "F", "G", "H", links),
    ]
    found = served(documents)
    assert sorted(found) == ["http://a", "http://c"]
    assert found["http://a"].documents == 2
    assert found["http://a"].inlinks == (Inlink("http://c", "one"), Inlink("http://c", "two"))
    assert found["http://c"].inlinks == ()


def test_a_synthetic_crawl_has_the_papers_duplicates() -> None:
    """3.3 documents in a cluster, 93 % of them with a duplicate."""
    crawl = Crawl(5_000, seed=1)
    canonical = canonical_urls({document.url: parse(document) for document in crawl})
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
