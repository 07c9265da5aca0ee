"""The target of `train`, `evaluate` and `predict`: a FILE.py with `def job()`, or a CONFIG.yaml."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from typer import Argument, Option

from karvan.cli.output import DAMAGED, FAILED, CommandError

if TYPE_CHECKING:
    import karvan as kv

# Arguments and options of several commands.
TRAINED = Argument(metavar="FILE.py|CONFIG.yaml", help="What was trained.")
SETTINGS = Option([], "--set", metavar="NAME=VALUE", help="As for train.")
DEVICE = Option(None, help="cpu, cuda, cuda:1, …")

EXAMPLE_DATA = "out/clicks"  # what `karvan train --example` reads
# The key of a config for an option of the command line.
_IN_CONFIG = {
    "folder": "checkpoints.folder",
    "precision": "train.precision",
    "device": "train.device",
    "eval_data": "data.eval",
}


@dataclass(frozen=True)
class Target:
    """What to run, and the values that the command line overrides.

    `settings` are those of --set, `options` those of separate options, such as --folder: for a config they
    are keys, for a file parameters of its job().
    """

    path: Path
    settings: Mapping[str, str]
    options: Mapping[str, str]

    def job(self, *, training: bool = True) -> kv.TrainingJob:
        """Make the job; without `training`, a config's training data is not opened."""
        from karvan.data import DataError

        try:
            return self._made(training=training)
        except DataError as error:
            if error.path is None or not error.path.startswith(EXAMPLE_DATA) or Path(EXAMPLE_DATA).exists():
                raise
            hint = f"To write a click log there: karvan demo --data {EXAMPLE_DATA}"
            raise CommandError(f"{error}\n{hint}", DAMAGED) from error

    def _made(self, *, training: bool) -> kv.TrainingJob:
        if not self.path.exists():
            raise CommandError(
                f"{self.path}: there is no such file; expected a FILE.py or a CONFIG.yaml.", DAMAGED
            )
        if self.path.suffix == ".py":
            return self._of_file()
        if self.path.suffix in (".yaml", ".yml"):
            from karvan.cli.config import make_job, read_config

            overrides = {_IN_CONFIG[name]: text for name, text in self.options.items()}
            return make_job(read_config(self.path, {**self.settings, **overrides}), training=training)
        raise CommandError(
            f"{self.path}: expected a FILE.py or a CONFIG.yaml, got '{self.path.suffix or 'no ending'}'."
        )

    def _of_file(self) -> kv.TrainingJob:
        import karvan as kv

        function = _job_function(self.path)
        arguments = _arguments(self.path, function, self.settings, self.options)
        job = function(**arguments)
        if not isinstance(job, kv.TrainingJob):
            raise CommandError(
                f"job() of {self.path} must return a kv.TrainingJob, got {type(job).__name__}."
            )
        return job


def target_of(path: Path, settings: Sequence[str], **options: str | None) -> Target:
    """The target of a command, with its --set and those of its options that are given."""
    given = {name: text for name, text in options.items() if text is not None}
    return Target(path, pairs(settings), given)


def pairs(settings: Sequence[str]) -> dict[str, str]:
    """The name and value of each --set."""
    names = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise CommandError(f"--set expects name=value, got '{setting}'.")
        names[name.strip()] = value
    return names


def _job_function(path: Path) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("karvan_job", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` would
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise CommandError(f"{error.filename}, line {error.lineno}: {error.msg}.", FAILED) from error
    function = getattr(module, "job", None)
    if not callable(function):
        raise CommandError(
            f"{path} must define a function job() that returns a kv.TrainingJob; there is none."
        )
    return function  # type: ignore[no-any-return]


def _arguments(
    path: Path, function: Callable[..., Any], settings: Mapping[str, str], options: Mapping[str, str]
) -> dict[str, Any]:
    from karvan.cli.config import convert

    signature = inspect.signature(function)
    try:
        hints = get_type_hints(function)
    except NameError:  # names that exist for type checkers only
        hints = {}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    names = {
        name: p for name, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    listed = ", ".join(map(str, names.values())) or "none"
    for name in options:
        if name not in names and not open_ended:
            raise CommandError(
                f"--{_option(name)} sets the parameter '{name}' of job(), but job() of {path} has no such "
                f"parameter; it has: {listed}."
            )
    for name in settings:
        if name not in names and not open_ended:
            raise CommandError(f"--set {name}: job() of {path} has no such parameter; it has: {listed}.")
    arguments = {}
    for name, text in {**settings, **options}.items():
        default = names[name].default if name in names else None
        usual = Any if default in (None, inspect.Parameter.empty) else type(default)
        kind = hints.get(name, usual)
        arguments[name] = convert(f"Parameter '{name}' of job()", text, kind)
    for name, parameter in names.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise CommandError(f"job() of {path} needs '{name}': --set {name}=…")
    return arguments


def _option(name: str) -> str:
    return {"eval_data": "data"}.get(name, name.replace("_", "-"))
