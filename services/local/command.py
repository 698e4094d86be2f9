"""The commands of `percolator dev`: start a cluster on this machine, and what one does with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from percolator.bucket.place import is_bucket
from percolator.cli.connection import confirm
from percolator.observers.definition import load
from percolator.services.local import directory, launcher
from percolator.services.local.cluster import START_SECONDS
from percolator.services.local.directory import DEFAULT_DATA, State, data_option
from percolator.services.local.launcher import Plan, ask
from percolator.services.local.process import STOP_SECONDS, LocalClusterError

PROGRAM = """\
import percolator
text = percolator.Table("notes").column("text", percolator.codecs.text)
with percolator.connect("{address}") as db:
    db.create_table(text.table, exist_ok=True)
    db.run(lambda tx: tx.set("first", text, "hello"))
"""


def processes(state: State) -> Table:
    """One line for each process."""
    table = Table("service", "process", "address", box=None)
    for process in state["processes"]:
        ended = process["exit_code"]
        # A worker whose tables do not exist yet has no address.
        where = process["address"] or "waiting for its tables"
        if ended is not None:
            where = f"exited with {ended}"
        table.add_row(process["name"], str(process["pid"]), where)
    return table


def next_steps(state: State, data: Path, *, stopped_by: str) -> str:
    """A program to begin with, how to look at the cluster, and how to break it."""
    option = data_option(data)
    address = state["address"]
    # Clients look at the default address if no one tells them where.
    is_default = address in {"127.0.0.1:7100", "localhost:7100"}
    command = "percolator" if is_default else f"percolator --address {address}"
    names = [process["name"] for process in state["processes"]]
    victim = next((name for name in reversed(names) if name.startswith("tabletserver")), names[-1])
    program = "".join(f"    {line}\n" for line in PROGRAM.format(address=address).splitlines())
    lines = [
        f"Percolator runs at {address}. {stopped_by}",
        "A first program, and a look at what it wrote:",
        "",
        program.rstrip(),
        "",
        f"    {command} scan notes",
        f"    {command} status",
        "",
        f"Kill a process and start it again; nothing is lost. Logs are in {data / 'logs'}.",
        "",
        f"    percolator dev kill {victim}{option}",
        f"    percolator dev restart {victim}{option}",
        f"    percolator dev ps{option}",
    ]
    if not state["observers"]:
        lines += ["", "Observers run with --observers module:name, and again when it changes."]
    if state["gateway_address"]:
        lines += ["", f"Programs in other languages use the gateway, {state['gateway_address']}."]
    return "\n".join(lines)


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
    help="Starts a whole cluster as processes on this machine, and stops it on Ctrl-C.",
)
err = Console(stderr=True)
_ERROR = "error: "


def _directory(given: str) -> Path:
    """An empty variable would otherwise mean the directory that one is in."""
    if not given:
        raise LocalClusterError("--data: is empty: give a value, or leave it out")
    return Path(given)


DataOption = Annotated[
    Path,
    typer.Option(
        help="Directory of the cluster's data, logs and state.", parser=_directory, metavar="PATH"
    ),
]
DataOrTemporaryOption = Annotated[
    Path | None,
    typer.Option(
        help=f"Directory of the cluster's data, logs and state.  [default: {DEFAULT_DATA}]",
        parser=_directory,
        metavar="PATH",
    ),
]
NameArgument = Annotated[
    str, typer.Argument(help="A process, such as tabletserver-2: `ps` lists all.")
]

StoreOption = Annotated[
    str,
    typer.Option(
        help="Keep all data in a row store, in place of tablet servers: "
        "bigtable://PROJECT/INSTANCE. BIGTABLE_EMULATOR_HOST may name an emulator.",
        show_default=False,
    ),
]
TabletServersOption = Annotated[
    int | None,
    typer.Option(
        help="How many tablet servers.  [default: 3, and 0 with --store]",
        min=0,
        show_default=False,
    ),
]


def _tablet_servers(store: str) -> int:
    """How many there are if nobody says it."""
    return 0 if store and not is_bucket(store) else 3


@app.callback(invoke_without_command=True)
def up(
    context: typer.Context,
    data: DataOrTemporaryOption = None,
    temporary: Annotated[
        bool, typer.Option("--temporary", help="Use a new directory, deleted at the end.")
    ] = False,
    store: StoreOption = "",
    tablet_servers: TabletServersOption = None,
    gateways: Annotated[int, typer.Option(help="How many gateways.", min=0)] = 1,
    workers: Annotated[
        int | None,
        typer.Option(
            help="How many workers.  [default: 1 if there are observers]", min=0, show_default=False
        ),
    ] = None,
    observers: Annotated[
        list[str] | None,
        typer.Option(
            help="What workers run: module:name; may be repeated. Workers restart when the "
            "module changes."
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            help="Port of the master; the first gateway's is 10 higher. 0 takes free ports.",
            min=0,
            max=65_500,
        ),
    ] = 7100,
    certificates: Annotated[
        Path | None, typer.Option(help="Directory of `percolator certs`; all calls use mutual TLS.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start in the background.")] = False,
    start_timeout: Annotated[
        float,
        typer.Option(
            help="Most seconds that one process may take to start. One that does nothing for "
            "30 s is given up earlier.",
            min=0.1,
            max=86_400,
        ),
    ] = START_SECONDS,
) -> None:
    """Start a cluster."""
    if context.invoked_subcommand is not None:
        _refuse_options_before(context)
        return
    if temporary and (data is not None or detach):
        _fail(
            "--temporary: has a directory of its own, and ends with this command: "
            "not together with --data or --detach"
        )
    plan = Plan(
        store=store,
        tablet_servers=_tablet_servers(store) if tablet_servers is None else tablet_servers,
        gateways=gateways,
        workers=len((observers or [])[:1]) if workers is None else workers,
        observers=observers or (),
        port=port,
        certificates=certificates,
        start_seconds=start_timeout,
    )
    if detach:
        where = data or DEFAULT_DATA
        for reference in plan.observers:
            # Nobody would hear of a worker that exits in the background.
            load(reference)
        stop = f"`percolator dev down{directory.data_option(where)}` stops it; the data stays."
        _show(launcher.detach(where, plan, _say), where, stop)
    elif temporary:
        where = Path(tempfile.mkdtemp(prefix="percolator-"))
        try:
            _run(where, plan, "Ctrl-C stops it and deletes its data.")
        finally:
            shutil.rmtree(where, ignore_errors=True)
    else:
        _run(data or DEFAULT_DATA, plan, "Ctrl-C stops it; the data stays.")


@app.command()
def ps(
    data: DataOption = DEFAULT_DATA,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the processes of a running cluster."""
    state = directory.running(data)
    if not state:
        _fail(f"no cluster is running on {data}, or it is starting or stopping right now")
    if as_json:
        typer.echo(json.dumps(state["processes"], indent=2))
        return
    Console(width=None if sys.stdout.isatty() else 1_000).print(processes(state))


