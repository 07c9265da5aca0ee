"""As much of Amazon S3's protocol as listing, reading, writing and deleting objects need.

`GET /-control?status=503&method=PUT&match=manifest&count=2` makes the next two such requests fail, before
anything is done, or with `done=1` after it was; with `skip=3` three succeed before. `count=0` ends that.
`hours=30` sets the store's clock forward.
"""

import re
import sys
import threading
import time
from hashlib import md5
from typing import ClassVar
from urllib.parse import unquote
from urllib.request import urlopen
from xml.sax.saxutils import escape, unescape

from cloud import Handler, serve

_FIRST = "Thu, 01 Jan 2026 00:00:00 GMT"
_NO_FAULT = {"count": "0"}


def control(address, **settings):
    """Set the faults of a server."""
    query = "&".join(f"{name}={value}" for name, value in settings.items())
    with urlopen(f"http://{address}/-control?{query}", timeout=30) as answer:
        return answer.read()


class S3(Handler):
    lock = threading.RLock()
    uploads: ClassVar = {}  # parts of multipart uploads, by id
    written: ClassVar = {}  # seconds, by bucket and key
    fault = _NO_FAULT
    hours = 0.0

    def answer(self, path, query):
        body = self._body()
        if path == "/-control":
            self._control(query)
            return
        with self.lock:
            failing = self._fails(path)
            if failing and "done" not in S3.fault:
                self._send(int(S3.fault["status"]), _error("InjectedFault"))
                return
            sent = []
            if failing:  # the request is done, and its answer is lost
                self._send = lambda *rest: sent.append(rest)
                self.content = lambda *rest: sent.append(rest)
            self._do(path, query, body)
            if failing:
                del self._send, self.content
                self._send(int(S3.fault["status"]), _error("InjectedFault"))

    def _do(self, path, query, body):
        bucket, _, key = unquote(path)[1:].partition("/")
        objects = self.server.buckets.get(bucket)
        if objects is None:
            self._send(404, _error("NoSuchBucket"))
        elif self.command == "POST":
            self._post(bucket, key, query, body)
        elif self.command == "PUT" and "uploadId" in query:
            S3.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self._send(200, "", {"ETag": f'"{md5(body).hexdigest()}"'})
        elif self.command == "PUT":
            self._put(bucket, key, body)
            self._send(200, "")
        elif self.command == "DELETE":
            if "uploadId" in query:
                S3.uploads.pop(query["uploadId"], None)
            else:
                objects.pop(key, None)
            self._send(204, "")
        elif key in objects:
            self.content(objects[key], self._headers(bucket, key))
        elif key:
            self._send(404, _error("NoSuchKey"))
        else:
            self._list(bucket, query)

    def _post(self, bucket, key, query, body):
        if "delete" in query:
            for each in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                self.server.buckets[bucket].pop(unescape(each), None)
            self._send(200, "<DeleteResult></DeleteResult>")
        elif "uploads" in query:
            number = f"upload-{len(S3.uploads)}-{time.monotonic_ns()}"
            S3.uploads[number] = {}
            self._send(
                200,
                f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>",
            )
        else:
            parts = S3.uploads.pop(query["uploadId"])
            self._put(bucket, key, b"".join(parts[number] for number in sorted(parts)))
            self._send(200, '<CompleteMultipartUploadResult><ETag>"1"</ETag></CompleteMultipartUploadResult>')

    def _put(self, bucket, key, body):
        self.server.buckets[bucket][key] = body
        S3.written[bucket, key] = time.time() + 3600 * S3.hours

    def _list(self, bucket, query):
        objects = self.server.buckets[bucket]
        after = query.get("continuation-token", "")
        keys, folders, more = self.page(
            objects, query.get("prefix", ""), query.get("delimiter") or None, after
        )
        count = len(keys) + len(folders)
        body = f"<KeyCount>{count}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
        for key in keys:
            at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(S3.written.get((bucket, key), 0)))
            body += f"<Contents><Key>{escape(key)}</Key><Size>{len(objects[key])}</Size>"
            body += f"<LastModified>{at}</LastModified></Contents>"
        for folder in folders:
            body += f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        if more:
            body += f"<NextContinuationToken>{escape(max(keys + folders))}</NextContinuationToken>"
        self._send(200, f"<ListBucketResult>{body}</ListBucketResult>")

    def _body(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while length := int(self.rfile.readline().partition(b";")[0], 16):
                body += self.rfile.read(length)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "STREAMING" not in self.headers.get("x-amz-content-sha256", ""):
            return body
        content = b""  # Amazon's own chunks, in the same form
        while body:
            size, _, body = body.partition(b"\r\n")
            length = int(size.partition(b";")[0], 16)
            if not length:
                break
            content, body = content + body[:length], body[length + 2 :]
        return content

    def _control(self, query):
        S3.hours = float(query.get("hours", S3.hours))
        if "count" in query:
            S3.fault = dict(query)
        self._send(200, "")

    def _fails(self, path):
        fault = S3.fault
        left = int(fault["count"])
        if not left or fault.get("match", "") not in unquote(path):
            return False
        if fault.get("method", self.command) != self.command:
            return False
        if skipped := int(fault.get("skip", 0)):
            fault["skip"] = str(skipped - 1)
            return False
        fault["count"] = str(left - 1)
        return True

    def _headers(self, bucket, key):
        written = S3.written.get((bucket, key))
        at = _FIRST if written is None else time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(written))
        return {"ETag": '"1"', "Last-Modified": at}

    def _send(self, status, body, headers=None):
        self.send(status, body.encode(), {"ETag": '"1"', "Last-Modified": _FIRST} | (headers or {}))


def _error(code):
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"


if __name__ == "__main__":
    serve(S3, sys.argv[1])
