"""The audit of a bucket: reads what a cluster has there, and judges whether all of it is whole.

Nothing is changed, and the cluster may run meanwhile. Rules, each with the failure that it
prevents:

- What a list lacks is asked for, and if it is missing, the log is read once more. Otherwise a list
  that lags, or an entry that its owner has just deleted, is taken for a loss.
- Of a sealed log that the map does not name, only the end is looked at. Otherwise, each table that
  was dropped, and each tablet that was split, is taken for a loss once it was swept.
- One damaged object does not end the audit, as it ends a sweep. But no orphans are judged then:
  what names them may be just what cannot be read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from percolator.bucket.bucket import Bucket
from percolator.bucket.checkpoint import TABLETS, download, read_checkpoint, tablet_folder
from percolator.bucket.log import Base, Entry, Kind, Segment, TabletLog
from percolator.bucket.sweep import Plan, Sweep, Unnamed
from percolator.errors import InvalidArgument, InvariantViolation, StoreFault, StoreUnusable
from percolator.services.chassis.cluster_store import FILE_NAME, ClusterIdentity, parse_identity
from percolator.services.chassis.coordinator import decode
from percolator.services.chassis.record_coordinator import (
    LEADER,
    ROLES,
    RoleRecord,
    role_key,
    value_column,
)
from percolator.services.chassis.records import FOLDER, BucketRecords, LongValue, Version
from percolator.services.master import map_store
from percolator.services.master.cluster_map import ClusterMap
from percolator.services.master.master import ROLE
from percolator.world import Clock, Random

_EPOCH_AFTER_ALL = (1 << 63) - 1
_TOLD_EVERY = 10_000
"""So many listed objects, and progress is told."""
_TRIES = 3
"""How often a tablet is looked at that changes meanwhile."""
_KINDS = (
    ("identity", re.compile(re.escape(FILE_NAME))),
    ("coordinator", re.compile(rf"{FOLDER}/.*")),
    ("log", re.compile(rf"{TABLETS}/[0-9]+/log/[0-9]+")),
    ("floor", re.compile(rf"{TABLETS}/[0-9]+/floor")),
    ("checkpoint", re.compile(rf"{TABLETS}/[0-9]+/checkpoint/.*")),
    ("file", re.compile(rf"{TABLETS}/[0-9]+/table/.*")),
    ("left by a check", re.compile(r"check-[0-9a-f]+/.*")),
)
_STRANGE = "not of a cluster"
_TABLET = re.compile(rf"{TABLETS}/([0-9]+)/.*")

GIGABYTE = 1 << 30
STORAGE_DOLLARS = 0.023
"""List price of Amazon S3, class Standard, us-east-1: a gigabyte for a month."""
CREATION_DOLLARS = 0.005 / 1000
"""A creation, change or list."""
MONTH_SECONDS = 730 * 3600


class Amount(NamedTuple):
    """Objects of one kind."""

    objects: int = 0
    bytes: int = 0

    def __add__(self, other: tuple[Any, ...]) -> Amount:
        return Amount(self.objects + other[0], self.bytes + other[1])


class RoleFound(NamedTuple):
    """A role's record."""

    role: str
    epoch: int
    leader: str
    """Empty after it resigned."""


