"""Several writes as one job: all of their rows appear at one moment, or none of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrameReader, SparkSession

import percolator
import percolator.spark
from percolator.errors import ConflictError
from tests.spark.tables import CATALOG, PAGES, Pages, failing, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Read = Callable[..., DataFrameReader]


def _frame(spark: SparkSession, visits: int, *urls: str) -> Any:
    return spark.createDataFrame([(url, "t", visits) for url in urls], PAGES).repartition(2)


def _save(job: Any, frame: Any, pages: Pages, mode: str) -> None:
    given = {**job.options, "table": pages.name, "catalog": CATALOG}
    frame.write.format("percolator").options(**given).mode(mode).save()


def test_tables_are_replaced_and_appended_to_at_one_moment(
    read: Read, db: percolator.Database, spark: SparkSession, cluster: Any
) -> None:
    replaced, grown = Pages(db, 40), Pages(db)
    old = replaced.stored()
    with percolator.spark.together(address=cluster.address) as job:
        _save(job, _frame(spark, 1, "a00001", "z"), replaced, "overwrite")
        _save(job, _frame(spark, 2, "a", "b", "c"), grown, "append")
        assert job.commit_timestamp is None
        assert (replaced.stored(), grown.stored()) == (old, {})
    assert replaced.stored() == {"a00001": ("t", 1), "z": ("t", 1)}
    assert grown.stored() == {"a": ("t", 2), "b": ("t", 2), "c": ("t", 2)}
    cells = [*read(replaced.name).load().collect(), *read(grown.name).load().collect()]
    assert {cell.commit_timestamp for cell in cells} == {job.commit_timestamp}


def test_an_error_in_the_block_gives_up_all_writes(
    db: percolator.Database, spark: SparkSession, cluster: Any
) -> None:
    pages = Pages(db, 40)
    old = pages.stored()

    def run() -> None:
        with percolator.spark.together(address=cluster.address, keep_seconds=3600) as job:
            _save(job, _frame(spark, 1, "a00001"), pages, "overwrite")
            raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        run()
    assert pages.stored() == old
    pages.fill(40)  # nothing is in the way


def test_a_job_of_which_a_write_has_failed_cannot_commit(
    db: percolator.Database, spark: SparkSession, cluster: Any, tmp_path: Path
) -> None:
    first, second = Pages(db), Pages(db)
    frame = failing(_frame(spark, 1, *keys(40)), tmp_path / "failed", attempts=3)

    def run() -> None:
        with percolator.spark.together(address=cluster.address) as job:
            _save(job, _frame(spark, 1, "a"), first, "append")
            with pytest.raises(Exception, match="the task fails after all its rows"):
                _save(job, frame, second, "append")

    with pytest.raises(ConflictError, match="none of it is committed"):
        run()
    assert (first.stored(), second.stored()) == ({}, {})


def test_a_write_after_the_end_of_its_job_is_refused(
    db: percolator.Database, spark: SparkSession, cluster: Any
) -> None:
    pages = Pages(db)
    with percolator.spark.together(address=cluster.address) as job:
        given = {**job.options, "table": pages.name, "catalog": CATALOG}
    frame = _frame(spark, 1, "a")
    with pytest.raises(Exception, match="comes too late"):
        frame.write.format("percolator").options(**given).mode("append").save()
    assert pages.stored() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"together": "x", "atomic": "true"}, "together: is not from percolator.spark.together"),
        ({"together": "x"}, "together: needs atomic=true"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    db: percolator.Database, spark: SparkSession, cluster: Any, options: dict[str, str],
    message: str,
) -> None:  # fmt: skip
    given = {"address": cluster.address, "table": Pages(db).name, "catalog": CATALOG, **options}
    writer = _frame(spark, 1, "a").write.format("percolator").options(**given)
    with pytest.raises(AnalysisException, match=message):
        writer.mode("append").save()
