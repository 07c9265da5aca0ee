"""The `karvan` command: its subcommands and its error handling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
from karvan.cli.errors import INTERRUPTED, OK, PIPE_CLOSED, USAGE, code_of, print_error, show
from karvan.cli.help_page import HelpedCommand, HelpedGroup
from karvan.cli.output import help_of
from karvan.process_end import run_to_end

app = typer.Typer(
    name="karvan",
    cls=HelpedGroup,
    epilog="Exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 data or checkpoint missing or damaged, "
    "75 a temporary failure such as a full disk, 130 Ctrl-C, 143 SIGTERM.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        version.version(None)
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error; allowed anywhere."),
    show_version: bool = typer.Option(
        False, "--version", "-V", callback=_show_version, is_eager=True, help="Show versions."
    ),
) -> None:
    """Train recommendation models with embedding tables of any size.

    \b
    Examples:
      karvan demo                              # a minute: what Karvan does
      karvan demo --data out/clicks            # write a click log to train on
      karvan train --example > my.yaml         # a config to start from
      karvan train my.yaml                     # run it again: it resumes
      karvan plot out/run                      # loss and metrics as charts
      karvan COMMAND --help                    # options and more examples
    """


# In the order of `karvan --help`.
_GROUPS: dict[str, tuple[Callable[..., int], ...]] = {
    "Learn": (demo.demo,),
    "Train": (train.train, evaluate.evaluate, predict.predict, inspect.inspect, plot.plot),
    "Jobs": (launch.launch, jobs.status, jobs.logs, jobs.scale, jobs.stop, role.role),
    "Tools": (doctor.doctor, bench.bench, import_checkpoint.import_checkpoint, run.run, version.version),
}
_SETTINGS = {run.run: run.SETTINGS}

for group, commands in _GROUPS.items():
    for command in commands:
        app.command(
            command.__name__.replace("_", "-"),
            cls=HelpedCommand,
            help=help_of(command),
            rich_help_panel=group,
            context_settings=_SETTINGS.get(command),
        )(command)


def program() -> NoReturn:
    """Run the command of this process, and end it."""
    run_to_end(main)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; see `errors.py`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    begin = words.index("run") if "run" in words else len(words)  # what follows may be the program's
    debug = "--debug" in words[:begin]
    words = [word for word in words[:begin] if word != "--debug"] + words[begin:]
    try:
        code = app(words or ["--help"], standalone_mode=False, prog_name="karvan")
        sys.stdout.flush()  # a full disk or a closed pipe is an error of the command
        return code if isinstance(code, int) else OK
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print_error("Interrupted.")
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as end:  # click and rich make a SystemExit of it
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        sys.stderr.close()  # the interpreter would complain of what it cannot write
        return PIPE_CLOSED
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
