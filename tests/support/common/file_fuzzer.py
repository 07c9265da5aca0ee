"""Hostile files, in a process of its own: `python file_fuzzer.py SEED CASES FOLDER`.

A case is a `job.yaml`, a config of `karvan train`, or a manifest of a checkpoint with a right checksum, each
with up to three random changes. Reading it succeeds, or ends with an error of Karvan; anything else is a
finding, and so are a case that takes seconds, a file outside of the folder, and memory that grows.
"""

import json
import os
import random
import resource
import shutil
import sys
import time
import traceback
import zlib
from collections import Counter
from importlib.resources import files
from pathlib import Path

import yaml
from checkpoint_helpers import Model
from mutations import copied, mutated

from karvan.checkpoint import Checkpoint, CheckpointError, Checkpoints, summary
from karvan.cli.config import read_config
from karvan.cli.output import CommandError
from karvan.launch.engines.choice import check_engine
from karvan.launch.job_spec import read_spec
from karvan.launch.role_programs import commands_of
from karvan.settings import SettingsError

KNOWN = (CheckpointError, CommandError, SettingsError)
SLOW = 10.0  # seconds; the machine may be busy
MEMORY = 4 << 30  # bytes
JOB = yaml.safe_load("""
name: j
entry: train.py
mode: sync
sharding: dynamic
roles:
  trainers: {min: 1, max: 4, replicas: 2, args: [--lr, 0.1], env: {A: b}, cpus: 0.1}
  parameter_servers: {replicas: 2}
checkpoints: out
max_restarts: 3
""")
TRAIN = yaml.safe_load((files("karvan.cli") / "example.yaml").read_text())
LAUGHS = (f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
TEXTS = [
    *(
        "[" * 5000,
        "{" * 5000,
        "&a [*a]",
        "2020-99-99",
        "!!python/object/apply:os.system [x]",
        "? [1, 2]\n: 3\n",
    ),
    *(
        "9" * 5000,
        "!!binary x",
        "!!timestamp x",
        "!!int x",
        "<<: 3",
        "<<: [1]",
        "- a\n- b",
        "\t",
        "!!set {a}",
    ),
    *("0x", "1:2", "\0", f"a0: &a0 [x]\n{''.join(LAUGHS)}"),
]


class Fuzz:
    """The files, as they should be, and what has become of others."""

    def __init__(self, seed, folder):
        self._random = random.Random(seed)
        self._folder = folder
        model = Model()
        checkpoints = Checkpoints(folder / "run", full_every=2)
        for step in (1, 2):
            model.train_on(1)
            checkpoints.save(step, model.state(), model, block=True)
        self._steps = sorted((folder / "run").glob("step-*"))
        self._manifests = {path: (path / "manifest.json").read_bytes() for path in self._steps}
        self.outcomes, self.findings = Counter(), []

    def run(self, cases):
        kinds = {"job": self._job, "train": self._train, "manifest": self._manifest}
        before = self._files()
        for _ in range(cases):
            name = self._random.choice(list(kinds))
            what, do = kinds[name]()
            begun = time.monotonic()
            try:
                do()
                self.outcomes[f"{name} read"] += 1
            except KNOWN as error:
                self.outcomes[f"{name} {type(error).__name__}"] += 1
                if len(str(error)) > 20_000:
                    self._find(name, what, f"an error of {len(str(error))} characters")
            except Exception:
                self._find(name, what, traceback.format_exc(limit=-6))
            if time.monotonic() - begun > SLOW:
                self._find(name, what, f"it took {time.monotonic() - begun:.0f} s")
        for name in kinds:
            if not self.outcomes[f"{name} read"]:
                self._find(name, "", "none was read: the example itself has a mistake")
        if self._files() != before:
            self._find("files", str(self._files() ^ before), "not the same files")
        if (used := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) > MEMORY:
            self._find("memory", "", f"{used} bytes")

    def _files(self):
        return {path for path in self._folder.parent.rglob("*") if path.name != "config.yaml"}

    def _find(self, name, what, text):
        self.outcomes["finding"] += 1
        self.findings.append(f"{name}: {what[:600]}\n{text}")

    def _settings(self, example, read):
        pick = self._random
        tree = copied(example)
        for _ in range(pick.choice((0, 1, 1, 2, 3))):
            tree = mutated(pick, tree)
        text = yaml.safe_dump(tree)
        if pick.random() < 0.3:
            at = pick.randrange(len(text))
            text = text[:at] + pick.choice([*TEXTS, text[at + pick.randrange(9) :]])
        elif pick.random() < 0.1:
            text = pick.choice(TEXTS)
        path = self._folder / "config.yaml"
        path.write_bytes(text.encode(errors="surrogatepass"))
        return text, lambda: read(path)

    def _job(self):
        def read(path):
            spec = read_spec(path, {})
            commands_of(spec)
            spec.files()
            try:
                check_engine("local", spec)
            except ValueError as error:
                raise CommandError(str(error)) from error

        return self._settings(JOB, read)

    def _train(self):
        return self._settings(TRAIN, lambda path: read_config(path, {}))

    def _manifest(self):
        pick = self._random
        path = pick.choice(self._steps)
        content = json.loads(self._manifests[path])
        del content["checksum"]
        for _ in range(pick.choice((0, 1, 1, 2, 3))):
            content = mutated(pick, content)
        text = json.dumps(copied(content), indent=1)
        if pick.random() < 0.02:
            text = text[:-2] + ', "state": ' + "[" * 100_000 + "]" * 100_000 + "}"
        rest = text.removeprefix("{\n").encode(errors="surrogatepass")
        data = b'{"checksum": "crc32:%08x",\n' % zlib.crc32(rest) + rest

        def read():
            (path / "manifest.json").write_bytes(data)
            try:
                checkpoint = Checkpoint(self._steps[-1])
                checkpoint.verify()
                summary(self._steps[-1])
                for table in checkpoint.manifest.tables:
                    checkpoint.row(table, 7)
                checkpoint.require_intact()
                checkpoint.load(Model(seed=1))
            finally:
                (path / "manifest.json").write_bytes(self._manifests[path])

        return text, read


def main(seed, cases, folder):
    resource.setrlimit(resource.RLIMIT_DATA, (3 * MEMORY, 3 * MEMORY))
    fuzz = Fuzz(seed, folder)
    begun = time.monotonic()
    fuzz.run(cases)
    print(f"{cases} cases in {time.monotonic() - begun:.0f} s: {dict(sorted(fuzz.outcomes.items()))}")
    for finding in fuzz.findings[:20]:
        print(f"FINDING {finding}")
    sys.stdout.flush()
    shutil.rmtree(folder)
    os._exit(1 if fuzz.findings else 0)


if __name__ == "__main__":
    made = Path(sys.argv[3]) / f"seed-{sys.argv[1]}" / "inside"
    made.mkdir(parents=True)
    main(int(sys.argv[1]), int(sys.argv[2]), made)
