"""The driver and the check on a real store, whose parts are killed."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from percolator.bucket.bucket import Bucket
from percolator.bucket.place import BucketPlace
from percolator.bucket.s3 import s3_attempts
from percolator.world import MachineClock
from tests.bucket.ceph import Ceph
from tests.bucket.rivals import COUNTER, Done, create_counter, key_of
from tests.doubles.s3_server import set_credentials

pytestmark = pytest.mark.bucket

PERCOLATOR = Path(sys.executable).parent / "percolator"


def checked(
    place: BucketPlace, environment: dict[str, str], *before: str, timeout: str = "10"
) -> subprocess.CompletedProcess[str]:
    """`percolator store check` in a process of its own, behind a command."""
    return subprocess.run(
        [*before, PERCOLATOR, "--json", "--timeout", timeout, "store", "check", str(place)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def bucket_at(ceph: Ceph, place: BucketPlace, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    set_credentials(monkeypatch, ceph.account.access_key_id, ceph.account.secret)
    return Bucket(
        s3_attempts(place, attempt_seconds=5.0),
        MachineClock(),
        random.Random(3),
        attempt_seconds=5.0,
        seconds=30.0,
    )


# ------------------------------------------------------------ what the check finds


def test_the_check_finds_that_all_promises_are_kept(ceph: Ceph) -> None:
    result = checked(ceph.new_bucket(), ceph.account.environment())
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["not_kept"] == {}
    assert found["warnings"] == []
    took = (f"{verb} {one:.1f} ms" for verb, one in found["median_milliseconds"].items())
    print("medians on Ceph:", ", ".join(took))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "403 SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "unknown"}, "403 InvalidAccessKeyId"),
    ],
    ids=["secret", "key"],
)
def test_wrong_credentials_are_refused_as_such(
    ceph: Ceph, changes: dict[str, str], text: str
) -> None:
    result = checked(ceph.new_bucket(), ceph.account.environment() | changes)
    assert (result.returncode, result.stdout) == (1, "")
    assert "the credentials are wrong or have expired: look at AWS_ACCESS_KEY" in result.stderr
    assert text in result.stderr


def test_keys_that_are_taken_back_and_accounts_without_rights_are_told_apart(ceph: Ceph) -> None:
    place = ceph.new_bucket()
    other = ceph.new_account("other")
    result = checked(place, other.environment())
    assert result.returncode == 1
    assert "the account may not do this: it needs to read, write, list" in result.stderr
    ceph.remove_key(other)
    result = checked(place, other.environment())
    assert result.returncode == 1
    assert "the credentials are wrong or have expired" in result.stderr


@pytest.mark.parametrize("off", ["+1h", "-1h"])
def test_a_clock_by_which_signatures_are_refused_is_named(ceph: Ceph, off: str) -> None:
    result = checked(ceph.new_bucket(), ceph.account.environment(), "faketime", "-f", off)
    assert (result.returncode, result.stdout) == (1, "")
    assert "the clocks of this machine and of the store differ by too much" in result.stderr


def test_a_bucket_that_is_missing_and_a_wrong_endpoint_are_named(ceph: Ceph) -> None:
    place = ceph.place("no-such-bucket")
    result = checked(place, ceph.account.environment())
    assert result.returncode == 2
    assert f"{place}: there is no such bucket" in result.stderr
    for endpoint, text in [
        (ceph.monitor_address, f"what listens at {ceph.monitor_address} does not speak HTTP"),
        ("http://127.0.0.1:9", "no connection to http://127.0.0.1:9"),
    ]:
        result = checked(replace(place, endpoint=endpoint), ceph.account.environment(), timeout="1")
        assert result.returncode == 1
        assert text in result.stderr


def test_radosgw_takes_any_region(ceph: Ceph) -> None:
    place = replace(ceph.new_bucket(), region="nowhere-7")
    assert checked(place, ceph.account.environment()).returncode == 0


# ------------------------------------------------------------ settings of the bucket

NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def versioning(status: str) -> bytes:
    return (
        f"<VersioningConfiguration {NAMESPACE}><Status>{status}</Status></VersioningConfiguration>"
    ).encode()


def test_a_bucket_that_keeps_versions_keeps_no_conditions_and_is_refused(ceph: Ceph) -> None:
    place = ceph.new_bucket()
    ceph.configure(place.bucket, "versioning", versioning("Enabled"))
    result = checked(place, ceph.account.environment(), timeout="2")
    assert result.returncode == 3, result.stderr
    found = json.loads(result.stdout)
    assert "a key is created once (If-None-Match)" in found["not_kept"]
    assert found["warnings"][-1].startswith("versioning may be why promises are not kept")


def test_a_bucket_whose_versioning_is_suspended_keeps_all_promises(ceph: Ceph) -> None:
    place = ceph.new_bucket()
    for status in ("Enabled", "Suspended"):
        ceph.configure(place.bucket, "versioning", versioning(status))
    result = checked(place, ceph.account.environment())
    assert result.returncode == 0, result.stderr


def test_a_rule_that_removes_objects_below_the_prefix_is_refused(ceph: Ceph) -> None:
    place = ceph.new_bucket()

    def rule(name: str, prefix: str, days: int) -> str:
        return (
            f"<Rule><ID>{name}</ID><Filter><Prefix>{prefix}</Prefix></Filter>"
            f"<Status>Enabled</Status><Expiration><Days>{days}</Days></Expiration></Rule>"
        )

    def set_rules(*rules: str) -> None:
        text = f"<LifecycleConfiguration {NAMESPACE}>{''.join(rules)}</LifecycleConfiguration>"
        ceph.configure(place.bucket, "lifecycle", text.encode())

    set_rules(rule("others", "elsewhere/", 3))
    assert checked(place, ceph.account.environment()).returncode == 0
    set_rules(rule("others", "elsewhere/", 3), rule("old", "some/", 30))
    result = checked(place, ceph.account.environment())
    assert result.returncode == 3
    (promise,) = json.loads(result.stdout)["not_kept"].items()
    assert promise[0] == "no rule removes or archives objects"
    assert "the rule 'old' of the lifecycle, for objects below 'some/', removes" in promise[1]


# ------------------------------------------------------------ rivals and faults

RIVALS = 3
FAULTS = ["osd 0", "gateway 0", "osd 1", "gateway 1", "osd 2"]
AMPLE_SECONDS = 45.0


class Rival:
    """A process of `tests.bucket.rivals`, and what it has said."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.doubts: Counter[str] = Counter()
        self.at = 0
        self.done: Done | None = None
        self.heard = asyncio.create_task(self._hear())

    async def _hear(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "doubt" in said:
                self.doubts[said["doubt"]] += 1
            elif "at" in said:
                self.at = said["at"]
            else:
                self.done = Done(*said["done"])


async def started_rival(place: BucketPlace, name: str, environment: dict[str, str]) -> Rival:
    return Rival(
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.bucket.rivals",
            str(place),
            name,
            env=environment,
            stdin=PIPE,
            stdout=PIPE,
            limit=1 << 24,
        )
    )


