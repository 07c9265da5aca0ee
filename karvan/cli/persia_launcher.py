"""`persia-launcher`: the roles of a PERSIA job, started one by one, in any order.

Each becomes a role of Karvan, which finds the others through the registry at PERSIA_NATS_URL (or
PERSIA_NATS_IP): `karvan role master --port 4222 --checkpoints FOLDER` in place of nats-server.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import typer

from karvan.cli.main import main as run_command
from karvan.compat.persia.config import (
    EMBEDDING_CONFIG,
    GLOBAL_CONFIG,
    publish_slots,
    read_global_config,
    read_slots,
)
from karvan.compat.persia.env import PERSIA_LAUNCHER_VERBOSE, join_job, log_level, wait_for_roles
from karvan.compat.persia.helper import end_processes, start_process
from karvan.errors import OK, USAGE
from karvan.job.environment import set_variables
from karvan.job.roles import Role
from karvan.launch.role_programs import module_command
from karvan.process_end import handling

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_INDEX = typer.Option(0, envvar="REPLICA_INDEX", help="The index of this process within its role.")
_SIZE = typer.Option(1, envvar="REPLICA_SIZE", help="How many processes of this role the job has.")
_EMBEDDING = typer.Option(None, envvar=EMBEDDING_CONFIG, help="The path of embedding_config.yml.")
_GLOBAL = typer.Option(None, envvar=GLOBAL_CONFIG, help="The path of global_config.yml.")
_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_POLL = 0.2  # seconds between two looks at the processes


@app.command("nn-worker", context_settings={"ignore_unknown_options": True})
def nn_worker(
    filepath: str = typer.Argument(..., envvar="PERSIA_NN_WORKER_ENTRY", help="The program."),
    arguments: list[str] = typer.Argument(None, help="Those of the program."),
    nproc_per_node: int = typer.Option(1, min=1, help="How many trainers this machine has."),
    node_rank: int = typer.Option(0, min=0, help="The index of this machine."),
    nnodes: int = typer.Option(1, min=1, help="How many machines the job has."),
) -> None:
    """Run trainers, each with the same program."""
    _join(Role.TRAINER, 0, nproc_per_node * nnodes)
    os.environ.update(WORLD_SIZE=str(nproc_per_node * nnodes), LOCAL_WORLD_SIZE=str(nproc_per_node))
    ranks = [
        {"RANK": str(node_rank * nproc_per_node + local), "LOCAL_RANK": str(local)}
        for local in range(nproc_per_node)
    ]
    words = _program(filepath, arguments)
    if nproc_per_node == 1:
        os.environ.update(ranks[0])
        _continue_as(words)
    raise typer.Exit(_run_together(words, ranks))


@app.command("data-loader", context_settings={"ignore_unknown_options": True})
def data_loader(
    filepath: str = typer.Argument(..., envvar="PERSIA_DATALOADER_ENTRY", help="The program."),
    arguments: list[str] = typer.Argument(None, help="Those of the program."),
    replica_index: int = _INDEX,
    replica_size: int = _SIZE,
) -> None:
    """Run a loader's program."""
    _join(Role.LOADER, replica_index, replica_size)
    os.environ.update(REPLICA_INDEX=str(replica_index), REPLICA_SIZE=str(replica_size))
    _continue_as(_program(filepath, arguments))


@app.command("embedding-worker")
def embedding_worker(
    port: int = typer.Option(8887, help="The port; 0 is any."),
    embedding_config: str = _EMBEDDING,
    global_config: str = _GLOBAL,
    replica_index: int = _INDEX,
    replica_size: int = _SIZE,
) -> None:
    """Run an embedding worker until it is stopped."""
    _join(Role.EMBEDDING_WORKER, replica_index, replica_size, port)
    _configure(Role.EMBEDDING_WORKER, embedding_config, global_config)
    wait_for_roles(Role.PARAMETER_SERVER)
    if embedding_config:
        publish_slots(embedding_config)
    _continue_as(["role", Role.EMBEDDING_WORKER])


@app.command("embedding-parameter-server")
def embedding_parameter_server(
    port: int = typer.Option(8888, help="The port; 0 is any."),
    embedding_config: str = _EMBEDDING,
    global_config: str = _GLOBAL,
    replica_index: int = _INDEX,
    replica_size: int = _SIZE,
) -> None:
    """Run a parameter server until it is stopped; it saves below KARVAN_CHECKPOINTS."""
    _join(Role.PARAMETER_SERVER, replica_index, replica_size, port)
    _configure(Role.PARAMETER_SERVER, embedding_config, global_config)
    _continue_as(["role", Role.PARAMETER_SERVER])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    try:
        code = app(args=arguments, prog_name="persia-launcher", standalone_mode=False)
    except typer.Exit as end:
        return end.exit_code
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except Exception as error:
        if not hasattr(error, "format_message"):  # that of typer's errors of usage
            raise
        print(f"error: {error.format_message()}", file=sys.stderr)
        return USAGE
    return code if isinstance(code, int) else OK


def _join(role: Role, index: int, count: int, port: int | None = None) -> None:
    set_variables(os.environ, {"role": role, "index": index, "count": count, "port": port})
    if not join_job():
        raise ValueError(
            "Expected the address of the job's registry in PERSIA_NATS_URL, such as localhost:4222, got "
            "none. The registry takes the place of NATS. Start one: karvan role master --port 4222 "
            "--checkpoints FOLDER."
        )


def _configure(role: Role, embedding_config: str | None, global_config: str | None) -> None:
    if embedding_config:  # for its errors; trainers tell workers and servers what they need
        read_slots(embedding_config)
    os.environ.update(read_global_config(global_config).variables(role))
    logging.basicConfig(level=log_level(), format=_FORMAT)


def _program(filepath: str, arguments: Sequence[str] | None) -> list[str]:
    return ["run", "--as", "persia", filepath, *(arguments or ())]


def _continue_as(words: list[str]) -> NoReturn:
    """Run a command of Karvan in this process, in its own right."""
    _tell(["karvan", *words])
    raise typer.Exit(run_command(words))


def _tell(words: Sequence[str]) -> None:
    if PERSIA_LAUNCHER_VERBOSE:
        print(f"execute command: {shlex.join(words)}", file=sys.stderr, flush=True)


def _run_together(words: Sequence[str], ranks: Sequence[dict[str, str]]) -> int:
    """Run a command several times at once; the exit code of the first that fails, which ends the others."""
    _tell(module_command("karvan", *words))
    processes = [start_process(words, rank) for rank in ranks]

    def stop(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    try:
        with handling(dict.fromkeys((signal.SIGTERM, signal.SIGINT), stop)):
            while True:
                codes = [process.poll() for process in processes]
                failed = next((code for code in codes if code), None)
                if failed is not None or all(code == 0 for code in codes):
                    return failed or OK
                time.sleep(_POLL)
    finally:
        end_processes(processes, signal.SIGTERM)
