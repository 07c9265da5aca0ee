"""Every code block of the documentation is checked, by its language.

- python: runs, in the order of its page; a block text title="Output" after it is what it prints;
- python title="… needs …": a fragment that needs more than this machine; it compiles, and its names exist;
- yaml: accepted by what reads it, a job or a config (or a part of one), or a manifest of Kubernetes;
- sh, bash, cron: correct shell; `karvan` commands are parsed with their options, `make` targets exist;
- text, console: not code.

The blocks of pages that are walkthroughs run as a reader runs them: see test_walkthroughs.py.

Anything else is an error with its page and line. Commands within the text are checked as well.
"""

import ast
import contextlib
import importlib
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from page_blocks import Block, blocks, same_output, visible
from pydantic import ValidationError

import karvan as kv
from karvan.cli.config import Config
from karvan.cli.main import app
from karvan.distributed.connection import KINDS
from karvan.launch.engines.choice import ENGINES
from karvan.launch.job_spec import JobSpec

ROOT = Path(__file__).parent.parent
PROJECT = ["README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES = [*PROJECT, *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
# Their blocks run in tests/test_walkthroughs.py.
WALKTHROUGHS = {page for page in PAGES if page.startswith(("docs/start/", "docs/tutorials/"))}
PROGRAMS = {
    "conda",
    "docker",
    "export",
    "head",
    "make",
    "nft",
    "ray",
    "openssl",
    "persia-launcher",
    "pip",
    "printf",
    "python3?",
    "source",
    "torchrun",
    "umask",
    "karvan",
    "[A-Z_]+=",
    # What every Linux has.
    *("cat", "cut", "echo", "for", "head", "kill", "mkdir", "sed", "tail", "timeout", "until", "wc"),
}
EXTENDING = [f"docs/extending/{page}.md" for page in ("reader", "optimizer", "store")]
_COMMAND = typer.main.get_command(app)


def _of(page, *languages):
    return [block for block in blocks((ROOT / page).read_text()) if block.language in languages]


def _placed(block):
    return "\n" * (block.line - 1) + block.code  # errors then point to the line in the page


def _runs(page):
    return [block for block in _of(page, "python") if not block.rest]


def _pages_that_run():
    """Pages with code; one that has the code and the outputs of an earlier page runs with that one."""
    pages = {}
    for page in PAGES:
        if _runs(page) and page not in WALKTHROUGHS:
            pages.setdefault(tuple((block.rest, block.code) for block in _of(page, "python", "text")), page)
    return list(pages.values())


@pytest.mark.parametrize("page", _pages_that_run())
def test_the_python_blocks_of_the_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # pages write files
    names = {"__name__": "__main__"}
    every = blocks((ROOT / page).read_text())
    for block, after in zip(every, [*every[1:], None], strict=True):
        if block.language == "python" and not block.rest:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(_placed(block), page, "exec"), names)
            if after is not None and after.rest == 'title="Output"':
                assert same_output(after.code, printed.getvalue()), (
                    f"{page}:{after.line}: {printed.getvalue()}"
                )
    assert names.get("kv") is kv, "expected code that uses karvan, as kv"
    names.clear()  # which ends threads of what the page has not read to its end


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_is_checked(page):
    for block in blocks((ROOT / page).read_text()):
        try:
            assert block.language in CHECKS, f"expected one of {', '.join(CHECKS)}"
            CHECKS[block.language](block)
        except Exception as error:
            what = f"{page}:{block.line}: a block of language '{block.language}'"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def _check_python(block):
    tree = ast.parse(block.code)
    if block.rest:
        assert re.fullmatch(r'title="(\w+\.py|[^"]*needs [^"]*)"', block.rest), (
            'expected nothing after "python", title="FILE.py", or title="… needs …" that says why the block '
            f"cannot run, got {block.rest}"
        )
        _check_names(tree)


