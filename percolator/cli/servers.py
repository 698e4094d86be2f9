"""`percolator servers`: the tablet servers, and taking one out of use."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table as Screen

from percolator.cli.connection import connection, plain
from percolator.cli.masters import ask_master
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods

app = typer.Typer(help="List tablet servers; drain one.")


@app.callback(invoke_without_command=True)
def servers(context: typer.Context) -> None:
    """List tablet servers, or change one with a subcommand."""
    if context.invoked_subcommand is not None:
        return
    here = connection(context)
    found = ask_master(here, methods.LIST_SERVERS, pb.ListServersRequest()).servers
    screen = Screen("address", "tablets", "served", "last answer", "", box=None)
    for one in found:
        screen.add_row(
            plain(one.address),
            str(one.tablets),
            str(one.serving),
            f"{one.silence_milliseconds / 1000:.1f} s ago",
            plain(remarks(one)),
        )
    data = [
        {
            "address": one.address,
            "server_id": one.server_id,
            "tablets": one.tablets,
            "serving": one.serving,
            "draining": one.draining,
            "silence_seconds": one.silence_milliseconds / 1000,
            "writes_refused": one.writes_refused.message or None,
        }
        for one in found
    ]
    here.show(data, screen if found else "no tablet servers")


@app.command()
def drain(
    context: typer.Context,
    server: Annotated[str, typer.Argument(help="The server's address.", show_default=False)],
    undo: Annotated[bool, typer.Option("--undo", help="Give it tablets again.")] = False,
) -> None:
    """Move all tablets away from a server, and assign it no others."""
    here = connection(context)
    ask_master(here, methods.DRAIN_SERVER, pb.DrainServerRequest(server=server, undo=undo))
    what = "takes tablets again" if undo else "no longer has any tablets"
    here.show({"server": server, "draining": not undo}, plain(f"{server} {what}"))


def remarks(server: pb.TabletServerInfo) -> str:
    """What is unusual about a tablet server, in a few words."""
    found = ["draining"] * server.draining
    found += ["takes no writes"] * server.HasField("writes_refused")
    return ", ".join(found)
