"""The commands `train`, `evaluate` and `predict`: their flags, and the jobs that they are.

Flags have ElasticDL's names and defaults. One that describes pods, images or volumes has no meaning here and
is a warning; one that would change what happens, and cannot, is an error, and so is one that ElasticDL does
not have. By its strategy a command is a job of `karvan launch`, whose workers are trainers:

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
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from karvan.compat.elasticdl import training
from karvan.compat.elasticdl.contract import (
    MINIBATCHES_PER_TASK,
    NUM_EPOCHS,
    ContractError,
    DistributionStrategy,
    FunctionNames,
)
from karvan.compat.elasticdl.readers import account_variables
from karvan.compat.elasticdl.training import checkpoint_folder
from karvan.compat.programs import environment
from karvan.errors import OK
from karvan.launch.job_spec import JobSpec
from karvan.launch.launcher import Launcher
from karvan.launch.role_programs import commands_of
from karvan.settings import SettingsError

# Of pods, images and volumes: processes of a job are those of this machine.
_WITHOUT_MEANING = (
    *("image_name", "docker_image_repository", "image_base", "image_pull_policy", "extra_pypi_index"),
    *("docker_base_url", "docker_tlscert", "docker_tlskey", "namespace", "restart_policy", "volume"),
    *("cluster_spec", "cluster_spec_json", "force_use_kube_config_file", "aux_params", "log_file_path"),
    *("master_resource_request", "master_resource_limit", "master_pod_priority", "worker_pod_priority"),
    *("worker_resource_request", "worker_resource_limit", "ps_resource_request", "ps_resource_limit"),
    *("ps_pod_priority", "use_go_ps", "worker_image", "ps_image", "populate_env_names"),
    *("chief_resource_request", "chief_resource_limit", "chief_pod_priority", "num_evaluators"),
    *("evaluator_resource_request", "evaluator_resource_limit", "evaluator_pod_priority"),
    *("enable_automate_memory", "launch_worker_after_ps_running", "need_tf_config", "local_pkg_dir"),
)
_AS_EVER = "a process that ends with an error or hangs is replaced, and others do its work"
# Of how a job recovers; the values are those that mean what happens here, for others there is a warning.
_OF_RECOVERY: Mapping[str, tuple[tuple[str, ...], str]] = {
    "task_fault_tolerance": (("true",), _AS_EVER),
    "relaunch_timeout_worker": (("true",), _AS_EVER),
    "need_pod_manager": (("true",), "the launcher starts and watches the processes of a job"),
    "need_task_manager": (("true",), "records are leased from a master"),
    "relaunch_on_worker_failure": ((), _AS_EVER),
    "ps_relaunch_max_num": ((), _AS_EVER),
    "ps_is_critical": ((), _AS_EVER),
    "critical_worker_index": ((), _AS_EVER),
}
# Of training, which ElasticDL's evaluate and predict know, too.
_OF_TRAINING = ("checkpoint_dir", "checkpoint_steps", "keep_checkpoint_max", "get_model_steps")
_REFUSED = {
    "yaml": "there is no job of Kubernetes to describe: leave it out, and the job runs on this machine",
    "custom_training_loop": 'run the program: karvan run --as elasticdl train --job_command "python …"',
    "max_step": "define callbacks() that give MaxStepsStopping(n)",
}
# Of models that the commands train, which a program of --job_command does not get.
_OF_THE_PROGRAM = (
    *("training_data", "validation_data", "minibatch_size", "model_zoo", "model_def", "num_ps_pods"),
    "log_level",
    *("checkpoint_dir", "checkpoint_steps", "keep_checkpoint_max", "output", "data_reader_params"),
)
_NO_PODS = "the job runs in processes of this machine, without pods and images"
_SWITCHES = (  # the value may be left out
    *("use_go_ps", "force_use_kube_config_file", "custom_training_loop", "need_tf_config"),
    *("enable_automate_memory", "task_fault_tolerance", "relaunch_timeout_worker", "need_pod_manager"),
    *("need_task_manager", "ps_is_critical"),
)
_DEFAULTS: Mapping[str, Any] = {"num_workers": 2, "num_ps_pods": 1, "job_name": "elasticdl"}
_INITIAL = ("--checkpoint_dir_for_init", "--checkpoint_filename_for_init")  # the second is its former name
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_STRATEGIES = tuple(text for name, text in vars(DistributionStrategy).items() if name.isupper())


class FlagParser(argparse.ArgumentParser):
    """Raises an error instead of ending the program."""

    @override
    def error(self, message: str) -> NoReturn:
        raise ContractError(f"{self.prog}: {message}.")


def parse(command: str, words: Sequence[str]) -> argparse.Namespace:
    """The flags of a command, checked; flags without a meaning are warned about."""
    parser = FlagParser(f"elasticdl {command}", allow_abbrev=False, argument_default=None)
    _add_common(parser)
    {"train": _add_train, "evaluate": _add_evaluate, "predict": _add_predict}[command](parser)
    of_others = () if command == "train" else _OF_TRAINING
    _add_known(parser, (*_WITHOUT_MEANING, *_OF_RECOVERY, *_REFUSED, *of_others))
    flags = parser.parse_args(list(words))
    values = vars(flags)
    for name, reason in _REFUSED.items():
        if name in values:
            raise ContractError(f"--{name} is not supported: {reason}.")
    flags.distribution_strategy = flags.distribution_strategy or DistributionStrategy.LOCAL
    for name, reason in _without_meaning(command, flags):
        _warn(name, reason)
    values |= {name: value for name, value in _DEFAULTS.items() if values[name] is None}
    _check(flags)
    return flags


def _add_known(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    for name in names:
        bare = {"nargs": "?", "const": "true"} if name in _SWITCHES else {}
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **bare)  # type: ignore[arg-type]


def parse_job_command(words: Sequence[str]) -> argparse.Namespace:
    """The flags of `train --job_command "python program.py"`; `program`: see `_program`."""
    parser = FlagParser("elasticdl train --job_command", allow_abbrev=False)
    parser.add_argument("--job_command", required=True, help="python program.py, with its arguments")
    parser.add_argument("--num_workers", type=_count, default=_DEFAULTS["num_workers"])
    parser.add_argument("--job_name", default=_DEFAULTS["job_name"])
    parser.add_argument("--envs", default="")
    parser.add_argument("--num_epochs", type=int, default=1)  # of data shards that do not say it
    parser.add_argument("--num_minibatches_per_task", type=_count, default=8)  # too
    parser.add_argument("--custom_training_loop", type=_flag, nargs="?", const=True)  # as always here
    parser.add_argument("--need_elasticdl_job_service", type=_flag, nargs="?", const=True, default=False)
    allreduce = DistributionStrategy.ALLREDUCE
    parser.add_argument("--distribution_strategy", choices=[allreduce], default=allreduce)
    _add_known(parser, (*_WITHOUT_MEANING, *_OF_RECOVERY, *_OF_THE_PROGRAM))
    flags = parser.parse_args(list(words))
    for name, reason in _of_pods(vars(flags)):
        _warn(name, reason)
    for name in _OF_THE_PROGRAM:
        if name in vars(flags):
            _warn(name, "a program of --job_command gets its own arguments, in its command")
    if flags.custom_training_loop is False or flags.need_elasticdl_job_service:
        raise ContractError(
            "A program of --job_command has its own training loop: expected --custom_training_loop=true and "
            "--need_elasticdl_job_service=false, or --model_zoo and --model_def without --job_command."
        )
    flags.program = _program(flags.job_command)
    return flags


def _program(text: str) -> list[str]:
    """`program` or `module`, the file and the arguments: of "python program.py …" or "python -m module …"."""
    words = shlex.split(text)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    kind = "module" if words[:1] == ["-m"] else "program"
    if kind == "module":
        words = [f"{words[1].replace('.', '/')}.py" if len(words) > 1 else "", *words[2:]]
    if not words or not Path(words[0]).is_file():
        raise ContractError(
            "--job_command expects python program.py, or python -m package.module of this folder, got "
            f"'{text}'."
        )
    return [kind, str(Path(words[0]).resolve()), *words[1:]]


def _warn(name: str, reason: str) -> None:
    warnings.warn(f"--{name} has no meaning here: {reason}.", stacklevel=3)


def _without_meaning(command: str, flags: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The flags that were given and have no meaning, and why."""
    values, strategy = vars(flags), flags.distribution_strategy
    yield from _of_pods(values)
    for name in _OF_TRAINING:
        if name in values and command != "train":
            yield name, f"{command} makes no steps"
    if values.get("evaluation_start_delay_secs") is not None:
        yield "evaluation_start_delay_secs", "evaluations begin at a step, or at the end of an epoch"
    for name in _DEFAULTS:
        if values[name] is not None and strategy == DistributionStrategy.LOCAL:
            yield name, "strategy Local trains in one process"
    if flags.num_ps_pods is not None and strategy == DistributionStrategy.ALLREDUCE and command != "evaluate":
        yield "num_ps_pods", "AllreduceStrategy has no servers"
    if command == "evaluate" and flags.output:
        yield "output", "evaluate prints metrics, and writes nothing"


