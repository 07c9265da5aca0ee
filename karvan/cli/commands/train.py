"""`karvan train`: runs a job, and continues it after a stop."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Argument, Option

from karvan.cli.output import (
    INTERRUPTED,
    JSON_PATH,
    OK,
    STOPPED,
    CommandError,
    CountedBatches,
    console,
    number_text,
    print_table,
    progress,
    write_json,
)
from karvan.cli.target import DEVICE, target_of
from karvan.job.checkpoint_url import shown
from karvan.system_limits import require_limits

if TYPE_CHECKING:
    import karvan as kv


def train(
    target: Path | None = Argument(
        None, metavar="FILE.py|CONFIG.yaml", help="A Python file with a function job(), or a config."
    ),
    settings: list[str] = Option(
        [],
        "--set",
        metavar="NAME=VALUE",
        help="A parameter of job(), or a key of the config: train.clip_norm=1.",
    ),
    epochs: int | None = Option(None, min=1, help="Train for this many epochs."),
    max_steps: int | None = Option(None, min=1, help="Train for at most this many optimizer steps."),
    eval_every: int | None = Option(None, min=1, help="Evaluate every this many steps."),
    folder: str | None = Option(None, help="The run's folder, for checkpoints."),
    precision: str | None = Option(None, help="fp32, bf16, fp16 or auto."),
    device: str | None = DEVICE,
    resume: bool = Option(True, "--resume/--no-resume", help="Resume from the folder's newest checkpoint."),
    resume_from: str | None = Option(
        None,
        "--resume-from",
        metavar="STEP",
        help="Continue from this checkpoint of the folder; later ones are set aside.",
    ),
    drop_unfinished: bool = Option(
        False, "--drop-unfinished", help="Use new data although the previous data was not finished."
    ),
    new_settings: bool = Option(
        False,
        "--new-settings",
        help="Optimizers continue with the learning rates and settings of this command.",
    ),
    quiet: bool = Option(False, "--quiet", "-q", help="No progress."),
    json_path: str | None = JSON_PATH,
    example: bool = Option(False, "--example", help="Print a config to start from."),
) -> int:
    """Train a model, or continue where the last run stopped.

    A CONFIG.yaml, or the function job() of a FILE.py, describes the model and the data. --set, --folder,
    --precision and --device set keys of the config or parameters of job(). Ctrl-C and SIGTERM save a
    checkpoint; the same command resumes from it. A finished run continues on new data, such as tomorrow's.

    \b
    Examples:
      karvan demo --data out/clicks            # data for the example
      karvan train --example > my.yaml
      karvan train my.yaml
      karvan train my.yaml --folder out/run --epochs 3
      karvan train my.yaml --set optimizers.sparse.lr=0.1 --set model.dim=32
      karvan train job.py --set lr=0.01 --max-steps 1000 --folder out/run
    """
    if example:
        print(resources.files("karvan.cli").joinpath("example.yaml").read_text(), end="")
        return OK
    if target is None:
        raise CommandError(
            "Expected a FILE.py or a CONFIG.yaml, got nothing; --example prints a config to start from."
        )
    require_limits()
    from karvan.train import reset_termination

    reset_termination()  # each command starts afresh, even if several run in one process
    job = target_of(target, settings, folder=folder, precision=precision, device=device).job()
    changes: dict[str, Any] = {"epochs": epochs, "max_steps": max_steps, "eval_every": eval_every}
    job = replace(job, **{name: value for name, value in changes.items() if value is not None})
    job.trainer.resume_hint = f"To resume: {_command_to_resume(sys.argv[1:])}"
    result = _fit(
        job,
        resume=_choice(resume, resume_from),
        drop_unfinished=drop_unfinished,
        new_settings=new_settings,
        quiet=quiet,
    )
    if job.trainer.connection.rank == 0:
        if quiet and result.checkpoint is not None and result.stopped in STOPPED:
            print(job.trainer.resume_hint, file=sys.stderr)  # otherwise progress has shown it
        if not quiet and job.trainer.saver.folder is not None:
            say_how_to_plot(job.trainer.saver.folder)
        if not write_json(json_path, result):
            _show(result)
    return STOPPED.get(result.stopped or "", OK)


def _command_to_resume(words: Sequence[str]) -> str:
    """The command of these words without what only its first run may have."""
    rest = iter(words)
    columns = []
    for word in rest:
        if word == "--resume-from":
            next(rest, None)
        elif word.partition("=")[0] not in ("--resume-from", "--no-resume", "--drop-unfinished"):
            columns.append(word)
    return shlex.join(["karvan", *columns])


def _choice(resume: bool, resume_from: str | None) -> bool | str:
    from karvan.checkpoint.recovery import check_resume

    if resume_from is None:
        return resume
    if not resume:
        raise CommandError("--no-resume and --resume-from exclude each other: give one of them.")
    try:
        check_resume(resume_from)
    except ValueError:
        raise CommandError(
            f"--resume-from expects the name of a checkpoint, such as step-000000001000, got '{resume_from}'."
        ) from None
    return resume_from


def _fit(
    job: kv.TrainingJob, *, resume: bool | str, drop_unfinished: bool, new_settings: bool, quiet: bool
) -> kv.train.FitResult:
    from karvan.train import NoProgress
    from karvan.train.dataset import UnfinishedError

    if job.eval_every is not None and job.eval_data is None:
        raise CommandError("--eval-every expects data to evaluate on, but the job has none.")
    saver = job.trainer.saver
    newest = None if resume else saver.newest_step()
    if newest is not None:
        raise CommandError(
            f"--no-resume expects a folder without checkpoints, but {shown(saver.folder)} has some, "
            f"up to step {newest}."
        )
    if quiet:
        job.trainer.progress = NoProgress()
    elif saver.folder is None:
        console(stderr=True).print(
            "[yellow]note:[/yellow] nothing will be saved; set a folder for checkpoints with --folder."
        )
    try:
        return job.fit(
            resume=resume,
            drop_unfinished=drop_unfinished,
            new_settings=new_settings,
            on_new_run=lambda: fit_features(job, quiet=quiet),
        )
    except UnfinishedError as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:  # the second, or before or after training
        newest = saver.newest_step()
        if newest is None:
            raise CommandError("Interrupted before a checkpoint was saved.", INTERRUPTED) from None
        raise CommandError(
            f"Interrupted. The newest checkpoint is of step {newest}.\n{job.trainer.resume_hint}", INTERRUPTED
        ) from None


def say_how_to_plot(folder: Path) -> None:
    """Say how to look at the run."""
    console(stderr=True).print(f"To look at the run: karvan plot {shlex.quote(shown(folder))}", markup=False)


def _show(result: kv.train.FitResult) -> None:
    names: Sequence[str] = list(dict.fromkeys([*result.metrics, *result.evaluation]))
    rows = [
        [name, *(number_text(of[name]) if name in of else "" for of in (result.metrics, result.evaluation))]
        for name in names
    ]
    if rows:
        print_table(
            f"Step {result.step:,}, {result.epoch} epoch{'s' * (result.epoch != 1)}, "
            f"{result.samples:,} samples",
            ["metric", "training", "evaluation"],
            rows,
            right=["training", "evaluation"],
        )
    sys.stdout.flush()


def fit_features(job: kv.TrainingJob, *, quiet: bool) -> None:
    """Fit the engines of a job that lack statistics: that of its data first, then those in its model.

    Each takes one pass over the training data. A job that resumes from a checkpoint takes its statistics from
    there and needs no fit.
    """
    from karvan import distributed
    from karvan.features import FeatureEngine

    data, quiet = job.data, quiet or distributed.current().rank != 0
    for engine in (getattr(data, "transform", None), *job.trainer.model.modules()):
        if not isinstance(engine, FeatureEngine) or not engine.unfitted:
            continue
        names, single_pass = ", ".join(engine.unfitted), getattr(data, "single_pass", None)
        if single_pass is None:
            raise CommandError(
                f"FeatureEngine '{engine.name}' has no statistics yet for {names}. Expected data of "
                f"kv.data.read, to find them in one pass, got {type(data).__name__}: call "
                "engine.fit(batches) in job()."
            )
        batches = single_pass(transformed=engine is not getattr(data, "transform", None))
        with progress("Fitting features", "samples", quiet=quiet) as steps:
            engine.fit(CountedBatches(batches, steps))
        if not quiet:
            console(stderr=True).print(f"Fitted {names} to the training data.", markup=False)
