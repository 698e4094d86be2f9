"""Spark sessions for tests: small, without a user interface, with the data source `gated`.

Made before any use of the client in the process: Spark forks to start Java.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tests.spark.gates import GATES, GatedDataSource

ROOT = Path(__file__).parents[2]
_CLASSES = ROOT / ".venv" / "spark-classes.jsa"
"""The archive of Java's classes that class_archive.py makes. Java does without it if need be."""
_SHARED = f'"-XX:SharedArchiveFile={_CLASSES}"'
_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
_PRELOADED = Path(__file__).parent / "preloaded"
WORKER_HOSTS = ("127.0.0.2", "127.0.0.3")
"""Spark starts a second attempt at a slow task on another host only."""
_WORKER_MEBIBYTES = 1024
_ANY_PORT = 0


def local_session(directory: Path, slots: int, java: str = _SHARED) -> SparkSession:
    """Executors are threads of the driver. Gives tasks three attempts.

    Its Python processes are forked with their imports; a `cluster_session` has them as users do.
    """
    conf = _conf(directory, java).setMaster(f"local[{slots},3]")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_PRELOADED), str(ROOT)])
    try:
        return _session(conf)  # Java starts here, and passes the path on
    finally:
        os.environ["PYTHONPATH"] = str(ROOT)


def cluster_session(directory: Path) -> SparkSession:
    """Two executors, each a process of its own with one slot, on two hosts of this machine.

    What Spark's `local-cluster` does, which gives all its workers the same host.
    """
    conf = _conf(directory).set("spark.executor.memory", "512m").set("spark.executor.cores", "1")
    for name in ("PYTHONPATH", GATES):
        conf.setExecutorEnv(name, os.environ[name])
    conf.set("spark.executor.extraJavaOptions", f"{_JAVA} {_SHARED}")
    conf.set("spark.speculation", "true").set("spark.speculation.interval", "50ms")
    conf.set("spark.speculation.minTaskRuntime", "50ms").set("spark.speculation.quantile", "0.5")
    conf.set("spark.speculation.multiplier", "1.01")
    # What an executor has lost with another one is not asked for again and again.
    conf.set("spark.shuffle.io.maxRetries", "1").set("spark.shuffle.io.retryWait", "100ms")
    SparkContext._ensure_initialized(conf=conf)
    java, gateway = SparkContext._jvm, SparkContext._gateway
    assert java is not None
    assert gateway is not None
    conf = SparkConf().setAll(conf.getAll())  # one that Java has, too, since it runs by now
    started = java.org.apache.spark.deploy.master.Master.startRpcEnvAndEndpoint(
        "127.0.0.1", _ANY_PORT, _ANY_PORT, conf._jconf
    )
    master = f"spark://{started._1().address()}"
    masters = gateway.new_array(java.java.lang.String, 1)
    masters[0] = master
    for number, host in enumerate(WORKER_HOSTS):
        java.org.apache.spark.deploy.worker.Worker.startRpcEnvAndEndpoint(
            host, _ANY_PORT, _ANY_PORT, 1, _WORKER_MEBIBYTES, masters,
            str(directory / f"worker-{number}"), java.scala.Option.apply(number), conf._jconf,
            java.scala.Option.empty(),
        )  # fmt: skip
    return _session(conf.setMaster(master))


def _conf(directory: Path, java: str = _SHARED) -> SparkConf:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    settings = {
        "spark.app.name": "percolator-tests",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"{_JAVA} {java}",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.shuffle.partitions": "2",
        # A stream that has nothing to do would ask its source a hundred times a second.
        "spark.sql.streaming.pollingDelay": "100ms",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    return SparkConf().setAll(list(settings.items()))


def _session(conf: SparkConf) -> SparkSession:
    session = SparkSession.builder.config(conf=conf).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    session.dataSource.register(GatedDataSource)
    return session
