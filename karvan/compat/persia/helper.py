"""`persia.helper`: a whole job on this machine, for tests; and the processes that `persia-launcher` starts.

A supervisor of `karvan launch` runs neither. The program of `ensure_persia_service` is itself a trainer of
the job, while a supervisor starts all trainers, and ends the job with them. Processes of PERSIA write to the
output of their program, not to logs of a job; none is restarted, and the first that fails is an error. They
have no mode: the DataLoader of each trainer chooses it. `nn-worker` starts trainers of a job whose registry
another process has. What is shared with jobs: roles, their environment, commands and tokens.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL
from types import TracebackType
from typing import Any, Self

from karvan import distributed
from karvan.compat.persia.config import EMBEDDING_CONFIG, GLOBAL_CONFIG, read_global_config
from karvan.compat.persia.env import dump_yaml, find_free_port
from karvan.discovery.registry import Registry
from karvan.job.environment import JobEnvironment, variable
from karvan.job.roles import Role
from karvan.launch.engines.local import ending_with_parent
from karvan.launch.role_programs import module_command
from karvan.launch.run_folder import make_token
from karvan.wire import Security

_TOKEN_FILE = variable("token_file")
_PROGRAM = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    sys.path[:] = pickle.load(file)
    pickle.load(file)()
"""


def start_process(words: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Run a command of Karvan in a process that dies with this one, with more variables than this one has."""
    command = ending_with_parent(module_command("karvan", *words))
    return subprocess.Popen(command, env={**os.environ, **variables})


def end_processes(processes: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    """Send those that run a signal, and wait until all have ended."""
    for process in processes:
        process.send_signal(number)
    for process in processes:
        process.wait()


class PersiaServiceCtx:
    """Runs parameter servers, embedding workers and a registry; inside of it, this process is a trainer.

    data_loader_func and nn_worker_func run in processes of their own, which need `cloudpickle`. Leaving the
    context waits for the trainers of nn_worker_func, and ends all processes; one that has failed is an error.
    The services ask for the token of KARVAN_TOKEN_FILE, or for a new one that is removed at the end.
    """

    def __init__(
        self,
        data_loader_func: Callable[[], Any] | None = None,
        nn_worker_func: Callable[[], Any] | None = None,
        embedding_config: Mapping[str, Any] | None = None,
        embedding_config_path: str | None = None,
        global_config: Mapping[str, Any] | None = None,
        global_config_path: str | None = None,
        data_loader_replica_num: int = 1,
        nproc_per_node: int = 1,
        embedding_worker_replica_num: int = 1,
        embedding_parameter_replica_num: int = 1,
        embedding_worker_port: int = 7777,
        embedding_parameter_server_port: int = 8888,
        nats_server_port: int = 4222,
    ) -> None:
        if (embedding_config is None) == (embedding_config_path is None):
            raise ValueError("Expected embedding_config or embedding_config_path, got both or none.")
        self._functions = {Role.LOADER: data_loader_func, Role.TRAINER: nn_worker_func}
        self._configs = {
            EMBEDDING_CONFIG: (embedding_config, embedding_config_path),
            GLOBAL_CONFIG: (global_config, global_config_path),
        }
        self._counts = {
            Role.PARAMETER_SERVER: embedding_parameter_replica_num,
            Role.EMBEDDING_WORKER: embedding_worker_replica_num,
            Role.LOADER: data_loader_replica_num if data_loader_func is not None else 0,
            Role.TRAINER: nproc_per_node,
        }
        self._ports = {
            Role.PARAMETER_SERVER: embedding_parameter_server_port,
            Role.EMBEDDING_WORKER: embedding_worker_port,
        }
        self._registry_port = nats_server_port
        self._processes: list[tuple[Role, subprocess.Popen[bytes]]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.callback(_restore, dict(os.environ))
            if not os.environ.get(_TOKEN_FILE):
                make_token(folder / "token")
                os.environ[_TOKEN_FILE] = str(folder / "token")
            port = find_free_port(self._registry_port)
            registry = Registry(port=port, security=Security.from_environment())
            stack.callback(registry.close)
            stack.callback(self._stop)
            stack.callback(distributed.disconnect)
            os.environ.update(self._variables(folder, registry.address))
            for role, port in self._ports.items():
                self._start(role, ["role", role], port)
            for role, function in self._functions.items():
                if function is not None:
                    self._start(role, _program(folder, role, function))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if error is None:
                for role, process in self._processes:
                    if role is Role.TRAINER:
                        process.wait()
            codes = [(role, process.poll()) for role, process in self._processes]
        failed = [f"{role} (exit code {code})" for role, code in codes if code]
        if error is None and failed:
            raise RuntimeError(f"Expected all processes of the job to succeed, but failed: {failed[0]}.")

    def _variables(self, folder: Path, registry: str) -> dict[str, str]:
        job = JobEnvironment(registry=registry, role=Role.TRAINER, counts=self._counts)
        variables = {"PERSIA_NATS_URL": registry, **job.variables()}
        for name, (content, path) in self._configs.items():
            if content is not None:
                path = str(folder / f"{name.lower()}.yml")
                dump_yaml(dict(content), path)
            if path is not None:
                variables[name] = path
        return variables

    def _start(self, role: Role, words: list[str], port: int | None = None) -> None:
        count = self._counts[role]
        for index in range(count):
            port = None if port is None else find_free_port(port + 1 if index else port)
            place = JobEnvironment(role=role, index=index, count=count, port=port or 0)
            variables = {**place.variables(), **read_global_config().variables(role)}
            if role is Role.TRAINER:
                variables |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(count)}
            self._processes.append((role, start_process(words, variables)))

    def _stop(self) -> None:
        end_processes([process for _, process in self._processes], SIGKILL)


def ensure_persia_service(*args: Any, **options: Any) -> PersiaServiceCtx:
    """A whole job on this machine: see `PersiaServiceCtx`."""
    return PersiaServiceCtx(*args, **options)


def _program(folder: Path, role: Role, function: Callable[[], Any]) -> list[str]:
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            "Functions of ensure_persia_service run in other processes, which needs cloudpickle: pip install "
            "cloudpickle."
        ) from error
    content, program = folder / f"{role}.pickle", folder / f"{role}.py"
    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)  # which the other process may not be able to import
    try:
        search_path = [os.path.abspath(entry) for entry in sys.path]  # "" is the current folder
        content.write_bytes(pickle.dumps(search_path) + cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    program.write_text(_PROGRAM)
    return ["run", "--as", "persia", str(program), str(content)]


def _restore(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
