"""Outcomes that the driver reports for answers of S3, and for silence."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator

import pytest

from percolator.bucket.bucket import Bucket
from percolator.bucket.place import BucketPlace, parse_bucket
from percolator.bucket.port import Doubtful, Refused
from percolator.bucket.s3 import s3_attempts
from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    PermissionDenied,
    StoreUnusable,
    Unauthenticated,
    Unavailable,
)
from percolator.world import MachineClock
from tests.doubles.s3_server import SILENCE, Answer, S3Server, s3_server, set_credentials

pytestmark = pytest.mark.real_time


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    set_credentials(monkeypatch)
    with s3_server() as started:
        yield started


def bucket_of(server: S3Server, *, attempt_seconds: float = 5.0, seconds: float = 20.0) -> Bucket:
    attempts = s3_attempts(parse_bucket(server.address), attempt_seconds=attempt_seconds)
    return Bucket(
        attempts,
        MachineClock(),
        random.Random(1),
        attempt_seconds=attempt_seconds,
        seconds=seconds,
    )


DOUBTFUL = [
    Answer(412, "PreconditionFailed", is_done=True),
    Answer(409, "ConditionalRequestConflict", is_done=True),
    Answer(500, "UnknownError", is_done=True),
    Answer(503, "SlowDown", is_done=True),
    Answer(500, "InternalError"),
    Answer(503, "SlowDown"),
    Answer(400, "RequestTimeout"),
    Answer(409, "ConditionalRequestConflict"),
]


@pytest.mark.parametrize("answer", DOUBTFUL, ids=str)
async def test_an_answer_is_believed_only_after_reading(server: S3Server, answer: Answer) -> None:
    bucket = bucket_of(server)
    server.answers["PUT"] = [answer]
    made = await bucket.create("log/1", b"own")
    assert made.is_own
    assert made.found is not None
    server.answers["PUT"] = [answer]
    changed = await bucket.replace("log/1", b"newer", made.found.tag)
    assert changed.is_own
    assert server.objects == {"some/prefix/log/1": b"newer"}
    # What was done is not done again, and the driver repeats nothing itself.
    assert server.requests["PUT"] == (2 if answer.is_done else 4)
    assert server.requests["GET"] == 2


async def test_silence_after_a_creation_is_no_failure(server: S3Server) -> None:
    bucket = bucket_of(server, attempt_seconds=0.2)
    server.answers["PUT"] = [Answer(SILENCE, is_done=True)]
    assert (await bucket.create("log/1", b"own")).is_own
    assert server.requests["PUT"] == 1
    assert bucket.doubtful == 1


LASTING: list[tuple[Answer, type[PercolatorError], str]] = [
    (Answer(404, "NoSuchBucket"), InvalidArgument, "there is no such bucket (404 NoSuchBucket"),
    (Answer(404), InvalidArgument, "there is no such bucket (404)"),
    (Answer(403, "AccessDenied"), PermissionDenied, "the account may not do this"),
    (Answer(403), PermissionDenied, "the account may not do this"),
    (Answer(403, "InvalidAccessKeyId"), Unauthenticated, "the credentials are wrong"),
    (Answer(403, "SignatureDoesNotMatch"), Unauthenticated, "the credentials are wrong"),
    (Answer(400, "ExpiredToken"), Unauthenticated, "or have expired"),
    (Answer(401), Unauthenticated, "the credentials are wrong"),
    (Answer(403, "RequestTimeTooSkewed"), Unauthenticated, "the clocks of this machine and"),
    (Answer(301, "PermanentRedirect"), InvalidArgument, "the bucket is in another region"),
    (Answer(400, "AuthorizationHeaderMalformed"), InvalidArgument, "in another region"),
    (Answer(501, "NotImplemented"), StoreUnusable, "answers 501 NotImplemented: as told"),
    (Answer(400, "InvalidArgument"), StoreUnusable, "answers 400 InvalidArgument: as told"),
]


@pytest.mark.parametrize(("answer", "kind", "text"), LASTING, ids=str)
async def test_an_answer_that_will_not_change_is_told_at_once(
    server: S3Server, answer: Answer, kind: type[PercolatorError], text: str
) -> None:
    server.always = answer
    with pytest.raises(kind) as caught:
        await bucket_of(server).create("log/1", b"own")
    assert text in str(caught.value)
    assert server.address in str(caught.value)
    assert sum(server.requests.values()) == 1


async def test_a_bucket_that_is_missing_is_not_an_object_that_is(server: S3Server) -> None:
    place = BucketPlace("another-bucket", endpoint=server.endpoint, region="here-1")
    attempts = s3_attempts(place, attempt_seconds=5.0)
    with pytest.raises(InvalidArgument, match="no such bucket"):
        await attempts.read("log/1")
    with pytest.raises(InvalidArgument, match="no such bucket"):
        await attempts.list("log", "", 10)


async def test_an_endpoint_where_nothing_listens_is_named(server: S3Server) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server.port = unused.getsockname()[1]
        with pytest.raises(Unavailable, match=f"no connection to {server.endpoint}"):
            await bucket_of(server, seconds=0.2).create("log/1", b"own")


async def test_a_silent_endpoint_is_named(server: S3Server) -> None:
    server.always = Answer(SILENCE)
    with pytest.raises(Unavailable, match=r"in 0\.3 s"):
        await bucket_of(server, attempt_seconds=0.1, seconds=0.3).create("log/1", b"own")


@pytest.mark.parametrize(
    ("scheme", "answer", "speaks_first", "text"),
    [
        ("http", b"ceph v2\n", False, "what listens at http://{} does not speak HTTP"),
        ("http", b"ceph v2\n", True, "what listens at http://{} does not speak HTTP"),
        ("http", b"", False, "http://{} broke the connection"),
        ("https", b"HTTP/1.1 400 Bad Request\r\n", False, "https://{} does not speak TLS, or its"),
    ],
)
async def test_an_endpoint_that_speaks_something_else_is_named(
    server: S3Server, scheme: str, answer: bytes, speaks_first: bool, text: str
) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not speaks_first:
            await reader.read(100)
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as listening:
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        attempts = s3_attempts(
            BucketPlace("bucket", endpoint=f"{scheme}://{address}", region="here-1"),
            attempt_seconds=5.0,
        )
        for call in (attempts.create("log/1", b"own"), attempts.read("log/1")):
            with pytest.raises(Doubtful) as caught:
                await call
            assert text.format(address) in str(caught.value)


async def test_an_answer_without_a_tag_is_no_success(server: S3Server) -> None:
    server.always = Answer(200)
    attempts = s3_attempts(parse_bucket(server.address), attempt_seconds=5.0)
    with pytest.raises(Doubtful, match="no ETag"):
        await attempts.create("log/1", b"own")


async def test_tags_are_sent_without_the_quotes_that_radosgw_refuses(server: S3Server) -> None:
    attempts = s3_attempts(parse_bucket(server.address), attempt_seconds=5.0)
    tag = await attempts.create("log/1", b"own")
    assert '"' not in tag
    with pytest.raises(Refused):
        await attempts.replace("log/1", b"newer", f'"{tag}"')
    await attempts.replace("log/1", b"newer", tag)


async def test_no_variable_of_the_environment_leads_to_another_endpoint(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert (await bucket_of(server, seconds=2.0).create("log/1", b"own")).is_own


async def test_missing_credentials_are_told_as_such(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.endpoint)  # the last that is asked
    server.always = Answer(404)
    with pytest.raises(Unauthenticated, match="no credentials were found"):
        await bucket_of(server).create("log/1", b"own")


async def test_the_secret_is_in_no_message(server: S3Server) -> None:
    server.always = Answer(403, "SignatureDoesNotMatch")
    with pytest.raises(Unauthenticated) as caught:
        await bucket_of(server).create("log/1", b"own")
    assert "secret" not in str(caught.value)
