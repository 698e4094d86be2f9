"""Frames, writers, views and helpers are used again, also after the whole cluster restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import percolator
import percolator.spark
from percolator.services.local.cluster import LocalCluster
from percolator.spark.bulk_load import bulk_load
from tests.spark.tables import CATALOG, PAGES, Pages

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ROWS = 8


@pytest.fixture
def restart(cluster: LocalCluster) -> Callable[[], None]:
    """Kills all processes of the cluster, and starts them again."""

    def restarting() -> None:
        for process in cluster.processes.values():
            process.kill()
        for name in cluster.processes:
            cluster.restart(name)

    return restarting


def test_whatever_was_made_before_a_restart_of_the_cluster_works_after_it(
    spark: SparkSession,
    cluster: LocalCluster,
    db: percolator.Database,
    restart: Callable[[], None],
    tmp_path: Path,
) -> None:
    pages, copy, followed = Pages(db, ROWS), Pages(db), Pages(db, ROWS, change_feed=True)
    address = cluster.address
    given = {"address": address, "table": pages.name, "catalog": CATALOG}
    frame = spark.read.format("percolator").options(**given).load()
    rows = sorted(map(tuple, frame.collect()))
    new = spark.createDataFrame([("a00000", "new", 100), ("z", "new", 1)], PAGES)
    target = {**given, "table": copy.name}
    # Each of these is one object, which is used before and after.
    writers = {
        "append": new.write.format("percolator").options(**target).mode("append"),
        "atomic": new.write.format("percolator").options(**target, atomic="true").mode("append"),
        "overwrite": frame.write.format("percolator").options(**target).mode("overwrite"),
    }
    view = percolator.spark.view(
        spark, "used_twice", lambda snapshot: snapshot.table(pages.name, catalog=CATALOG),
        address=address,
    )  # fmt: skip
    seen: list[tuple[Any, ...]] = []
    stream = spark.readStream.format("percolator").options(**{**given, "table": followed.name})
    changes = stream.option("starting_from", "snapshot").load()
    following = changes.writeStream.option("checkpointLocation", str(tmp_path)).foreachBatch(
        lambda batch, _: seen.extend(map(tuple, batch.select("url", "change_kind").collect()))
    )

    def use(time: int) -> None:
        assert sorted(map(tuple, frame.collect())) == rows, "the frame reads at its snapshot"
        for name in ("append", "atomic"):
            writers[name].save()
            assert copy.stored()["z"] == ("new", 1)
            assert copy.stored()["a00000"] == ("new", 100)
        writers["overwrite"].save()
        assert sorted((url, *both) for url, both in copy.stored().items()) == rows
        with percolator.spark.together(address=address) as job:
            writer = new.write.format("percolator").options(**job.options, **_without(target))
            writer.mode("append").save()
        assert copy.stored()["z"] == ("new", 1)
        merged = {"table": copy.name, "catalog": CATALOG, "address": address}
        percolator.spark.merge(new, delete_where="url = 'z'", **merged)
        assert "z" not in copy.stored()
        with percolator.spark.snapshot(spark, address=address) as snapshot:
            table = snapshot.table(pages.name, catalog=CATALOG, columns="visits")
            assert table.count() == table.union(table).count() // 2 == len(pages.stored())
        with db.transaction() as tx:
            tx.set(f"used-{time}", pages.visits, time)
            tx.set(f"used-{time}", followed.visits, time)
        view.refresh()
        assert spark.table("used_twice").count() == ROWS + time
        following.trigger(availableNow=True).start().awaitTermination()
        assert len(seen) == ROWS + time
        loaded = Pages(db)
        bulk_load(new, **{**given, "table": loaded.name}, load_name=f"load-{time}")
        assert loaded.stored()["z"] == ("new", 1)
        assert new.rdd.mapPartitions(_timestamps(address)).count() == new.rdd.getNumPartitions()

    use(1)
    restart()
    use(2)
    view.drop()


def _without(options: dict[str, str]) -> dict[str, str]:
    """Those that `together` does not give."""
    return {name: value for name, value in options.items() if name != "address"}


def _timestamps(address: str) -> Callable[[Iterable[Any]], Iterable[int]]:
    def take(_: Iterable[Any]) -> Iterator[int]:
        yield int(percolator.spark.database(address).timestamp())

    return take
