"""python -m tests.fuzz --seconds 60 [--seed 7] | --replay var/fuzz/FILE: `make fuzz`.

Without --seed it takes another one each time, and prints it. The exit code is 1 if anything was
found, if a method was never called with a request that got past all checks, or if some kind of
input was never made. A failing input is kept in var/fuzz.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from percolator.backup.export_files import ExportFormat
from percolator.errors import PercolatorError
from percolator.services.local.authority import files_in, make_all
from percolator.services.local.cluster import LocalCluster
from percolator.wire import tls
from percolator.wire.channels import GrpcNetwork
from percolator.wire.credentials import Credentials
from percolator.world import Random
from tests.fuzz import valid_requests
from tests.fuzz.calls import KINDS, Calls, Tokens
from tests.fuzz.findings import FOUND, Input, Record
from tests.fuzz.guided import HAS_ATHERIS, bodies
from tests.fuzz.messages import METHODS
from tests.fuzz.scene import Canary, Processes, Scene, Sockets
from tests.fuzz.targets import (
    TARGETS,
    ExportDirectories,
    export_judged,
    fuzz_exports,
    fuzz_files,
    judged,
)
from tests.fuzz.valid_requests import Recorded, RecordingNetwork

_SEED_BITS = 31
_WIDTH = 140
_GUIDED_SHARE, _FILES_SHARE = 0.2, 0.15
"""Shares of the time; the cluster has the rest."""

_ON_ROWS = "the cluster has tablet servers; judging.py gives these to one on a row store"
UNREACHED = {
    f"/percolator.v1.{name}": _ON_ROWS
    for name in (
        "MasterService/BeginLoad",
        "MasterService/PublishLoads",
        "MasterService/AbandonLoad",
        "RowStoreService/CheckAndMutateRow",
        "RowStoreService/MutateRows",
        "RowStoreService/ReadRows",
        "RowStoreService/SampleRowKeys",
    )
}
"""Methods that no request gets past all checks of, with the reason."""


def main() -> int:
    arguments = _arguments()
    console = Console(highlight=False, width=_WIDTH)
    record = Record()
    with tempfile.TemporaryDirectory(prefix="percolator-fuzz-") as temporary:
        directory = Path(temporary)
        if arguments.replay:
            _replay(arguments.replay, directory, record)
        else:
            seed = secrets.randbits(_SEED_BITS) if arguments.seed is None else arguments.seed
            console.print(f"again: make fuzz FUZZ_SECONDS={arguments.seconds} FUZZ_SEED={seed}")
            _run(arguments.seconds, seed, directory, record, console)
            _show(record, console)
            _require_all(record)
    for what, file in record.keep().items():
        console.print(f"found: {what}", style="red", markup=False)
        if file is not None:
            console.print(f"  again: .venv/bin/python -m tests.fuzz --replay {file}")
    if not record.found:
        console.print("[green]nothing was found[/green]")
    return 1 if record.found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="how long, start and end apart")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--replay", type=Path, metavar="FILE", help="one kept input")
    arguments = parser.parse_args()
    if arguments.seconds < 1:
        parser.error("--seconds has to be at least 1")
    return arguments


def _run(seconds: int, seed: int, directory: Path, record: Record, console: Console) -> None:
    share = max(1, round(seconds * _GUIDED_SHARE))
    for said in run_guided(directory / "guided", record, seconds=share, seed=seed):
        console.print(said)
    files = directory / "files"
    files.mkdir()
    fuzz_files(files, record, seconds=seconds * _FILES_SHARE, seed=seed)
    rest = seconds * (1 - _GUIDED_SHARE - _FILES_SHARE)
    for said in asyncio.run(fuzz(directory, record, seconds=rest, seed=seed)):
        console.print(said)


def _replay(file: Path, directory: Path, record: Record) -> None:
    several = [Input.from_json(line) for line in file.read_text().splitlines()]
    one = several[0]
    if one.target in TARGETS:
        judged(TARGETS[one.target](directory), one, record)
    elif one.target == "guided":
        replay_guided(one, record)
    else:
        asyncio.run(replay(directory, record, several))


def _show(record: Record, console: Console) -> None:
    total: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for (of, kind), count in record.sent.items():
        total[of] += count
        kinds[kind if of in METHODS else f"{of}: {kind}"] += count
    table = Table("given to", "inputs", "accepted", "refused with", box=None)
    for of, count in sorted(total.items()):
        refused = ", ".join(f"{name} {n}" for name, n in record.refused[of].most_common())
        table.add_row(
            of.removeprefix("/percolator.v1."), str(count), str(record.accepted[of]), refused
        )
    console.print(table)
    console.print("kinds: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    accepted = sum(record.accepted.values())
    console.print(f"{sum(total.values()):,} inputs, of which {accepted:,} got past all checks")


def _require_all(record: Record) -> None:
    """Every method was reached, and every kind of input was made."""
    for path in METHODS:
        if not record.accepted[path] and path not in UNREACHED:
            record.wrong(f"no request got past all checks of {path}")
    made = {kind for of, kind in record.sent if of in METHODS}
    for kind in KINDS:
        if kind not in made:
            record.wrong(f"no call of the kind {kind!r} was made")


# A fuzzed cluster from start to end: callers, a canary, and everything that is looked at.

CALLERS = 6
_EXPORTS_SHARE = 0.15
"""The share of the time that imports have; calls have the rest."""
_RENEW_SECONDS = 6.0
_LEARN_SECONDS = 0.5
_OBSERVERS = "tests.integration.observed_orders:observers"


@dataclass(frozen=True)
class Rig:
    """A running cluster with a scene, a canary, and callers that are ready to begin."""

    cluster: LocalCluster
    scene: Scene
    canary: Canary
    exports: list[ExportDirectories]
    calls: Calls
    processes: Processes
    sockets: Sockets


@contextmanager
def running(directory: Path) -> Iterator[tuple[LocalCluster, Path]]:
    """A cluster in which every kind of service runs, and the directory of its certificates."""
    certificates = directory / "certificates"
    certificates.mkdir()
    make_all(certificates)
    with LocalCluster(
        directory / "cluster",
        tablet_servers=2,
        gateways=1,
        workers=1,
        observers=[_OBSERVERS],
        certificates=certificates,
    ) as cluster:
        yield cluster, certificates


@asynccontextmanager
async def rigged(
    cluster: LocalCluster, certificates: Path, record: Record, seed: int
) -> AsyncIterator[Rig]:
    """Sets the scene; closes all connections at the end."""
    token = (certificates / "client" / "client.token").read_text().strip()
    admin = (certificates / "client" / "admin.token").read_text().strip()
    as_client = tls.load(files_in(certificates / "client"), str, serves=False)
    as_server = tls.load(files_in(certificates / "cluster"), str, serves=True)
    known = Recorded()
    library = RecordingNetwork(Credentials(as_client, admin))
    library.recorded = known
    network, client = GrpcNetwork(Credentials(as_server)), GrpcNetwork(Credentials(as_client))
    scene = Scene(cluster, network)
    database = await valid_requests.connected(cluster.address, library, "the canary")
    try:
        playing = asyncio.create_task(valid_requests.play(database))
        await asyncio.to_thread(cluster.wait_workers)
        await playing
        canary = Canary(database, record)
        await canary.hatch(scene)
        await scene.renew()
        processes = Processes(cluster, _https(certificates), record)
        calls = Calls(scene, known, record, client, Tokens(token, admin), seed)
        sockets = Sockets(cluster, certificates, record, seed)
        where = certificates.parent / "exports"
        exports = [ExportDirectories(where, database, form) for form in ExportFormat]
        yield Rig(cluster, scene, canary, exports, calls, processes, sockets)
    finally:
        await database.close()
        await asyncio.gather(network.close(), client.close())


def _https(certificates: Path) -> ssl.SSLContext:
    files = files_in(certificates / "client")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.check_hostname = False
    return context


async def fuzz(directory: Path, record: Record, *, seconds: float, seed: int) -> list[str]:
    """Fuzzes a cluster for so long. Returns what was measured, in sentences."""
    with running(directory) as (cluster, certificates):
        async with rigged(cluster, certificates, record, seed) as rig:
            usual = await rig.processes.in_flight()
            for exports in rig.exports:
                share = seconds * _EXPORTS_SHARE / len(rig.exports)
                await fuzz_exports(exports, record, seconds=share, seed=seed)
            await _disturb(rig, record, seconds * (1 - _EXPORTS_SHARE))
            await rig.canary.judge()
            await rig.processes.require_done(usual)
            rig.processes.look()
            said = _measured(rig)
        rig.processes.judge_logs()
    if record.found:
        FOUND.mkdir(parents=True, exist_ok=True)
        shutil.copytree(cluster.data / "logs", FOUND / "logs", dirs_exist_ok=True)
    return said


async def replay(directory: Path, record: Record, inputs: Sequence[Input]) -> None:
    """Gives calls, or exports, to a new cluster, one after another."""
    with running(directory) as (cluster, certificates):
        async with rigged(cluster, certificates, record, 0) as rig:
            exports = {one.name: one for one in rig.exports}
            for directories in exports.values():
                await directories.prepare()
            for one in inputs:
                if one.target in exports:
                    await export_judged(exports[one.target], one, record)
                else:
                    await rig.calls.send(one, Random(0))
            await rig.canary.judge()
            rig.processes.look()
        rig.processes.judge_logs()


async def _disturb(rig: Rig, record: Record, seconds: float) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    watching = [
        asyncio.create_task(rig.processes.watch()),
        asyncio.create_task(_keep_scene(rig.scene, record)),
    ]
    try:
        async with asyncio.TaskGroup() as callers:
            for _ in range(CALLERS):
                callers.create_task(rig.calls.go_on(deadline))
            callers.create_task(rig.canary.sing(deadline))
            callers.create_task(rig.sockets.go_on(deadline))
    finally:
        for task in watching:
            task.cancel()
        ended = await asyncio.gather(*watching, return_exceptions=True)
    for one in ended:
        if isinstance(one, Exception):
            raise one


async def _keep_scene(scene: Scene, record: Record) -> None:
    """Keeps the scene fit for valid requests, until it is cancelled."""
    loop = asyncio.get_running_loop()
    renewed = loop.time()
    while True:
        await asyncio.sleep(_LEARN_SECONDS)
        try:
            if loop.time() - renewed > _RENEW_SECONDS:
                await scene.renew()
                renewed = loop.time()
            else:
                with suppress(_Gone):
                    await _learn(scene)
        except PercolatorError as error:
            record.wrong(f"the scene cannot be set: {type(error).__name__}: {error}")


class _Gone(Exception):
    """A table of the scene was deleted by a call: the next renewal brings another."""


async def _learn(scene: Scene) -> None:
    try:
        await scene.learn()
    except PercolatorError as error:
        raise _Gone from error


def _measured(rig: Rig) -> list[str]:
    growth = rig.processes.growth()
    memory = ", ".join(f"{name} {first} → {most}" for name, (first, most) in growth.items())
    return [
        f"{rig.calls.drawn:,} calls drawn",
        f"memory in MiB: {memory}",
        f"the canary was read {rig.canary.reads} times, at most "
        f"{rig.canary.longest_seconds:.2f} s for a scan and a commit",
    ]


# Runs the guided targets, each in its own process: libFuzzer ends the process that it is in.

_LATE_SECONDS = 120.0
_UNITS = re.compile(r"number_of_executed_units: (\d+)")
_COVERED = re.compile(r"DONE +cov: (\d+)")
_SAID_CHARACTERS_MAX = 500


def run_guided(directory: Path, record: Record, *, seconds: int, seed: int) -> Iterator[str]:
    """Runs all of them at the same time. Yields what was measured, in sentences."""
    running = {}
    for name in bodies():
        folder = directory / name
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "tests.fuzz.guided", name, "--folder", str(folder)]
        command += ["--seconds", str(seconds), "--seed", str(seed)]
        log = (folder / "log").open("wb")
        running[name] = subprocess.Popen(command, stdout=log, stderr=log), folder, log
    for name, (process, folder, log) in running.items():
        try:
            code = process.wait(seconds + _LATE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        log.close()
        said = (folder / "log").read_text(errors="replace")
        _take(name, folder, code, said, record)
        units = int((_UNITS.findall(said) or ["0"])[-1])
        record.sent[f"guided {name}", "guided" if HAS_ATHERIS else "damaged"] += units
        record.accepted[f"guided {name}"] += units
        covered = (_COVERED.findall(said) or ["not counted"])[-1]
        yield f"guided {name}: {units:,} inputs, branches reached: {covered}"


def _take(name: str, folder: Path, code: int, said: str, record: Record) -> None:
    kept = [path for path in folder.iterdir() if path.name.partition("-")[0] in _ARTIFACTS]
    if code == 0 and not kept:
        return
    why = said.partition("=== Uncaught Python exception: ===")[2] or said[-_SAID_CHARACTERS_MAX:]
    data = kept[0].read_bytes() if kept else b""
    one = Input("guided", name, data) if kept else None
    record.wrong(f"guided {name}, exit code {code}: {why.strip()[:_SAID_CHARACTERS_MAX]}", one)


_ARTIFACTS = ("crash", "timeout", "oom", "leak")


def replay_guided(one: Input, record: Record) -> None:
    """Gives one input to the code that failed, without guidance."""
    asyncio.set_event_loop(asyncio.new_event_loop())
    try:
        bodies()[one.kind]()(one.data)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the finding)
        record.wrong(f"guided {one.kind}: {type(error).__name__}: {error}", one)


if __name__ == "__main__":
    sys.exit(main())
