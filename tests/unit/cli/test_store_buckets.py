"""`percolator store check` of a bucket, and the refusal of a bucket as the store of a cluster."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from percolator.bucket.place import UNFINISHED
from percolator.cli import app as program
from percolator.cli.app import app
from percolator.services.chassis.settings import load
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import LocalClusterError
from percolator.services.master.service import MasterSettings
from percolator.services.oracle.service import OracleSettings
from percolator.services.tabletserver.settings import TabletServerSettings
from tests.command_line import CliRunner
from tests.doubles.s3_server import Answer, S3Server, s3_server, set_credentials

run = CliRunner()
NOT_YET = "a cluster cannot keep its data in a bucket yet"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    set_credentials(monkeypatch)
    with s3_server() as started:
        yield started


def checked(server: S3Server, *options: str) -> Result:
    return run.invoke(app, [*options, "store", "check", server.address])


def test_a_bucket_that_keeps_all_promises_is_left_empty(server: S3Server) -> None:
    result = checked(server)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("kept: ") == 7
    assert f"all promises are kept by {server.address}\n" in result.stdout
    assert "\nmedians of a few calls with 4 KiB: create " in result.stdout
    assert NOT_YET in result.stdout
    assert server.requests["PUT"] > 20
    assert server.objects == {}


def test_programs_get_the_latencies_of_each_call(server: S3Server) -> None:
    server.answers["PUT"] = [Answer(500, "InternalError")]
    shown = json.loads(checked(server, "--json").stdout)
    assert shown["not_kept"] == {}
    assert shown["usable_by_clusters"] is False
    assert shown["attempts_without_an_answer"] == 1
    took = shown["median_milliseconds"]
    assert took.keys() == {"create", "replace", "read", "head", "list", "delete"}
    assert all(found > 0 for found in took.values())


@pytest.mark.parametrize("header", ["if-none-match", "if-match"])
def test_a_store_that_ignores_a_condition_is_named_with_what_it_did(
    server: S3Server, header: str
) -> None:
    server.ignores.add(header)
    result = checked(server, "--json")
    assert result.exit_code == 3
    broken = json.loads(result.stdout)["not_kept"]
    assert len(broken) == 2
    ignores = {"if-none-match": "it ignores If-None-Match", "if-match": "it ignores If-Match"}
    assert f"{server.address}: {ignores[header]}" in next(iter(broken.values()))
    assert "not kept: " in result.stderr
    assert server.objects == {}


def test_a_bucket_that_would_lose_objects_or_keeps_versions_is_told(server: S3Server) -> None:
    server.settings["versioning"] = (
        "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    )
    result = checked(server, "--json")
    assert result.exit_code == 0
    (warning,) = json.loads(result.stdout)["warnings"]
    assert warning.startswith("the bucket keeps all versions")
    assert f"warning: {warning}\n" in result.stderr
    server.settings["lifecycle"] = (
        "<LifecycleConfiguration><Rule><ID>old</ID><Status>Enabled</Status>"
        "<Expiration><Days>7</Days></Expiration></Rule></LifecycleConfiguration>"
    )
    result = checked(server)
    assert result.exit_code == 3
    assert "not kept: no rule removes or archives objects: the rule 'old'" in result.stderr


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        (Answer(404, "NoSuchBucket"), 2, "there is no such bucket"),
        (Answer(301, "PermanentRedirect"), 2, "the bucket is in another region"),
        (Answer(403, "AccessDenied"), 1, "the account may not do this"),
        (Answer(403, "SignatureDoesNotMatch"), 1, "the credentials are wrong"),
        (Answer(403, "RequestTimeTooSkewed"), 1, "the clocks of this machine and of the store"),
        (Answer(503, "SlowDown"), 1, "the last: 503 SlowDown"),
    ],
    ids=str,
)
def test_what_prevents_all_calls_is_one_line_with_the_exit_code_of_its_kind(
    server: S3Server, answer: Answer, code: int, text: str
) -> None:
    server.always = answer
    result = checked(server, "--timeout", "0.5")
    assert result.exit_code == code
    lines = result.stderr.splitlines()
    assert text in lines[-1]
    # Only where an attempt may have arrived.
    assert len(lines) == (2 if answer.status == 503 else 1)
    assert result.stdout == ""


@pytest.mark.parametrize("ended", [SystemExit(), SystemExit(3), SystemExit("why")], ids=repr)
def test_the_process_ends_before_pythons_end_meets_threads_of_obstore(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: SystemExit
) -> None:
    exits: list[int] = []

    def work(args: list[str]) -> None:
        print("a result", end="")
        raise ended

    monkeypatch.setattr(program, "app", work)
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(sys, "argv", ["percolator", "store"])
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(SystemExit):
        program.main()
    monkeypatch.delitem(sys.modules, "obstore")
    with pytest.raises(SystemExit):
        program.main()
    assert exits == [{None: 0, 3: 3, "why": 1}[ended.code]]
    assert capsys.readouterr().out == "a resulta result"


def test_what_could_not_be_deleted_is_told(server: S3Server) -> None:
    server.answers["POST"] = [Answer(403, "AccessDenied")] * 2
    result = checked(server)
    assert result.exit_code == 1
    (folder,) = {key.split("/")[2] for key in server.objects}
    assert f"objects may be left below {folder}/" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["check", "gs://bucket/p"], "Google Cloud Storage is refused until"),
        (["check", "az://bucket/p"], "Azure Blob Storage is refused until"),
        (["check", "s3://"], "the bucket is missing"),
        (["check", "s3://bucket?sekret=x"], "'sekret' is not known"),
        (["check", "s3://bucket", "--nodes", "3"], "--nodes: measures Bigtable"),
        (["check", "s3://bucket", "--in-flight", "3"], "--in-flight: measures Bigtable"),
        (["check", "ftp://bucket"], "expected bigtable://PROJECT/INSTANCE?profile=NAME"),
        (["init", "s3://bucket"], "nothing is to be prepared in a bucket"),
    ],
    ids=str,
)
def test_a_wrong_command_is_refused_before_anything_is_called(
    arguments: list[str], text: str
) -> None:
    result = run.invoke(app, ["store", *arguments])
    assert result.exit_code == 2
    assert text in result.stderr


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "percolator.bucket.s3", raising=False)
    for name in [one for one in sys.modules if one.startswith("obstore.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    result = run.invoke(app, ["store", "check", "s3://bucket"])
    assert result.exit_code == 2
    assert "pip install 'percolator-store[bucket]'" in result.stderr


@pytest.mark.parametrize("kind", [MasterSettings, OracleSettings, TabletServerSettings])
def test_no_service_takes_a_bucket_for_a_directory(
    kind: type[MasterSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(kind, ["--store", "s3://bucket/p"], {})
    assert caught.value.code == 2
    assert NOT_YET in capsys.readouterr().err


def test_neither_does_a_local_cluster(tmp_path: Path) -> None:
    with pytest.raises(LocalClusterError, match=NOT_YET):
        LocalCluster(tmp_path, store="s3://bucket/p", tablet_servers=0)


@pytest.mark.parametrize(
    ("given", "expected"), [([], 256 << 20), (["--split-bytes", "1000000"], 1_000_000)]
)
def test_a_tablet_in_a_bucket_is_split_earlier(
    given: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNFINISHED, "1")
    settings = load(MasterSettings, ["--store", "s3://bucket/p", *given], {})
    assert settings.times().balance.split_bytes == expected
    assert load(MasterSettings, ["--store", "data"], {}).times().balance.split_bytes == 1 << 30
