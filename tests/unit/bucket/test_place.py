"""Addresses of buckets."""

from __future__ import annotations

import pytest

from percolator.bucket.place import BucketPlace, is_bucket, parse_bucket, parse_cluster_bucket
from percolator.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", BucketPlace("bucket")),
        ("s3://my.bucket-1/a/b", BucketPlace("my.bucket-1", "a/b")),
        (
            "s3://bucket/p?endpoint=http://127.0.0.1:9000&region=eu-west-1",
            BucketPlace("bucket", "p", "http://127.0.0.1:9000", "eu-west-1"),
        ),
        (
            "s3://bucket?endpoint=https://[::1]:9000",
            BucketPlace("bucket", "", "https://[::1]:9000"),
        ),
    ],
)
def test_an_address_names_bucket_prefix_endpoint_and_region(
    text: str, expected: BucketPlace
) -> None:
    assert parse_bucket(text) == expected
    assert str(expected) == text


def test_slashes_at_the_end_mean_nothing() -> None:
    assert parse_bucket("s3://bucket/p/?endpoint=http://host/") == BucketPlace(
        "bucket", "p", "http://host"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected s3://BUCKET/PREFIX"),
        ("http://bucket/p", "expected s3://BUCKET/PREFIX"),
        ("s3://bucket#x", "expected s3://BUCKET/PREFIX"),
        ("s3://", "the bucket is missing"),
        ("s3:///prefix", "the bucket is missing"),
        ("s3://Bucket", "3 to 63 lower-case letters"),
        ("s3://ab", "3 to 63 lower-case letters"),
        ("s3://user@bucket", "3 to 63 lower-case letters"),
        ("s3://bucket//p", "the prefix: expected at most 512 letters"),
        ("s3://bucket/a/../b", "the prefix: expected at most 512 letters"),
        ("s3://bucket/p?", "nothing follows the question mark"),
        ("s3://bucket/p?endpoint", "expected s3://BUCKET/PREFIX"),
        ("s3://bucket?endpoint=", "endpoint: expected http://HOST:PORT"),
        ("s3://bucket?endpoint=localhost:9000", "endpoint: expected http://HOST:PORT"),
        ("s3://bucket?endpoint=http://u:p@host", "endpoint: expected http://HOST:PORT"),
        ("s3://bucket?endpoint=http://host:port", "endpoint: expected http://HOST:PORT"),
        ("s3://bucket?endpoint=http://host/path", "endpoint: expected http://HOST:PORT"),
        ("s3://bucket?region=", "region: expected lower-case letters"),
        ("s3://bucket?region=a&region=b", "region is given twice"),
        ("s3://bucket?secret=x", "'secret' is not known"),
        ("gs://bucket/p", "Google Cloud Storage is refused until the driver's tests have run"),
        ("az://container/p", "Azure Blob Storage is refused until the driver's tests have run"),
    ],
)
def test_a_malformed_address_is_refused_with_the_part_that_is_wrong(text: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match="store: ") as caught:
        parse_bucket(text)
    assert why in caught.value.reason


@pytest.mark.parametrize("text", ["s3://bucket", "S3://bucket", "gs://b", "az://c", "abfss://c"])
def test_no_bucket_is_the_store_of_a_cluster(text: str) -> None:
    assert is_bucket(text)
    with pytest.raises(InvalidArgument, match="cannot keep its data in a bucket yet"):
        parse_cluster_bucket(text)


@pytest.mark.parametrize("text", ["data", "/data/s3", "bigtable://project/instance", "s3"])
def test_other_stores_are_not_taken_for_buckets(text: str) -> None:
    assert not is_bucket(text)
    assert parse_cluster_bucket(text) is None