@dataclass
class TabletFound:
    """A tablet, as its log has it."""

    tablet_id: int
    place: str
    """The table, or that no table has it."""
    amount: Amount = field(default_factory=Amount)
    epoch: int = 0
    last: str = ""
    """The kind of the last entry; empty if the log has none."""
    end: int = 0
    floor: int = 0
    included: int = 0
    """Up to this entry, everything is in the checkpoint."""
    checkpoint: str = ""
    files: int = 0
    to_apply: int = 0
    """Entries that the next owner has to read, also of other logs."""
    holes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The result of an audit."""

    store: str
    cluster_id: str = ""
    format: int = 0
    roles: list[RoleFound] = field(default_factory=list)
    tables: int = 0
    tablets: list[TabletFound] = field(default_factory=list)
    kinds: dict[str, Amount] = field(default_factory=dict)
    strange: list[str] = field(default_factory=list)
    """Keys that no cluster has written, the first few."""
    unneeded_values: list[str] = field(default_factory=list)
    """Long values that no record names: the next change of the record deletes them."""
    plan: Plan | None = None
    """None if something cannot be read that may name files."""
    problems: list[str] = field(default_factory=list)
    """Everything that is missing or damaged."""

    @property
    def total(self) -> Amount:
        return sum(self.kinds.values(), Amount())


class Audit:
    """One audit of a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        clock: Clock,
        random: Random,
        *,
        is_deep: bool = False,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """A deep one reads every object that counts, and compares its checksum."""
        self._bucket = bucket
        self._clock = clock
        self._random = random
        self._is_deep = is_deep
        self._progress = progress
        self._records = BucketRecords(bucket, bucket, random)
        self._sizes: dict[str, int] = {}

    async def run(self) -> Report:
        """Raises `InvalidArgument` if there is no cluster, and `PercolatorError` if the store
        refuses or does not answer."""
        report = Report(self._bucket.name)
        await self._list()
        identity = await self._identity()
        report.cluster_id, report.format = identity.cluster_id, identity.format
        await self._read_roles(report)
        tablets = await self._map(report)
        self._sort(report)
        await self._look_at_tablets(report, tablets)
        report.problems += [problem for tablet in report.tablets for problem in tablet.problems]
        if tablets is not None and not report.problems:
            self._progress("looking for what no log names")
            given_up = [tablet_id for _, tablet_id in tablets.retired]
            report.plan = await self._sweep().plan(tablets.named_tablets, given_up)
        return report

    async def plan(self) -> Plan:
        """The sweep that the leading master would do now. Raises `StoreUnusable` if something that
        decides cannot be read: the master would delete nothing either."""
        await self._identity()
        tablets = map_store.decoded(await self._map_value())
        given_up = [tablet_id for _, tablet_id in tablets.retired]
        return await self._sweep().plan(tablets.named_tablets, given_up)

    def _sweep(self) -> Sweep:
        return Sweep(self._bucket, self._clock, self._random)

    # ------------------------------------------------------------------ the cluster

    async def _list(self) -> None:
        async with aclosing(self._bucket.all("")) as listed:
            async for key, size in listed:
                self._sizes[key] = size
                if len(self._sizes) % _TOLD_EVERY == 0:
                    self._progress(f"{len(self._sizes):,} objects listed")
        self._progress(f"{len(self._sizes):,} objects listed")

    async def _identity(self) -> ClusterIdentity:
        found = await self._bucket.read(FILE_NAME)
        if found is None:
            raise InvalidArgument(
                "store", f"{self._bucket.name} belongs to no cluster: it has no {FILE_NAME}"
            )
        where = f"{FILE_NAME} in {self._bucket.name}"
        return parse_identity(found.data, where, f"store: {self._bucket.name}")

    async def _read_roles(self, report: Report) -> None:
        named: set[str] = set()
        versions: dict[str, int] = {}
        for key in self._below(f"{FOLDER}/{ROLES.decode()}"):
            role = key.removeprefix(f"{FOLDER}/{ROLES.decode()}")
            try:
                found = await self._bucket.read(key)
                if found is None:
                    raise _missing(self._bucket, key)
                version = Version.decode(found, f"{key} in {self._bucket.name}")
                versions[role] = version.number
                for value in version.columns.values():
                    if isinstance(value, LongValue):
                        named.add(value.key)
                        await self._require_size(value.key, value.size)
                seen = await RoleRecord(self._records, role).look(LEADER)
                stamp, leader = seen.stamp, seen.cells.get(LEADER, b"")
                epoch = 0 if stamp is None else stamp.epoch
                report.roles.append(RoleFound(role, epoch, leader.decode(errors="replace")))
                if self._is_deep:
                    await self._records.read(role_key(role), list(version.columns))
            except StoreUnusable as error:
                report.problems.append(error.message)
        for key in self._below(f"{FOLDER}/led/"):
            role = key.removeprefix(f"{FOLDER}/led/")
            of_role = f"{FOLDER}/{ROLES.decode()}{role}"
            if await self._size(of_role) is None:
                report.problems.append(_missing(self._bucket, of_role).message)
        folder = f"{FOLDER}/values/"
        report.unneeded_values = [key for key in self._below(folder) if key not in named]

    async def _map_value(self) -> bytes | None:
        column = value_column(map_store.KEY)
        found = (await self._records.read(role_key(ROLE), [column])).get(column)
        return None if found is None else decode(found, f"{ROLE}/{map_store.KEY}")

    async def _map(self, report: Report) -> ClusterMap | None:
        """None if it cannot be read."""
        try:
            found = map_store.decoded(await self._map_value())
        except (StoreUnusable, InvariantViolation) as error:
            if error.message not in report.problems:
                report.problems.append(f"the map of tablets: {error.message}")
            return None
        report.tables = len(found.tables)
        return found

    def _sort(self, report: Report) -> None:
        kinds: defaultdict[str, Amount] = defaultdict(Amount)
        for key, size in self._sizes.items():
            kind = next((name for name, form in _KINDS if form.fullmatch(key)), _STRANGE)
            kinds[kind] += (1, size)
            if kind is _STRANGE and len(report.strange) < 10:
                report.strange.append(key)
        report.kinds = dict(sorted(kinds.items()))

    # ------------------------------------------------------------------ tablets

    async def _look_at_tablets(self, report: Report, tablets: ClusterMap | None) -> None:
        amounts: defaultdict[int, Amount] = defaultdict(Amount)
        for key, size in self._sizes.items():
            if match := _TABLET.fullmatch(key):
                amounts[int(match[1])] += (1, size)
        current = tablets or ClusterMap()
        given_up = {tablet_id for _, tablet_id in current.retired}
        for tablet_id in sorted({*amounts, *current.named_tablets}):
            tablet = current.tablets.get(tablet_id)
            if tablet is not None:
                place = f"table {current.tables[tablet.table_id].name}"
            else:
                place = "given up" if tablet_id in given_up else "in no table"
            if tablets is None:
                place = "unknown"
            found = TabletFound(tablet_id, place)
            await self._look_at(
                found,
                must_exist=tablet is not None and tablet.exists,
                is_named=tablets is None or tablet_id in current.named_tablets,
            )
            found.amount = amounts[tablet_id]
            report.tablets.append(found)
            self._progress(
                f"tablet {tablet_id}: {found.amount.objects:,} objects, "
                + ("; ".join(found.problems) or "nothing is missing")
            )

    async def _look_at(self, found: TabletFound, *, must_exist: bool, is_named: bool) -> None:
        folder = tablet_folder(found.tablet_id)
        log = TabletLog(self._bucket, self._random, folder, _EPOCH_AFTER_ALL)
        for _ in range(_TRIES):
            found.holes, found.problems = [], []
            end: Entry | None = None
            try:
                end = await log.end()
                found.floor = (await log.floor()).number
                if end is not None:
                    await self._look_at_log(found, log, end, is_named=is_named)
                elif must_exist:
                    found.problems.append(
                        f"{self._bucket.name}: the log {folder} has no entries, though its tablet "
                        "was served"
                    )
            except StoreUnusable as error:
                found.problems.append(error.message)
            if not found.problems or not await self._has_moved(log, end):
                return

    async def _has_moved(self, log: TabletLog, before: Entry | None) -> bool:
        """True if its owner may have deleted what was missing."""
        try:
            now = await log.end()
        except StoreUnusable:
            return False
        return before is None or now is None or now.base != before.base

    async def _look_at_log(
        self, found: TabletFound, log: TabletLog, end: Entry, *, is_named: bool
    ) -> None:
        base = end.base
        found.epoch, found.last, found.end = end.epoch, end.kind.name.lower(), end.number
        found.included, found.checkpoint = base.number, base.checkpoint
        if end.kind is Kind.SEAL and not is_named:
            return  # swept, or to be: whatever tablets that were split off need, is among theirs
        rest = (*base.segments, Segment(log.folder, base.number, end.number))
        found.to_apply = sum(part.through - part.after for part in rest)
        for part in rest:
            await self._look_at_entries(found, log, part)
        for number in range(found.floor + 1, base.number + 1):
            # Nobody needs them, but the end of the log is found by them.
            await self._require_entry(found, log.folder, number)
        await self._look_at_checkpoint(found, base)

    async def _look_at_entries(self, found: TabletFound, log: TabletLog, part: Segment) -> None:
        before = len(found.holes)
        for number in range(part.after + 1, part.through + 1):
            await self._require_entry(found, part.folder, number)
        if self._is_deep and len(found.holes) == before:
            async with aclosing(log.entries(part)) as entries:
                async for _ in entries:
                    pass

    async def _require_entry(self, found: TabletFound, folder: str, number: int) -> None:
        key = f"{folder}/log/{number:020d}"
        if await self._size(key) is None:
            found.holes.append(number)
            found.problems.append(f"{self._bucket.name}: {key} is missing: the log has a hole")

    async def _look_at_checkpoint(self, found: TabletFound, base: Base) -> None:
        if not base.checkpoint:
            return
        checkpoint = await read_checkpoint(self._bucket, base.checkpoint)
        found.files = len(checkpoint.files)
        for file in checkpoint.files.values():
            try:
                await self._require_size(file.key, file.size)
            except StoreUnusable as error:
                found.problems.append(error.message)
        if self._is_deep and not found.problems:
            await download(self._bucket, base.checkpoint, _discard)

    # ------------------------------------------------------------------ objects

    def _below(self, prefix: str) -> Iterator[str]:
        return (key for key in self._sizes if key.startswith(prefix))

    async def _size(self, key: str) -> int | None:
        """None if there is no such object: a list may lack one."""
        size = self._sizes.get(key)
        if size is None:
            head = await self._bucket.head(key)
            size = None if head is None else head.size
        return size

    async def _require_size(self, key: str, expected: int) -> None:
        size = await self._size(key)
        if size is None:
            raise _missing(self._bucket, key)
        if size != expected:
            raise StoreUnusable(
                f"{self._bucket.name}: {key} is damaged: {size} bytes instead of {expected}",
                fault=StoreFault.DAMAGED,
            )


