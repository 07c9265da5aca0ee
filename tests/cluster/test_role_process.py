"""Roles as processes: how they start, are found, and end."""

import os
import re
import resource
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pyarrow as pa
import pytest
import torch
from forked_programs import ForkedProgram
from small_disk import small_disk
from support_paths import support_path

import karvan as kv
from karvan.cluster.role_process import RoleSettings, factory_of
from karvan.data.task_records import may_be_of_a_record
from karvan.discovery.directory import Directory, Membership
from karvan.discovery.registry import Registry
from karvan.errors import FAILED, TEMPORARY, is_out_of_memory, is_temporary
from karvan.job.roles import role_of
from karvan.wire import Client, RefusedError, Security, Server, Service, WireError

PROGRAM = support_path("cluster/echo_role.py")


class Role:
    """A process of `karvan role`."""

    def __init__(self, *arguments, **environment):
        command = [sys.executable, str(PROGRAM), *map(str, arguments)]
        self.process = ForkedProgram(command, stdout=PIPE, stderr=PIPE, env={**os.environ, **environment})

    def address(self):
        """What it says once it serves."""
        self.line = self.process.stderr.readline()
        return re.search(r" at (\S+:\d+)$", self.line.strip()).group(1)

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.wait()

    def wait(self):
        self.out, self.err = self.process.communicate(timeout=60)
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_role_serves_until_a_signal_even_if_a_caller_stays(number):
    with Role("loader", "--index", 1, "--count", 2, "--threads", 1) as role:
        peer = Client("loader 1", role.address())
        assert "loader 1 of 2 at 127.0.0.1:" in role.line
        assert peer.call("ping").head["service"] == "loader 1"
        assert peer.call("echo", {}, [np.arange(3)]).arrays[0].tolist() == [0, 1, 2]
        assert role.end(number) == 0
        assert role.out == "closed\n"
        assert role.err.splitlines()[-1].endswith("loader 1 ends")
        peer.close()


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        ("MemoryError", FAILED, "error: loader 0 is out of memory: no room"),
        ("OSError", TEMPORARY, "error: loader 0 cannot use its disk: no room"),
    ],
)
def test_a_role_without_memory_or_disk_ends_and_its_caller_has_lost_it(kind, code, text):
    with Role("loader") as role:
        peer = Client("loader 0", role.address(), deadline=1.0)
        with pytest.raises(WireError):
            peer.call("raise", {"kind": kind})
        assert role.wait() == code
        assert role.err.splitlines()[-1] == text


class Exhausted(Service):
    """Has no memory for another caller."""

    def __init__(self, error):
        self.error, self.seen = error, []
        self.on_exhaustion = self.seen.append

    def welcome(self, caller):
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        RuntimeError("can't start new thread"),
        pa.ArrowMemoryError("malloc of size 64 failed"),
    ],
)
def test_a_role_without_memory_for_a_caller_ends_too(error):
    """The caller would connect again and again otherwise, to a server that lives."""
    service = Exhausted(error)
    with (
        Server(service) as server,
        Client("exhausted", server.address, deadline=1.0) as peer,
        pytest.raises((WireError, RefusedError)),
    ):
        peer.call("ping")
    assert service.seen[0] is error


def test_an_array_that_no_machine_holds_is_the_fault_of_who_asks_for_it():
    assert is_out_of_memory(MemoryError("malloc of size 1048576 failed"))
    assert not is_out_of_memory(MemoryError(f"malloc of size {1 << 60} failed"))


def test_a_parameter_server_that_gets_no_more_memory_ends_before_it_answers_for_a_record():
    with Role("parameter-server", "--threads", 1) as role:
        kv.connect("remote", servers=[role.address()])
        engine = kv.EmbeddingEngine({"user": kv.Table(64)})
        engine({"user": torch.arange(10)})
        pid = role.process.pid
        used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        with ThreadPoolExecutor() as threads:
            filling = threads.submit(_fill, engine)
            assert role.wait() == FAILED
            kv.connect("memory")  # it would wait for another server
            assert not may_be_of_a_record(filling.exception())
        assert "error: parameter-server 0 is out of memory" in role.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "evict", "warns"),
    [
        (["--capacity", 10**12], {}, True),
        (["--capacity", 1000], {}, False),
        ([], {"evict": kv.eviction.LRU(10**12)}, True),
    ],
)
def test_a_parameter_server_warns_once_of_more_rows_than_memory(options, evict, warns):
    with Role("parameter-server", "--threads", 1, *options) as role:
        kv.connect("remote", servers=[role.address()])
        engine = kv.EmbeddingEngine({"user": kv.Table(64, **evict)})
        kv.optim.Adam(engine, lr=0.1)
        engine({"user": torch.arange(10)})
        kv.connect("memory")
        role.end()
    lines = [line for line in role.err.splitlines() if "WARNING" in line]
    assert len(lines) == warns
    # A row has 64 floats, twice as many of Adam, and 30 bytes in the index.
    assert all("may have 1,000,000,000,000 rows, which take 743,195 GiB, but " in line for line in lines)


