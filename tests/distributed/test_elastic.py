"""Jobs under torchrun whose processes are killed: every record is in the final model once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from free_ports import free_port
from processes import kill
from support_paths import support_path

import karvan as kv

ROWS = 3001


@pytest.fixture
def job(tmp_path):
    """Folders for data, checkpoints and notes, with data in them."""
    for name in ("data", "checkpoints", "notes"):
        (tmp_path / name).mkdir()
    random = np.random.default_rng(0)
    for part, ids in enumerate(np.array_split(np.arange(ROWS), 4)):
        columns = {
            "record": ids,
            "user": random.integers(0, 50, len(ids)),
            "label": random.integers(0, 2, len(ids)).astype(np.float32),
        }
        pq.write_table(pa.table(columns), tmp_path / "data" / f"{part}.parquet")
    return tmp_path


def torchrun(job, ranks, pause, *options):
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [
        torchrun,
        *options,
        f"--nproc-per-node={ranks}",
        support_path("distributed/elastic_program.py"),
    ]
    folders = [job / "data", job / "checkpoints", job / "notes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = (job / f"log-{time.monotonic_ns()}").open("wb")
    return subprocess.Popen(
        [*map(str, command), *map(str, folders), str(pause)],
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for(what, seconds=90):
    """The first thing that is true, in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.05)
    raise TimeoutError


def process_of(job, world, rank, step):
    """The process of a rank once it has come to a step."""
    for note in (job / "notes").glob(f"{world}-{rank}-*"):
        pid, text = int(note.name.split("-")[2]), note.read_text()
        if text and int(text) >= step and Path(f"/proc/{pid}").exists():
            return pid
    return None


def logs(job):
    return "\n".join(path.read_text(errors="replace")[-20000:] for path in job.glob("log-*"))


def assert_each_record_once(job):
    newest = kv.Checkpoints(job / "checkpoints").latest()
    uses = {}
    for rows in newest.parts("record"):
        uses |= dict(zip(rows.keys.tolist(), rows.counts.tolist(), strict=True))
    assert uses == dict.fromkeys(range(ROWS), 1)


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_every_record_counts_once(job):
    process = torchrun(job, 2, 0.02, "--standalone", "--max-restarts=3")
    try:
        os.kill(wait_for(lambda: process_of(job, 2, 1, 17)), signal.SIGKILL)
        assert process.wait(120) == 0, logs(job)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert len(list((job / "notes").glob("2-*"))) == 4  # two generations
    assert_each_record_once(job)


@pytest.mark.slow
def test_other_numbers_of_ranks_go_on_where_a_killed_job_was(job):
    for ranks, until in ((2, 12), (3, 30), (1, None)):
        process = torchrun(job, ranks, 0.02 if until else 0.0, "--standalone")
        try:
            if until:
                wait_for(lambda ranks=ranks, until=until: process_of(job, ranks, 0, until))
            else:
                assert process.wait(120) == 0, logs(job)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                for note in (job / "notes").glob(f"{ranks}-*"):
                    pid = int(note.name.split("-")[2])
                    kill(pid)
                process.wait()
    assert_each_record_once(job)


def end(agent):
    """Kill an agent and its ranks, each of which leads a session of its own."""
    if agent.poll() is None:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in [agent.pid, *map(int, children)]:
            kill(pid)
        agent.wait()


@pytest.mark.slow
def test_agents_join_and_leave_while_the_job_goes_on(job, monkeypatch):
    # Torch's first agent tells the place of the store that all share to those only that begin with it.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options = [
        "--nnodes=1:2",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=caravan",
        "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
        "--monitor-interval=0.2",
        "--local-addr=127.0.0.1",
    ]
    agents = [torchrun(job, 1, 0.3, *options)]
    try:
        wait_for(lambda: process_of(job, 1, 0, 12))
        alone = newest_step(job)
        agents.append(torchrun(job, 1, 0.3, *options))
        wait_for(lambda: process_of(job, 2, 0, alone + 10) and process_of(job, 2, 1, alone + 10))
        assert newest_step(job) > alone
        end(agents[1])
        (job / "notes" / "hurry").touch()
        assert agents[0].wait(120) == 0, logs(job)
    finally:
        for agent in agents:
            end(agent)
    generations = [note.name.rsplit("-", 1)[0] for note in (job / "notes").glob("*-*")]
    assert set(generations) == {"1-0", "2-0", "2-1"}
    assert generations.count("1-0") >= 2  # before and after
    assert_each_record_once(job)


def newest_step(job):
    return kv.Checkpoints(job / "checkpoints").latest().step
