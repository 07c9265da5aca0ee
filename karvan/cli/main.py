"""The `karvan` command: its subcommands and its error handling."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from karvan.cli.commands import (
    bench,
    demo,
    doctor,
    evaluate,
    import_checkpoint,
    inspect,
    jobs,
    launch,
    plot,
    predict,
    role,
    run,
    train,
    version,
)
from karvan.cli.errors import FAILED, INTERRUPTED, OK, USAGE, code_of, print_error, show
from karvan.process_end import run_to_end

app = typer.Typer(
    name="karvan",
    epilog="Exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 data or checkpoint missing or damaged, "
    "75 a temporary failure, as of a full disk, "
    "130 Ctrl-C, 143 SIGTERM (both with a checkpoint saved).",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show where an error comes from; allowed anywhere."),
) -> None:
    """Train recommendation models whose embedding tables outgrow a machine.

    \b
    Examples:
      karvan demo                                 # learn a synthetic click log
      karvan train --example > my.yaml            # a config to start from
      karvan train my.yaml --folder out/run       # run again: it resumes
      karvan evaluate my.yaml --checkpoint out/run
      karvan inspect out/run                      # its contents
      karvan plot out/run                         # its loss and metrics as charts
      karvan launch job.yaml                      # a job of several roles
      karvan status                               # jobs that run, or have ended
      karvan run --as recis program.py            # a program of another system
      karvan import-checkpoint --from recis OLD NEW   # a checkpoint of another system
    """


for command in (
    demo,
    train,
    evaluate,
    predict,
    inspect,
    plot,
    launch,
    run,
    import_checkpoint,
    jobs,
    role,
    bench,
    doctor,
    version,
):
    command.add_to(app)


def program() -> NoReturn:
    """Run the command of this process, and end it."""
    run_to_end(main)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; see `errors.py`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = words.index("run") if "run" in words else len(words)  # what follows may be the program's
    debug = "--debug" in words[:own]
    words = [word for word in words[:own] if word != "--debug"] + words[own:]
    try:
        code = app(words or ["--help"], standalone_mode=False, prog_name="karvan")
        sys.stdout.flush()  # a full disk or a closed pipe is an error of the command
        return code if isinstance(code, int) else OK
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print_error("Interrupted.")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
        sys.stderr.close()
        return FAILED
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own, which is not a public name of typer
            print_error(_usage(error))
            return USAGE
        show(error, debug=debug)
        return code_of(error)


def _usage(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "karvan"
    return f"{error.format_message()}\nTry '{path} --help'."  # type: ignore[attr-defined]
