"""The commands of ElasticDL: train, evaluate, predict."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from karvan.compat.elasticdl import training
from karvan.compat.elasticdl.constants import DistributionStrategy
from karvan.compat.elasticdl.flags import environment_of, parse, parse_job_command
from karvan.compat.elasticdl.job import launch, launch_program
from karvan.compat.elasticdl.tables import account_variables
from karvan.exit_codes import OK

COMMANDS = ("train", "evaluate", "predict")


def run(command: str, words: Sequence[str]) -> int:
    """Run a command of this name; returns its exit code."""
    if command == "train" and any(word.startswith("--job_command") for word in words):
        return launch_program(parse_job_command(words))
    flags = parse(command, words)
    code = OK
    with _environment(environment_of(flags.envs)):
        if flags.distribution_strategy == DistributionStrategy.LOCAL:
            _run_here(command, flags)
        else:
            code = launch(command, flags, words)
        if command == "train" and code == OK:
            training.export(flags)
    return code


def work(arguments: Sequence[str]) -> None:
    """Run a command as a worker of a job, which `job.launch` has started.

    Servers add the gradients of rows up over workers, as those of ElasticDL do; dense ones are averaged.
    """
    import karvan

    command, *words = arguments
    flags: argparse.Namespace = parse(command, words)
    servers = command == "evaluate" or flags.distribution_strategy == DistributionStrategy.PARAMETER_SERVER
    if servers:
        karvan.connect("remote", grad_reduce="sum")
    else:
        karvan.connect("sharded")
    _run_here(command, flags)


def _run_here(command: str, flags: argparse.Namespace) -> None:
    with _environment(account_variables(os.environ)):
        training.run(command, flags)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
