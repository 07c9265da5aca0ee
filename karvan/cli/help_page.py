"""The pages of `--help`: usage, what a command does, its arguments and options, and commands in groups.

Names are in one column, their meanings in a second one. A name that is too long for its column gets a line of
its own, so that no terminal is too narrow for a whole name.
"""

from __future__ import annotations

import inspect
import re
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

if TYPE_CHECKING:
    from rich.console import Console

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
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
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
    elif option.is_flag or not option.show_default or not isinstance(default, str | int):
        return text
    return f"{text} [default: {default}]"
