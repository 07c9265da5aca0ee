"""Services at socket files: private to their user, taken over from the dead and never from the living."""

import os
import signal
import socket
import stat
import subprocess
import sys
from subprocess import PIPE

import pytest
from forked_programs import ForkedProgram
from neighbour import needs_root, run_as_neighbour
from wire_helpers import Counting, Process, wait_for

from karvan.job.address import shut_connections, split_address
from karvan.wire import Client, ListenError, Security, Server, WireError

TOKEN = "a-token-of-sufficient-length"


@pytest.fixture
def host(tmp_path):
    (tmp_path / "run").mkdir(0o700)
    return f"unix:{tmp_path}/run/one.sock"


def test_a_service_answers_at_a_socket_file_which_goes_with_it(host):
    security = Security(token=TOKEN)
    with Server(Counting(), host, security=security) as server:
        assert server.address == host
        with Client("counting", server.address, security) as peer:
            assert peer.call("ping").head["service"] == "counting"
        path = host.removeprefix("unix:")
        assert stat.S_ISSOCK(os.stat(path).st_mode)
    assert not os.path.exists(path)


def test_tls_is_not_used_at_a_socket_file(host):
    both = Security(token=TOKEN, ca=b"no certificate")
    with Server(Counting(), host, security=both) as server, Client("counting", server.address, both) as peer:
        assert peer.call("ping").head["service"] == "counting"


def test_a_restarted_service_takes_over_the_file_of_a_killed_one_and_is_found_again(host):
    with Process(host) as first, Client("counting", host, forgetful=True) as peer:
        assert first.address == host
        peer.call("ping")
        first.kill()
        assert os.path.exists(host.removeprefix("unix:"))
        with Process(host):
            assert peer.call("ping").head["service"] == "counting"
        assert peer.connections == 2


def test_the_file_of_a_service_that_lives_is_not_taken(host):
    with Server(Counting(), host) as server:
        with pytest.raises(
            ListenError, match=f"listen at {host}, got: .*process {os.getpid()} listens there"
        ):
            Server(Counting(), host)
        with Client("counting", server.address) as peer:
            assert peer.call("ping").head["service"] == "counting"


FORKS = """
import os, sys, time
from karvan.wire import Server
from wire_helpers import Counting
server = Server(Counting(), sys.argv[1])
child = os.fork()
if child == 0:
    time.sleep(1000)
print(child, flush=True)
sys.stdin.read()
"""


def test_a_fork_of_a_dead_service_does_not_keep_its_file(host):
    process = ForkedProgram([sys.executable, "-c", FORKS, host], stdin=PIPE, stdout=PIPE)
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait(60)
        with socket.socket(socket.AF_UNIX) as orphan:
            orphan.connect(host.removeprefix("unix:"))  # the child holds it open
        with Server(Counting(), host) as server, Client("counting", server.address) as peer:
            assert peer.call("ping").head["service"] == "counting"
    finally:
        os.kill(child, signal.SIGKILL)


ENDS = """
import os, sys
from karvan.wire import Client, Server
from wire_helpers import Counting
server = Server(Counting(), sys.argv[1])
child = os.fork()
if child == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
with Client("counting", server.address) as peer:
    print(peer.call("ping").head["service"])
"""


def test_a_fork_that_ends_neither_hangs_nor_takes_the_file_of_its_parent_away(host):
    command = [sys.executable, "-W", "ignore", "-c", ENDS, host]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("counting\n", "")


def test_a_folder_that_others_may_enter_is_refused_by_service_and_caller(tmp_path):
    tmp_path.chmod(0o755)
    host = f"unix:{tmp_path}/one.sock"
    with pytest.raises(ValueError, match=r"expects a folder of this user .* with mode 700, got .* mode 755"):
        Server(Counting(), host)
    with Client("counting", host, Security(token=TOKEN)) as peer, pytest.raises(ValueError, match="mode 700"):
        peer.call("ping")


@pytest.mark.parametrize(
    "path", ["", "relative.sock", "/with space", "/with%20escape", "/with,comma", "/a\n"]
)
def test_a_path_that_a_list_or_a_line_cannot_hold_is_refused(path):
    with pytest.raises(ValueError, match="socket file expects an absolute path"):
        split_address(f"unix:{path}")


def test_a_service_that_is_not_there_yet_is_waited_for(host):
    with Client("counting", host) as peer:
        reply = peer.begin("ping")
        wait_for(lambda: peer._thread.is_alive())
        with Server(Counting(), host):
            assert reply.wait().head["service"] == "counting"
    with (
        Client("counting", host, deadline=0.3) as peer,
        pytest.raises(WireError, match=r"counting expected to answer 'ping' within .* got: .*No such file"),
    ):
        peer.call("ping")


ATTACK = """
import socket
import pyarrow.flight as flight
path = sys.argv[1]
try:
    socket.socket(socket.AF_UNIX).connect(path)
    print("connected")
except PermissionError:
    print("no")
try:
    list(flight.FlightClient("grpc+unix://" + path).do_action(flight.Action("x", b"0" * 2**20)))
    print("answered")
except flight.FlightUnavailableError:
    print("no")
"""


@needs_root
def test_another_user_does_not_reach_grpc_at_all(tmp_path):
    for parent in (tmp_path, *tmp_path.parents):  # all may look for it
        parent.chmod(parent.stat().st_mode | 0o011)
    (tmp_path / "run").mkdir(0o700)
    with Server(Counting(), f"unix:{tmp_path}/run/one.sock") as server:
        os.chmod(tmp_path / "run" / "one.sock", 0o777)  # the folder alone protects it
        assert run_as_neighbour(ATTACK, server.address.removeprefix("unix:")) == "no\nno\n"


def test_shutting_connections_down_leaves_no_descriptor_open():
    before = os.listdir("/proc/self/fd")
    shut_connections("127.0.0.1", 1)
    assert os.listdir("/proc/self/fd") == before