def _check_names(tree):
    """Every kv.name and every import of karvan exists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "karvan":
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"
        elif isinstance(node, ast.Attribute) and (path := _path(node)):
            found = kv
            for name in path:
                assert hasattr(found, name), f"kv.{'.'.join(path)} does not exist"
                found = getattr(found, name)


def _path(node):
    """The names after kv in kv.a.b."""
    if isinstance(node, ast.Attribute):
        return [*before, node.attr] if (before := _path(node.value)) is not None else None
    return [] if isinstance(node, ast.Name) and node.id == "kv" else None


def _check_yaml(block):
    given = yaml.safe_load(block.code)
    if "apiVersion" in given:
        assert given.keys() == {"apiVersion", "kind", "metadata", "spec"}
        return
    job = {"name": "job", "entry": "train.py"} | given
    example = yaml.safe_load((ROOT / "karvan" / "cli" / "example.yaml").read_text())
    problems = []
    for kind, tree in ((JobSpec, job), (Config, _merged(example, given))):
        try:
            kind.model_validate(tree)
            return
        except ValidationError as error:
            problems.append(f"as {kind.__name__}: {error}")
    raise AssertionError("neither a job nor a config:\n" + "\n".join(problems))


def _merged(below, above):
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merged(below.get(key), value) for key, value in above.items()}


def _check_shell(block):
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True, capture_output=True)
    for program in re.findall(r'\bpython -c "(.*?)"', block.code, re.DOTALL):
        _check_names(ast.parse(program))
    text = re.sub(r'"[^"]*"', lambda quoted: quoted[0].replace("\n", " "), block.code)
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace("$(", "$"), comments=True)
        if words:
            _check_command(words)


def _check_command(words):
    first = words[0]
    if first == "karvan":
        _parse(words[1:])
    elif first == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets, f"the Makefile has no target {words[1]}"
    elif first == "python" and words[1].startswith(("benchmarks/", "examples/")):
        assert (ROOT / words[1]).exists(), f"there is no {words[1]}"
    else:
        known = any(re.match(rf"{program}(?![\w-])|{program}(?<==)", first) for program in PROGRAMS)
        assert known, f"'{first}' is none of the programs that the documentation uses: {sorted(PROGRAMS)}"


def _parse(words):
    """Let the command line parse the words after `karvan`, up to what the shell takes; nothing runs."""
    ends = [words.index(word) for word in (">", "|", "&&", ";") if word in words]
    words = words[: min(ends, default=len(words))]
    with _COMMAND.make_context("karvan", list(words)) as context:
        name, command, rest = _COMMAND.resolve_command(context, words)
        command.make_context(name, rest, parent=context)


def _check_cron(block):
    for line in block.code.splitlines():
        command = line.partition(" karvan ")[2].replace("\\%", "%")
        assert command, f"no karvan command in {line}"
        _parse(shlex.split(re.sub(r"\$\([^)]*\)", "VALUE", command)))


def _check_text(block):
    assert not re.search(r"\bkv\.\w+\(", block.code), "a block of text has code: make it python"


CHECKS = {
    "python": _check_python,
    "yaml": _check_yaml,
    "sh": _check_shell,
    "bash": _check_shell,
    "cron": _check_cron,
    "text": _check_text,
    "console": _check_text,
}


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_in_the_text_of_the_page_exist(page):
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        for words in re.findall(r"`karvan ([a-z][^`]*)`", line):
            name, *options = words.split()
            where = f"{page}:{number}: karvan {words}"
            command = _COMMAND.get_command(None, name)
            assert command is not None, f"{where}: there is no such command"
            known = {option for parameter in command.params for option in parameter.opts}
            known |= {
                option
                for inner in getattr(command, "commands", {}).values()
                for p in inner.params
                for option in p.opts
            }
            used = {option.split("=")[0] for option in options if option.startswith("--")}
            assert used <= known | {"--help", "--debug"}, where


@pytest.mark.parametrize("page", PAGES)
def test_what_people_copy_fits_in_80_columns_and_asserts_nothing(page):
    for block in visible((ROOT / page).read_text()):
        for number, line in enumerate(block.code.splitlines(), block.line):
            assert len(line) <= 80, f"{page}:{number}: expected at most 80 columns, got {len(line)}"
            assert block.language != "python" or not line.lstrip().startswith("assert "), f"{page}:{number}"


def test_the_readme_says_what_exists_and_what_does_not():
    """The table of what works where has every place for rows, and every engine."""
    text = (ROOT / "README.md").read_text().partition("## What works where")[2].partition("\n## ")[0]
    table = "".join(line for line in text.splitlines(True) if line.startswith("|"))
    assert set(re.findall(r'kv\.connect\("(\w+)"\)', table)) == {*KINDS} - {"memory"}
    assert set(re.findall(r"--engine (\w+)", table)) == {*ENGINES}
    assert len({line.count("|") for line in table.splitlines()}) == 1
    lacking = {
        "a server for predictions": "serve" not in _COMMAND.commands,
        "a store on disks": "disk" not in KINDS,
    }
    for what, is_lacking in lacking.items():
        assert (f"no {what.removeprefix('a ')}" in text) == is_lacking, what


def test_citation_and_changelog_are_of_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == kv.__version__
    assert f"\n## [{kv.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", *EXTENDING])
def test_the_page_has_python_blocks(page):
    assert [block for block in _of(page, "python") if not block.rest]


@pytest.mark.parametrize("page", PAGES)
def test_the_files_a_page_links_to_exist(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    # The site makes pages of notebooks: tools/notebook_pages.py.
    tutorials = ROOT / "docs" / "tutorials"
    notebooks = {tutorials / f"{path.stem}.md" for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")}
    targets = {link: ((ROOT / page).parent / link).resolve() for link in links}
    assert [link for link, path in targets.items() if not path.exists() and path not in notebooks] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page):
    folders = r"(?:karvan|csrc|tests|tools|benchmarks|examples|docs)"
    named = re.findall(rf"`({folders}/[\w/]+(?:/|\.\w+))[`:]", (ROOT / page).read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
    alone = {*re.findall(r"`(\w+\.(?:py|cpp|h|toml))`", (ROOT / page).read_text())} - {"FILE.py"}
    alone -= {*re.findall(r'^```python title="(\w+\.py)"$', (ROOT / page).read_text(), re.MULTILINE)}
    parts = [ROOT / part for part in ("karvan", "csrc", "tests", "tools", "benchmarks", "examples")]
    known = {path.name for path in (*ROOT.glob("*.*"), *(p for part in parts for p in part.rglob("*.*")))}
    assert sorted(alone - known) == []


@pytest.mark.parametrize(
    ("language", "rest", "code"),
    [
        ("python", "", "x ="),
        ("python", 'title="later"', "x = 1"),
        ("python", 'title="needs a GPU"', "kv.NoSuchName"),
        ("python", 'title="needs a GPU"', "from karvan.data import no_such_name"),
        ("yaml", "", "roles: {cooks: 2}"),
        ("sh", "", "karvan train --no-such-option"),
        ("sh", "", "karvan cook"),
        ("sh", "", "make tea"),
        ("sh", "", "cat 'x"),
        ("cron", "", "0 1 * * *  cd x && karvan cook"),
        ("text", "", "kv.connect()"),
    ],
)
def test_a_wrong_block_is_noticed(language, rest, code):
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the reader of that language raises
        CHECKS[language](Block(1, language, rest, code + "\n"))


def test_blocks_are_found_in_lists_and_with_their_lines():
    text = "a\n\n```python\nx = 1\ny = 2\n```\n- b\n\n  ```sh title\n  make demo\n  ```\n"
    assert blocks(text) == [Block(4, "python", "", "x = 1\ny = 2\n"), Block(10, "sh", "title", "make demo\n")]
