"""Reports to the master that records of a task raise an error, and what to tell users about it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from karvan.data.errors import DataError, reason
from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.record_search import BadRecord
from karvan.data.leasing.task_records import TakenRecords
from karvan.exit_codes import is_ours, origin_of
from karvan.work.ledger import JobFailedError

_log = logging.getLogger("karvan.data")


def report(
    client: WorkClient,
    error: BaseException,
    suspects: Sequence[TakenRecords],
    record: BadRecord | None,
    hint: str = "",
) -> None:
    """Report the failure of a task: the bad record's, or the first one's if no record alone is to blame.

    Its lease ends, so all that is done of it must be acknowledged before. A JobFailedError if it has failed
    too often; hint: what to do about a bad record then.
    """
    if record is None:
        lease = suspects[0].lease
        failed = client.fail(lease.token, described(error))
    else:
        lease = record.lease
        failed = client.fail(lease.token, described(error), record.place, record.number)
    what = lease.task if record is None else record
    if failed.failure is not None:
        raise JobFailedError(failed.failure if record is None else failed.failure + hint) from error
    if failed.skipped:
        _log.warning("Skipped %s, bad record %d of the job: %s", what, failed.bad_records, described(error))
    elif failed.tries:
        times = f"{failed.tries} time{'s' * (failed.tries != 1)}"
        _log.warning("Failed %s, and is tried again: %s: %s", times, what, described(error))


def named_error(
    error: BaseException, suspects: Sequence[TakenRecords], record: BadRecord | None
) -> DataError:
    """An error that names the bad record, and the records of its batch."""
    batch = " and ".join(str(taken.lease.task) for taken in suspects)
    if record is None:
        return DataError(f"{described(error)}; no record alone raises it", place=batch)
    return DataError(f"{described(error)}; its batch is of {batch}", place=str(record))


def described(error: BaseException) -> str:
    """An error in one line: its type, the first line of its text, and where the program has raised it."""
    kind, text = type(error).__name__, reason(error)
    line = kind if text == kind else f"{kind}: {text}"
    return line if is_ours(error) or error.__traceback__ is None else f"{line} ({origin_of(error)})"