def _missing(bucket: Bucket, key: str) -> StoreUnusable:
    return StoreUnusable(f"{bucket.name}: {key} is missing", fault=StoreFault.DAMAGED)


async def _discard(name: str, data: bytes) -> None:
    """Its checksum was right."""


# ------------------------------------------------------------------ as text, and for programs


def dollars_per_month(report: Report, commits_per_second: float) -> dict[str, float]:
    """At list prices. Each commit of each tablet creates an entry; deletions cost nothing."""
    served = sum(tablet.last not in ("", "seal") for tablet in report.tablets)
    creations = commits_per_second * served * MONTH_SECONDS
    return {
        "storage": report.total.bytes / GIGABYTE * STORAGE_DOLLARS,
        "entries": creations * CREATION_DOLLARS,
    }


def as_data(report: Report, commits_per_second: float) -> dict[str, object]:
    """The report for programs."""
    return {
        "store": report.store,
        "cluster_id": report.cluster_id,
        "format": report.format,
        "roles": [role._asdict() for role in report.roles],
        "tables": report.tables,
        "tablets": [
            {**vars(tablet), "amount": tablet.amount._asdict()} for tablet in report.tablets
        ],
        "kinds": {kind: amount._asdict() for kind, amount in report.kinds.items()},
        "total": report.total._asdict(),
        "not_of_a_cluster": report.strange,
        "unneeded_values": report.unneeded_values,
        "unnamed": None if report.plan is None else plan_as_data(report.plan),
        "dollars_per_month": dollars_per_month(report, commits_per_second),
        "problems": report.problems,
    }


