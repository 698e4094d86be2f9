"""An S3 server for measurements: one bucket in memory, in a process of its own.

It answers each request as late as it is told, as a store some milliseconds away does, and counts
what arrives: calls per operation are counted where they cost money, and not where they are made.
It costs a fraction of the driver's own time, which a server with a library for HTTP does not, and
does of S3 only what the driver uses. Signatures are not looked at.

    GET /-/counts          requests by kind and by what they are about, and uploaded bytes
    PUT /-/delay?ms=20     from now on, each answer leaves so many milliseconds late
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote
from urllib.request import ProxyHandler, Request, build_opener
from xml.sax.saxutils import escape

BUCKET = "measured"
_CONTROL = "-/"
_DATE = "Tue, 01 Dec 2026 00:00:00 GMT"
_STATUS = {200: "OK", 204: "No Content", 404: "Not Found", 412: "Precondition Failed"}
_KEY = re.compile(rb"<Key>([^<]*)</Key>")
_FOLDERS = re.compile(
    r"coordinator/role/(oracle)$|(coordinator)/|(log)/|(floor)$|(checkpoint)/|(table)/"
)
_START_SECONDS = 30.0

Answer = tuple[int, bytes, bytes]
"""Status, further headers, and body."""


class Objects:
    """The bucket."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[bytes, bytes]] = {}
        """Tag and bytes, by key."""
        self._keys: list[str] = []
        """In order."""
        self._writes = 0
        self.delay_seconds = 0.0
        self.requests: Counter[str] = Counter()
        self.uploaded_bytes = 0

    def answer(self, method: str, target: str, headers: dict[bytes, bytes], body: bytes) -> Answer:
        path, _, parameters = target.partition("?")
        query = {name: one[0] for name, one in parse_qs(parameters, True).items()}
        name = unquote(path).removeprefix("/")
        if name.startswith(_CONTROL):
            return self._control(name.removeprefix(_CONTROL), query)
        bucket, _, key = name.partition("/")
        if bucket != BUCKET:
            return _refusal(404, "NoSuchBucket")
        if method == "PUT":
            return self._put(key, headers, body)
        if method in ("DELETE", "POST"):
            return self._delete([one.decode() for one in _KEY.findall(body)] or [key])
        if "list-type" in query:
            self._count("list", query["prefix"])
            return 200, b"", self._list(query)
        self._count("head" if method == "HEAD" else "read", key)
        found = self._found.get(key)
        if found is None:
            return _refusal(404, "NoSuchKey")
        return 200, b"etag: %s\r\n" % found[0], found[1]

    def _put(self, key: str, headers: dict[bytes, bytes], body: bytes) -> Answer:
        found, match = self._found.get(key), headers.get(b"if-match")
        is_creation = b"if-none-match" in headers
        self._count("create" if is_creation else "replace", key)
        self.uploaded_bytes += len(body)
        if is_creation and found is not None:
            return _refusal(412, "PreconditionFailed")
        if match is not None and (found is None or match.strip(b'"') != found[0].strip(b'"')):
            return _refusal(412, "PreconditionFailed")
        if found is None:
            insort(self._keys, key)
        self._writes += 1
        tag = b'"%d"' % self._writes
        self._found[key] = tag, body
        return 200, b"etag: %s\r\n" % tag, b""

    def _delete(self, keys: list[str]) -> Answer:
        for key in keys:
            self._count("delete", key)
            if self._found.pop(key, None) is not None:
                del self._keys[bisect_right(self._keys, key) - 1]
        named = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return 200, b"", f"<DeleteResult>{named}</DeleteResult>".encode()

    def _list(self, query: dict[str, str]) -> bytes:
        prefix, most = query["prefix"], int(query.get("max-keys", "1000"))
        after = query.get("continuation-token", query.get("start-after", ""))
        first = bisect_right(self._keys, after) if after >= prefix else 0
        page, more = list[str](), False
        for key in self._keys[first:]:
            if key.startswith(prefix):
                if more := len(page) == most:
                    break
                page.append(key)
            elif page or key > prefix:
                break
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self._found[key][1])}</Size>"
            "<LastModified>2026-12-01T00:00:00.000Z</LastModified>"
            f"<ETag>{self._found[key][0].decode()}</ETag></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}"
            "</ListBucketResult>"
        ).encode()

    def _control(self, what: str, query: dict[str, str]) -> Answer:
        if what == "delay":
            self.delay_seconds = float(query["ms"]) / 1000
            return 200, b"", b""
        found = {"requests": self.requests, "uploaded_bytes": self.uploaded_bytes}
        return 200, b"", json.dumps(found).encode()

    def _count(self, kind: str, key: str) -> None:
        folder = _FOLDERS.search(key)
        self.requests[f"{kind} {folder[folder.lastindex or 0] if folder else 'other'}"] += 1


