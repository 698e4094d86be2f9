"""The driver for S3 and what speaks its protocol, on obstore: the extra `bucket`.

It reads what went wrong from the text of obstore's errors, which name the status and carry the
store's answer. What it does not recognize is doubtful, so that an unknown text never counts as an
answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from typing import TYPE_CHECKING, Final
from urllib.error import HTTPError
from urllib.request import urlopen

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from percolator.bucket.place import BucketPlace
from percolator.bucket.port import Doubtful, Head, Listed, Refused, Stored
from percolator.bucket.settings import Settings, rules_for, versioning_of
from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    PermissionDenied,
    StoreFault,
    StoreUnusable,
    Unauthenticated,
)

if TYPE_CHECKING:
    from obstore.store import S3Config

_CONNECT_SECONDS = 2.0
_SIGNED_FOR = timedelta(seconds=60)
_SETTING_BYTES_MAX = 1 << 20
_FAILURES: Final = (BaseError, FileNotFoundError)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<]*?)\s*</Message>")
_MACHINE_ROLE = re.compile(r"https?://[^/\s]+/latest/(api/token|meta-data)")
"""In the report that no credentials were found: obstore asks for the machine's role at last."""
_NO_BUCKET = {"NoSuchBucket", "InvalidBucketName"}
_NO_RULES = "NoSuchLifecycleConfiguration"
_OTHER_REGION = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
}
_BARE_REDIRECT = "incorrectly configured region"  # obstore's guess, which is right
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"}
_UNKNOWN_CALLER = {
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_NOT_NOW = {"RequestTimeout", "SlowDown", "ThrottlingException", "TooManyRequests"}
_LASTING = {400, 401, 403, 404, 405, 411, 413, 414, 501, 505}
"""Statuses that the same request gets again. 409, 412 and 5xx are never answers by themselves."""


class S3Attempts:
    """The attempts of the port, on a store of obstore that makes no retries."""

    def __init__(
        self,
        store: S3Store,
        store_at: Callable[[str], S3Store],
        place: BucketPlace,
        attempt_seconds: float,
    ) -> None:
        """`store_at` opens the bucket at another address."""
        self._store = store
        self._store_at = store_at
        self._prefix = place.prefix
        self._attempt_seconds = attempt_seconds
        self._name = str(place)
        self._endpoint = place.endpoint or "the endpoint"

    @property
    def name(self) -> str:
        """The store for messages."""
        return self._name

    async def create(self, key: str, data: bytes) -> str:
        """Stores an object if the key has none: If-None-Match: *."""
        try:
            put = await self._store.put_async(key, data, mode="create", use_multipart=False)
        except _FAILURES as error:
            raise self._meaning(error) from error
        return _tag(put["e_tag"])

    async def replace(self, key: str, data: bytes, tag: str) -> str:
        """Stores an object in place of the one with this tag: If-Match."""
        try:
            put = await self._store.put_async(key, data, mode={"e_tag": tag}, use_multipart=False)
        except _FAILURES as error:
            self._require_absent(error)
            raise Refused("there is no object") from error
        return _tag(put["e_tag"])

    async def read(self, key: str) -> Stored | None:
        """The object; None if the key has none."""
        try:
            found = await self._store.get_async(key)
            data = bytes(await found.bytes_async())
        except _FAILURES as error:
            self._require_absent(error)
            return None
        return Stored(data, _tag(found.meta["e_tag"]))

    async def head(self, key: str) -> Head | None:
        """The object's tag and size; None if the key has none."""
        try:
            found = await self._store.head_async(key)
        except _FAILURES as error:
            self._require_absent(error)
            return None
        return Head(_tag(found["e_tag"]), found["size"])

    async def list(self, folder: str, after: str, limit: int) -> list[Listed]:
        """The first objects of a folder, in the order in which the store lists them."""
        try:
            # A part ends before the list does only if it is full, however many calls it takes.
            parts = self._store.list(folder or None, offset=after or None, chunk_size=limit)
            async for part in parts:
                return [Listed(one["path"], one["size"]) for one in part]
        except _FAILURES as error:
            raise self._meaning(error) from error
        return []

    async def delete(self, key: str) -> None:
        """Deletes the object if there is one."""
        try:
            await self._store.delete_async(key)
        except _FAILURES as error:
            self._require_absent(error)

    async def settings(self) -> Settings:
        """Settings of the bucket, as far as the store tells them to this account."""
        versioning, untold = "", list[str]()
        try:
            versioning = versioning_of(await self._setting("versioning"))
        except ValueError as error:
            untold.append(f"versioning ({error})")
        rules = Settings()
        try:
            if answer := await self._setting("lifecycle"):
                rules = rules_for(answer, self._prefix)
        except ValueError as error:
            untold.append(f"lifecycle ({error})")
        return rules._replace(versioning=versioning, untold=tuple(untold))

    async def _setting(self, name: str) -> bytes:
        """The store's answer for a setting of the bucket; empty if it has none.

        Raises `ValueError` if the store does not tell. obstore has no call for it, but signs
        addresses, with whatever credentials it has. It ends one with the key of an object, which
        is why that becomes part of a parameter: S3 ignores those that begin with "x-"."""
        try:
            signed = await obstore.sign_async(self._store, "GET", "key", _SIGNED_FOR)
            object_address = signed.partition("?")[0]
            address = object_address.removesuffix("/key").removesuffix(f"/{self._prefix}")
            store = self._store_at(f"{address}?{name}=&x-percolator=")
            signed = await obstore.sign_async(store, "GET", "", _SIGNED_FOR)
        except _FAILURES as error:
            raise self._meaning(error) from error
        status, body = await asyncio.to_thread(_fetched, signed, self._attempt_seconds)
        if status == HTTPStatus.OK:
            return body
        text = f"status code: {status}: {body.decode(errors='replace')}"
        code = _CODE.search(text)
        if code and code[1] == _NO_RULES:
            return b""
        if self._lasting(text, status, code[1] if code else "") is not None:
            raise ValueError(_answer(text))
        raise Doubtful(_answer(text))

    def _require_absent(self, error: Exception) -> None:
        """Raises what the answer means, unless it is that there is no such object."""
        code = _CODE.search(str(error))
        if not isinstance(error, FileNotFoundError) or (code and code[1] in _NO_BUCKET):
            raise self._meaning(error) from error

    def _meaning(self, error: Exception) -> Exception:
        text = str(error)
        if isinstance(error, AlreadyExistsError | PreconditionError):
            return Refused(_answer(text))
        status, code = _STATUS.search(text), _CODE.search(text)
        lasting = self._lasting(text, int(status[1]) if status else 0, code[1] if code else "")
        return lasting or Doubtful(self._silence(text))

    def _lasting(self, text: str, status: int, code: str) -> PercolatorError | None:
        """The error for an answer that will not change by itself; None for any other."""
        said = _answer(text)
        if _MACHINE_ROLE.search(text):
            return Unauthenticated(
                f"{self._name}: no credentials were found: set AWS_ACCESS_KEY_ID and "
                f"AWS_SECRET_ACCESS_KEY, or run with a role of the machine ({said})"
            )
        if code in _NO_BUCKET or (status == 404 and not code):
            return InvalidArgument("store", f"{self._name}: there is no such bucket ({said})")
        if code in _OTHER_REGION or _BARE_REDIRECT in text:
            return InvalidArgument(
                "store", f"{self._name}: the bucket is in another region: name it with region="
                f"NAME in the address, or AWS_REGION ({said})",
            )  # fmt: skip
        if code in _SKEWED:
            return Unauthenticated(
                f"{self._name}: the clocks of this machine and of the store differ by too much for "
                f"signatures: set this machine's ({said})"
            )
        if code in _UNKNOWN_CALLER or status == 401:
            return Unauthenticated(
                f"{self._name}: the credentials are wrong or have expired: look at "
                f"AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN ({said})"
            )
        if status == 403:
            return PermissionDenied(
                f"{self._name}: the account may not do this: it needs to read, write, list and "
                f"delete objects below the prefix ({said})"
            )
        if status in _LASTING and code not in _NOT_NOW:
            return StoreUnusable(f"{self._name} answers {said}", fault=StoreFault.INPUT_OUTPUT)
        return None

    def _silence(self, text: str) -> str:
        if "kind: Connect" in text and "kind: InvalidData" in text:
            return f"{self._endpoint} does not speak TLS, or its certificate is not trusted"
        if "kind: Connect" in text:
            why = "the name is unknown: " if "dns error" in text else ""
            return f"{why}no connection to {self._endpoint}"
        if "kind: Timeout" in text:
            return f"{self._endpoint} was silent for too long"
        if "Parse(" in text or "UnexpectedMessage" in text:
            return f"what listens at {self._endpoint} does not speak HTTP"
        if "IncompleteMessage" in text or "kind: Interrupted" in text:
            return f"{self._endpoint} broke the connection"
        if "MissingEtag" in text:
            return "the answer has no ETag"
        return _answer(text)


def s3_attempts(place: BucketPlace, *, attempt_seconds: float) -> S3Attempts:
    """The driver of a place. Credentials come from the environment, or from the machine's role.

    Raises `InvalidArgument` if settings of the environment make no sense.
    """
    config: S3Config = {"conditional_put": "etag"}
    if place.endpoint:
        # Both: a variable of the environment may name the second, which takes precedence.
        config["endpoint"] = config["aws_endpoint_url_s3"] = place.endpoint
    if place.region:
        config["region"] = place.region
    opened = partial(_opened, place, attempt_seconds)

    def store_at(address: str) -> S3Store:
        there: S3Config = {
            **config,
            "endpoint": address,
            "aws_endpoint_url_s3": address,
            "virtual_hosted_style_request": True,
        }
        return opened(there, "")

    try:
        store = opened(config, place.prefix)
    except BaseError as error:
        raise InvalidArgument("store", f"{place}: {_answer(str(error))}") from error
    return S3Attempts(store, store_at, place, attempt_seconds)


def _opened(place: BucketPlace, attempt_seconds: float, config: S3Config, prefix: str) -> S3Store:
    return S3Store(
        place.bucket,
        prefix=prefix or None,
        config=config,
        client_options={
            "timeout": timedelta(seconds=attempt_seconds),
            "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, attempt_seconds)),
            **({"allow_http": True} if place.endpoint.startswith("http://") else {}),
        },
        # Its retries would hide whether an attempt has arrived.
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=attempt_seconds)},
    )


def _fetched(address: str, seconds: float) -> tuple[int, bytes]:
    """Status and body of the answer."""
    try:
        with urlopen(address, timeout=seconds) as found:  # noqa: S310 obstore made it
            return found.status, found.read(_SETTING_BYTES_MAX)
    except HTTPError as error:
        with error:
            return error.code, error.read(_SETTING_BYTES_MAX)
    except (OSError, HTTPException) as error:
        raise Doubtful(f"no answer: {error}") from error


def _tag(quoted: str | None) -> str:
    """Without the quotes, with which radosgw refuses a right tag."""
    if not quoted:
        raise Doubtful("the answer has no ETag")
    return quoted.removeprefix('"').removesuffix('"')


def _answer(text: str) -> str:
    """The store's own words, on one line."""
    status, code, message = _STATUS.search(text), _CODE.search(text), _MESSAGE.search(text)
    if status is None:
        return " ".join(text.partition("\n")[0].split())
    parts = [status[1], code[1] if code else ""]
    return " ".join(filter(None, parts)) + (f": {message[1]}" if message and message[1] else "")
