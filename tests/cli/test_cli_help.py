"""Help, completion and docs/cli.md name every command and option, and cut none of them."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from karvan.cli.main import app

ROOT = Path(__file__).parent.parent.parent
GROUP = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)
PAGE = (ROOT / "docs" / "cli.md").read_text()


def _help(run, monkeypatch, width, *words):
    monkeypatch.setenv("COLUMNS", str(width))
    return run(*words, "--help").out


def _parameters(command):
    return [each for each in GROUP.commands[command].params if not getattr(each, "hidden", False)]


def _names(command):
    return {name for each in _parameters(command) for name in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_cuts_no_name_and_is_not_too_wide(run, monkeypatch, command, width):
    shown = _help(run, monkeypatch, width, command)
    wide = [line for line in shown.splitlines() if len(line) > width]
    assert set(wide) <= set(inspect.cleandoc(GROUP.commands[command].help).splitlines())  # examples
    assert all(len(line) <= 80 for line in wide)
    words = set(shown.replace(", ", " ").split())
    for each in _parameters(command):
        names = (*each.opts, *each.secondary_opts) if each.param_type_name == "option" else ()
        metavars = (each.metavar or "").strip("[]").split()
        assert {*names, *metavars} <= words | {word.strip("[]") for word in words}
        if getattr(each, "help", None):
            assert " ".join(each.help.split()) in " ".join(shown.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_has_most_of_the_line_for_what_it_does(run, monkeypatch, command):
    options = _help(run, monkeypatch, 80, command).split("Options:")[1].splitlines()
    first = [line for line in options if re.match(r" +-", line)]
    starts = {len(match[1]) for line in first if (match := re.match(r"( +-.*?  +)\S", line))}
    assert len(starts) == 1
    assert starts.pop() <= 32


def test_examples_of_help_are_whole_lines_of_80_columns(run, monkeypatch):
    for command in [[], *([each] for each in COMMANDS)]:
        text = (GROUP.commands[command[0]] if command else GROUP).help
        shown = _help(run, monkeypatch, 80, *command)
        for line in text.splitlines():
            if line.startswith("  karvan"):
                assert line.strip() in shown, line


def test_commands_are_in_groups(run, monkeypatch):
    shown = _help(run, monkeypatch, 80)
    groups = re.findall(r"^(\w[\w ]*):$", shown, re.MULTILINE)
    assert groups == ["Examples", "Learn", "Train", "Jobs", "Tools", "Options"]
    assert all(re.search(rf"^  {command} ", shown, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_is_an_option_too(run, option):
    assert run(option).out == run("version").out


def _section(command):
    """The page's part about a command: below a heading that names it, or in a list of commands."""
    parts = re.split(r"^(#+ .*)$", PAGE, flags=re.MULTILINE)
    return "".join(
        text
        for heading, text in zip(parts[1::2], parts[2::2], strict=True)
        if f"`karvan {command}`" in heading
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_has_every_option_of_the_command_and_no_other(command):
    section = _section(command)
    assert section, f"docs/cli.md has no heading with `karvan {command}`"
    table = re.findall(r"^\| (`-.*?) \|", section, re.MULTILINE)
    options = {name for cell in table for name in re.findall(r"`(--?[\w-]+)", cell)}
    expected = {name for name in _names(command) if name.startswith("-")}
    assert options == expected


def test_the_page_has_the_commands_in_their_groups(run, monkeypatch):
    shown = _help(run, monkeypatch, 80)
    lines = shown[shown.index("Learn:") : shown.index("Options:")].splitlines()
    named = [line.split()[0].strip(":") for line in lines if re.match(r"\w|  \w", line)]
    headings = re.findall(r"^##+ (?:`karvan ([\w-]+)`|(\w+)$)", PAGE, re.MULTILINE)
    order = [command or group for command, group in headings]
    assert [each for each in order if each in named] == named


def _in_bash(home, script, tmp_path):
    environment = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = ["bash", "--noprofile", "--norc", "-c", script]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


COMPLETE = """
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE="{words}"; COMP_POINT=${{#COMP_LINE}}
function_of() {{ complete -p karvan | sed 's/.*-F \\([^ ]*\\).*/\\1/'; }}
$(function_of) karvan; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def test_completion_is_installed_for_bash_and_completes(tmp_path):
    # The command finds its shell among its ancestors: bash has more to do, so it stays the first of them.
    install = "touch ~/.bashrc; karvan --install-completion bash || exit 1"
    _in_bash(tmp_path, install, tmp_path)
    script = "source ~/.bashrc\n" + COMPLETE.format(words="karvan tr")
    assert _in_bash(tmp_path, script, tmp_path).stdout.split() == ["train"]
    script = "source ~/.bashrc\n" + COMPLETE.format(words="karvan train --resume-")
    assert _in_bash(tmp_path, script, tmp_path).stdout.split() == ["--resume-from"]


def test_completion_does_not_wait_for_torch():
    script = (
        "import sys, os, atexit; from karvan.cli.main import main\n"
        "os.environ |= {'_KARVAN_COMPLETE': 'complete_bash', 'COMP_WORDS': 'karvan tr', 'COMP_CWORD': '1'}\n"
        "try: main([])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'karvan.settings'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["train"]
