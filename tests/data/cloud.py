"""A server that speaks as much of S3's protocol as reading needs."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 3  # so few keys to a page that every listing takes several


@contextmanager
def serving(buckets):
    """Serve `{bucket: {key: bytes}}`; gives host and port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.buckets = buckets
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        bucket, _, key = unquote(url.path)[1:].partition("/")
        objects = self.server.buckets.get(bucket)
        if objects is None:
            self._send(404, b"<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>")
        elif key in objects:
            self._content(objects[key])
        elif key:
            self._send(404, b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>")
        else:
            self._list(objects, query)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *rest):
        pass

    def _list(self, objects, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        found = set()
        for key in objects:
            if key.startswith(prefix):
                cut = key.find(delimiter, len(prefix)) + 1 if delimiter else 0
                found.add(key[:cut] if cut else key)
        rest = sorted(name for name in found if name > query.get("continuation-token", ""))
        more = len(rest) > PAGE
        body = f"<KeyCount>{len(rest[:PAGE])}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
        for name in rest[:PAGE]:
            if name in objects:
                body += f"<Contents><Key>{escape(name)}</Key><Size>{len(objects[name])}</Size></Contents>"
            else:
                body += f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        if more:
            body += f"<NextContinuationToken>{escape(rest[PAGE - 1])}</NextContinuationToken>"
        self._send(200, f"<ListBucketResult>{body}</ListBucketResult>".encode())

    def _content(self, data):
        size = len(data)
        given = self.headers.get("Range")
        if given is None:
            self._send(200, data)
            return
        first, _, last = given.removeprefix("bytes=").partition("-")
        begin, end = (int(first), int(last or size - 1) + 1) if first else (size - int(last), size)
        self._send(206, data[begin:end], {"Content-Range": f"bytes {begin}-{min(end, size) - 1}/{size}"})

    def _send(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "ETag": '"1"', **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
