"""A command that has printed its result ends, whatever threads of libraries are doing."""

import os
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked_programs import run_forked

STORE = """
import threading
from fsspec.implementations.local import LocalFileSystem

class Store(LocalFileSystem):
    '''Once it is `stuck`, every read blocks for ever.'''

    cachable = False
    stuck = False
    blocked = threading.Event()

    def _open(self, path, mode="rb", **options):
        return File(super()._open(path, mode, **options))

class File:
    def __init__(self, file):
        self._file = file

    def read(self, *size):
        if Store.stuck:
            Store.blocked.set()
            threading.Event().wait()
        return self._file.read(*size)

    def __getattr__(self, name):
        return getattr(self._file, name)

class First:
    '''The first batch; then the rest is being read, in the background.'''

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        batches = iter(self.data)
        yield next(batches)
        Store.stuck = True
        threading.Thread(target=list, args=(batches,), daemon=True).start()
        Store.blocked.wait()
"""

JOB = """
import atexit
import threading
import torch
import karvan as kv
from store import First, Store

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

atexit.register(setattr, threading.Thread, "start", refuse)  # as Python 3.12 does
notes = open("notes.txt", "w")

def job(eval: bool = True):
    torch.manual_seed(0)
    trainer = kv.Trainer(
        kv.models.DLRM([], ["user", "item"], dim=4, bottom=(8,), top=[8]),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=torch.optim.Adam,
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
        checkpoints="run",
    )
    notes.write("a line in a buffer")
    train = kv.data.read("train.parquet", 64)
    many = kv.data.read("many.parquet", 64, filesystem=Store())
    return kv.TrainingJob(trainer, train, eval_data=First(many) if eval else None, epochs=1)
"""


def karvan(folder, *arguments):
    command = [sys.executable, "-m", "karvan", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def test_evaluate_ends_although_a_read_in_advance_is_stuck(place):
    table = pq.read_table(place / "eval.parquet")
    pq.write_table(pa.concat_tables([table] * 100), place / "many.parquet", row_group_size=2000)
    (place / "store.py").write_text(STORE)
    (place / "job.py").write_text(JOB)
    train = [sys.executable, "-m", "karvan", "train", "job.py", "--quiet", "--set", "eval=false"]
    assert run_forked(train, cwd=place).returncode == 0
    ran = karvan(place, "evaluate", "job.py", "--json", "-")
    assert ran.returncode == 0, ran.stderr
    assert '"loss"' in ran.stdout
    assert (place / "notes.txt").read_text() == "a line in a buffer"


@pytest.mark.parametrize("command", [["version"], ["version", "--json", "-"]])
def test_a_full_disk_behind_stdout_is_an_error_of_one_line(command):
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "karvan", *command], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ran.returncode == 75
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["version"], ["train", "--example"], ["inspect", "run"]])
def test_a_reader_that_has_gone_ends_a_command_without_a_word(command, trained):
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "karvan", *command]
    ran = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, cwd=trained)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (141, b"")  # as other programs, which SIGPIPE ends


INSPECTING = """
import karvan as kv
from store import Store

class Second(Store):
    def _open(self, path, mode="rb", **options):
        Store.stuck = path.endswith("2.csv")
        return super()._open(path, mode, **options)

def tell():
    Store.blocked.wait()
    print("blocked", flush=True)

def job():
    import threading
    threading.Thread(target=tell, daemon=True).start()
    kv.data.read(["1.csv", "2.csv"], 64, filesystem=Second())
"""


def test_one_interrupt_ends_a_command_although_files_are_being_inspected(tmp_path):
    for name in ("1.csv", "2.csv"):
        (tmp_path / name).write_text("user,label\n1,1\n")
    (tmp_path / "store.py").write_text(STORE)
    (tmp_path / "job.py").write_text(INSPECTING)
    command = [sys.executable, "-m", "karvan", "evaluate", "job.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as started:
        try:
            assert started.stdout.readline() == b"blocked\n"
            started.send_signal(signal.SIGINT)
            assert started.wait(60) == 130
        finally:
            started.kill()
