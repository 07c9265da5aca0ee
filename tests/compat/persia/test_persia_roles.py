"""All roles of a PERSIA job, started by hand in any order; loaders whose program simply ends."""

import os
import re
import sys
from pathlib import Path
from subprocess import Popen

import pytest
from forked_programs import run_forked
from persia_job import PersiaJob
from wire_helpers import wait_for

SLOTS = "slots_config: {user: {dim: 4}, item: {dim: 4, embedding_summation: false, sample_fixed_size: 2}}\n"
LOADER = """
import numpy as np
from persia.ctx import DataCtx
from persia.embedding.data import *
from persia.env import get_replica_index, get_replica_size

ctx = DataCtx()  # never entered, never closed: the program simply ends
for number in range(get_replica_index(), 20, get_replica_size()):
    generator = np.random.default_rng(number)
    users = generator.integers(0, 9, 8).astype(np.uint64)
    items = [generator.integers(0, 9, length).astype(np.uint64) for length in generator.integers(0, 4, 8)]
    ctx.send_data(
        PersiaBatch(
            [IDTypeFeature("item", items), IDTypeFeatureWithSingleID("user", users)],
            [NonIDTypeFeature(generator.random((8, 1), np.float32))],
            [Label((users % 2).astype(np.float32)[:, None])],
            meta=str(number).encode(),
        )
    )
print("sent", flush=True)
"""
TRAINER = """
import os, torch
from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding.optim import Adagrad
from persia.env import get_rank
from persia.utils import setup_seed

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(15, 1)
    def forward(self, non_ids, embeddings):
        item, user = embeddings
        return self.layer(torch.cat([*non_ids, item.flatten(1), user], 1)).sigmoid()

setup_seed(1)
net = Net()
losses, numbers = [], []
with TrainCtx(
    model=net,
    embedding_optimizer=Adagrad(lr=0.5),
    dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
    mixed_precision=False,
) as ctx:
    for data in DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=1):
        output, labels = ctx.forward(data)
        numbers.append(None if data.meta is None else int(data.meta))
        losses.append(float(ctx.backward(torch.nn.functional.binary_cross_entropy(output, labels[0]))))
    print("result", get_rank(), numbers, losses, ctx.get_embedding_size(), flush=True)
"""


@pytest.fixture
def job(tmp_path):
    one = PersiaJob(tmp_path, {"embedding.yml": SLOTS, "loader.py": LOADER, "trainer.py": TRAINER})
    yield one
    one.close()


ROLES = {
    "nn-worker": [["{folder}/trainer.py"]],
    "data-loader": [["{folder}/loader.py"]],
    "embedding-worker": [["--port", 0]],
    "embedding-parameter-server": [
        ["--port", 0, "--replica-index", index, "--replica-size", 2] for index in (1, 0)
    ],
}


def results_of(output):
    """Numbers of batches, losses and sizes of servers by rank."""
    found = re.findall(r"result (\d+) (\[.*?\]) (\[.*?\]) (\[.*?\])", output)
    return {int(rank): tuple(map(eval, rest)) for rank, *rest in found}


def test_roles_that_are_started_by_hand_find_each_other(job):
    output = job.run(ROLES, list(ROLES))  # trainers first, servers last
    assert output.count("sent") == 1
    numbers, losses, sizes = results_of(output)[0]
    assert numbers == list(range(20))  # all that the loader sent before it ended, and the end of the epoch
    assert losses[-1] < losses[0]
    assert len(sizes) == 2
    assert sum(sizes) == 18


@pytest.mark.slow
@pytest.mark.parametrize("order", [list(ROLES), list(reversed(ROLES))])
def test_processes_of_their_own_do_the_same(job, order):
    job.program = Popen  # whose interpreters end as all interpreters do
    numbers, losses, sizes = results_of(job.run(ROLES, order))[0]
    assert numbers == list(range(20))
    assert losses[-1] < losses[0]
    assert sum(sizes) == 18


@pytest.mark.slow
def test_several_trainers_and_loaders(job):
    several = {
        **ROLES,
        "nn-worker": [["{folder}/trainer.py", "--nproc-per-node", 2]],
        "data-loader": [
            ["{folder}/loader.py", "--replica-index", index, "--replica-size", 3] for index in range(3)
        ],
        "embedding-worker": [
            ["--port", 0, "--replica-index", index, "--replica-size", 2] for index in range(2)
        ],
    }
    results = results_of(job.run(several, ["data-loader", "nn-worker", *list(ROLES)[2:]]))
    assert sorted(results) == [0, 1]
    taken = [numbers for numbers, _, _ in results.values()]
    assert sorted(number for each in taken for number in each if number is not None) == list(range(20))
    assert results[0][2] == results[1][2]
    assert sum(results[0][2]) == 18


