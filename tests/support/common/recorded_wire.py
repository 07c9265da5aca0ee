"""Records what this process, as a client of services, sends and receives, below the code of the wire.

It stands between `karvan.wire` and pyarrow's Flight client, and keeps the bytes of each message as they are.
What differs from run to run is cut out: see `_UNSTABLE`. Heartbeats and good-byes are left out.
"""

import hashlib
import json
import re
import threading

import pyarrow.flight as flight

# Random names, times, a folder of the test, and the number of the last answer that had arrived at that time.
_UNSTABLE = re.compile(
    rb'"(session|connection|incarnation|run|capture|since|base|folder|now|received)":("[^"]*"|[-+.e\d]+)'
)


class Recorder:
    """Digests of the messages of each connection, by method."""

    def __init__(self, monkeypatch):
        self._connections = []
        lock, real, connections = threading.Lock(), flight.FlightClient, self._connections

        class Client:
            def __init__(self, *arguments, **options):
                self._client, self._messages = real(*arguments, **options), []
                with lock:
                    connections.append(self._messages)

            def do_exchange(self, *arguments):
                writer, reader = self._client.do_exchange(*arguments)
                return _Stream(writer, "call", self._messages), _Stream(reader, "answer", self._messages)

            def close(self):
                self._client.close()

        monkeypatch.setattr(flight, "FlightClient", Client)

    def digests(self):
        """For each connection: the direction and method of messages → a digest of them in their order.

        Several connections are opened at a time, so their order is that of what was sent.
        """
        made = []
        for messages in self._connections:
            methods, shas = {}, {}
            for direction, chunks in list(messages):
                head = json.loads(chunks[0])
                if "busy" in head or head.get("method") == "bye":
                    continue
                if direction == "call":
                    methods[head.get("number")] = head["method"]
                name = f"{direction} {methods.get(head.get('number'), 'hello')}"
                sha = shas.setdefault(name, hashlib.sha256())
                sha.update(_UNSTABLE.sub(rb'"\1":', chunks[0]))
                for chunk in chunks[1:]:
                    sha.update(chunk)
            made.append({name: sha.hexdigest()[:32] for name, sha in sorted(shas.items(), reverse=True)})
        return sorted(made, key=json.dumps)


class _Stream:
    """A writer or a reader of Flight; each message is a list of its head and its arrays."""

    def __init__(self, stream, direction, messages):
        self._stream, self._direction, self._messages = stream, direction, messages

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write_metadata(self, head):
        self._note(head, None)
        self._stream.write_metadata(head)

    def write_with_metadata(self, batch, head):
        self._note(head, batch)
        self._stream.write_with_metadata(batch, head)

    def write_batch(self, batch):
        self._note(None, batch)
        self._stream.write_batch(batch)

    def read_chunk(self):
        chunk = self._stream.read_chunk()
        self._note(None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes(), chunk.data)
        return chunk

    def _note(self, head, batch):
        if head is not None:
            self._messages.append((self._direction, chunks := [bytes(head)]))
            self._current = chunks
        if batch is not None:
            self._current += [memoryview(buffer).tobytes() for buffer in batch.column(0).buffers() if buffer]
