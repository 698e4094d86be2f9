"""What a launcher shows once its cluster runs: the processes, and what to do next."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from percolator.services.local.directory import State, data_option

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
    command = "percolator" if _is_default(address) else f"percolator --address {address}"
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


def _is_default(address: str) -> bool:
    """Whether clients look there if no one tells them where."""
    return address in {"127.0.0.1:7100", "localhost:7100"}
