"""`percolator store`: prepares an instance of Bigtable for a cluster, and checks what it can do, or
whether a bucket keeps the promises that a cluster would rely on.

No cluster is needed: these commands speak to the store itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from importlib import import_module
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from rich.text import Text

from percolator.bigtable import admin
from percolator.bigtable.admin import require_table
from percolator.bigtable.connection import Connection
from percolator.bigtable.place import parse_place
from percolator.bucket.bucket import Bucket
from percolator.bucket.place import BucketPlace, is_bucket, parse_bucket
from percolator.bucket.port import Attempts
from percolator.bucket.probe import Probe
from percolator.cli.connection import connection, errors_console, fail
from percolator.errors import InvalidArgument, PercolatorError, UsageError
from percolator.rowstore.conformance import Conformance, Measured, measured, verdict
from percolator.rowstore.port import TIME_UNIT
from percolator.world import MachineClock, machine_random

T = TypeVar("T")

_RECORDS_TABLE = 0
"""The table of the cluster itself: the master would create it, too."""
_CHECK_TABLE = 2**31 - 1
"""The table of `store check`: it stays, and is empty."""
_LATEST_TIME = 2**63 - 1 - TIME_UNIT  # a deletion names the time behind it, too
_LATEST_TIME_OF_EMULATORS = 250_000_000_000_000_000
"""Before the year 9999."""
_BROKEN = 3
"""The exit code if the store does not keep a promise."""
_MEASURING = ("seconds", "in_flight", "nodes", "transfers", "price")
"""Options of `store check` that mean nothing for a bucket."""
_NOT_YET = "a cluster cannot keep its data in a bucket yet: this was only a check"

app = typer.Typer(
    no_args_is_help=True,
    help="Prepare Bigtable as the store of a cluster; check it, or a bucket; audit a bucket.",
)

_BIGTABLE_HELP = (
    "bigtable://PROJECT/INSTANCE?profile=NAME; BIGTABLE_EMULATOR_HOST names an emulator."
)
Store = Annotated[str, typer.Argument(help=_BIGTABLE_HELP, show_default=False)]
StoreOrBucket = Annotated[
    str,
    typer.Argument(
        help=f"{_BIGTABLE_HELP} Or s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME.",
        show_default=False,
    ),
]


BucketOnly = Annotated[
    str,
    typer.Argument(
        help="s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME.", show_default=False
    ),
]


@app.command("init")
def init(context: typer.Context, store: Store) -> None:
    """Check roles and app profile, and create the first table of a cluster.

    Changes nothing else, and can be repeated. Exit codes: 0 a cluster can be started; 1 something
    is missing, or the store did not answer; 2 the address is wrong.
    """
    seconds = connection(context).timeout_seconds
    if is_bucket(store):
        parse_bucket(store)
        raise InvalidArgument(
            "store",
            f"nothing is to be prepared in a bucket, and {_NOT_YET.partition(':')[0]}: "
            f"`percolator store check` says whether it will do; found {store!r}",
        )

    async def work(to: Connection) -> dict[str, object]:
        cluster = ""
        if to.place.is_emulated:
            _tell("an emulator has neither roles nor app profiles")
        else:
            missing = await admin.missing_permissions(to.network, to.place, seconds)
            for role, permissions in missing.items():
                _tell(f"missing: {', '.join(permissions)}; grant the account {role}")
            if missing:
                raise typer.Exit(1)
            _tell("roles: nothing is missing")
            cluster = await admin.require_profile(to.network, to.place, seconds)
            _tell(f"app profile: routes to the cluster {cluster} alone")
        await require_table(to.network, to.place, _RECORDS_TABLE, seconds)
        return {
            "store": str(to.place),
            "cluster": cluster or None,
            "table": to.place.table_name(_RECORDS_TABLE),
        }

    done = _run(store, work)
    connection(context).show(done, Text(f"{done['store']} is ready: start a master on it"))


@app.command("check")
def check(
    context: typer.Context,
    store: StoreOrBucket,
    seconds: Annotated[
        float, typer.Option(help="Seconds to measure; 0: only test the promises.", min=0, max=3600)
    ] = 5.0,
    in_flight: Annotated[int, typer.Option(help="How many calls at a time.", min=1, max=900)] = 64,
    nodes: Annotated[
        int, typer.Option(help="How many nodes the cluster of the instance has.", min=1)
    ] = 1,
    transfers: Annotated[
        float,
        typer.Option(help="The load to size for: transactions of two rows per second.", min=1),
    ] = 1_000.0,
    price: Annotated[
        float, typer.Option(help="What a node costs per hour, in any currency.", min=0)
    ] = 0.0,
) -> None:
    """Test whether the store keeps the promises that transactions rely on, and measure it.

    Works in a table of its own, which is empty afterwards; in a bucket, below a new name, which it
    deletes. Its calls are billed like any others. For a bucket, no option applies.
    Exit codes: 0 all promises are kept; 1 the store refused or did not answer; 2 the command was
    wrong; 3 a promise is not kept: do not start a cluster there.
    """
    timeout = connection(context).timeout_seconds
    if is_bucket(store):
        _check_bucket(context, store, timeout)
        return

    async def work(to: Connection) -> tuple[dict[str, str], Measured | None, float]:
        run = b"check-%s-" % os.urandom(8).hex().encode()
        broken = await _tried(to, run, timeout)
        if not seconds:
            return broken, None, 0.0
        _tell(f"measuring for {seconds:g} s")
        cpu = time.process_time()
        found = await measured(
            to.store,
            _CHECK_TABLE,
            run,
            MachineClock(),
            seconds=seconds,
            in_flight=in_flight,
            timeout_seconds=timeout,
        )
        return broken, found, (time.process_time() - cpu) / found.seconds

    broken, found, cpu = _run(store, work)
    shown: dict[str, object] = {"store": store, "not_kept": broken}
    lines = [f"{len(broken)} promises are not kept" if broken else "all promises are kept"]
    if found is not None:
        needs = verdict(found, nodes, transfers, price)
        shown |= {
            "check_and_mutates_per_second": found.per_second,
            "median_milliseconds": found.median_seconds * 1000,
            "percentile_99_milliseconds": found.late_seconds * 1000,
            "cores_of_this_process": cpu,
            "nodes": needs.nodes,
            "cost_per_month": needs.cost_per_month if price else None,
        }
        lines += _told(found, cpu, nodes, transfers, needs.nodes, needs.cost_per_month)
    connection(context).show(shown, Text("\n".join(lines)))
    if broken:
        raise typer.Exit(_BROKEN)


def _check_bucket(context: typer.Context, store: str, timeout: float) -> None:
    place = parse_bucket(store)
    for name in _MEASURING:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise InvalidArgument(
                f"--{name.replace('_', '-')}", "measures Bigtable, and means nothing for a bucket"
            )
    attempt_seconds = min(_ATTEMPT_SECONDS, timeout)
    attempts = _attempts(place, attempt_seconds)

    async def work() -> _Probed:
        return await _probed(attempts, attempt_seconds, timeout)

    broken, warnings, seconds, doubtful = asyncio.run(work())
    shown: dict[str, object] = {
        "store": store,
        "not_kept": broken,
        "warnings": warnings,
        "median_milliseconds": {verb: took * 1000 for verb, took in seconds.items()},
        "attempts_without_an_answer": doubtful,
        "usable_by_clusters": False,
    }
    kept = f"{len(broken)} promises are not kept" if broken else "all promises are kept"
    lines = [f"{kept} by {place}"]
    if seconds:
        took = (f"{verb} {found * 1000:.1f} ms" for verb, found in seconds.items())
        lines.append(f"medians of a few calls with 4 KiB: {', '.join(took)}")
    if doubtful:
        lines.append(f"{doubtful} attempts had no answer that says anything, and were repeated")
    connection(context).show(shown, Text("\n".join([*lines, _NOT_YET])))
    if broken:
        raise typer.Exit(_BROKEN)


def _attempts(place: BucketPlace, attempt_seconds: float) -> Attempts:
    try:
        from percolator.bucket.s3 import s3_attempts  # it takes a while to load
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "obstore":
            raise
        raise UsageError("buckets need obstore: pip install 'percolator-store[bucket]'") from None
    return s3_attempts(place, attempt_seconds=attempt_seconds)


def _audited(
    store: str, timeout: float, work: Callable[[Any], Coroutine[Any, Any, T]], **settings: object
) -> tuple[Any, T]:
    """The module of the audit, and the result of some work of it: it knows how services write."""
    place = parse_bucket(store)
    serve = import_module("percolator.services.serve")
    if missing := serve.absent(serve.NEEDED):
        raise UsageError(f"this command needs {missing}")
    module = import_module("percolator.services.master.bucket_audit")
    clock, random = MachineClock(), machine_random()
    bucket = Bucket(
        _attempts(place, timeout), clock, random, attempt_seconds=timeout, seconds=timeout
    )
    return module, asyncio.run(work(module.Audit(bucket, clock, random, **settings)))


@app.command("audit")
def audit(
    context: typer.Context,
    store: BucketOnly,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read all objects that count, and compare checksums.")
    ] = False,
    commits_per_second: Annotated[
        float, typer.Option(help="In each tablet, to estimate the cost of its log.", min=0)
    ] = 0.0,
) -> None:
    """Read what a cluster has in a bucket, and tell whether all of it is whole, and what it costs.

    Changes nothing; the cluster may run. Reads one object for each tablet and for each checkpoint,
    and with --deep all that count. Exit codes: 0 nothing is missing or damaged; 1 the store refused
    or did not answer, or the identity is damaged; 2 the command was wrong, or there is no cluster;
    3 something is missing or damaged.
    """
    to = connection(context)
    module, report = _audited(
        store, to.timeout_seconds, lambda found: found.run(), is_deep=deep, progress=_tell
    )
    text = module.as_text(report, commits_per_second)
    to.show(module.as_data(report, commits_per_second), Text(text))
    if report.problems:
        raise typer.Exit(_BROKEN)


@app.command("sweep")
def sweep(
    context: typer.Context,
    store: BucketOnly,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Needed: only tell, and delete nothing.")
    ] = False,
) -> None:
    """Tell what the sweep of the leading master would delete in a bucket now, and why.

    Deletes nothing. The master itself waits for an hour after it has found an object. Exit codes: 0
    told; 1 the store refused or did not answer, or something is damaged: then the master deletes
    nothing either; 2 the command was wrong, or there is no cluster.
    """
    if not dry_run:
        raise InvalidArgument(
            "--dry-run", "is needed: only the leading master sweeps, by itself, once an hour"
        )
    to = connection(context)
    module, plan = _audited(store, to.timeout_seconds, lambda found: found.plan())
    to.show(module.plan_as_data(plan), Text(module.plan_as_text(plan)))


_ATTEMPT_SECONDS = 5.0
"""Silence of a bucket after which the same is sent again."""


class _Probed(NamedTuple):
    """Result of the check of a bucket."""

    broken: dict[str, str]
    """The promises that are not kept, and why."""
    warnings: list[str]
    seconds: dict[str, float]
    """The median of each kind of call."""
    doubtful: int
    """How many attempts had no answer."""


async def _probed(attempts: Attempts, attempt_seconds: float, timeout: float) -> _Probed:
    clock, random = MachineClock(), machine_random()
    bucket = Bucket(attempts, clock, random, attempt_seconds=attempt_seconds, seconds=timeout)
    folder = f"check-{os.urandom(8).hex()}"
    probe = Probe(bucket, clock, folder)
    broken: dict[str, str] = {}
    try:
        async for promise, why in probe.verdicts():
            _tell(f"not kept: {promise}: {why}" if why else f"kept: {promise}")
            if why:
                broken[promise] = f"{attempts.name}: {why}"
        for warning in probe.warnings:
            _tell(f"warning: {warning}")
    finally:
        if not await probe.clean_up():
            _tell(f"could not delete everything: objects may be left below {folder}/")
    return _Probed(broken, probe.warnings, probe.median_seconds(), bucket.doubtful)


async def _tried(to: Connection, run: bytes, timeout: float) -> dict[str, str]:
    """The promises that are not kept, and why."""
    if not to.place.is_emulated:
        cluster = await admin.require_profile(to.network, to.place, timeout)
        _tell(f"kept: all calls go to the cluster {cluster}")
    await require_table(to.network, to.place, _CHECK_TABLE, timeout)
    latest = _LATEST_TIME_OF_EMULATORS if to.place.is_emulated else _LATEST_TIME
    trials = Conformance(to.store, _CHECK_TABLE, run, latest, timeout)
    broken: dict[str, str] = {}
    try:
        async for promise, why in trials.verdicts():
            _tell(f"not kept: {promise}: {why}" if why else f"kept: {promise}")
            if why:
                broken[promise] = why
        if not to.store.scans_backwards:
            _tell("not tried: scans backwards, which are refused on this store")
    finally:
        await trials.clean_up()
    return broken


def _told(
    found: Measured, cpu: float, nodes: int, transfers: float, needed: int, cost: float
) -> list[str]:
    lines = [
        f"{found.per_second:,.0f} check-and-mutates per second with {nodes} node(s); half of them "
        f"within {found.median_seconds * 1000:.1f} ms, 99 of 100 within "
        f"{found.late_seconds * 1000:.1f} ms"
    ]
    if cpu > _BUSY:
        lines.append(
            "this process was the limit, not the store: the store can do more than was measured"
        )
    lines.append(
        f"{transfers:,.0f} transfers per second need at most {needed} node(s) at 70% load"
        + (f", which cost {cost:,.0f} a month without storage and network" if cost else "")
    )
    return lines


_BUSY = 0.8
"""Load of a core above which it is this process that is measured."""


def _run(store: str, work: Callable[[Connection], Awaitable[T]]) -> T:
    async def connected() -> T:
        to = Connection(parse_place(store))
        try:
            return await work(to)
        finally:
            await to.close()

    try:
        return asyncio.run(connected())
    except PercolatorError as error:
        fail(error)


def _tell(text: str) -> None:
    """Shows progress, apart from the result."""
    errors_console.print(Text(text), highlight=False, soft_wrap=True)
