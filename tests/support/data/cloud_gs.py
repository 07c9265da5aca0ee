"""As much of the JSON API of Google Cloud Storage as listing and reading need."""

import json
import sys
from urllib.parse import unquote

from cloud import Handler, serve

_TIMES = {"timeCreated": "2026-01-01T00:00:00Z", "updated": "2026-01-01T00:00:00Z"}


class GS(Handler):
    def answer(self, path, query):
        bucket, *below = path.removeprefix("/storage/v1/b/").split("/")  # then "o" and a key
        objects = self.server.buckets.get(bucket)
        if objects is None:
            self._fail("The specified bucket does not exist.")
        elif not below:
            self._send(200, {"kind": "storage#bucket", "name": bucket} | _TIMES)
        elif len(below) == 1:
            self._list(bucket, objects, query)
        elif (key := unquote(below[1])) not in objects:
            self._fail(f"No such object: {bucket}/{key}")
        elif query.get("alt") == "media":
            self.content(objects[key], {"X-Goog-Generation": "1"})
        else:
            self._send(200, _metadata(bucket, key, objects[key]))

    def _list(self, bucket, objects, query):
        after = query.get("pageToken", "")
        keys, folders, more = self.page(objects, query.get("prefix", ""), query.get("delimiter"), after)
        end = {"nextPageToken": max(keys + folders)} if more else {}
        # Folders are no items, unless there is an object of that very name and it is asked for.
        if query.get("includeTrailingDelimiter") == "true":
            keys += [folder for folder in folders if folder in objects]
        items = [_metadata(bucket, key, objects[key]) for key in keys]
        self._send(200, {"kind": "storage#objects", "prefixes": folders, "items": items} | end)

    def _fail(self, message):
        self._send(404, {"error": {"code": 404, "message": message}})

    def _send(self, status, answer):
        self.send(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})


def _metadata(bucket, key, data):
    numbers = {"size": str(len(data)), "generation": "1", "metageneration": "1"}
    return {"kind": "storage#object", "bucket": bucket, "name": key} | numbers | _TIMES


if __name__ == "__main__":
    serve(GS, sys.argv[1])