def test_a_full_disk_of_checkpoints_fails_a_save_and_not_the_server(tmp_path):
    with (
        small_disk(tmp_path / "disk") as disk,
        Role("parameter-server", "--threads", 1, "--checkpoints", disk.folder) as role,
    ):
        kv.connect("remote", servers=[role.address()])
        engine = kv.EmbeddingEngine({"user": kv.Table(64)})
        engine({"user": torch.arange(1 << 14)})  # more than the disk has
        with pytest.raises(Exception, match="No space left on device") as raised:
            kv.Checkpoints(disk.folder).save(1, {}, engine).wait()
        assert is_temporary(raised.value)
        assert engine.table("user").stats()["rows"] == 1 << 14
        kv.connect("memory")
        assert role.end() == 0


def _fill(engine):
    for first in range(0, 100 << 20, 1 << 18):
        engine({"user": torch.arange(first, first + (1 << 18))})


def test_a_role_registers_and_leaves():
    registry = Registry()
    directory = Directory(registry.address)
    environment = {"KARVAN_REGISTRY": registry.address, "KARVAN_INDEX": "5", "KARVAN_COUNT": "9"}
    with Role("loader", "--index", 2, **environment) as role:  # an option comes before the variable
        address = directory.find("loader", 2, 30)
        assert address == role.address()
        peer = Client("loader 2", lambda: directory.find("loader", 2))
        assert peer.call("ping").head["service"] == "loader 2"
        assert role.end() == 0
        assert registry.healthy(role_of("loader"), 2) is None
        peer.close()
    directory.close()
    registry.close()


def test_a_role_of_an_older_generation_is_refused():
    registry = Registry()
    registry.begin_generation(4)
    newer = Membership(registry.address, "loader", 0, "h:1", generation=4)
    with Role("loader", "--registry", registry.address, "--generation", 3) as role:
        assert role.wait() == 1
        assert "generation 4, got 3" in role.err
        assert "Traceback" not in role.err
    newer.leave()
    registry.close()


def test_a_signal_ends_a_role_that_waits_for_its_registry():
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, Role("loader", "--registry", f"127.0.0.1:{silent.getsockname()[1]}") as role:
        silent.accept()
        assert role.end() == 0
        assert "Traceback" not in role.err


def test_a_port_in_use_is_told_in_a_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Role("loader", "--port", port) as role:
            assert role.wait() == 75
            assert f"loader 0 expected to listen at 127.0.0.1:{port}" in role.err
            assert "Traceback" not in role.err


def test_the_token_of_a_file_is_asked_for(tmp_path):
    (tmp_path / "token").write_text("a-token-of-16-letters\n")
    (tmp_path / "token").chmod(0o600)
    with Role("loader", "--token-file", tmp_path / "token") as role:
        address = role.address()
        with pytest.raises(RefusedError, match="token"):
            Client("loader", address).call("ping")
        peer = Client("loader", address, Security(token="a-token-of-16-letters"))
        peer.call("ping")
        peer.close()
        assert role.end() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["cook"], 2, ", loader, master, got 'cook'"),
        (["loader", "--index", "2", "--count", "2"], 2, "index 2 of 2"),
        (["loader", "--host", "0.0.0.0"], 2, "expects a loopback address"),
        (["loader", "--tls-cert", "none.pem"], 3, "none.pem"),
    ],
)
def test_wrong_options_are_told_in_a_line(arguments, code, said):
    with Role(*arguments) as role:
        assert role.wait() == code
        assert said in role.err
        assert "Traceback" not in role.err


def test_settings_come_from_the_environment():
    given = {"KARVAN_INDEX": "1", "KARVAN_COUNT": "4", "KARVAN_PORT": "7000", "KARVAN_THREADS": "2"}
    settings = RoleSettings.from_environment("loader", given)
    job = settings.job
    assert (job.index, job.count, job.port, job.threads) == (1, 4, 7000, 2)
    assert (settings.host, job.registry, job.generation) == ("127.0.0.1", "", 0)
    assert RoleSettings.from_environment("loader", {}) == RoleSettings("loader")
    with pytest.raises(ValueError, match="KARVAN_PORT expects a whole number, got 'x'"):
        RoleSettings.from_environment("loader", {"KARVAN_PORT": "x"})
    with pytest.raises(ValueError, match="parameter-server"):
        factory_of("cook")