def _refusal(status: int, code: str) -> Answer:
    return status, b"", f"<Error><Code>{code}</Code></Error>".encode()


class _Connection(asyncio.Protocol):
    """One connection: a request after another."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._arrived = bytearray()
        self._head: tuple[str, str, dict[bytes, bytes]] | None = None
        """Method, target and headers of a request whose body is not complete."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        while True:
            if self._head is None:
                end = self._arrived.find(b"\r\n\r\n")
                if end < 0:
                    return
                first, *lines = bytes(self._arrived[:end]).split(b"\r\n")
                del self._arrived[: end + 4]
                method, target, _ = first.decode().split(" ")
                pairs = (line.partition(b":") for line in lines)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                self._head = method, target, headers
            method, target, headers = self._head
            size = int(headers.get(b"content-length", b"0"))
            if len(self._arrived) < size:
                return
            body = bytes(self._arrived[:size])
            del self._arrived[:size]
            self._head = None
            self._answer(method, target, headers, body)

    def _answer(self, method: str, target: str, headers: dict[bytes, bytes], body: bytes) -> None:
        status, more, found = self._objects.answer(method, target, headers, body)
        head = (
            f"HTTP/1.1 {status} {_STATUS[status]}\r\nlast-modified: {_DATE}\r\n"
            f"content-length: {len(found)}\r\n"
        ).encode()
        whole = head + more + b"\r\n" + (b"" if method == "HEAD" else found)
        seconds = self._objects.delay_seconds
        if seconds and not target.startswith(f"/{_CONTROL}"):
            asyncio.get_running_loop().call_later(seconds, self._transport.write, whole)
        else:
            self._transport.write(whole)


async def _serve() -> None:
    objects = Objects()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(objects), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    # Until the process that started this one ends.
    await asyncio.to_thread(sys.stdin.read)


class ObjectStore:
    """The server, as the process that has started it sees it."""

    def __init__(self, port: int, pid: int) -> None:
        self._endpoint = f"http://127.0.0.1:{port}"
        self._opener = build_opener(ProxyHandler({}))
        self.pid = pid

    def address(self, prefix: str) -> str:
        """A part of the bucket, for `LocalCluster`."""
        return f"s3://{BUCKET}/{prefix}?endpoint={self._endpoint}&region=here"

    def delay(self, milliseconds: float) -> None:
        self._ask("PUT", f"delay?ms={milliseconds:g}")

    def counts(self) -> tuple[Counter[str], int]:
        """Requests until now, by kind and by what they are about; and uploaded bytes."""
        found = json.loads(self._ask("GET", "counts"))
        return Counter(found["requests"]), found["uploaded_bytes"]

    def _ask(self, method: str, what: str) -> bytes:
        request = Request(f"{self._endpoint}/{_CONTROL}{what}", method=method)
        with self._opener.open(request, timeout=_START_SECONDS) as answer:
            return bytes(answer.read())


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server, with an environment in which clusters may use it."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "measured",
        "AWS_SECRET_ACCESS_KEY": "measured",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "benchmarks.object_store"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        try:
            yield ObjectStore(int(running.stdout.readline()), running.pid)
        finally:
            running.kill()


if __name__ == "__main__":
    asyncio.run(_serve())
