"""Rules by which a bucket would lose objects are found in what stores answer."""

from __future__ import annotations

import random

import pytest

from percolator.bucket.bucket import Bucket
from percolator.bucket.place import parse_bucket
from percolator.bucket.s3 import s3_attempts
from percolator.bucket.settings import Settings, rules_for, versioning_of
from percolator.errors import Unavailable
from percolator.world import MachineClock
from tests.doubles.s3_server import Answer, s3_server, set_credentials

NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def lifecycle(rule: str, status: str = "Enabled") -> bytes:
    return (
        f"<?xml version='1.0'?><LifecycleConfiguration {NAMESPACE}>"
        f"<Rule><ID>old</ID><Status>{status}</Status>{rule}</Rule></LifecycleConfiguration>"
    ).encode()


AFTER_A_WEEK = "<Expiration><Days>7</Days></Expiration>"


@pytest.mark.parametrize(
    ("rule", "effect"),
    [
        (AFTER_A_WEEK, "the rule 'old' of the lifecycle removes them 7 days after they were"),
        ("<Expiration><Date>2030-01-01T00:00:00Z</Date></Expiration>", "removes them on 2030-01"),
        (f"<Filter></Filter>{AFTER_A_WEEK}", "removes them 7 days"),
        (f"<Prefix>pre</Prefix>{AFTER_A_WEEK}", "for objects below 'pre', removes them 7 days"),
        (f"<Filter><Prefix>pre/fix/</Prefix></Filter>{AFTER_A_WEEK}", "removes them 7 days"),
        (f"<Filter><Prefix>pre/fix/log/</Prefix></Filter>{AFTER_A_WEEK}", "removes them 7 days"),
        (
            "<Filter><And><Prefix>pre</Prefix><ObjectSizeLessThan>9</ObjectSizeLessThan></And>"
            f"</Filter>{AFTER_A_WEEK}",
            "removes them 7 days",
        ),
        (f"<Filter><Unheard>of</Unheard></Filter>{AFTER_A_WEEK}", "removes them 7 days"),
        (
            "<Transition><Days>90</Days><StorageClass>GLACIER</StorageClass></Transition>",
            "moves them to GLACIER 90 days after they were written, where they cannot be read",
        ),
    ],
)
def test_a_rule_that_meets_objects_below_the_prefix_is_found(rule: str, effect: str) -> None:
    (found,) = rules_for(lifecycle(rule), "pre/fix").removing
    assert effect in found


@pytest.mark.parametrize(
    "rule",
    [
        f"<Prefix>pre/fixed</Prefix>{AFTER_A_WEEK}",
        f"<Filter><Prefix>other/</Prefix></Filter>{AFTER_A_WEEK}",
        f"<Filter><Tag><Key>k</Key><Value>v</Value></Tag></Filter>{AFTER_A_WEEK}",
        "<Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>",
        "<Transition><Days>30</Days><StorageClass>STANDARD_IA</StorageClass></Transition>",
        "<AbortIncompleteMultipartUpload><DaysAfterInitiation>7</DaysAfterInitiation>"
        "</AbortIncompleteMultipartUpload>",
    ],
)
def test_a_rule_that_no_object_below_the_prefix_loses_by_is_harmless(rule: str) -> None:
    assert rules_for(lifecycle(rule), "pre/fix") == Settings()


def test_a_rule_that_is_switched_off_is_harmless() -> None:
    assert rules_for(lifecycle(AFTER_A_WEEK, "Disabled"), "") == Settings()


@pytest.mark.parametrize(
    ("begins", "removes"),
    [("", True), ("pre/", True), ("pre/fix/log/", False), ("other/", False)],
)
def test_old_versions_are_removed_only_by_a_rule_for_all_objects(
    begins: str, removes: bool
) -> None:
    rule = (
        f"<Filter><Prefix>{begins}</Prefix></Filter><NoncurrentVersionExpiration>"
        "<NoncurrentDays>1</NoncurrentDays></NoncurrentVersionExpiration>"
    )
    assert rules_for(lifecycle(rule), "pre/fix") == Settings(removes_versions=removes)


@pytest.mark.parametrize("answer", [b"", b"<html>", b"<Other/>"])
def test_what_is_no_such_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(ValueError, match="the answer is"):
        rules_for(answer, "")
    with pytest.raises(ValueError, match="the answer is"):
        versioning_of(answer)


# ------------------------------------------------------------ what the driver asks for


def bucket_at(address: str) -> Bucket:
    return Bucket(
        s3_attempts(parse_bucket(address), attempt_seconds=5.0),
        MachineClock(),
        random.Random(1),
        attempt_seconds=5.0,
        seconds=0.3,
    )


@pytest.mark.real_time
async def test_the_driver_asks_for_both_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)
    with s3_server() as server:
        for address in (server.address, server.address.replace("/some/prefix", "")):
            assert await bucket_at(address).settings() == Settings()
        status = "<Status>Enabled</Status>"
        server.settings["versioning"] = (
            f"<VersioningConfiguration {NAMESPACE}>{status}</VersioningConfiguration>"
        )
        server.settings["lifecycle"] = lifecycle(AFTER_A_WEEK).decode()
        found = await bucket_at(server.address).settings()
        assert found.versioning == "Enabled"
        assert len(found.removing) == 1
        assert found.untold == ()


@pytest.mark.real_time
@pytest.mark.parametrize(
    "answer",
    [Answer(403, "AccessDenied"), Answer(501, "NotImplemented"), Answer(405)],
    ids=str,
)
async def test_a_store_that_does_not_tell_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    set_credentials(monkeypatch)
    with s3_server() as server:
        server.always = answer
        found = await bucket_at(server.address).settings()
        assert server.requests["GET"] == 2
    first, second = found.untold
    assert first.startswith(f"versioning ({answer.status}")
    assert second.startswith(f"lifecycle ({answer.status}")


@pytest.mark.real_time
async def test_silence_about_settings_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)
    with s3_server() as server:
        server.always = Answer(503, "SlowDown")
        with pytest.raises(Unavailable, match="503 SlowDown"):
            await bucket_at(server.address).settings()
        address = server.address
    with pytest.raises(Unavailable, match="no answer"):
        await bucket_at(address).settings()