@pytest.mark.slow
def test_the_error_of_a_loader_reaches_the_trainer(job):
    (job.folder / "loader.py").write_text(LOADER.replace('print("sent"', 'raise ValueError("spoiled")  #'))
    for role, processes in ROLES.items():
        for arguments in processes:
            process = job.start(role, *(str(each).format(folder=job.folder) for each in arguments))
            if role == "nn-worker":
                trainer = process
    assert trainer.wait(300) == 1
    assert "ValueError: spoiled" in job.output(trainer)


JOB = """
name: from-one-file
system: persia
entry: {folder}/trainer.py
loader_entry: {folder}/loader.py
roles: {{trainers: 2, parameter_servers: 2, embedding_workers: 1, loaders: 2}}
max_restarts: 0
"""


def launch(job, **environment):
    """What `karvan launch` prints for the job of one file, and its exit code."""
    (job.folder / "job.yaml").write_text(JOB.format(folder=job.folder))
    variables = {
        **os.environ,
        "PERSIA_EMBEDDING_CONFIG": str(job.folder / "embedding.yml"),
        "KARVAN_JOBS": str(job.folder / "jobs"),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [sys.executable, "-m", "karvan", "launch", str(job.folder / "job.yaml")]
    return run_forked(command, timeout=300, env=variables)


@pytest.mark.slow
def test_one_file_launches_a_whole_job(job):
    ended = launch(job)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = results_of(ended.stdout)
    assert sorted(results) == [0, 1]
    taken = [number for numbers, _, _ in results.values() for number in numbers]
    assert sorted(number for number in taken if number is not None) == list(range(20))
    assert sum(results[0][2]) == 18


@pytest.mark.slow
def test_a_launched_job_has_the_capacity_of_its_global_configuration(job):
    (job.folder / "global.yml").write_text("embedding_parameter_server_config: {capacity: 5}\n")
    ended = launch(job, PERSIA_GLOBAL_CONFIG=str(job.folder / "global.yml"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert max(results_of(ended.stdout)[0][2]) == 5


def test_a_launched_job_reads_its_configurations_before_anything_starts(job):
    (job.folder / "global.yml").write_text("common_config: {job_type: Infer}\n")
    ended = launch(job, PERSIA_GLOBAL_CONFIG=str(job.folder / "global.yml"))
    assert ended.returncode == 2
    assert "job_type: Infer, and infer_config of PERSIA is not supported" in ended.stderr
    ended = launch(job, PERSIA_EMBEDDING_CONFIG="")
    assert ended.returncode == 2
    assert "PERSIA_EMBEDDING_CONFIG, or a job that gives it to its embedding worker" in ended.stderr


def is_running(process):
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_trainers_die_with_a_launcher_that_is_killed(job, tmp_path):
    (job.folder / "trainer.py").write_text("print('started', flush=True)\nimport time; time.sleep(600)")
    job.program = Popen
    launcher = job.start("nn-worker", tmp_path / "trainer.py", "--nproc-per-node", 2)
    wait_for(lambda: job.output(launcher).count("started") == 2)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert len(children) == 2
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(map(is_running, children)))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nn-worker"], "Missing argument"),
        (["cook"], "No such command 'cook'"),
        (["embedding-worker"], "in PERSIA_NATS_URL, such as"),
        (["embedding-worker", "--global-config", "missing.yml"], "in PERSIA_NATS_URL, such as"),
    ],
)
def test_wrong_usage_of_the_launcher(words, text, monkeypatch, capsys):
    from karvan.cli.persia_launcher import main

    for name in ("ROLE", "INDEX", "COUNT", "PORT"):
        monkeypatch.setenv(f"KARVAN_{name}", "")
    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_a_configuration_that_is_refused_ends_a_role(tmp_path, monkeypatch, capsys):
    from karvan.cli.persia_launcher import main

    for name in ("ROLE", "INDEX", "COUNT", "PORT", "REGISTRY"):
        monkeypatch.setenv(f"KARVAN_{name}", "")
    monkeypatch.setenv("PERSIA_NATS_IP", "localhost:4222")
    (tmp_path / "global.yml").write_text("common_config: {job_type: Infer}\n")
    assert main(["embedding-parameter-server", "--global-config", str(tmp_path / "global.yml")]) == 2
    assert "job_type: Infer, and infer_config of PERSIA is not supported" in capsys.readouterr().err