def plan_as_data(plan: Plan) -> dict[str, object]:
    """The plan of a sweep for programs."""
    return {
        "swept": {one.key: one.why_never for one in plan.unnamed if one.why_never},
        "may_be_published": [one.key for one in plan.unnamed if not one.why_never],
        "logs_cleared": list(plan.cleared),
    }


def as_text(report: Report, commits_per_second: float) -> str:
    """The report for people."""
    lines = [f"{report.store}: cluster {report.cluster_id}, format {report.format}"]
    for role in report.roles:
        leader = f"led by {role.leader}" if role.leader else "its leader has resigned"
        lines.append(f"role {role.role}: epoch {role.epoch}, {leader}")
    lines.append(f"{report.tables} tables, {len(report.tablets)} tablets")
    lines += map(_tablet_line, report.tablets)
    lines += [f"{kind}: {_amount_text(amount)}" for kind, amount in report.kinds.items()]
    lines += [f"not of a cluster: {key}" for key in report.strange]
    if report.unneeded_values:
        lines.append(
            f"{len(report.unneeded_values)} values that no record names: a later change of the "
            "record deletes them"
        )
    if report.plan is None:
        lines.append("not judged, since something cannot be read: files that no log names")
    else:
        counts = Counter(bool(one.why_never) for one in report.plan.unnamed)
        lines.append(
            f"files that no log names: {counts[True]} to be swept, {counts[False]} that may still "
            "be published"
        )
    costs = dollars_per_month(report, commits_per_second)
    lines.append(
        f"{_amount_text(report.total)} in all: {costs['storage']:,.2f} dollars a month at the list "
        "price of S3 Standard"
    )
    if commits_per_second:
        lines.append(
            f"{commits_per_second:g} commits a second in each tablet: {costs['entries']:,.2f} "
            "dollars a month for the entries of logs"
        )
    found = [f"problem: {problem}" for problem in report.problems]
    return "\n".join([*lines, *(found or ["nothing is missing or damaged"])])


