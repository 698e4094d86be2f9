"""A small S3 server in a thread, as far as the driver uses S3: it can be told to misbehave.

It keeps conditions as strictly as radosgw: a tag in quotes matches nothing.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest


class Answer(NamedTuple):
    """Answers of the server in place of the truth."""

    status: int
    code: str = ""
    is_done: bool = False
    """True if the request is carried out all the same."""


SILENCE = 0
"""The status of an answer that never comes."""


class S3Server:
    """One bucket."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.objects: dict[str, bytes] = {}
        self.answers: dict[str, list[Answer]] = {}
        """By method: what is answered to the next requests, the first one first."""
        self.always: Answer | None = None
        """The answer to every request."""
        self.ignores: set[str] = set()
        """Headers that it does not look at, in lower case."""
        self.settings: dict[str, str] = {}
        """By the parameter that asks for it: a setting of the bucket."""
        self.requests: Counter[str] = Counter()
        """Requests that have arrived, by method."""
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """For `percolator store check`."""
        return f"s3://{self.bucket}/some/prefix?endpoint={self.endpoint}&region=here-1"

    def answered(self, request: _Request) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body; a status of `SILENCE` for none."""
        with self.lock:
            self.requests[request.command] += 1
            told = self.always or next(iter(self.answers.get(request.command, [])), None)
            if told and not self.always:
                del self.answers[request.command][0]
            true = None if told and not told.is_done else self._done(request)
        if told is None:
            assert true is not None
            return true
        body = f"<Error><Code>{told.code}</Code><Message>as told</Message></Error>"
        return told.status, {}, body.encode() if told.code else b""

    def _done(self, request: _Request) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(request.path)
        query = {name: found[0] for name, found in parse_qs(parts.query, True).items()}
        bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
        if bucket != self.bucket:
            return 404, {}, b"<Error><Code>NoSuchBucket</Code></Error>"
        if request.command == "POST":
            deleted = re.findall(r"<Key>([^<]*)</Key>", request.body.decode())
            for one in deleted:
                self.objects.pop(one, None)
            named = "".join(f"<Deleted><Key>{one}</Key></Deleted>" for one in deleted)
            return 200, {}, f"<DeleteResult>{named}</DeleteResult>".encode()
        if query.get("list-type"):
            return 200, {}, self._list(query)
        if "versioning" in query:
            return 200, {}, self.settings.get("versioning", "<VersioningConfiguration/>").encode()
        if "lifecycle" in query:
            if "lifecycle" in self.settings:
                return 200, {}, self.settings["lifecycle"].encode()
            return 404, {}, b"<Error><Code>NoSuchLifecycleConfiguration</Code></Error>"
        found = self.objects.get(key)
        if request.command == "PUT":
            return self._put(key, found, request)
        if found is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        return 200, _headers(found), found

    def _put(
        self, key: str, found: bytes | None, request: _Request
    ) -> tuple[int, dict[str, str], bytes]:
        wanted = {
            name: request.headers[name]
            for name in ("if-none-match", "if-match")
            if name in request.headers and name not in self.ignores
        }
        exists = "if-none-match" in wanted and found is not None
        if exists or (
            "if-match" in wanted and (found is None or wanted["if-match"] != _tag(found))
        ):
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        self.objects[key] = request.body
        return 200, _headers(request.body), b""

    def _list(self, query: dict[str, str]) -> bytes:
        after = query.get("continuation-token", query.get("start-after", ""))
        keys = sorted(one for one in self.objects if one.startswith(query["prefix"]))
        keys = [one for one in keys if one > after]
        page = keys[: int(query.get("max-keys", "2"))]
        more = len(keys) > len(page)
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        contents = "".join(
            f"<Contents><Key>{escape(one)}</Key><Size>{len(self.objects[one])}</Size>"
            f"<LastModified>2026-12-01T00:00:00.000Z</LastModified>"
            f'<ETag>"{_tag(self.objects[one])}"</ETag></Contents>'
            for one in page
        )
        truncated = str(more).lower()
        return (
            f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{token}{contents}"
            "</ListBucketResult>"
        ).encode()


@contextmanager
def s3_server(bucket: str = "some-bucket") -> Iterator[S3Server]:
    """A server that listens on this machine until the block ends."""
    server = S3Server(bucket)

    class Handler(_Request):
        served = server

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True  # some wait for requests on open connections
        server.port = listening.server_port
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            listening.shutdown()
            thread.join()
            listening.block_on_close = False


def set_credentials(
    monkeypatch: pytest.MonkeyPatch, access_key_id: str = "somebody", secret: str = "secret"
) -> None:
    """An environment with credentials, in which nothing leads anywhere else."""
    for name in [one for one in os.environ if one.upper().startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # one packet for each answer
    served: S3Server
    body: bytes

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the driver gave up, or the test has ended
            self.close_connection = True

    def do_PUT(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        status, headers, body = self.served.answered(self)
        if status == SILENCE:
            self.served.ended.wait(30)
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest would show it."""


def _tag(data: bytes) -> str:
    return sha256(data).hexdigest()[:32]


def _headers(data: bytes) -> dict[str, str]:
    return {"etag": f'"{_tag(data)}"', "last-modified": "Tue, 01 Dec 2026 00:00:00 GMT"}
