"""inspect: whole checkpoints and damaged ones."""

import os
import pty
import re
import shutil
import sys
from contextlib import suppress

import pytest
from forked_programs import ForkedProgram

import karvan as kv


def test_tables_are_shown(run, checkpoint):
    ran = run("inspect", checkpoint.parent)  # a run's folder stands for its newest
    assert ran.code == 0
    assert all(name in ran.out for name in ("user", "item", "category", "Adagrad", "step 48", "auc"))
    told = run("inspect", checkpoint, "--json", "-", "--top", "2").json
    seen = kv.checkpoint.summary(checkpoint, hottest=2)
    assert [table["rows"] for table in told["tables"]] == [table.rows for table in seen.tables]
    assert [len(table["hottest"]) for table in told["tables"]] == [2, 2, 2]


def test_in_a_pipe_lines_have_the_width_of_their_content_and_times_are_those_of_people(run, checkpoint):
    lines = run("inspect", checkpoint).out.splitlines()
    assert all(line == line.rstrip() and "…" not in line for line in lines)
    assert re.search(r"saved (just now|\d+ (seconds|minutes?) ago)$", lines[0])
    header = next(line for line in lines if line.startswith("table"))
    assert header.split("  ")[0] == "table"
    assert len(header) <= 80
    assert len(re.findall(r"^\w+: Adagrad; hottest keys \(uses\): \d+ \(", "\n".join(lines), re.M)) == 3


@pytest.mark.parametrize("width", [40, 80])
def test_a_terminal_shows_every_value_of_a_table_however_narrow_it_is(checkpoint, width):
    out, terminal = pty.openpty()
    command = [sys.executable, "-m", "karvan", "inspect", str(checkpoint)]
    with ForkedProgram(command, stdout=terminal, env={**os.environ, "COLUMNS": str(width)}) as shown:
        os.close(terminal)
        written = b""
        with suppress(OSError):  # the end, of a terminal
            while part := os.read(out, 65536):
                written += part
        assert shown.wait(60) == 0
    os.close(out)
    text = written.decode()
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert ("max norm" in text) == (width == 80)  # folded where there is no room
    assert "…" not in text


def test_one_key_is_shown(run, checkpoint):
    hottest = kv.checkpoint.summary(checkpoint).tables[0].hottest[0]
    told = run("inspect", checkpoint, "--key", "user", str(hottest.key), "--json", "-").json
    assert (told["key"], told["count"], len(told["vector"]), len(told["state"])) == (
        hottest.key,
        hottest.count,
        4,
        4,
    )
    shown = run("inspect", checkpoint, "--key", "user", hex(hottest.key))
    assert f"used {hottest.count:,} times" in shown.out
    assert run("inspect", checkpoint, "--key", "user", "123456789").code == 3
    text = run("inspect", checkpoint, "--key", "user", "u-1")
    assert text.code == 2
    assert "kv.ids.farm('u-1') or kv.ids.murmur('u-1')" in text.err
    unknown = run("inspect", checkpoint, "--key", "users", "1")
    assert unknown.code == 3
    assert "'user'" in unknown.err or "user" in unknown.err


def test_an_intact_run_passes(run, checkpoint):
    ran = run("inspect", checkpoint.parent, "--verify")
    assert ran.code == 0
    assert "all intact" in ran.out


def _part(checkpoint):
    return next((checkpoint / "tables" / "user").glob("part-*"))


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit": lambda c: _flip(_part(c)),
    "a truncated file": lambda c: _part(c).write_bytes(_part(c).read_bytes()[:-10]),
    "a missing file": lambda c: _part(c).unlink(),
    "a missing table": lambda c: shutil.rmtree(c / "tables"),
    "a damaged manifest": lambda c: _flip(c / "manifest.json"),
    "no manifest": lambda c: (c / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_exits_with_3(run, checkpoint, damage):
    DAMAGES[damage](checkpoint)
    for path in (checkpoint, checkpoint.parent):
        ran = run("inspect", path, "--verify")
        assert ran.code == 3
        assert "step-000000000048" in ran.out + ran.err
    told = run("inspect", checkpoint.parent, "--verify", "--json", "-")
    assert told.code == 3
    assert told.json["damaged"]


@pytest.mark.parametrize("content", [None, "text"])
def test_a_folder_that_is_no_checkpoint_exits_with_3(run, tmp_path, content):
    if content:
        (tmp_path / "manifest.json").write_text(content)
    for more in ([], ["--verify"], ["--key", "user", "1"]):
        ran = run("inspect", tmp_path, *more)
        assert ran.code == 3
        assert "expected" in ran.out + ran.err


def test_the_row_of_a_text_id_is_found_by_its_hash(run, tmp_path):
    hashed = kv.FeatureEngine([kv.Feature("user").hash("farm")])
    (batch,) = kv.data.read({"user": ["u-1", "u-2"]}, 2, transform=hashed)
    engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
    engine(batch)
    kv.checkpoint.save(tmp_path / "one", {}, engine)
    key = kv.ids.farm("u-1")
    assert run("inspect", tmp_path / "one", "--key", "user", str(key)).out.startswith(f"user {key}: used 1")
