"""Services to call, here and in a process of their own: `python wire_helpers.py PORT-OR-HOST`."""

import os
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import numpy as np
from forked_programs import ForkedProgram

from karvan.job.address import split_address
from karvan.wire import Message, Security, Server, Service
from karvan.wire.schema import Plain


class Counting(Service):
    """Gives back what it gets, and counts what was done for whom, in which order."""

    name = "counting"
    hello = Plain()  # and calls that bring whatever a test wants

    def __init__(self):
        self.done = {}
        self.gate = threading.Event()
        self.entered = threading.Event()

    def welcome(self, caller):
        return {"hello": caller.hello.get("who")}

    def answer(self, call, caller):
        match call.head["method"]:
            case "echo":
                self.done.setdefault(caller.session, []).append(call.head.get("n"))
                return Message({"n": call.head.get("n")}, call.arrays)
            case "sum":
                self.done.setdefault(caller.session, []).append(call.head.get("n"))
                return Message({"sum": int(sum(a.astype(np.int64).sum() for a in call.arrays))})
            case "sleep":
                time.sleep(call.head["seconds"])
                self.done.setdefault(caller.session, []).append("sleep")
                return Message({})
            case "gate":
                self.entered.set()
                self.gate.wait(30)
                return Message({})
            case "big":
                return Message({}, [np.zeros(call.head["size"], np.uint8)])
            case "fail" if call.head["kind"] == "own":
                from karvan.checkpoint import CheckpointError  # with torch, which takes seconds

                raise CheckpointError("step-7", "expected a whole one, got half of it.")
            case "fail":
                raise {"key": KeyError, "value": ValueError, "other": ZeroDivisionError}[call.head["kind"]](
                    "so"
                )
            case "unfit":
                return (
                    Message({"x": object()}) if call.head["what"] == "head" else Message({}, [np.array("x")])
                )
        return super().answer(call, caller)


class Process:
    """A counting service in a process of its own, at a port or a socket file."""

    def __init__(self, port=0, environment=None):
        streams = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE}
        environment = {**os.environ, **(environment or {})}
        self._process = ForkedProgram([sys.executable, __file__, str(port)], env=environment, **streams)
        self.address = self._process.stdout.readline().strip()
        self.port = split_address(self.address)[1]

    def memory(self):
        """Resident bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(status.split("VmRSS:")[1].split()[0])

    def threads(self):
        """How many it has."""
        return len(os.listdir(f"/proc/{self._process.pid}/task"))

    def kill(self):
        self._process.kill()
        return self._process.communicate()[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def wait_for(condition, seconds=60.0):
    due = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < due, "waited in vain"
        time.sleep(0.005)
    return value


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO)
    at = {"port": int(sys.argv[1])} if sys.argv[1].isdigit() else {"host": sys.argv[1]}
    server = Server(Counting(), **at, security=Security.from_environment())
    print(server.address, flush=True)
    sys.stdin.read()
