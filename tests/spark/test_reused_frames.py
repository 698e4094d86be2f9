"""A frame answers every query as a Parquet copy of its rows does, whatever it was asked before.

Spark keeps what it has planned for a frame and may use it for the next query. So each query here
runs twice, on frames that all queries share, with `spark.sql.python.filterPushdown.enabled` on and
off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, DataFrameReader, SparkSession

import percolator
from tests.spark.tables import CATALOG, Pages, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ROWS = 400
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
CHOSEN: dict[str, tuple[dict[str, str], str]] = {
    "everything": ({}, "true"),
    "key": ({"key": "b00007"}, "url = 'b00007'"),
    "keys": (
        {"keys": '["a00001", "c00098", "zzz", "a00001"]'},
        "url in ('a00001', 'c00098', 'zzz')",
    ),
    "between": ({"key_from": "b00050", "key_to": "c00001"}, "url >= 'b00050' and url < 'c00001'"),
    "prefix": ({"key_prefix": "a0000"}, "url like 'a0000%'"),
    "ranges": (
        {"key_ranges": '[{"to": "a00003"}, {"prefix": "c0009"}, {"key": "b00001"}, {"from": "d"}]'},
        "url < 'a00003' or url like 'c0009%' or url = 'b00001' or url >= 'd'",
    ),
}
"""The options that choose rows, and the condition that says the same."""


@dataclass
class Twins:
    """The same rows in Percolator and in a Parquet file, as frames and as views."""

    spark: SparkSession
    frames: dict[str, tuple[DataFrame, DataFrame]]

    def compare(self, query: Callable[[Callable[[str], DataFrame]], DataFrame]) -> None:
        """Runs a query twice on each of both."""
        expected = _sorted(query(lambda name: self.frames[name][1]))
        for _ in range(2):
            assert _sorted(query(lambda name: self.frames[name][0])) == expected

    @contextmanager
    def pushdown(self, *, enabled: bool) -> Iterator[None]:
        before = self.spark.conf.get(PUSHDOWN) or "false"
        self.spark.conf.set(PUSHDOWN, str(enabled).lower())
        try:
            yield
        finally:
            self.spark.conf.set(PUSHDOWN, before)


def _sorted(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, frame.collect()), key=repr)


@pytest.fixture(scope="module")
def rows(spark: SparkSession, db: percolator.Database, tmp_path_factory: Any) -> tuple[Pages, Path]:
    """A table of four tablets, some of whose rows have no title, and its copy."""
    pages = Pages(db, ROWS)
    with db.transaction() as tx:
        for url in keys(ROWS)[::3]:
            tx.delete(url, pages.title)
    copy = tmp_path_factory.mktemp("copy") / "pages.parquet"
    stored = [(url, title, visits) for url, (title, visits) in pages.stored().items()]
    schema = "url string, title string, visits bigint"
    spark.createDataFrame(stored, schema).coalesce(1).write.parquet(str(copy))
    return pages, copy


@pytest.fixture(scope="module")
def twins(spark: SparkSession, cluster: Any, rows: tuple[Pages, Path]) -> Iterator[Twins]:
    pages, copy = rows
    given = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    frames = {}
    for name, (options, condition) in CHOSEN.items():
        chosen = spark.read.format("percolator").options(**given, **options).load()
        frames[name] = chosen, spark.read.parquet(str(copy)).where(condition)
    yield Twins(spark, frames)
    spark.catalog.dropTempView(VIEW)


URLS = ["", "a", "a00000", "a00001", "b00007", "b00050", "c00099", "d00098", "d00099", "zzz"]
urls = st.sampled_from(URLS)
simple = st.one_of(
    st.builds("url {} '{}'".format, st.sampled_from(["=", "<", "<=", ">", ">=", "<=>"]), urls),
    st.builds("url in ('{}', '{}', '{}')".format, urls, urls, urls),
    st.builds("url like '{}%'".format, st.sampled_from(["a", "b0000", "c00099", "d000", "x"])),
    st.builds("visits % {} = 0".format, st.integers(2, 5)),
    st.builds("visits > {}".format, st.integers(0, ROWS)),
    st.sampled_from(["title is null", "title is not null", "url is not null", "url like '%7'"]),
)
conditions = st.one_of(
    simple,
    st.builds("({}) and ({})".format, simple, simple),
    st.builds("({}) or ({})".format, simple, simple),
    st.builds("not ({})".format, simple),
)
sources = st.sampled_from(["everything", "everything", *CHOSEN])
Source = Callable[[str], DataFrame]
VIEW = "rows_of_a_frame"


def filtered(source: Source, name: str, one: str, other: str) -> DataFrame:
    return source(name).where(one)


def everything_after(source: Source, name: str, one: str, other: str) -> DataFrame:
    """The frame is asked for a part, and then for all of it."""
    source(name).where(one).count()
    return source(name)


def union_of_two_parts(source: Source, name: str, one: str, other: str) -> DataFrame:
    return source(name).where(one).unionAll(source(name).where(other))


def union_with_everything(source: Source, name: str, one: str, other: str) -> DataFrame:
    return source(name).where(one).unionAll(source(name))


def self_join(source: Source, name: str, one: str, other: str) -> DataFrame:
    left, right = source(name).where(one).alias("l"), source(name).where(other).alias("r")
    return left.join(right, "url", "full").select("url", "l.visits", "r.title")


def anti_join(source: Source, name: str, one: str, other: str) -> DataFrame:
    return source(name).join(source(name).where(one).select("url"), "url", "anti").where(other)


def cached(source: Source, name: str, one: str, other: str) -> DataFrame:
    """What is cached is a part; what is asked next, another one."""
    part = source(name).where(one).cache()
    try:
        part.count()
        rows = part.where(other).unionAll(source(name).where(other)).collect()
        return part.sparkSession.createDataFrame(rows, part.schema)
    finally:
        part.unpersist()


def view(source: Source, name: str, one: str, other: str) -> DataFrame:
    frame, view = source(name), VIEW
    frame.createOrReplaceTempView(view)
    return frame.sparkSession.sql(
        f"SELECT url, visits FROM {view} WHERE {one} UNION ALL "
        f"SELECT url, visits FROM {view} WHERE visits > (SELECT avg(visits) FROM {view})"
    )


def counted(source: Source, name: str, one: str, other: str) -> DataFrame:
    grouped = source(name).where(one).groupBy("title").agg({"visits": "sum", "url": "count"})
    return grouped.unionAll(source(name).selectExpr("'all'", "sum(visits)", "count(url)"))


QUERIES = [
    filtered,
    everything_after,
    union_of_two_parts,
    union_with_everything,
    self_join,
    anti_join,
    cached,
    view,
    counted,
]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.__name__)
def test_a_frame_that_was_filtered_once_still_has_all_its_rows(
    twins: Twins, query: Callable[..., DataFrame]
) -> None:
    with twins.pushdown(enabled=True):
        twins.compare(lambda source: query(source, "everything", "url = 'a00001'", "url < 'b'"))


@pytest.mark.parametrize("pushdown", [False, True])
@pytest.mark.parametrize("name", CHOSEN)
def test_rows_that_options_choose_are_those_of_the_same_condition(
    twins: Twins, name: str, pushdown: bool
) -> None:
    with twins.pushdown(enabled=pushdown):
        twins.compare(lambda source: source(name))


@given(
    drawn=st.tuples(st.sampled_from(QUERIES), sources, conditions, conditions),
    pushdown=st.booleans(),
)
@settings(max_examples=24, deadline=None, derandomize=True, database=None)
def test_any_query_gives_what_it_gives_on_a_copy(
    twins: Twins, drawn: tuple[Callable[..., DataFrame], str, str, str], pushdown: bool
) -> None:
    query, name, one, other = drawn
    with twins.pushdown(enabled=pushdown):
        twins.compare(lambda source: query(source, name, one, other))


def test_only_the_tablets_with_chosen_rows_are_read(
    read: Callable[..., DataFrameReader], rows: tuple[Pages, Path]
) -> None:
    expected = {"everything": 4, "key": 1, "keys": 3, "between": 2, "prefix": 1, "ranges": 4}
    for name, (options, _) in CHOSEN.items():
        frame = read(rows[0].name, catalog=CATALOG, **options).load()
        assert frame.rdd.getNumPartitions() == expected[name], name
