"""`python -m services.local`: a cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.local.cluster import (
    START_SECONDS,
    LocalCluster,
    delete,
    make_directory,
    read_state,
    require_stopped,
    running,
)
from services.local.process import LocalClusterError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    help="Starts every service as a process on this machine, and stops them on Ctrl-C.",
)
err = Console(stderr=True)
_ERROR = "error: "

DataOption = Annotated[Path, typer.Option(help="Directory of the cluster's data, logs and state.")]
DEFAULT_DATA = Path("var/cluster")


@app.callback(invoke_without_command=True)
def up(
    context: typer.Context,
    data: DataOption = DEFAULT_DATA,
    tablet_servers: Annotated[int, typer.Option(help="How many tablet servers.", min=0)] = 3,
    gateways: Annotated[int, typer.Option(help="How many gateways.", min=0)] = 0,
    workers: Annotated[int, typer.Option(help="How many workers.", min=0)] = 0,
    observers: Annotated[
        list[str] | None, typer.Option(help="What workers run: module:name; may be repeated.")
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            help="Port of the master, the first gateway's is 10 more; 0 takes free ones.",
            min=0,
            max=65_500,
        ),
    ] = 7100,
    certificates: Annotated[
        Path | None, typer.Option(help="Directory of `make certs`: everything is mutual TLS.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start in the background.")] = False,
) -> None:
    """Start a cluster."""
    if context.invoked_subcommand is not None:
        return
    if detach:
        arguments = ["--tablet-servers", str(tablet_servers), "--gateways", str(gateways)]
        arguments += ["--workers", str(workers), "--port", str(port)]
        arguments += [f"--observers={reference}" for reference in observers or ()]
        if certificates is not None:
            arguments += ["--certificates", str(certificates)]
        _detach(data, arguments)
        return
    cluster = LocalCluster(
        data,
        tablet_servers=tablet_servers,
        gateways=gateways,
        workers=workers,
        observers=observers or (),
        port=port,
        certificates=certificates,
        progress=_say,
    )
    # Registered before anything starts: Ctrl-C while starting must stop what was started.
    leave = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: leave.set())
    try:
        cluster.start()
        _show(cluster)
        reported: set[int] = set()
        while not leave.wait(0.5):
            _report_deaths(cluster, reported)
        codes = cluster.stop()
    except LocalClusterError as error:
        _fail(error)
    failed = [f"{name}: exit code {code}" for name, code in codes.items() if code != 0]
    if failed:
        _say(f"not stopped cleanly: {', '.join(failed)}")
        raise typer.Exit(1)


@app.command()
def down(data: DataOption = DEFAULT_DATA) -> None:
    """Stop a cluster that runs in the background; its data stays."""
    state = running(data)
    if state is None:
        _say(f"no cluster is running on {data}")
        return
    pid = state.get("pid")
    if not isinstance(pid, int):
        _fail(LocalClusterError(f"the cluster on {data} is starting or stopping right now"))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + START_SECONDS * 2
    while running(data) is not None:
        if time.monotonic() > deadline:
            _fail(LocalClusterError(f"the launcher, process {pid}, did not exit"))
        time.sleep(0.05)
    _say("stopped")


@app.command()
def destroy(
    data: DataOption = DEFAULT_DATA,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a stopped cluster with all its data."""
    require_stopped(data)
    if not yes:
        typer.confirm(f"Delete everything below {data}?", abort=True)
    delete(data)


def _detach(data: Path, arguments: list[str]) -> None:
    if running(data) is not None:
        _fail(LocalClusterError(f"--data: a cluster is already running on {data}"))
    logs = data / "logs"
    make_directory(logs)
    command = [sys.executable, "-m", "services.local", "--data", str(data), *arguments]
    with (logs / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(  # noqa: S603 - our own module, and no shell
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    # It gives up by itself if a service does not start in time.
    while launcher.poll() is None:
        state = read_state(data)
        if state.get("pid") == launcher.pid:
            typer.echo(state["address"])
            return
        time.sleep(0.05)
    words = (logs / "launcher.log").read_text().strip().splitlines()
    last = words[-1] if words else "the launcher exited"
    _fail(LocalClusterError(last.removeprefix(_ERROR)))


def _show(cluster: LocalCluster) -> None:
    table = Table("service", "process", "address", "log", box=None)
    for process in cluster.processes.values():
        log = Text(str(process.log), overflow="fold")
        # A worker whose tables do not exist yet has none.
        address = process.address if process.ready else "waiting"
        table.add_row(process.name, str(process.pid), address, log)
    err.print(table)
    # Alone on standard output, for scripts.
    typer.echo(cluster.address)


def _report_deaths(cluster: LocalCluster, reported: set[int]) -> None:
    for process in cluster.processes.values():
        if process.exit_code is not None and process.pid not in reported:
            reported.add(process.pid)
            _say(f"{process.name} exited with {process.exit_code}: {process.last_words()}")


def _say(text: str) -> None:
    """Prints one line, which the parent of a detached launcher reads. Paths and logs are not
    interpreted as markup."""
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def _fail(error: LocalClusterError) -> NoReturn:
    _say(f"{_ERROR}{error}")
    raise typer.Exit(2)


def main() -> None:
    """Runs a command. An error that the user can correct is reported in one line."""
    try:
        app()
    except LocalClusterError as error:
        _say(f"{_ERROR}{error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
