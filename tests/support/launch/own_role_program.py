"""A job with a role of its own, "adder": `python own_role_program.py job FOLDER`.

Its trainer has each of two adders add two numbers, lets the first one end, and asks the next one, which
replaces it. It writes what they say to FOLDER/sums.
"""

import os
import sys
from functools import partial
from pathlib import Path

from bare_jobs import NoGroup, NoWork
from own_role import ADDER

from karvan.cli.main import main
from karvan.discovery.directory import directory_from_environment
from karvan.discovery.registry import Registry
from karvan.job.environment import JobEnvironment
from karvan.launch.engines.local import LocalEngine
from karvan.launch.health import Timing
from karvan.launch.job_spec import JobSpec
from karvan.launch.merged_logs import MergedLogs
from karvan.launch.role_programs import commands_of
from karvan.launch.supervisor import Supervisor
from karvan.wire import Client, Endpoint, Message, Service, WireError, endpoints
from karvan.wire.schema import Call, Head, table_of


class Add(Head):
    left: int
    right: int


class Sum(Head):
    sum: int


ADD = Call("add", Add, answer=Sum)
END = Call("end")


class Adder(Service):
    def __init__(self, settings):
        self.name = settings.name
        self.endpoints = endpoints(
            table_of(ADD, END), Endpoint(ADD, self._add), Endpoint(END, lambda request: os._exit(1))
        )

    def _add(self, request):
        return Message(Sum(sum=request.head.left + request.head.right))

    def close(self):
        pass


def make(settings):
    return Adder(settings)


def sum_of(addresses, index):
    with Client(f"adder {index}", partial(addresses.find, ADDER, index), forgetful=True) as adder:
        return adder.call(ADD, Add(left=index, right=40)).head.sum


def train(folder):
    addresses = directory_from_environment()
    count = JobEnvironment.read().counts[ADDER]
    sums = [sum_of(addresses, index) for index in range(count)]
    before = addresses.find(ADDER, 0)
    try:
        with Client("adder 0", before, forgetful=True, patience=0.5) as adder:
            adder.call(END, deadline=1.0)
    except WireError:
        pass
    while addresses.find(ADDER, 0) == before:
        pass
    (folder / "sums").write_text(str([*sums, sum_of(addresses, 0)]))


def run_job(folder):
    roles = {"trainers": 1, "parameter_servers": 0, "adders": {"replicas": 2, "threads": 1}}
    job = {"name": "sums", "entry": "train.py", "sharding": "dynamic", "roles": roles}
    spec = JobSpec.model_validate(job)
    commands = {
        role: (sys.executable, __file__, *(command[4:] if role is ADDER else ("train", str(folder))))
        for role, command in commands_of(spec).items()
    }
    registry = Registry(replicas={role: spec.of_role(role).most for role in commands})
    logs = MergedLogs()
    engine = LocalEngine(logs.write, folder)
    parts = spec, engine, registry, logs, commands, NoWork(), NoGroup()
    outcome = Supervisor(*parts, Timing(backoff=0.01)).run()
    registry.close()
    return outcome.code


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "role":
        sys.exit(main([verb, *words]))
    sys.exit(train(Path(words[0])) if verb == "train" else run_job(Path(words[0])))
