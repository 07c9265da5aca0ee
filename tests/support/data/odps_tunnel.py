"""As much of MaxCompute's service and tunnel as downloading tables in Arrow's format needs.

`MaxCompute` answers on a socket: where the tunnel is, download sessions, and ranges of their records, with
the checksums of the tunnel. Requests must be signed by its account. `fail` makes the next requests for
records, or those that match, go wrong.
"""

import base64
import hashlib
import hmac
import json
import struct
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from http.server import ThreadingHTTPServer
from threading import Lock, Thread
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
from cloud import Handler

from karvan import _native

ID, KEY = "id-of-the-account", "key-of-the-account"
BATCH_ROWS = 700
CHUNK = 1000  # bytes between two checksums


@dataclass
class Table:
    """Types as MaxCompute writes them, and records by partition; the partition of one without any is None."""

    types: dict
    partition_types: dict = field(default_factory=dict)
    records: dict = field(default_factory=dict)
    versions: dict = field(default_factory=dict)

    def put(self, records, partition=None):
        self.records[partition] = records
        self.versions[partition] = self.versions.get(partition, 0) + 1


class MaxCompute:
    """A server, from `start` to `stop`; it can be started again at the same port."""

    def __init__(self):
        self.tables = {}  # by project and path below it
        self.sessions = {}
        self.initiating = 0  # how often a new session is not ready yet
        self.requests = []
        self.faults = []
        self.lock = Lock()
        self.port = 0
        self._server = None

    def add(self, project, name, types, records=None, partition_types=None):
        table = self.tables[project, name] = Table(types, partition_types or {})
        if records is not None:
            table.put(records)
        return table

    def fail(self, count=1, match="data", **fault):
        """status, code: of the answer. cut: bytes until the connection ends. flip: a byte. short: records."""
        with self.lock:
            self.faults += [{"match": match, **fault}] * count

    def environment(self):
        return {
            "ODPS_ENDPOINT": f"http://127.0.0.1:{self.port}/api",
            "ODPS_ACCESS_ID": ID,
            "ODPS_ACCESS_KEY": KEY,
        }

    def ranges(self):
        """The requests for records: first, count and columns."""
        asked = [query for _, _, query in self.requests if "data" in query]
        return [
            (*map(int, query["rowrange"].strip("()").split(",")), query.get("columns")) for query in asked
        ]

    def start(self):
        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _Tunnel)
        self._server.daemon_threads = True
        self._server.service = self
        self.port = self._server.server_port
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@contextmanager
def serving():
    """A server that has no tables yet."""
    service = MaxCompute()
    service.start()
    try:
        yield service
    finally:
        service.stop()


class _RefusedError(Exception):
    pass


