"""Data is not to blame for a process that has no memory left."""

import sys

import pyarrow as pa
import pyarrow.parquet as pq
from forked_programs import run_forked

PROGRAM = """
import resource, sys
from pathlib import Path
import pyarrow as pa
import karvan as kv
from karvan.data.errors import located
from karvan.data.task_records import may_be_of_a_record

def allocate(size):
    with located("file"):
        pa.allocate_buffer(size)

def read(path):
    for batch in kv.data.read(path, batch_size=1 << 22):
        pass

def name_of(work, argument):
    try:
        work(argument)
    except Exception as error:
        return error

read(sys.argv[2])  # everything is imported, and its threads run
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (16 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
errors = [name_of(allocate, 1 << 30), name_of(allocate, 1 << 60), name_of(read, sys.argv[1])]
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
print(*map(may_be_of_a_record, errors))
print(*(f"{type(error).__name__}: {error}" for error in errors), sep="\\n")
"""


def test_who_has_no_memory_blames_no_file_unless_it_asks_for_more_than_any_machine_has(tmp_path):
    pq.write_table(pa.table({"x": pa.array([0.5] * (1 << 22))}), tmp_path / "large.parquet")
    pq.write_table(pa.table({"x": [0.5] * 8}), tmp_path / "small.parquet")
    command = [sys.executable, "-c", PROGRAM, tmp_path / "large.parquet", tmp_path / "small.parquet"]
    done = run_forked(command)
    assert done.stdout.splitlines()[0] == "False True False", done.stdout + done.stderr
