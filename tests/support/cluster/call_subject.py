"""A service in this process with a valid call of each of its methods, and the way of a call through the wire.

A call is packed, written and read as messages are, then goes to `Service.answer`; its arrays are the very
memory that was given, so that AddressSanitizer sees every read beyond them.
"""

import itertools
from types import SimpleNamespace

import pyarrow as pa

import karvan as kv
from karvan.store.messages import rule_to_json, spec_to_json
from karvan.wire import Message
from karvan.wire.message import pack, read, write
from karvan.wire.schema import hello_fields
from karvan.wire.server import Caller

DIMS = {"t": 4, "u": 8}
TRAINER = {"generation": 0, "trainer": 0, "trainers": 1, "mode": "hybrid", "staleness": 4}


def spec_of(name):
    """A table as calls describe it."""
    return spec_to_json(kv.Table(DIMS[name]).spec(name, 0, 4))


def rule_of(kind):
    """An optimizer as calls describe it."""
    rule = kv.store.Rule(kind)
    rule.lr = 0.1
    return rule_to_json(rule)


class _Stream:
    """What is written can be read; nothing is copied."""

    def __init__(self):
        self._chunks = []

    def write_metadata(self, head):
        self._chunks.append(SimpleNamespace(app_metadata=pa.py_buffer(head), data=None))

    def write_with_metadata(self, batch, head):
        self._chunks.append(SimpleNamespace(app_metadata=pa.py_buffer(head), data=batch))

    def write_batch(self, batch):
        self._chunks.append(SimpleNamespace(app_metadata=None, data=batch))

    def read_chunk(self):
        return self._chunks.pop(0)


def through_the_wire(head, arrays=(), **numbers):
    """The message that a service reads when a caller sends this."""
    stream = _Stream()
    write(stream, pack(Message(head, arrays)), **numbers)
    return read(stream.read_chunk)


class Subject:
    """A service, one caller of it, and a maker of a valid call for each of its methods."""

    def __init__(self, name, service, hello):
        self.name = name
        self.service = service
        self.makers = {}
        self.refuses = {}  # calls that no caller of this kind may make, with valid heads and arrays
        self._numbers = itertools.count(1)
        self._hello = hello
        self.caller = None
        self.meet(hello)

    def meet(self, hello):
        """Say hello, as the wire would have it."""
        said = hello_fields(through_the_wire({**hello, "method": "hello"}).head)
        caller = Caller("session", self.service.hello.check(said, "the hello"))
        self.service.welcome(caller)
        self.caller = caller

    def number(self):
        """One that was not used before."""
        return next(self._numbers)

    def call(self, method, head, arrays=()):
        """Have a call done."""
        message = through_the_wire({**head, "method": method}, arrays, number=1, received=0)
        return self.service.answer(message, self.caller)

    def make(self, method):
        """Head and arrays of a valid call; what it needs has happened before."""
        return self.makers[method]()

    def hello(self):
        """A valid one."""
        return dict(self._hello)

    def fingerprint(self):
        """What must not change when a call is refused."""
        return None

    def close(self):
        self.service.close()
