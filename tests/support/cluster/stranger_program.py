"""A hostile neighbour: `python stranger_program.py`, which turns into uid nobody and attacks ports.

A line of its input is a list of addresses to attack from then on; the end of the input ends it. It
connects, sends garbage, holds idle connections, calls services without a token and with a wrong one, and
talks to each port as to torch's TCPStore, to overwrite what ranks have told each other and to fill memory.
At the end it prints what it achieved, as JSON.
"""

import encodings.idna  # noqa: F401  imports come first: the interpreter's folder may be closed to other users
import json
import os
import random
import socket
import struct
import sys
import threading
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from karvan.distributed.wire_store import WireStore
from karvan.job.address import join_address, split_address
from karvan.wire import Client, RefusedError, Security, WireError

NOBODY = 65534
_SECONDS = 0.5  # for a connection
_HELD = 100  # idle connections at a time

done = Counter()
held = []


def connect(host, port):
    if host.startswith("unix:"):
        made = socket.socket(socket.AF_UNIX)
        made.connect(host.removeprefix("unix:"))
    else:
        made = socket.create_connection((host, port), _SECONDS)
    done[f"connected {join_address(host, port)}"] += 1
    return made


def send_garbage(host, port):
    """Bytes that mean nothing, the beginning of HTTP/2, and numbers with which gloo's pairs begin."""
    draw = random.Random()
    for data in (
        draw.randbytes(draw.randint(1, 5000)),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(200),
        struct.pack("=Q", draw.randint(0, 20)) + draw.randbytes(100),
    ):
        with connect(host, port) as one:
            one.sendall(data)


def hold_idle(host, port):
    for _ in range(5):
        held.append(connect(host, port))
    while len(held) > _HELD:
        held.pop(0).close()


def call_services(host, port):
    address = join_address(host, port)
    for security in (Security(), Security(token="guessed-by-a-stranger")):
        for method, head in (
            ("members", {}),
            ("save", {"folder": "/tmp/stranger"}),
            ("begin", {"generation": 10**9}),
        ):
            peer = Client("stranger", address, security, patience=2.0, forgetful=True)
            with suppress(RefusedError, WireError, RuntimeError, ValueError):
                peer.call(method, head, deadline=2.0)
                done["answered"] += 1
            peer.close()
        store = WireStore(address, 0, security, timeout=2.0)
        with suppress(RefusedError, RuntimeError, ValueError):
            store.set("karvan/hello/0", b"overwritten")
            done["set"] += 1
        store.close()


def use_torch_store(host, port):
    """As a client of torch's TCPStore, which asks for no token."""
    with connect(host, port):  # torch itself tries for a minute
        pass
    with suppress(RuntimeError, ValueError):
        store = dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False
        )
        done["torch store"] += 1
        for rank in range(4):
            store.set(f"karvan/hello/{rank}", "overwritten")
        for number in range(50):
            store.set(f"filled/{number}", "x" * 4_000_000)
        done["torch store set"] += 1


def attack(ports, ended):
    try:
        attack_in_rounds(ports, ended)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def attack_in_rounds(ports, ended):
    rounds = 0
    with ThreadPoolExecutor(16) as pool:
        while not ended.is_set():
            list(pool.map(attack_port, list(ports)))
            if ports:
                rounds += 1
                print(f"round {rounds}", flush=True)
            ended.wait(0.05)


def attack_port(address):
    host, port = split_address(address)
    for way in (send_garbage, hold_idle, call_services, use_torch_store):
        with suppress(OSError):
            way(host, port)


def main():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    ports, ended = [], threading.Event()
    print("ready", flush=True)
    attacker = threading.Thread(target=attack, args=(ports, ended), daemon=True)
    attacker.start()
    for line in sys.stdin:
        ports[:] = json.loads(line)
    ended.set()
    attacker.join(30)
    print(json.dumps(done), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
