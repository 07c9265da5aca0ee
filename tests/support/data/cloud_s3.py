"""As much of Amazon S3's protocol as listing and reading need."""

import sys
from urllib.parse import unquote
from xml.sax.saxutils import escape

from cloud import Handler, serve

_HEADERS = {"ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


class S3(Handler):
    def answer(self, path, query):
        bucket, _, key = unquote(path)[1:].partition("/")
        objects = self.server.buckets.get(bucket)
        if objects is None:
            self._send(404, "<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>")
        elif key in objects:
            self.content(objects[key], _HEADERS)
        elif key:
            self._send(404, "<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>")
        else:
            self._list(objects, query)

    def _list(self, objects, query):
        after = query.get("continuation-token", "")
        keys, folders, more = self.page(objects, query.get("prefix", ""), query.get("delimiter"), after)
        count = len(keys) + len(folders)
        body = f"<KeyCount>{count}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
        for key in keys:
            body += f"<Contents><Key>{escape(key)}</Key><Size>{len(objects[key])}</Size></Contents>"
        for folder in folders:
            body += f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        if more:
            body += f"<NextContinuationToken>{escape(max(keys + folders))}</NextContinuationToken>"
        self._send(200, f"<ListBucketResult>{body}</ListBucketResult>")

    def _send(self, status, body):
        self.send(status, body.encode(), _HEADERS)


if __name__ == "__main__":
    serve(S3, sys.argv[1])