class _Tunnel(Handler):
    def answer(self, path, query):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.close_connection = True  # so that a server that has stopped answers nothing
        service = self.server.service
        base = "/api" if path.startswith("/api/") else ""
        with service.lock:
            service.requests.append((self.command, path, query))
            fault = next((each for each in service.faults if each["match"] in self.path), {})
            if fault:
                service.faults.remove(fault)
        try:
            if "status" in fault:
                raise _RefusedError(fault["status"], fault.get("code", "InternalServerError"))
            self._check_signature(base)
            _, kind, project, rest = f"{path.removeprefix(base)}///".split("/", 3)
            rest = rest.rstrip("/")
            if kind != "projects" or not any(project == each for each, _ in service.tables):
                raise _RefusedError(404, "NoSuchProject")
            if base and rest == "tunnel" and "service" in query:
                self.send(200, f"127.0.0.1:{service.port}".encode(), {})
            elif base:
                raise _RefusedError(404, "NoSuchObject")
            else:
                self._table(service, project, rest, query, fault)
        except _RefusedError as refused:
            status, code = refused.args
            message = {"Code": code, "Message": f"{code} for account {ID}", "RequestId": "1"}
            self.send(status, json.dumps(message).encode(), {"Connection": "close"})

    def _table(self, service, project, rest, query, fault):
        table = service.tables.get((project, rest.removeprefix("tables/")))
        if table is None:
            raise _RefusedError(404, "NoSuchTable")
        partition = query.get("partition")
        if table.partition_types and partition is None:
            raise _RefusedError(400, "MissingPartitionSpec")
        if partition not in table.records:
            raise _RefusedError(404, "NoSuchPartition")
        if self.command == "POST" and "downloads" in query:
            with service.lock:
                number = f"session-{len(service.sessions)}"
                service.sessions[number] = (table, partition, table.versions[partition])
            status = "INITIATING" if service.initiating else "NORMAL"
            self._session(table, partition, number, status)
            return
        number = query["downloadid"]
        if service.sessions.get(number, (None, None))[:2] != (table, partition):
            raise _RefusedError(404, "NoSuchDownload")
        if "data" not in query:
            service.initiating -= 1
            self._session(table, partition, number, "INITIATING" if service.initiating > 0 else "NORMAL")
            return
        if service.sessions[number][2] != table.versions[partition]:
            raise _RefusedError(409, "TableModified")
        self._records(table, partition, query, fault)

    def _session(self, table, partition, number, status):
        described = {"DownloadID": number, "Status": status}
        if status == "NORMAL":
            columns, keys = (
                [
                    {"name": name, "type": type_, "comment": "", "nullable": True}
                    for name, type_ in types.items()
                ]
                for types in (table.types, table.partition_types)
            )
            described["RecordCount"] = table.records[partition].num_rows
            described["Schema"] = {"IsVirtualView": False, "columns": columns, "partitionKeys": keys}
        self.send(200, json.dumps(described).encode(), {"Connection": "close"})

    def _records(self, table, partition, query, fault):
        assert "arrow" in query
        records = table.records[partition]
        first, count = map(int, query["rowrange"].strip("()").split(","))
        if not 0 <= first <= first + count <= records.num_rows:
            raise _RefusedError(400, "InvalidRowRange")
        asked = query["columns"].split(",") if query.get("columns") else list(table.types)
        if not set(asked) <= set(table.types):
            raise _RefusedError(400, "InvalidColumnSpec")
        found = records.slice(first, fault.get("short", count)).select([n for n in table.types if n in asked])
        batches = found.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)
        body = bytearray(_checked(b"".join(bytes(batch.serialize()) for batch in batches)))
        if "flip" in fault:
            body[fault["flip"]] ^= 1
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        for at in range(0, min(len(body), fault.get("cut", len(body))), 4096):
            piece = body[at : at + 4096]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if "cut" not in fault:
            self.wfile.write(b"0\r\n\r\n")

    def _check_signature(self, base):
        """The second version of the signature: HMAC-SHA1 of the request's parts, one in a line."""
        url = urlsplit(unquote(self.path.removeprefix(base)))
        parameters = sorted(parse_qsl(url.query, keep_blank_values=True))
        resource = url.path
        if parameters:
            resource += "?" + "&".join(f"{name}={value}" if value else name for name, value in parameters)
        of_service = sorted(
            f"{name.lower()}:{value}" for name, value in self.headers.items() if name.lower()[:7] == "x-odps-"
        )
        plain = [self.headers.get(name, "") for name in ("Content-MD5", "Content-Type", "Date")]
        text = "\n".join([self.command, *plain, *of_service, resource])
        signature = base64.b64encode(hmac.new(KEY.encode(), text.encode(), hashlib.sha1).digest()).decode()
        if self.headers.get("Authorization") != f"ODPS {ID}:{signature}":
            raise _RefusedError(401, "InvalidSignature")


def _checked(data):
    """The tunnel's form: the size of chunks, chunks with a checksum each, the last one with that of all."""
    full = len(data) // CHUNK
    body = struct.pack("!I", CHUNK)
    for at in range(0, full * CHUNK, CHUNK):
        body += data[at : at + CHUNK] + struct.pack("!I", _crc32c(data[at : at + CHUNK]))
    return body + data[full * CHUNK :] + struct.pack("!I", _crc32c(data))


def _crc32c(data):
    rotated = (_native.masked_crc32c(bytes(data)) - 0xA282EAD8) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def clicks(records, first=0):
    """A table with every type that Karvan reads, with nulls, and its types in MaxCompute."""
    numbers = range(first, first + records)
    types = {
        "id": "bigint",
        "small": "int",
        "price": "double",
        "score": "float",
        "name": "string",
        "tag": "varchar(20)",
        "flag": "boolean",
        "items": "array<bigint>",
        "words": "array<string>",
        "weights": "map<bigint,double>",
        "amount": "decimal(20,2)",
        "at": "datetime",
        "day": "date",
        "moment": "timestamp",
    }
    rows = pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "small": pa.array([None if n % 7 == 3 else n % 100 for n in numbers], pa.int32()),
            "price": pa.array([None if n % 5 == 2 else n / 4 for n in numbers], pa.float64()),
            "score": pa.array([n / 2 for n in numbers], pa.float32()),
            "name": pa.array([None if n % 6 == 1 else f"name {n}" for n in numbers], pa.string()),
            "tag": pa.array([f"t{n % 3}" for n in numbers], pa.string()),
            "flag": pa.array([n % 2 == 0 for n in numbers], pa.bool_()),
            "items": pa.array(
                [None if n % 4 == 1 else list(range(n % 4)) for n in numbers], pa.list_(pa.int64())
            ),
            "words": pa.array([["a", str(n)] for n in numbers], pa.list_(pa.string())),
            "weights": pa.array(
                [[(n, 0.5), (n + 1, 2.0)] for n in numbers], pa.map_(pa.int64(), pa.float64())
            ),
            "amount": pa.array([Decimal(n) / 4 for n in numbers], pa.decimal128(20, 2)),
            "at": pa.array([n * 1000 for n in numbers], pa.timestamp("ms")),
            "day": pa.array([n % 20000 for n in numbers], pa.date32()),
            "moment": pa.array([n * 10**9 for n in numbers], pa.timestamp("ns")),
        }
    )
    return types, rows
