"""The tunnel of MaxCompute by pyodps: who is asked, as whom, and what its errors mean.

`Tunnel.open` starts a download session, which is a fixed view of a table or partition: its columns, and its
records by number. `Download.read` asks for a range of records and yields them as Arrow batches, with the
checksums of the answer verified.

pyodps would repeat failed requests itself, in silence, for two minutes or for ever. Karvan has its own limit
and warnings for that (see `karvan/data/retry.py`), so pyodps is told not to: its options are changed in a
context of their own, and errors that it would act on are translated before it sees them. `temporary` errors
are outages: lost connections, timeouts, and the answers 408, 429 and 5xx. What a server says is shown without
the account's id and keys, which some of its messages repeat.

This module needs pyodps; `maxcompute.py` imports it when a table is opened.
"""

from __future__ import annotations

import contextvars
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pyarrow as pa
import requests
import urllib3
from odps import accounts, errors, options
from odps.config import option_context
from odps.models import TableSchema
from odps.rest import RestClient
from odps.tunnel import TableTunnel
from odps.tunnel.io.types import odps_type_to_arrow_type
from odps.tunnel.pb.errors import DecodeError
from odps.tunnel.tabletunnel import TableDownloadSession
from typing_extensions import override

from karvan.data.errors import DataError, reason

_OPTIONS = {
    "retry_times": 0,
    "local_timezone": False,  # timestamps are in UTC, as in files; the default is that of this machine
    "table_read_limit": None,  # it would end the data early
}
_SESSION_SECONDS = 300  # until a session is ready, which takes long for tables of very many files
_OUTAGE_STATUS = {308, 408, 429}  # 308: another server has the session soon
_RESTART_CODES = ("NoSuchDownload", "DownloadSessionExpired")  # a session ends after a day
_CLOUD_KEYS = (
    "ALIBABA_CLOUD_ACCESS_KEY_ID",
    "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
    "ALIBABA_CLOUD_SECURITY_TOKEN",
)

T = TypeVar("T")


class DamagedAnswerError(DataError):
    """An answer with wrong checksums or too few records; it may be right when asked again."""


class EndedSessionError(DataError):
    """The download session does not exist any more; another one can be opened."""


class _AnswerError(Exception):
    """An answer of the server that is an error."""

    def __init__(self, error: errors.BaseODPSError) -> None:
        text = error.args[0] if error.args else ""
        super().__init__(str(text))
        self.code = str(error.code or "")
        self.status = int(error.status_code or 0)