@app.command()
def kill(name: NameArgument, data: DataOption = DEFAULT_DATA) -> None:
    """Kill one process with SIGKILL, to see what happens then."""
    _say(ask(data, "kill", name))


@app.command()
def restart(name: NameArgument, data: DataOption = DEFAULT_DATA) -> None:
    """Start a process again; if it is running, it is stopped first."""
    _say(ask(data, "restart", name))


@app.command()
def down(data: DataOption = DEFAULT_DATA) -> None:
    """Stop a running cluster; its data stays."""
    state = directory.running(data)
    if state is None:
        _say(f"no cluster is running on {data}")
        return
    pid = state.get("pid")
    if not isinstance(pid, int):
        _fail(f"the cluster on {data} is starting or stopping right now")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 2 * STOP_SECONDS
    while directory.running(data) is not None:
        if time.monotonic() > deadline:
            _fail(f"the launcher, process {pid}, did not exit")
        time.sleep(0.05)
    _say("stopped")


@app.command()
def destroy(
    data: DataOption = DEFAULT_DATA,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a stopped cluster with all its data."""
    directory.require_stopped(data)
    if not yes:
        confirm(f"Delete everything below {data}?")
    directory.delete(data)


def _refuse_options_before(context: typer.Context) -> None:
    """`dev --data x destroy` would delete the cluster of another directory: options that come
    before a subcommand are those of a start."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option, command = f"--{name.replace('_', '-')}", context.invoked_subcommand
            _fail(
                f"{option}: belongs to starting a cluster; what {command} takes comes after it: "
                f"`percolator dev {command} --help`"
            )


def _run(data: Path, plan: Plan, stopped_by: str) -> None:
    codes = launcher.run(data, plan, _say, lambda state: _show(state, data, stopped_by))
    failed = [f"{name}: exit code {code}" for name, code in codes.items() if code != 0]
    if failed:
        _say(f"not stopped cleanly: {', '.join(failed)}")
        raise typer.Exit(1)


def _show(state: directory.State, data: Path, stopped_by: str) -> None:
    err.print(processes(state))
    err.print()
    _say(next_steps(state, data, stopped_by=stopped_by))
    # Alone on standard output, for scripts.
    typer.echo(state["address"])


def _say(text: str) -> None:
    """Prints one line, which the parent of a detached launcher reads. Paths and logs are not
    interpreted as markup."""
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def _fail(text: str) -> NoReturn:
    raise LocalClusterError(text)


def main(arguments: Sequence[str], program: str) -> NoReturn:
    """Runs a command, called `program`. An error that the user can correct is one line."""
    try:
        app(args=list(arguments), prog_name=program)
    except LocalClusterError as error:
        _say(f"{_ERROR}{error}")
        sys.exit(2)
    sys.exit(0)