async def wait_until(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + AMPLE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


@pytest.mark.timeout(240)
async def test_each_number_has_one_winner_and_no_increment_is_lost_while_parts_are_killed(
    ceph: Ceph, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ceph.new_bucket()
    bucket = bucket_at(ceph, place, monkeypatch)
    await create_counter(bucket)
    rivals = [
        await started_rival(
            replace(place, endpoint=ceph.endpoint(number % 2)),
            f"r{number}",
            ceph.account.environment(),
        )
        for number in range(RIVALS)
    ]
    struck: Counter[str] = Counter()
    try:
        for fault in FAULTS:
            await advance(rivals)
            before = doubts(rivals)
            kind, number = fault.split()
            kill, start, wait = (
                (ceph.kill_osd, ceph.start_osd, ceph.wait_for_osds)
                if kind == "osd"
                else (ceph.kill_gateway, ceph.start_gateway, ceph.wait_for_gateways)
            )
            kill(int(number))
            await wait_until(
                f"{fault} is dead, and nobody has noticed",
                lambda: doubts(rivals) > before,  # noqa: B023
            )
            start(int(number))
            await asyncio.to_thread(wait)
            await advance(rivals)
            struck[fault] += doubts(rivals) - before
        for one in rivals:
            assert one.process.stdin is not None
            one.process.stdin.close()
        await asyncio.wait_for(asyncio.gather(*(one.heard for one in rivals)), AMPLE_SECONDS)
    finally:
        for one in rivals:
            if one.process.returncode is None:
                one.process.kill()
            await one.process.wait()
    done = [one.done for one in rivals if one.done is not None]
    assert len(done) == RIVALS
    assert all(struck[fault] > 0 for fault in FAULTS)
    await audit(bucket, done)
    print(
        f"{RIVALS} processes, {max(len(one.found) for one in done)} numbers, of which "
        f"{sum(one.own_after_silence for one in done)} were found to be one's own after a lost "
        f"answer; {sum(one.increments for one in done)} increments; attempts struck: {dict(struck)}"
    )


def doubts(rivals: list[Rival]) -> int:
    return sum(one.doubts.total() for one in rivals)


async def advance(rivals: list[Rival]) -> None:
    """Returns when each rival has got further."""
    aims = [one.at + 12 for one in rivals]
    await wait_until(
        "a rival does not get on",
        lambda: all(one.at >= aim for one, aim in zip(rivals, aims, strict=True)),
    )


async def audit(bucket: Bucket, done: list[Done]) -> None:
    length = max(len(one.found) for one in done)
    owners = Counter(number for one in done for number in one.own)
    assert owners == dict.fromkeys(range(length), 1)
    stored: list[str] = []
    while len(stored) < length:
        some = range(len(stored), min(len(stored) + 50, length))
        for found in await asyncio.gather(*(bucket.read(key_of(number)) for number in some)):
            assert found is not None
            stored.append(found.data.decode())
    for name, one in enumerate(done):
        assert one.found == stored[: len(one.found)]
        mine = [number for number, data in enumerate(stored) if data.startswith(f"r{name} ")]
        assert one.own == mine
    listed: list[str] = []
    while page := await bucket.list("log", after=listed[-1] if listed else ""):
        listed += [one.key for one in page]
    assert listed == [key_of(number) for number in range(length)]
    counter = await bucket.read(COUNTER)
    assert counter is not None
    state = json.loads(counter.data)
    assert state["sum"] == sum(one.increments for one in done)
    assert state["last"] == {f"r{name}": one.increments for name, one in enumerate(done)}