class _Client(RestClient):  # type: ignore[misc]
    """Raises errors that pyodps does not act on."""

    @override
    def request(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().request(*args, **kwargs)
        except errors.BaseODPSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise _AnswerError(error) from None


class Tunnel:
    """The tunnel of a project, with the account and the endpoints of this process's environment."""

    def __init__(self, project: str) -> None:
        endpoint = os.environ.get("ODPS_ENDPOINT")
        if not endpoint:
            raise DataError(
                "Reading MaxCompute needs the URL of its service: set ODPS_ENDPOINT in the environment, "
                "such as https://service.cn-shanghai.maxcompute.aliyun.com/api."
            )
        # It writes tokens into the log.
        if logging.getLogger("odps.accounts").level == logging.NOTSET:
            logging.getLogger("odps.accounts").setLevel(logging.WARNING)
        self._account = _account()
        self._project = project
        self._service = self._connect(endpoint, options.api_proxy)
        self._client: _Client | None = None

    def _connect(self, endpoint: str, proxy: Any) -> _Client:
        return _Client(
            self._account,
            endpoint,
            self._project,
            proxy=proxy,
            region_name=os.environ.get("ODPS_REGION_NAME") or None,
            namespace=os.environ.get("ODPS_NAMESPACE") or None,
            retry_enabled=False,
        )

    def open(self, url: str, path: str, name: str, partition: str | None) -> Download:
        """A download session of a table, or of a partition of it; path: where the service has the table."""
        with _Calls(url, self._account) as calls:
            session = calls.run(lambda: self._start(path, name, partition))
        return Download(url, self._account, session)

    def _start(self, path: str, name: str, partition: str | None) -> TableDownloadSession:
        if self._client is None:
            endpoint = os.environ.get("ODPS_TUNNEL_ENDPOINT") or None
            tunnel = TableTunnel(client=self._service, project=self._project, endpoint=endpoint)
            self._client = self._connect(tunnel.tunnel_rest.endpoint, options.data_proxy)
        resource = f"{self._client.endpoint}/projects/{path}"
        # What a session needs to know of a table; that of pyodps would ask the tunnel about the tenant.
        table = SimpleNamespace(
            name=name, project=SimpleNamespace(name=self._project), table_resource=lambda: resource
        )
        return TableDownloadSession(
            self._client,
            table,
            partition,
            timeout=_SESSION_SECONDS,
            quota_name=options.tunnel.quota_name,
        )


class Download:
    """A download session: the columns of a table or partition, and its records by number.

    `types` has Arrow's type of each column, None for those that Arrow has none for; `type_names` has
    MaxCompute's.
    """

    def __init__(self, path: str, account: Any, session: TableDownloadSession) -> None:
        self._path = path
        self._account = account
        self._session = session
        self.records = int(session.count)
        self.type_names = {column.name: str(column.type) for column in session.schema.simple_columns}
        self.types = {column.name: _arrow_type(column.type) for column in session.schema.simple_columns}
        self.partition_types = {column.name: _arrow_type(column.type) for column in session.schema.partitions}
        # pyodps makes Arrow's types of all columns of a session, not only of those that are read.
        columns = [column for column in session.schema.simple_columns if self.types[column.name] is not None]
        session.schema = TableSchema(columns=columns)

    def read(self, first: int, count: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Records `first` to `first + count`, with these columns."""
        done = 0
        with _Calls(self._path, self._account) as calls:
            reader = calls.run(lambda: self._session.open_arrow_reader(first, count, columns=list(columns)))
            try:
                while done < count:
                    batch = calls.run(reader.read_next_batch)
                    came = done if batch is None else done + batch.num_rows
                    if batch is None or came > count:
                        raise DamagedAnswerError(
                            f"Expected {count} records from record {first} on, but the answer has "
                            f"{came if batch is None else 'more'}.",
                            path=self._path,
                        )
                    done = came
                    yield batch
            finally:
                reader.close()


class _Calls:
    """Calls of pyodps with the options that are needed here, and with errors that name the table."""

    def __init__(self, path: str, account: Any) -> None:
        self._path = path
        self._account = account
        self._context = contextvars.copy_context()
        self._options = option_context(_OPTIONS)

    def __enter__(self) -> _Calls:
        self._context.run(self._options.__enter__)
        return self

    def __exit__(self, *rest: object) -> None:
        self._context.run(self._options.__exit__, None, None, None)

    def run(self, work: Callable[[], T]) -> T:
        """The result of a call."""
        try:
            return self._context.run(work)
        except _AnswerError as error:
            raise self._refused(error) from None
        except (errors.ChecksumError, DecodeError, pa.ArrowException) as error:
            detail = f"The answer of MaxCompute is damaged: {reason(error)}"
            raise DamagedAnswerError(detail, path=self._path) from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            text = _without_account(reason(error), self._account)
            permanent = isinstance(error, ValueError) or "certificate" in text.lower()  # a wrong URL
            raise DataError(
                f"MaxCompute cannot be reached: {text}", path=self._path, temporary=not permanent
            ) from None
        except errors.BaseODPSError as error:
            raise DataError(_without_account(reason(error), self._account), path=self._path) from None

    def _refused(self, error: _AnswerError) -> DataError:
        text = _without_account(f"{error.code or error.status}: {reason(error)}", self._account)
        if error.code in _RESTART_CODES:
            return EndedSessionError(text, path=self._path)
        if error.code == "TableModified":
            return DataError(f"The table was changed while it was read: start again. {text}", path=self._path)
        temporary = error.status in _OUTAGE_STATUS or error.status >= 500
        return DataError(f"MaxCompute answered {text}", path=self._path, temporary=temporary)


def _account() -> Any:
    id_, key = os.environ.get("ODPS_ACCESS_ID"), os.environ.get("ODPS_ACCESS_KEY")
    if id_ and key:
        return accounts.CloudAccount(id_, key)
    if (account := accounts.from_environments()) is not None:
        return account
    id_, key, token = map(os.environ.get, _CLOUD_KEYS)
    if id_ and key:
        return accounts.StsAccount(id_, key, token) if token else accounts.CloudAccount(id_, key)
    raise DataError(
        "Reading MaxCompute needs an account: set ODPS_ACCESS_ID and ODPS_ACCESS_KEY in the environment, "
        "ODPS_STS_ACCESS_KEY_ID, ODPS_STS_ACCESS_KEY_SECRET and ODPS_STS_TOKEN, ODPS_BEARER_TOKEN, or "
        f"{_CLOUD_KEYS[0]} and {_CLOUD_KEYS[1]}."
    )


def _without_account(text: str, account: Any) -> str:
    for name in ("access_id", "secret_access_key", "sts_token", "token"):
        if value := getattr(account, name, None):
            text = text.replace(str(value), "***")
    return text


def _arrow_type(type_: Any) -> pa.DataType | None:
    try:
        return odps_type_to_arrow_type(type_)
    except TypeError:
        return None