def plan_as_text(plan: Plan) -> str:
    """The plan of a sweep for people."""
    dead = [f"would delete {one.key}: {one.why_never}" for one in plan.unnamed if one.why_never]
    logs = [f"would clear the log of {folder}: its tablet was given up" for folder in plan.cleared]
    left = [one for one in plan.unnamed if not one.why_never]
    return "\n".join([*dead, *logs, f"{len(dead)} objects, {len(logs)} logs", *_kept(left)])


def _kept(left: Iterable[Unnamed]) -> list[str]:
    return [f"would keep {one.key}: no log names it, but its owner may publish it" for one in left]


def _tablet_line(tablet: TabletFound) -> str:
    if not tablet.last:
        state = "cannot be read" if tablet.problems else "no log"
        return f"tablet {tablet.tablet_id} ({tablet.place}): {state}"
    holes = f", holes: {tablet.holes}" if tablet.holes else ""
    return (
        f"tablet {tablet.tablet_id} ({tablet.place}): epoch {tablet.epoch}, the log ends with "
        f"{tablet.last} {tablet.end}, floor {tablet.floor}, {tablet.to_apply} entries after the "
        f"checkpoint, which has {tablet.files} files; {_amount_text(tablet.amount)}{holes}"
    )


def _amount_text(amount: Amount) -> str:
    return f"{amount.objects:,} objects, {amount.bytes:,} bytes"
