"""Where objects are: `s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from percolator.bucket.port import require_key
from percolator.errors import InvalidArgument

SCHEME = "s3://"
_FORM = "expected s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME"
_SETTINGS = ("endpoint", "region")
_UNTRIED = {
    "gs://": "Google Cloud Storage",
    "gcs://": "Google Cloud Storage",
    "az://": "Azure Blob Storage",
    "azure://": "Azure Blob Storage",
    "abfs://": "Azure Blob Storage",
    "abfss://": "Azure Blob Storage",
}
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True)
class BucketPlace:
    """A part of a bucket, and how it is reached."""

    bucket: str
    prefix: str = ""
    """Without a slash at either end. Empty for the whole bucket."""
    endpoint: str = ""
    """Empty for Amazon's own, and for what AWS_ENDPOINT_URL names."""
    region: str = ""
    """Empty for what AWS_REGION names."""

    def __str__(self) -> str:
        """The address that `parse_bucket` understands."""
        settings = [f"{name}={value}" for name in _SETTINGS if (value := getattr(self, name))]
        path = f"{self.bucket}/{self.prefix}" if self.prefix else self.bucket
        return f"{SCHEME}{path}" + ("?" + "&".join(settings) if settings else "")


def is_bucket(text: str) -> bool:
    """True if the text names a bucket, of any kind, supported or not."""
    return text.lower().startswith((SCHEME, *_UNTRIED))


UNFINISHED = "PERCOLATOR_UNFINISHED_BUCKETS"
"""A variable of the environment, for tests: clusters may keep their data in buckets, although not
everything works there yet."""


def parse_cluster_bucket(text: str, field: str = "store") -> BucketPlace | None:
    """The place of a cluster's store; None if it is no bucket. Raises `InvalidArgument` for a
    bucket: that does not work yet, and as a path it would be a directory called "s3:"."""
    if not is_bucket(text):
        return None
    if not os.environ.get(UNFINISHED):
        raise InvalidArgument(
            field,
            f"a cluster cannot keep its data in a bucket yet, found {text!r}: use a directory or "
            "bigtable://PROJECT/INSTANCE. `percolator store check` says whether a bucket of S3 "
            "will do",
        )
    return parse_bucket(text, field=field)


def parse_bucket(text: str, *, field: str = "store") -> BucketPlace:
    """The place of an address. `InvalidArgument` names `field`, and the part that is malformed."""
    scheme = text[: text.find("://") + 3].lower()
    if scheme in _UNTRIED:
        raise InvalidArgument(
            field,
            f"{_UNTRIED[scheme]} is refused until the driver's tests have run against it, or an "
            f"emulator; found {text!r}; {_FORM}",
        )
    if not text.startswith(SCHEME) or "#" in text:
        raise InvalidArgument(field, f"{_FORM}, found {text!r}")
    path, question, query = text.removeprefix(SCHEME).partition("?")
    bucket, _, prefix = path.partition("/")
    if not bucket:
        raise InvalidArgument(field, f"the bucket is missing in {text!r}; {_FORM}")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgument(
            field,
            "expected as the bucket 3 to 63 lower-case letters, digits, dots and hyphens, with a "
            f"letter or digit at both ends; found {bucket!r} in {text!r}",
        )
    prefix = prefix.removesuffix("/")
    if prefix:
        try:
            require_key(prefix)
        except InvalidArgument as error:
            raise InvalidArgument(field, f"the prefix: {error.reason}, in {text!r}") from None
    given = _settings(query, text, field) if question else {}
    endpoint = given.get("endpoint", "").removesuffix("/")
    if "endpoint" in given and not _is_endpoint(endpoint):
        raise InvalidArgument(
            field, f"endpoint: expected http://HOST:PORT or https://HOST:PORT, found {text!r}"
        )
    region = given.get("region", "")
    if "region" in given and not _REGION.fullmatch(region):
        raise InvalidArgument(
            field, f"region: expected lower-case letters, digits and hyphens, found {text!r}"
        )
    return BucketPlace(bucket, prefix, endpoint, region)


def _settings(query: str, text: str, field: str) -> dict[str, str]:
    if not query:
        raise InvalidArgument(field, f"nothing follows the question mark in {text!r}; {_FORM}")
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        raise InvalidArgument(field, f"{_FORM}, found {text!r}") from None
    found: dict[str, str] = {}
    for name, value in given:
        if name not in _SETTINGS:
            raise InvalidArgument(
                field,
                f"{name!r} is not known in {text!r}: the settings are {' and '.join(_SETTINGS)}; "
                "credentials come from the environment",
            )
        if name in found:
            raise InvalidArgument(field, f"{name} is given twice in {text!r}")
        found[name] = value
    return found


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    # A name and password would be shown in every message.
    is_bare = not (parts.path or parts.query or parts.fragment or "@" in parts.netloc)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_bare