def _of_pods(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Flags of pods, images and volumes, and those of recovery that mean something else than what happens."""
    for name in _WITHOUT_MEANING:
        if name in arguments:
            yield name, _NO_PODS
    for name, (values, reason) in _OF_RECOVERY.items():
        if name in arguments and str(arguments[name]).lower() not in values:
            yield name, reason


def environment_of(text: str) -> dict[str, str]:
    """The variables of --envs, "a=1,b=2"; a value may have commas."""
    variables: dict[str, str] = {}
    name = ""
    for part in filter(None, text.split(",")):
        if "=" in part:
            name, _, value = part.partition("=")
            variables[name.strip()] = value
        elif name:
            variables[name.strip()] += f",{part}"
        else:
            raise ContractError(f"--envs expects name=value,name=value, got '{text}'.")
    return variables


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model_zoo", required=True, help="the folder of modules with models")
    add("--model_def", required=True, help="a module in it and its model: mnist.mnist_cnn.CustomModel")
    add("--model_params", default="", help='arguments of the model: "classes=10; name=cnn"')
    add("--minibatch_size", type=_count, default=64, help="records of a batch")
    add("--num_minibatches_per_task", type=_count, default=8, help="batches that a worker leases at once")
    add("--distribution_strategy", choices=("", *_STRATEGIES), default=DistributionStrategy.PARAMETER_SERVER)
    add("--num_workers", type=_count, help="processes that train; 2 if it is not given")
    add("--num_ps_pods", type=_count, help="parameter servers; 1 if it is not given")
    add("--job_name", help="the name of the job in karvan status; elasticdl if it is not given")
    add("--data_reader_params", default="", help="\"sep=,; columns=['a', 'b']\", or arguments of the reader")
    add("--envs", default="", help="variables of the environment: a=1,b=2")
    add("--output", default="", help="the folder of the trained model, or of predictions")
    add("--log_level", choices=_LEVELS, type=str.upper, default="INFO")
    for name, value in vars(FunctionNames()).items():
        if name != "prediction_outputs_processor":
            add(f"--{name}", default=value, help="its name in the module")
    add("--dataset_fn", dest="feed", default=argparse.SUPPRESS, help="the former name of --feed")


def _add_train(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    sources = "a folder or file of RecordIO or CSV, or any source that the reader takes"
    add("--training_data", required=True, help=sources)
    add("--validation_data", "--evaluation_data", dest="validation_data", default="")
    add("--num_epochs", type=int, default=1, help="0 for no end")
    add("--evaluation_steps", type=_count_or_zero, default=0, help="0: after every epoch")
    add("--evaluation_throttle_secs", type=_count_or_zero, default=0, help="0 only: see --evaluation_steps")
    add("--evaluation_start_delay_secs", type=_count_or_zero, help=argparse.SUPPRESS)
    add("--log_loss_steps", type=_count, default=100)
    add("--checkpoint_dir", default="")
    add("--checkpoint_steps", type=_count_or_zero, default=0, help="0: at the end only")
    add("--keep_checkpoint_max", type=_count_or_zero, default=0, help="0: all")
    add(*_INITIAL, dest="checkpoint_dir_for_init", default="", help="a checkpoint or output to begin with")
    add("--tensorboard_log_dir", default="")
    add("--use_async", type=_flag, nargs="?", const=True, default=False)
    add("--lr_staleness_modulation", type=_flag, nargs="?", const=True, default=False)
    add("--grads_to_wait", type=_count, help="how many workers contribute gradients to a step")
    add("--sync_version_tolerance", type=_count_or_zero)
    add("--get_model_steps", type=_count, default=1, help="with --use_async: steps between two pulls")
    add("--need_elasticdl_job_service", type=_flag, nargs="?", const=True, default=True)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--validation_data", "--evaluation_data", dest="validation_data", required=True)
    parser.add_argument(*_INITIAL, dest="checkpoint_dir_for_init", required=True)


def _add_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prediction_data", required=True)
    parser.add_argument(*_INITIAL, dest="checkpoint_dir_for_init", required=True)
    parser.add_argument("--prediction_outputs_processor", default="PredictionOutputsProcessor")


def _check(flags: argparse.Namespace) -> None:
    """Raise for flags that do not go together."""
    values: Mapping[str, Any] = vars(flags)
    servers = flags.distribution_strategy == DistributionStrategy.PARAMETER_SERVER
    for name in ("use_async", "grads_to_wait", "sync_version_tolerance"):
        if values.get(name) and not servers:
            raise ContractError(
                f"--{name} is for --distribution_strategy ParameterServerStrategy, got "
                f"{flags.distribution_strategy}."
            )
    if values.get("lr_staleness_modulation") and not flags.use_async:
        raise ContractError("--lr_staleness_modulation is for asynchronous SGD: expected --use_async=true.")
    if "training_data" in values and flags.get_model_steps > 1 and not flags.use_async:
        raise ContractError("--get_model_steps is for asynchronous SGD: expected --use_async=true.")
    for name in ("grads_to_wait", "sync_version_tolerance"):
        if values.get("use_async") and values.get(name) is not None and name in values:
            raise ContractError(f"--{name} is for synchronous SGD: expected no --use_async.")
    if not values.get("need_elasticdl_job_service", True):
        raise ContractError(
            "--need_elasticdl_job_service=false is for programs with their own training loop: expected "
            '--job_command "python program.py".'
        )
    if values.get("evaluation_throttle_secs"):
        raise ContractError(
            "--evaluation_throttle_secs is not supported: evaluations are counted in steps, by "
            "--evaluation_steps."
        )
    if values.get("evaluation_steps") and not flags.validation_data:
        raise ContractError("--evaluation_steps needs --validation_data.")
    for name in ("checkpoint_steps", "keep_checkpoint_max"):
        if values.get(name) and "training_data" in values and not (flags.checkpoint_dir or flags.output):
            raise ContractError(f"--{name} needs --checkpoint_dir, where checkpoints are saved.")


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got '{text}'")
    return int(text)


_count_or_zero = partial(_count, least=0)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "yes", "t", "y", "false", "no", "f", "n"):
        raise argparse.ArgumentTypeError(f"expected true or false, got '{text}'")
    return text.lower() in ("true", "yes", "t", "y")


COMMANDS = ("train", "evaluate", "predict")
_WORKER = Path(__file__).with_name("worker.py")


def run(command: str, words: Sequence[str]) -> int:
    """Run a command of this name; returns its exit code."""
    if command == "train" and any(word.startswith("--job_command") for word in words):
        return _run_job(make_program_spec(parse_job_command(words)))
    flags = parse(command, words)
    code = OK
    with environment(environment_of(flags.envs)):
        if flags.distribution_strategy == DistributionStrategy.LOCAL:
            _run_here(command, flags)
        else:
            code = _run_job(make_spec(command, flags, words))
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


def _run_job(spec: JobSpec) -> int:
    """Run a job to its end; returns its exit code."""
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
