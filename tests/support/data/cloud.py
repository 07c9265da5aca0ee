"""What servers of object storage have in common: buckets of objects, listed in pages and read in ranges.

A server is a process of its own, because pyarrow holds Python's lock while it opens an object of Google's
storage: a thread of the test's process could never answer.
"""

import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE
from threading import Thread
from urllib.parse import parse_qs, urlsplit

from forked_programs import ForkedProgram

PAGE = 3  # so few names to a page that every listing takes several


@contextmanager
def serving(protocol, folder):
    """Serve the folders inside of a folder as buckets, by `cloud_{protocol}.py`; gives host and port."""
    command = [sys.executable, Path(__file__).with_name(f"cloud_{protocol}.py"), folder]
    with ForkedProgram(command, stdin=PIPE, stdout=PIPE) as process:
        yield process.stdout.readline().strip()


def serve(handler, folder):
    """Answer by a `Handler` of some protocol until the standard input ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.buckets = {bucket.name: _objects(bucket) for bucket in Path(folder).iterdir()}
    Thread(target=server.serve_forever, daemon=True).start()
    print(f"127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()


def _objects(bucket):
    """Objects by key. Folders are none, but Hadoop's writers leave empty objects that stand for theirs."""
    objects = {}
    for path in bucket.rglob("*"):
        key = path.relative_to(bucket).as_posix()
        if path.is_file():
            objects[key] = path.read_bytes()
        elif (path / "_SUCCESS").exists() or not any(path.iterdir()):
            objects[f"{key}/"] = b""
    return objects


class Handler(BaseHTTPRequestHandler):
    """A protocol's `answer` is given the path, still quoted, and the options after it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        url = urlsplit(self.path)
        self.answer(
            url.path,
            {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()},
        )

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *rest):
        pass

    def page(self, objects, prefix, delimiter, after):
        """Up to a page of keys and folders that follow the last page's end, and whether there are more."""
        keys, folders = set(), set()
        for key in objects:
            if key.startswith(prefix):
                cut = key.find(delimiter, len(prefix)) + 1 if delimiter else 0
                (folders if cut else keys).add(key[:cut] if cut else key)
        rest = sorted(name for name in keys | folders if name > after)
        page = rest[:PAGE]
        more = len(rest) > PAGE
        return [name for name in page if name in keys], [name for name in page if name in folders], more

    def content(self, data, headers):
        """The bytes of an object, or the range of them that was asked for."""
        size = len(data)
        given = self.headers.get("Range")
        if given is None:
            self.send(200, data, headers)
            return
        first, _, last = given.removeprefix("bytes=").partition("-")
        begin, end = (int(first), int(last or size - 1) + 1) if first else (max(size - int(last), 0), size)
        if begin >= size:
            self.send(416, b"", {"Content-Range": f"bytes */{size}"})
        else:
            place = f"bytes {begin}-{min(end, size) - 1}/{size}"
            self.send(206, data[begin:end], headers | {"Content-Range": place})

    def send(self, status, body, headers):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
