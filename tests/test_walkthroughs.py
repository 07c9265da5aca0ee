"""Pages of docs/start and docs/tutorials are followed as a reader follows them, in an empty folder.

- python title="FILE.py" and yaml title="FILE.yaml": the file is written;
- python without a title: runs after the page's earlier ones, in the same process;
- sh: runs in bash, and must succeed; its python, karvan and torchrun are forks (see forked_commands);
- sh title="… needs …" is something that this machine cannot do;
- text title="Output" after a block: what it prints, stdout before stderr, where ... stands for anything.

A block in an HTML comment runs as well: it prepares what a reader has, or shortens what takes long.
"""

import contextlib
import io
import subprocess
from pathlib import Path

import pytest
from forked_commands import forked_commands
from page_blocks import blocks, same_output

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("start", "tutorials")
    for path in (ROOT / "docs" / folder).glob("*.md")
)


@pytest.fixture
def shell(tmp_path):
    """Runs a block of a shell; returns what it prints."""
    with forked_commands(tmp_path / "bin") as environment:
        environment |= {"COLUMNS": "80", "OMP_NUM_THREADS": "1"}

        def run(code, where):
            words = ["bash", "-e", "-u", "-o", "pipefail", "-c", code]
            ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
            assert ended.returncode == 0, f"{where}\n{ended.stdout}\n{ended.stderr}"
            return ended.stdout + ended.stderr

        yield run


@pytest.mark.parametrize("page", PAGES)
def test_a_reader_can_follow_the_page(page, tmp_path, monkeypatch, shell):
    folder = tmp_path / "reader"
    folder.mkdir()
    monkeypatch.chdir(folder)
    printed, names = "", {"__name__": "__main__"}
    for block in blocks((ROOT / page).read_text()):
        where = f"{page}:{block.line}"
        name = block.rest.removeprefix('title="').removesuffix('"')
        if block.language in ("python", "yaml") and name.endswith((".py", ".yaml")):
            Path(name).write_text(block.code)
        elif block.language == "python" and not block.rest:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), names)
            printed = output.getvalue()
        elif block.language == "sh" and "needs" not in block.rest:
            printed = shell(block.code, where)
        elif block.rest == 'title="Output"':
            assert same_output(block.code, printed), f"{where}: expected what the page shows, got\n{printed}"
    names.clear()  # which ends threads of what the page has not read to its end
