"""Ports for services that are restarted at the same address."""

import random
import socket
from contextlib import contextmanager


def free_port():
    """A free port that no other process gets by chance: the system gives out those from 32768 on."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as bound:
            try:
                bound.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@contextmanager
def unanswered_address():
    """An address at which nobody listens, nor can begin to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"
