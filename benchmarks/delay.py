"""A network that can be made bad: a TCP proxy, in a process of its own, before a port of this machine.

with Network("127.0.0.1:7000") as network:      # clients connect to network.address
    network.delay(0.005)                        # from now on bytes arrive 5 ms later, each way
    network.stall()                             # nothing is forwarded, connections stay; network.flow()
    network.cut()                               # all connections are closed, at once
    network.refuse()                            # and no new ones are made; network.accept()

The delay is a line, not a pause: bytes keep their order, and as many of them may be under way as a real
network of that length would hold.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress

_PIECE = 2**18  # bytes read at once
_UNDER_WAY = 2**28  # bytes in one direction of a connection


class Network:
    """The proxy, as seen by those who use it; returns from a method once it holds."""

    def __init__(self, target: str, delay: float = 0.0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = f"127.0.0.1:{self._read()}"
        if delay:
            self.delay(delay)

    def delay(self, seconds: float) -> None:
        """How much later bytes arrive, each way; those under way keep theirs."""
        self._do("delay", seconds)

    def stall(self) -> None:
        """Forward nothing; connections are accepted and stay open."""
        self._do("stall", True)

    def flow(self) -> None:
        """Forward again."""
        self._do("stall", False)

    def cut(self) -> int:
        """Close all connections, with what is under way; how many there were."""
        return self._do("cut")

    def refuse(self) -> None:
        """Accept no more connections."""
        self._do("refuse")

    def accept(self) -> None:
        """Accept connections again, at the same port."""
        self._do("accept")

    def retarget(self, target: str) -> None:
        """Where new connections go."""
        self._do("retarget", target)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _do(self, name: str, *arguments: object) -> int:
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> int:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("The proxy has ended.")
        return json.loads(line)


class _Proxy:
    """What runs in the process."""

    def __init__(self, target: str) -> None:
        self.retarget(target)
        self.seconds = 0.0
        self.flowing = threading.Event()
        self.flowing.set()
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._port = 0
        self.accept()

    def run(self) -> None:
        _say(self._port)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            _say(getattr(self, name)(*arguments) or 0)

    def delay(self, seconds: float) -> None:
        self.seconds = seconds

    def stall(self, yes: bool) -> None:
        self.flowing.clear() if yes else self.flowing.set()

    def retarget(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)

    def cut(self) -> int:
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            link.cut()
        return len(links)

    def refuse(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._acceptor.join()

    def accept(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=128)
        self._port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._acceptor.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                service = socket.create_connection(self._target, timeout=5)
            except OSError:
                _reset(client)
                continue
            service.settimeout(None)
            link = _Link(self, client, service)
            with self._lock:
                self._links.add(link)
            link.start()

    def forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)


class _Link:
    """A connection: two lines of bytes."""

    def __init__(self, proxy: _Proxy, client: socket.socket, service: socket.socket) -> None:
        self._proxy = proxy
        self._sockets = client, service
        self._ends = 0
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = [_Line(proxy, client, service, self), _Line(proxy, service, client, self)]

    def start(self) -> None:
        for line in self._lines:
            line.start()

    def cut(self) -> None:
        for each in self._sockets:
            _reset(each)
        for line in self._lines:
            line.end()

    def line_ended(self) -> None:
        self._ends += 1
        if self._ends == len(self._lines):
            self._proxy.forget(self)
            for each in self._sockets:
                each.close()


class _Line:
    """One direction: a thread puts bytes on the line, another takes them off when their time has come."""

    def __init__(self, proxy: _Proxy, source: socket.socket, sink: socket.socket, link: _Link) -> None:
        self._proxy = proxy
        self._source, self._sink, self._link = source, sink, link
        self._changed = threading.Condition()
        self._line: deque[tuple[float, memoryview]] = deque()
        self._under_way = 0
        self._ended = False

    def start(self) -> None:
        for target in (self._put, self._take):
            threading.Thread(target=target, daemon=True).start()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._line.clear()
            self._under_way = 0
            self._changed.notify_all()

    def _put(self) -> None:
        with suppress(OSError):
            while True:
                piece = memoryview(bytearray(_PIECE))
                size = self._source.recv_into(piece)
                with self._changed:
                    self._line.append((time.monotonic() + self._proxy.seconds, piece[:size]))
                    self._under_way += size
                    self._changed.notify_all()
                    if not size:
                        return
                    self._changed.wait_for(lambda: self._under_way < _UNDER_WAY or self._ended)
                    if self._ended:
                        return

    def _take(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._line or self._ended)
                    if self._ended:
                        return
                    due, piece = self._line[0]
                while (left := due - time.monotonic()) > 0:
                    time.sleep(left)
                self._proxy.flowing.wait()
                with self._changed:
                    if self._ended:
                        return
                    self._line.popleft()
                if not len(piece):
                    self._sink.shutdown(socket.SHUT_WR)
                    return
                self._sink.sendall(piece)
                with self._changed:
                    self._under_way -= len(piece)
                    self._changed.notify_all()
        except OSError:
            _reset(self._source)
        finally:
            self._link.line_ended()


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes the threads that use it
    connection.close()


def _say(answer: int) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _Proxy(sys.argv[1]).run()
