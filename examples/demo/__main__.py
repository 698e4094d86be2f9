"""`python -m examples.demo`: options, starting and stopping."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from examples.demo.checking import WentWrong
from examples.demo.queries import show_commands
from examples.demo.screen import Screen
from examples.demo.story import OBSERVERS, Plan, tell
from percolator.bucket.place import is_bucket
from percolator.errors import PercolatorError
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.directory import delete, running
from percolator.services.local.process import LocalClusterError

TABLET_SERVERS = 3
ORACLES_ON_ROWS = 2
"""One of them is killed."""
WORKERS = 2

NEXT = """\
  the library in a quarter of an hour     docs/tutorial.md
  what you have just seen                 docs/webindex.md, examples/webindex
  the same in containers                  docker-compose up
  the same from scratch, with Spark       docs/spark.md, examples/webindex/batch.py
  a cluster to play with                  make cluster-up; .venv/bin/percolator status
"""


def main(
    keep: Annotated[
        bool,
        typer.Option("--keep", envvar="KEEP", help="Leave the cluster running in the background."),
    ] = False,
    data: Annotated[
        Path, typer.Option(help="Directory of the cluster; an earlier demo there is deleted.")
    ] = Path("var/demo"),
    store: Annotated[
        str,
        typer.Option(
            help="An empty bucket under tablet servers (s3://BUCKET/PREFIX), or an empty row store "
            "in place of them: bigtable://PROJECT/INSTANCE. BIGTABLE_EMULATOR_HOST may name an "
            "emulator. There, an oracle and a worker are killed.",
            show_default=False,
        ),
    ] = "",
    port: Annotated[
        int, typer.Option(help="Port of the master; 0 takes a free one.", min=0, max=65_500)
    ] = 0,
    documents: Annotated[int, typer.Option(help="How many documents to crawl.", min=10)] = 300,
    rate: Annotated[float, typer.Option(help="Documents per second.", min=1)] = 30,
    updates: Annotated[
        int, typer.Option(help="How many documents to update afterwards.", min=0)
    ] = 40,
    deletions: Annotated[
        int, typer.Option(help="How many documents to delete afterwards.", min=0)
    ] = 20,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a view, as without a terminal.")
    ] = False,
) -> None:
    """Crawl documents into a local cluster, kill servers, and check everything that is served.

    The exit code is 1 if anything is wrong.
    """
    is_terminal = sys.stdout.isatty()
    console = Console(force_terminal=is_terminal)
    screen = Screen(console, live=is_terminal and not (plain or console.is_dumb_terminal))
    plan = Plan(documents, rate, updates, deletions)
    try:
        _make_space(data, screen)
        _run(data, store, port, plan, screen)
        if keep:
            _keep(data, store, port, documents, screen)
        else:
            delete(data)
    except KeyboardInterrupt:
        # Interrupted again while stopping its processes, it leaves them to end on their own.
        screen.say(f"interrupted: everything {'is stopped' if running(data) is None else 'stops'}")
        raise typer.Exit(130) from None
    except LocalClusterError as error:
        screen.say(f"error: {error}", style="bold red")
        raise typer.Exit(2) from None
    except (WentWrong, PercolatorError, subprocess.SubprocessError, OSError) as error:
        kind = "wrong" if isinstance(error, WentWrong) else f"failed: {type(error).__name__}"
        screen.say(f"{kind}: {error}", style="bold red")
        screen.say(f"the cluster's logs are in {data / 'logs'}")
        raise typer.Exit(1) from None
    screen.chapter("what next")
    screen.show(Text(NEXT))


def _make_space(data: Path, screen: Screen) -> None:
    """Deletes what an earlier demo left, and nothing else."""
    if running(data) is not None:
        raise LocalClusterError(
            f"a cluster is running on {data}, kept by --keep or of another demonstration; "
            f"to stop it: {_down(data)}"
        )
    if data.is_dir() and any(data.iterdir()):
        delete(data)
        screen.say(f"what an earlier demonstration left in {data} is deleted")


def _run(data: Path, store: str, port: int, plan: Plan, screen: Screen) -> None:
    screen.chapter("a cluster of processes")
    in_rows = bool(store) and not is_bucket(store)
    cluster = LocalCluster(
        data,
        store=store,
        tablet_servers=0 if in_rows else TABLET_SERVERS,
        oracles=ORACLES_ON_ROWS if in_rows else 1,
        workers=WORKERS,
        observers=[OBSERVERS],
        port=port,
    )
    cluster.start()
    # A dead server makes transactions slow; the warnings go to the logs of the cluster.
    logging.getLogger("percolator").addHandler(logging.FileHandler(data / "logs" / "demo.log"))
    try:
        started = ", ".join(f"{one.name} {one.pid}" for one in cluster.processes.values())
        screen.say(f"started, with their process ids: {started}")
        top = asyncio.run(tell(cluster, plan, screen))
        show_commands(cluster.address, top, screen)
    except BaseException:
        try:
            cluster.stop()
        except LocalClusterError as error:
            screen.say(str(error))  # the error raised before is the one that matters
        raise
    codes = cluster.stop()
    if any(codes.values()):
        raise WentWrong(f"processes that did not stop cleanly, and their exit codes: {codes}")


def _keep(data: Path, store: str, port: int, documents: int, screen: Screen) -> None:
    """Starts the same cluster on the same data with a launcher that outlives this process."""
    arguments = ["--data", str(data), "--port", str(port), "--detach"]
    if store:
        arguments += ["--store", store]
    if not store or is_bucket(store):
        arguments += ["--tablet-servers", str(TABLET_SERVERS)]
    arguments += ["--workers", str(WORKERS), "--observers", OBSERVERS]
    started = subprocess.run(  # noqa: S603 - our own module, and no shell
        [sys.executable, "-m", "percolator.cli", "dev", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    address = started.stdout.strip()
    screen.chapter("the cluster runs on, in the background")
    screen.show(
        Text(
            f"  export PERCOLATOR_ADDRESS={address}\n"
            "  .venv/bin/percolator status --watch\n"
            f"  .venv/bin/python -m examples.webindex.load --documents {documents} --rate 20 "
            "--forever\n"
            f"  {_down(data)}   (stops it)"
        )
    )


def _down(data: Path) -> str:
    return f"make cluster-down DATA={data}"


if __name__ == "__main__":
    # SIGTERM acts like Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    typer.run(main)
