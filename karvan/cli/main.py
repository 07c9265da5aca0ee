"""The `karvan` command: its subcommands, its pages of help and its error handling."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from inspect import cleandoc
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from karvan.cli.commands import (
    bench,
    demo,
    doctor,
    evaluate,
    import_checkpoint,
    inspect,
    jobs,
    plot,
    role,
    run,
    train,
)
from karvan.cli.output import INTERRUPTED, OK, PIPE_CLOSED, USAGE, code_of, help_of, print_error, show
from karvan.process_end import run_to_end

if TYPE_CHECKING:
    from rich.console import Console


# The pages of `--help`: usage, what a command does, its arguments and options, and commands in groups.
#
# Names are in one column, their meanings in a second one. A name that is too long for its column gets a line
# of its own, so that no terminal is too narrow for a whole name.

_WIDEST = 100  # columns; longer lines are hard to read
_LONGEST = 24  # columns of a name beside its meaning

Rows = list[tuple[str, str]]


class HelpedCommand(TyperCommand):
    """A command with such a page."""

    @override
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _Page().print(self, ctx, {})


class HelpedGroup(TyperGroup):
    """The group of all commands."""

    @override
    def format_help(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, Rows] = {}
        for name, command in self.commands.items():
            sentence = re.split(r"(?<=[.?])\s", command.help or "", maxsplit=1)[0]
            sections.setdefault(str(getattr(command, "rich_help_panel", None)), []).append((name, sentence))
        _Page().print(self, ctx, sections)


class _Page:
    """Prints a page as wide as the terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._out: Console = Console(highlight=False, soft_wrap=True)
        self._width = min(self._out.width, _WIDEST)

    def print(self, command: TyperCommand | TyperGroup, ctx: Any, sections: dict[str, Rows]) -> None:
        """The page of a command, with the sections of a group."""
        parameters: list[Any] = command.get_params(ctx)
        arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
        options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
        words = [ctx.command_path, "[OPTIONS]", *map(_argument, arguments)]
        self._paragraph(" ".join(["Usage:", *words, *(["COMMAND"] if sections else [])]))
        for paragraph in cleandoc(command.help or "").split("\n\n"):
            self._paragraph(paragraph)
        all_sections = {
            "Arguments": [(_argument(argument), argument.help or "") for argument in arguments],
            **sections,
            "Options": [(_option(option), _meaning(option)) for option in options],
        }
        for title, rows in all_sections.items():
            if rows:
                self._section(title, rows, [*sections.values()] if title in sections else [rows])
        if command.epilog:
            self._paragraph(command.epilog, last=True)

    def _line(self, name: str, text: str = "", style: str = "") -> None:
        from rich.text import Text

        self._out.print(Text.assemble((name, style), text))

    def _paragraph(self, text: str, *, last: bool = False) -> None:
        """The lines below a heading, such as "Examples:", stay as they are."""
        heading, *lines = text.strip("\b\n").split("\n")
        if text.startswith("\b") and heading.endswith(":"):
            self._line(heading, style="bold")
        else:
            lines = wrap(text.strip("\b\n"), self._width, break_on_hyphens=False)
        for line in lines:
            self._line(line)
        if not last:
            self._line("")

    def _section(self, title: str, rows: Rows, aligned: list[Rows]) -> None:
        """Names with their meanings, aligned with those of other sections."""
        self._line(f"{title}:", style="bold")
        column = 2 + min(_LONGEST, max(len(name) for pairs in aligned for name, _ in pairs)) + 2
        for name, meaning in rows:
            name = f"  {name}"
            if len(name) + 2 > column:
                self._line(name, style="cyan")
                name = ""
            for line in wrap(meaning, self._width - column, break_on_hyphens=False) or [""]:
                self._line(name.ljust(column), line, "cyan")
                name = ""
        self._line("")


def _argument(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]")
    return name if argument.required else f"[{name}]"


def _option(option: Any) -> str:
    """Its names, short ones first, and the name of its value."""
    names = sorted((*option.opts, *option.secondary_opts), key=lambda name: name.startswith("--"))
    if option.is_flag:
        return ", ".join(names)
    value = option.metavar or names[-1].strip("-").replace("-", "_").upper()
    return f"{', '.join(names)} {value}"


def _meaning(option: Any) -> str:
    text, default = " ".join((option.help or "").split()), option.default
    if option.required:
        return f"{text} [required]"
    if option.secondary_opts:
        default = (option.opts if default else option.secondary_opts)[0]
    elif option.is_flag or not isinstance(default, str | int):
        return text
    return f"{text} [default: {default}]"


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
        doctor.version(None)
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
    "Train": (train.train, evaluate.evaluate, evaluate.predict, inspect.inspect, plot.plot),
    "Jobs": (jobs.launch, jobs.status, jobs.logs, jobs.scale, jobs.stop, role.role),
    "Tools": (doctor.doctor, bench.bench, import_checkpoint.import_checkpoint, run.run, doctor.version),
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
