"""A Ray cluster of two machines: this one, and a network namespace that does not see some folder."""

import json
import os
import secrets
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from engine_helpers import token_settings
from launch_helpers import PATIENCE, wait_until
from processes import kill

STORE = str(80 << 20)
_STARTED = 3 * PATIENCE  # seconds that a node of Ray may take, on a busy machine
RAY = str(Path(sys.executable).with_name("ray"))


def can_make_namespaces():
    """Whether this user may, and the tools are there."""
    try:
        done = subprocess.run(["unshare", "-m", "-n", "ip", "link"], capture_output=True)
    except FileNotFoundError:
        return False
    return os.geteuid() == 0 and done.returncode == 0


def ip(*words):
    subprocess.run(["ip", *words], check=True)


@contextmanager
def namespace(name, here, there):
    """A network namespace with one address, which this machine reaches from another one."""
    ip("netns", "add", name)
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
        ip("link", "set", f"{name}b", "netns", name)
        ip("addr", "add", f"{here}/24", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        for words in (["addr", "add", f"{there}/24", "dev", f"{name}b"], ["link", "set", f"{name}b", "up"]):
            ip("-n", name, *words)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "route", "add", "default", "via", here)
        yield
    finally:
        ip("netns", "del", name)


@contextmanager
def node(command, log, environment):
    """A Ray node that ends with the context."""
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


COMMON = ["--num-cpus=16", f"--object-store-memory={STORE}", "--block", "--disable-usage-stats"]


def join(address, ip_address, **resources):
    """The command of a node that joins a cluster, at an address of its own."""
    return [
        *(RAY, "start", f"--address={address}", f"--node-ip-address={ip_address}", *COMMON),
        f"--resources={json.dumps(resources)}",
    ]


@contextmanager
def one_more_node(folder, address, environment, **resources):
    """A node of this machine, beside its first one."""
    host = address.partition(":")[0]
    with node(join(address, host, **resources), folder / "more.log", environment):
        wait_until(lambda: "Ray runtime started" in (folder / "more.log").read_text(), "the node", _STARTED)
        yield


def launched_far(number):
    """Words before a command that runs it on the second machine, where Ray does not see the first one."""
    [first] = _raylets(f"10.77.{number}.1")
    hide = f'mount -t tmpfs none /proc/{first} && exec "$@"'
    return ["ip", "netns", "exec", f"kv{number}", "unshare", "-m", "sh", "-c", hide, "sh"]


def _raylets(address):
    """The process ids of raylets at an address."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            program, *words = path.read_text(errors="replace").split("\0")
            if program.endswith("/raylet") and f"--node_ip_address={address}" in words:
                found.append(path.parent.name)
    return found


def kill_far(number):
    """Kill all processes of the second machine; their ids."""
    pids = [int(pid) for pid in subprocess.check_output(["ip", "netns", "pids", f"kv{number}"]).split()]
    for pid in pids:
        kill(pid)
    return pids


@contextmanager
def two_machines(folder, hidden, number):
    """The address of the cluster, that of its second machine, which has the resource `far`, and the
    environment of programs that connect to it. Of the resource `room`, the first one has 2, the other 1.

    The cluster has a token of its own: all its processes must have the same, and it is not that of the user.
    """
    token = folder / "ray-token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    environment = {**os.environ, **token_settings(token)}
    here, there = f"10.77.{number}.1", f"10.77.{number}.2"
    address = f"{here}:6390"
    head = [RAY, "start", "--head", f"--node-ip-address={here}", "--port=6390", "--include-dashboard=false"]
    head += [*COMMON, '--resources={"near": 1, "room": 2}', f"--ray-client-server-port={20000 + number}"]
    without = f'mount -t tmpfs none "{hidden}" && exec "$@"'
    elsewhere = ["ip", "netns", "exec", f"kv{number}", "unshare", "-m", "sh", "-c", without, "sh"]
    far = [*elsewhere, *join(address, there, far=1, room=1)]
    with ExitStack() as stack:
        stack.enter_context(namespace(f"kv{number}", here, there))
        stack.enter_context(node(head, folder / "head.log", environment))
        wait_until(lambda: "Ray runtime started" in (folder / "head.log").read_text(), "the head", _STARTED)
        stack.enter_context(node(far, folder / "node.log", environment))
        wait_until(lambda: "Ray runtime started" in (folder / "node.log").read_text(), "the node", _STARTED)
        yield address, there, environment
