"""Files that anybody may have written: settings and manifests end in an error of Karvan, or are read."""

import json
import os
import subprocess
import sys
import time
import zlib

import pytest
from checkpoint_helpers import Model
from forked_programs import run_forked
from support_paths import support_path

from karvan.checkpoint import Checkpoint, CheckpointError, Checkpoints, DamagedCheckpointError
from karvan.launch.job_spec import read_spec
from karvan.settings import SettingsError

SEEDS, CASES = 8, 12_500
LAUGHS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


def fuzz(seed, cases, folder):
    return [sys.executable, str(support_path("common/file_fuzzer.py")), str(seed), str(cases), str(folder)]


def test_a_few_hostile_files_are_refused_or_read(tmp_path):
    ended = run_forked(fuzz(0, 200, tmp_path), env=dict(os.environ))
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-6000:]
    assert "200 cases" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_hostile_files_are_refused_or_read(seed, tmp_path):
    ended = subprocess.run(fuzz(seed, CASES, tmp_path), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-6000:]
    print(ended.stdout)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: 2020-99-99", "a value cannot be read: month must be in"),
        ('name: "\\ud800"', "a value cannot be read"),
        ("name: !!timestamp x", "a value cannot be read"),
        (f"name: {'9' * 5000}", "a value cannot be read: Exceeds the limit"),
        ("? [1, 2]\n: 3", "expected a key that is text or a number"),
        ("name: " + "[" * 5000, "expected at most 100 brackets within each other"),
        ("".join(f"{' ' * n}a:\n" for n in range(2000)), "expected at most 100 levels"),
        ("name: &a [*a]", "an alias stands for a value that it is in"),
        (f"a0: &a0 [x]\n{LAUGHS}", "expected at most 100,000 values"),
    ],
)
def test_yaml_that_is_no_setting_is_an_error_at_once(tmp_path, text, message):
    (tmp_path / "job.yaml").write_text(text)
    begun = time.monotonic()
    with pytest.raises(SettingsError, match=message) as error:
        read_spec(tmp_path / "job.yaml", {})
    assert len(str(error.value)) < 2000
    assert time.monotonic() - begun < 10


def test_a_thousand_mistakes_are_an_error_of_twenty(tmp_path):
    arguments = ", ".join("[]" for _ in range(1000))
    (tmp_path / "job.yaml").write_text(
        f"name: j\nentry: t.py\nroles: {{trainers: {{args: [{arguments}]}}}}\n"
    )
    with pytest.raises(SettingsError, match=r"… and \d+ more\.") as error:
        read_spec(tmp_path / "job.yaml", {})
    assert len(str(error.value).splitlines()) == 21


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a checkpoint, and its manifest."""
    folder = tmp_path_factory.mktemp("run")
    model = Model().train_on(1)
    Checkpoints(folder).save(1, model.state(), model, block=True)
    (step,) = folder.glob("step-*")
    return step, json.loads((step / "manifest.json").read_bytes())


def write_manifest(folder, content):
    """Write it with a right checksum."""
    fields = {name: value for name, value in content.items() if name != "checksum"}
    rest = json.dumps(fields, indent=1).removeprefix("{\n").encode()
    (folder / "manifest.json").write_bytes(b'{"checksum": "crc32:%08x",\n' % zlib.crc32(rest) + rest)


def with_base(folder):
    base = {"folder": folder, "step": 0, "id": "i", "checksum": "c"}
    return lambda content: content.update(kind="delta", base=base)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["dense"].update(name="../dense"),
        lambda content: content["dense"].update(name="/dense"),
        lambda content: content["dense"].update(name="a\0b"),
        lambda content: content["dense"].update(name=""),
        lambda content: content["dense"].update(bytes="7"),
        lambda content: content["dense"].update(bytes=-1),
        lambda content: content["tables"]["user"].update(dim=2**40),
        lambda content: content["tables"]["user"].update(rows=0.5),
        lambda content: content["tables"]["user"].update(parts=[]),
        lambda content: content["tables"]["user"].update(evict=[]),
        lambda content: content["tables"]["user"]["parts"][0].update(rows=True),
        lambda content: content.update(step=True),
        lambda content: content.update(tables=[]),
        with_base(".."),
        with_base(7),
    ],
)
def test_a_manifest_with_a_right_checksum_and_wrong_values_is_damaged(checkpoint, change):
    folder, content = checkpoint
    content = json.loads(json.dumps(content))
    change(content)
    write_manifest(folder, content)
    with pytest.raises(DamagedCheckpointError, match="the fields of a manifest"):
        Checkpoint(folder)


@pytest.mark.parametrize("field", ["format", "version", "mix"])
def test_a_manifest_of_another_format_is_an_error_that_fits_on_a_screen(checkpoint, field):
    folder, content = checkpoint
    write_manifest(folder, {**content, field: [["f", 2**53]] * 1025})
    with pytest.raises(CheckpointError, match=f"expected {field}") as error:
        Checkpoint(folder)
    assert len(str(error.value)) < 2000
