"""Several writes of one program as one shared transaction: their rows appear at one moment.

with percolator.spark.together() as job:
    pages.write.format("percolator").options(**job.options, table="pages").mode("overwrite").save()
    links.write.format("percolator").options(**job.options, table="links").mode("append").save()

Spark runs the end of each write in a process of its own on the driver's machine. There the receipts
of the write's tasks go into a file, in a directory of the job, and the program commits those of all
files together. A write that fails closes the transaction, so the job can no longer commit.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from percolator import aio, private_files
from percolator.aio.tickets import Receipt, Ticket
from percolator.arguments import require_seconds
from percolator.blocking.shared import SharedTransaction
from percolator.errors import ConflictError, InvalidArgument, OutcomeUnknown, UsageError
from percolator.spark.executors import shared_database
from percolator.spark.given_options import KEEP_SECONDS_MAX, KEEP_SECONDS_MIN
from percolator.timestamps import Timestamp

_SUFFIX = ".receipts"
_PREFIX_BYTES = 6


@dataclass(frozen=True)
class PartOfJob:
    """One write of the job, as the processes of that write know it."""

    ticket: Ticket
    directory: str
    name: str
    """Tells the tasks of this write from those of others."""

    def note(self, receipts: Sequence[Receipt]) -> None:
        """Leaves the receipts to the job. Raises `UsageError` on any other machine."""
        directory = Path(self.directory)
        if not directory.is_dir():
            raise UsageError(
                f"together: there is no directory {directory} here: the program that began the "
                "job has to run on the driver's machine, and be in its block"
            )
        made = directory / f"{self.name}.new"
        with open(made, "wb", opener=private_files.opener) as file:
            pickle.dump(list(receipts), file)
        made.rename(directory / f"{self.name}{_SUFFIX}")


def part_of_job(option: str) -> PartOfJob:
    """A new write of the job that this option names."""
    try:
        given = json.loads(option)
        directory = given.pop("directory")
        ticket = Ticket(**(given | {"row": bytes.fromhex(given["row"])}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            "together", "is not from percolator.spark.together: pass all of its options"
        ) from error
    return PartOfJob(ticket, directory, os.urandom(_PREFIX_BYTES).hex())


async def commit_or_roll_back(
    whole: aio.SharedTransaction, receipts: Sequence[Receipt], job: str
) -> Timestamp | None:
    """As `commit`, but an unknown outcome is settled by asking: otherwise the job would fail, and
    its rows might appear."""
    try:
        return await whole.commit(receipts)
    except OutcomeUnknown as unknown:
        committed = await whole.abort()
        if committed is None:
            raise ConflictError(f"{job} was rolled back: {unknown.message}") from unknown
        return committed


class Together:
    """The job, on the driver. Leaving its block commits what its writes have locked; leaving it by
    an error gives all of it up."""

    def __init__(self, address: str | None, keep_seconds: float) -> None:
        require_seconds(keep_seconds, "keep_seconds")
        if not KEEP_SECONDS_MIN <= keep_seconds <= KEEP_SECONDS_MAX:
            bounds = f"from {KEEP_SECONDS_MIN:.0f} to {KEEP_SECONDS_MAX:.0f}"
            raise InvalidArgument("keep_seconds", f"expected a number {bounds}, got {keep_seconds}")
        self._address = address
        self._keep_seconds = keep_seconds
        self._whole: SharedTransaction | None = None
        self._directory: TemporaryDirectory[str] | None = None

    @property
    def options(self) -> dict[str, str]:
        """The options that make a write part of the job."""
        if self._whole is None or self._directory is None:
            raise UsageError("the job begins with its block: use it in a with statement")
        ticket = self._whole.ticket
        part = asdict(ticket) | {"row": ticket.row.hex(), "directory": self._directory.name}
        address = {} if self._address is None else {"address": self._address}
        return {"together": json.dumps(part), "atomic": "true", **address}

    @property
    def commit_timestamp(self) -> Timestamp | None:
        """When everything appeared. None before that, and if nothing was written."""
        return None if self._whole is None else self._whole.commit_timestamp

    def _commit(self, whole: SharedTransaction, directory: Path) -> None:
        files = sorted(directory.glob(f"*{_SUFFIX}"))
        receipts: list[Receipt] = []
        for file in files:
            receipts += pickle.loads(file.read_bytes())  # noqa: S301 - only our user can write there
        whole.call_inside(commit_or_roll_back, receipts, "the job")

    def __enter__(self) -> Together:
        if self._whole is not None:
            raise UsageError("the job has begun already")
        whole = shared_database(self._address).shared_transaction(ttl=self._keep_seconds)
        # Before the transaction begins: if the disk is full, nothing would end that.
        directory = TemporaryDirectory(prefix="percolator-job-")
        try:
            whole.__enter__()
        except BaseException:
            directory.cleanup()
            raise
        self._whole, self._directory = whole, directory
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._whole is None or self._directory is None:
            return
        with self._directory as directory:
            try:
                if error is None:
                    self._commit(self._whole, Path(directory))
            except BaseException as failure:
                self._whole.__exit__(type(failure), failure, failure.__traceback__)
                raise
            self._whole.__exit__(kind, error, traceback)
