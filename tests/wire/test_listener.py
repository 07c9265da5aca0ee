"""A token is shown to services of one's own user only, where nothing but a port says who they are."""

import ipaddress
import os
import socket
import subprocess
import sys

import pytest
from neighbour import NOBODY, needs_root
from wire_helpers import Counting

from karvan.wire import Client, Security, Server, WireError
from karvan.wire.security import listener
from karvan.wire.security.listener import check_listener

TOKEN = Security(token="a-token-of-the-job")
IMPOSTOR = f"""
import os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
with socket.create_server((sys.argv[1], int(sys.argv[3])), family=int(sys.argv[2])) as server:
    print(server.getsockname()[1], flush=True)
    came, _ = server.accept()
    came.settimeout(5)
    # What HTTP/2 needs to go on: an empty SETTINGS frame, and the acknowledgement of the caller's.
    came.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]) + bytes([0, 0, 0, 4, 1, 0, 0, 0, 0]))
    try:
        while data := came.recv(65536):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    except TimeoutError:
        pass
"""


class Impostor:
    """A process of another user that listens, and what callers have sent to it."""

    def __init__(self, host="127.0.0.1", port=0):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._process = subprocess.Popen(
            [sys.executable, "-c", IMPOSTOR, host, str(int(family)), str(port)], stdout=subprocess.PIPE
        )
        self.port = int(self._process.stdout.readline())

    def received(self):
        os.set_blocking(self._process.stdout.fileno(), False)
        return self._process.stdout.read() or b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()


@needs_root
def test_a_service_of_another_user_is_not_shown_the_token():
    with Impostor() as impostor:
        peer = Client("service", f"127.0.0.1:{impostor.port}", TOKEN)
        with pytest.raises(
            WireError, match=rf"uid 0\) at 127\.0\.0\.1:\d+, got one of uid {NOBODY}, to which"
        ):
            peer.call("echo", deadline=2)
        assert impostor.received() == b""


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_listeners_are_found_at_every_kind_of_address(host):
    target = "::1" if ":" in host else "127.0.0.1"
    with Impostor(host) as impostor:
        with pytest.raises(WireError, match=f"got one of uid {NOBODY}"):
            check_listener(target, impostor.port)
        expected = [(ipaddress.ip_address(host), NOBODY)]
        assert listener._ask_kernel(impostor.port) == listener._read_tables(impostor.port) == expected


@needs_root
def test_a_neighbour_at_another_address_of_the_same_port_does_not_disturb():
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
        with Impostor("::", port):
            check_listener("127.0.0.1", port)
            with pytest.raises(WireError, match=f"got one of uid {NOBODY}"):
                check_listener("::1", port)


def test_a_service_of_ones_own_is_served():
    with Server(Counting(), security=TOKEN) as server:
        peer = Client("service", server.address, TOKEN)
        assert peer.call("echo", {"n": 1}, deadline=60).head["n"] == 1
        peer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_at_which_nobody_listens_is_tried_again(host):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
        check_listener(host, port)
    with pytest.raises(WireError, match=f"nobody listens at {host}:{port}"):
        check_listener(host, port)
    peer = Client("service", f"{host}:{port}", TOKEN)
    reply = peer.begin("echo", {"n": 1}, deadline=60)
    with Server(Counting(), port=port, security=TOKEN):
        reply.wait()
        peer.close()
