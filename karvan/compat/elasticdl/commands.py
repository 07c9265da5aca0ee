"""The strategies: a command as a job of `karvan launch`, whose workers are trainers.

| strategy | job |
|---|---|
| ParameterServerStrategy | mode sync: a step has the gradients of all workers that are there |
| with --use_async | mode async: each worker pulls and pushes dense parameters on its own |
| with --grads_to_wait of another number than all workers, or --sync_version_tolerance | mode async whose \
servers collect that many gradients for a step and reject stale ones; the number of workers is fixed |
| AllreduceStrategy, --job_command | mode sync without servers |

But for the third, workers lease records and may come and go.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from karvan.compat.elasticdl import training
from karvan.compat.elasticdl.common import MINIBATCHES_PER_TASK, NUM_EPOCHS, DistributionStrategy
from karvan.compat.elasticdl.contract import ContractError
from karvan.compat.elasticdl.flags import environment_of, parse, parse_job_command
from karvan.compat.elasticdl.readers import account_variables
from karvan.compat.elasticdl.training import checkpoint_folder
from karvan.compat.programs import environment
from karvan.errors import OK
from karvan.launch.job_spec import JobSpec
from karvan.launch.launcher import Launcher
from karvan.launch.role_commands import commands_of
from karvan.settings import SettingsError

COMMANDS = ("train", "evaluate", "predict")
_WORKER = Path(__file__).with_name("worker.py")


def run(command: str, words: Sequence[str]) -> int:
    """Run a command of this name; returns its exit code."""
    if command == "train" and any(word.startswith("--job_command") for word in words):
        return launch_program(parse_job_command(words))
    flags = parse(command, words)
    code = OK
    with environment(environment_of(flags.envs)):
        if flags.distribution_strategy == DistributionStrategy.LOCAL:
            _run_here(command, flags)
        else:
            code = launch(command, flags, words)
        if command == "train" and code == OK:
            training.export(flags)
    return code


def work(arguments: Sequence[str]) -> None:
    """Run a command as a worker of a job, which `launch` has started.

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
    with environment(account_variables(os.environ)):
        training.run(command, flags)


def launch(command: str, flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a command as a job to its end; returns its exit code."""
    return _run(make_spec(command, flags, words))


def make_spec(command: str, flags: argparse.Namespace, words: Sequence[str]) -> JobSpec:
    """The job of a command."""
    workers, variables = flags.num_workers, environment_of(flags.envs)
    trainers: dict[str, Any] = {"replicas": workers, "args": [command, *words], "env": variables}
    servers = {"replicas": flags.num_ps_pods, "env": variables}
    job: dict[str, Any] = {"name": flags.job_name, "entry": _WORKER, "mode": "sync"}
    if command == "evaluate":  # whose metrics are those of fixed shares of the data
        job["sharding"] = "static"
    elif waits_for_some(command, flags):
        tolerance = flags.sync_version_tolerance or 0
        job |= {
            "sharding": "static",
            "mode": "async",
            "dense": {"grads_to_wait": flags.grads_to_wait or workers, "tolerance": tolerance},
        }
    else:
        job["sharding"] = "dynamic"
        trainers |= {"min": 1, "max": workers}
        if command == "train" and flags.use_async:
            dense = {"lr_staleness": flags.lr_staleness_modulation, "pull_every": flags.get_model_steps}
            job |= {"mode": "async", "dense": dense}
        if flags.distribution_strategy == DistributionStrategy.ALLREDUCE:
            servers = {"replicas": 0}
    job["roles"] = {"trainers": trainers, "parameter_servers": servers}
    if command == "train" and (folder := checkpoint_folder(flags)):
        job["checkpoints"] = folder
    try:
        return JobSpec.model_validate(job)
    except (ValueError, SettingsError) as error:
        raise ContractError(f"The flags describe no job that can be run: {error}") from error


def launch_program(flags: argparse.Namespace) -> int:
    """Run the program of --job_command as a job to its end; returns its exit code."""
    return _run(make_program_spec(flags))


def make_program_spec(flags: argparse.Namespace) -> JobSpec:
    """The job of a program: workers that come and go, and share records and gradients by elasticai_api."""
    workers = flags.num_workers
    variables = {
        "WORKER_NUM": str(workers),
        NUM_EPOCHS: str(flags.num_epochs),
        MINIBATCHES_PER_TASK: str(flags.num_minibatches_per_task),
        **environment_of(flags.envs),
    }
    trainers = {"min": 1, "max": workers, "replicas": workers, "args": flags.program}
    job = {
        **{"name": flags.job_name, "entry": _WORKER, "mode": "sync", "sharding": "dynamic"},
        "roles": {"trainers": {**trainers, "env": variables}, "parameter_servers": {"replicas": 0}},
    }
    return JobSpec.model_validate(job)


def _run(spec: JobSpec) -> int:
    outcome = Launcher(spec, commands_of(spec)).run()
    assert outcome is not None  # only a detached job has none
    if outcome.failure is not None:
        print(f"error: {outcome.failure}", file=sys.stderr)
    return outcome.code


def waits_for_some(command: str, flags: argparse.Namespace) -> bool:
    """Whether a step has the gradients of so many workers, instead of all that are there."""
    if command != "train" or flags.use_async:
        return False
    return flags.grads_to_wait not in (None, flags.num_workers) or flags.sync_version_tolerance is not None
