"""Shows a `State` on a terminal, and as a line of plain text."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.demo.state import LEADS, Latency, Runs, Server, State, Tablet

BAR_WIDTH = 30
LABEL_WIDTH = 16


def view(state: State, seconds: float) -> RenderableType:
    """About twenty lines, which are redrawn continually."""
    return Group(
        Text(f"\n{state.chapter}, {seconds:.0f} s", style="bold"),
        _figures(state),
        Text(),
        _observers(state),
        Text(),
        _servers(state),
        *_legend(state),
    )


def line(state: State, seconds: float) -> str:
    """One line for a log."""
    repeated = sum(runs.repeated for runs in state.observers.values())
    runs = ", ".join(f"{name} {runs.committed:,}" for name, runs in _runs(state))
    parts = [
        f"{state.written:,} of {state.to_write:,} changes written",
        f"runs {runs or 0}, {repeated:,} repeated",
        f"{state.pages:,} pages for {state.documents_served:,} documents",
        _latency(state.latency),
        *_who_serves(state),
    ]
    return f"{seconds:5.1f} s  {'; '.join(parts)}{_silent(state)}"


def _figures(state: State) -> Table:
    figures = _grid(LABEL_WIDTH, None)
    bar = ProgressBar(total=max(state.to_write, 1), completed=state.written, width=BAR_WIDTH)
    written = _grid(BAR_WIDTH + 2, None)
    written.add_row(bar, f"{state.written:,} of {state.to_write:,} changes")
    figures.add_row("written", written)
    served = f"{state.pages:,} pages, for {state.documents_served:,} documents"
    figures.add_row("served", served)
    figures.add_row("written → served", _latency(state.latency))
    if state.tablets:
        waiting = f"{state.notifications:,} notifications wait for observers"
        figures.add_row("backlog", Text(waiting + _silent(state)))
    else:
        figures.add_row("", Text(_silent(state)))
    return figures


def _observers(state: State) -> Table:
    screen = Table("observer", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("runs", "repeated", "failed"):
        screen.add_column(name, justify="right", min_width=8)
    for name, runs in _runs(state):
        failed = Text(f"{runs.failed:,}", style="red" if runs.failed else "")
        screen.add_row(name, f"{runs.committed:,}", f"{runs.repeated:,}", failed)
    return screen


def _servers(state: State) -> Table:
    does = "tablets" if state.tablets else "role"
    screen = Table("server", "process", does, box=None, padding=(0, 2, 0, 0))
    screen.header_style = "dim"
    for server in state.servers:
        process = str(server.pid) if server.alive else Text("killed", style="red")
        screen.add_row(server.name, process, _tablets(state, server))
    return screen


def _tablets(state: State, server: Server) -> Text:
    if server.role:
        return Text(server.role if server.alive else "", style="green")
    here = [one for one in state.tablets if one.address == server.address]
    names = state.names()
    parts = [_tablet(state, one, names[one.tablet_id], server) for one in here]
    return Text(" ").join(parts)


def _tablet(state: State, tablet: Tablet, name: str, server: Server) -> Text:
    if not (tablet.serving and server.alive):
        return Text(f"?{name}", style="red")
    if tablet.tablet_id in state.lost:
        return Text(f"+{name}", style="yellow")
    return Text(name, style="green")


def _legend(state: State) -> list[Text]:
    if not state.tablets:
        return []
    return [Text("+ taken over from the killed server   ? not served now", style="dim")]


def _who_serves(state: State) -> list[str]:
    if not state.tablets:
        leading = [one.name for one in state.servers if one.role == LEADS]
        return [f"{leading[0] if leading else 'no oracle'} leads"]
    return [
        f"{state.notifications:,} notifications wait",
        f"{state.served_tablets} of {len(state.tablets)} tablets served",
    ]


def _runs(state: State) -> list[tuple[str, Runs]]:
    return sorted(state.observers.items())


def _latency(latency: Latency | None) -> str:
    if latency is None:
        return "nothing is served yet"
    return f"median {latency.median:.2f} s, 95 of 100 within {latency.slow:.2f} s"


def _silent(state: State) -> str:
    return f" (no answer yet: {', '.join(sorted(state.silent))})" if state.silent else ""


def _grid(*widths: int | None) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for width in widths:
        grid.add_column(min_width=width)
    return grid
