"""`kv.data.elastic`: a plain loop with torch's DataLoader, over records that are leased from a master."""

import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from forked_programs import ForkedProgram
from pyarrow import parquet as pq

import karvan as kv
from karvan.data.errors import DataError
from karvan.data.formats.recordio import RecordIOWriter
from karvan.wire import RefusedError, Server
from karvan.work.ledger import JobFailedError
from karvan.work.service import WorkService

LOOP = """
import sys
import karvan as kv
dataset = kv.data.elastic(sys.argv[1], 16, master=sys.argv[2], epochs=2, shuffle=True)
for number, batch in enumerate(dataset.loader()):
    print(*batch["id"].tolist(), flush=True)
    if sys.argv[3] == "stop" and number == 5:
        sys.stdin.read()  # until it is killed
    assert dataset.acknowledge(batch)
    print("acknowledged", flush=True)
"""


@pytest.fixture
def files(tmp_path):
    for number in range(2):
        ids = np.arange(number * 150, number * 150 + 150)
        pq.write_table(pa.table({"id": ids}), tmp_path / f"{number}.parquet", row_group_size=40)
    return str(tmp_path / "*.parquet")


@pytest.fixture
def master(tmp_path):
    command = [sys.executable, "-m", "karvan", "role", "master", "--checkpoints", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        yield re.search(r"master at (\S+),", process.stderr.readline())[1]
        process.kill()


@pytest.mark.parametrize("workers", [0, 2])
def test_every_record_comes_once_in_every_epoch(files, master, workers):
    dataset = kv.data.elastic(files, 16, master=master, epochs=2, shuffle=True)
    seen = []
    for batch in dataset.loader(num_workers=workers):
        seen += batch["id"].tolist()
        assert dataset.acknowledge(batch)
    assert Counter(seen[:300]) == Counter(range(300))
    assert Counter(seen) == Counter([*range(300)] * 2)
    assert seen[:300] != sorted(seen[:300])
    assert list(dataset.loader()) == []


def test_workers_read_records_of_json(tmp_path, master):
    for part in range(2):
        with RecordIOWriter(tmp_path / f"{part}.recordio") as writer:
            for number in range(part, 100, 2):
                writer.write(b'{"id": %d}' % number)
    decode = kv.data.json_rows(pa.schema([("id", pa.int64())]))
    dataset = kv.data.elastic(str(tmp_path / "*.recordio"), 16, master=master, options={"decode": decode})
    seen = []
    for batch in dataset.loader(num_workers=2):
        seen += batch["id"].tolist()
        assert dataset.acknowledge(batch)
    assert sorted(seen) == list(range(100))


def start_loop(files, master, how):
    command = [sys.executable, "-c", LOOP, files, master, how]
    return ForkedProgram(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def acknowledged(text):
    lines = text.splitlines()
    batches = [line for line, after in pairwise(lines) if after == "acknowledged"]
    return Counter(int(number) for line in batches for number in line.split())


def test_two_programs_share_the_records(files, master):
    loops = [start_loop(files, master, "run") for _ in range(2)]
    done = sum((acknowledged(loop.communicate(timeout=60)[0]) for loop in loops), Counter())
    assert [loop.returncode for loop in loops] == [0, 0]
    assert done == Counter([*range(300)] * 2)


def test_what_a_killed_program_did_not_acknowledge_goes_to_the_next(files, tmp_path):
    work = WorkService(tmp_path / "work.db")
    server = Server(work, "127.0.0.1")
    first = start_loop(files, server.address, "stop")
    lines = [first.stdout.readline() for _ in range(11)]  # five batches with acknowledgement, and one without
    first.kill()
    first.wait()
    holders = {lease.holder for lease in work.ledger.leases}
    assert len(holders) == 1
    work.release(holders.pop())
    second = start_loop(files, server.address, "run")
    done = acknowledged("".join(lines)) + acknowledged(second.communicate(timeout=60)[0])
    assert second.returncode == 0
    assert done == Counter([*range(300)] * 2)
    server.close()
    work.close()


def train(dataset):
    for batch in dataset:
        assert dataset.acknowledge(batch)


def no_77(batch):
    if 77 in batch["id"]:
        raise ValueError("77")
    return batch


def test_a_record_that_raises_an_error_is_named(files, tmp_path):
    work = WorkService(tmp_path / "work.db")
    server = Server(work, "127.0.0.1")
    options = {"master": server.address, "shuffle": True, "transform": no_77, "most_tries": 2}
    dataset = kv.data.elastic(files, 16, **options)
    name = rf"record 77 of {tmp_path / '0.parquet'} \(epoch 0\)"
    with pytest.raises(DataError, match=rf"^{name}: ValueError: 77 \(.*; its batch is of .*records 40 to 79"):
        train(dataset)
    with pytest.raises(JobFailedError, match=rf"^{name} failed 2 times. The last error: ValueError: 77"):
        train(dataset)
    server.close()
    work.close()


def test_a_batch_that_was_given_to_another_process_is_not_acknowledged(files, tmp_path, caplog):
    work = WorkService(tmp_path / "work.db", patience=0.0)
    server = Server(work, "127.0.0.1")
    dataset = kv.data.elastic(files, 16, master=server.address)
    batch = next(batches := iter(dataset))
    assert work.overdue()
    assert not dataset.acknowledge(batch)
    assert "this one made no progress for too long" in caplog.text
    batches.close()
    server.close()
    work.close()


def test_without_a_master_it_says_how_to_start_one(files):
    with pytest.raises(ValueError, match=r"karvan role master --checkpoints FOLDER.*KARVAN_REGISTRY"):
        kv.data.elastic(files, 16)


def test_another_kind_of_batch_cannot_be_acknowledged(files, master):
    dataset = kv.data.elastic(files, 16, master=master)
    with pytest.raises(TypeError, match="batch_size=None and no collate_fn"):
        dataset.acknowledge({"id": torch.arange(3)})


def test_processes_that_describe_other_work_are_refused(files, master):
    next(iter(kv.data.elastic(files, 16, master=master)))
    with pytest.raises(RefusedError, match="epochs was 1, and is"):
        next(iter(kv.data.elastic(files, 16, master=master, epochs=3)))


def test_a_forked_worker_is_an_error_that_says_what_to_do(files, master):
    dataset = kv.data.elastic(files, 16, master=master)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(RuntimeError, match="multiprocessing_context='forkserver'"):
        next(iter(loader))
