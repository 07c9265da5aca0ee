"""PERSIA's Adult example in its published form: a loader, both configurations, a dump with TorchScript.

Its roles are started by a Procfile, by persia-launcher, and by `karvan launch`.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_programs import run_forked
from free_ports import free_port
from persia_job import PersiaJob

HERE = Path(__file__).parent / "adult"
ADULT = HERE.parent.parent.parent.parent.parent / "shared" / "data" / "adult"
GATE = 0.89
NAMES = [
    *("workclass", "education", "marital_status", "occupation"),
    *("relationship", "race", "gender", "native_country"),
]
COLUMNS = [1, 3, 5, 6, 7, 8, 9, 13]
NUMBERS = [0, 4, 10, 11, 12]
VARIABLES = {"REPRODUCIBLE": "1", "EMBEDDING_STALENESS": "1", "OMP_NUM_THREADS": "1", "KARVAN_THREADS": "1"}

needs_adult = pytest.mark.skipif(not ADULT.exists(), reason="needs the Adult data")


def read_adult(name):
    """The cells of a file of the real data."""
    with open(ADULT / name) as file:
        return np.array([[cell.strip() for cell in line] for line in csv.reader(file) if len(line) == 15])


def save(path, ids, numbers, labels):
    """Write a file as the example's preprocessing does."""
    path.parent.mkdir(exist_ok=True)
    np.savez(
        path,
        target=labels.astype(np.float32),
        continuous_data=numbers.astype(np.float32),
        categorical_data=ids.astype(np.uint64),
        categorical_columns=np.array(NAMES),
    )


@pytest.fixture
def example(tmp_path):
    """The folder of the example, with data that are made up."""
    folder = tmp_path / "adult"
    shutil.copytree(HERE, folder)
    generator = np.random.default_rng(3)
    for name, samples in (("train", 12 * 128 + 5), ("test", 300)):
        ids = generator.integers(0, 9, (samples, len(NAMES)))
        numbers = generator.standard_normal((samples, len(NUMBERS)))
        labels = ids[:, 0] + numbers[:, 0] > 4
        save(folder / "data" / f"{name}.npz", ids, numbers, labels)
    return folder


@pytest.fixture
def adult(example):
    """The folder of the example with the real data."""
    cells = read_adult("adult.data")
    known = [
        {text: number for number, text in enumerate(np.unique(column))} for column in cells[:, COLUMNS].T
    ]
    numbers = cells[:, NUMBERS].astype(float)
    for name, part in (("train", cells), ("test", read_adult("adult.test"))):
        ids = [
            [one.get(text, len(one)) for one, text in zip(known, line, strict=True)]
            for line in part[:, COLUMNS]
        ]
        scaled = (part[:, NUMBERS].astype(float) - numbers.mean(0)) / numbers.std(0)
        labels = np.array([text.startswith(">") for text in part[:, 14]])
        save(example / "data" / f"{name}.npz", np.array(ids), scaled, labels)
    return example


def results_of(output):
    """Rows of each server and AUC by rank, as trainers print them."""
    found = re.findall(r"rank (\d) of \d, rows \[(.*)\], auc (\S+)", output)
    return {int(rank): ([int(each) for each in rows.split(",")], float(auc)) for rank, rows, auc in found}


def run_roles(folder, trainers=1, **variables):
    """The job by persia-launcher, servers last; the output of trainers and loaders, and that of a server."""
    configs = [
        *("--embedding-config", folder / "config" / "embedding_config.yml"),
        *("--global-config", folder / "config" / "global_config.yml"),
    ]
    roles = {
        "nn-worker": [[folder / "train.py", "--nproc-per-node", trainers]],
        "data-loader": [[folder / "data_loader.py"]],
        "embedding-worker": [["--port", 0, *configs]],
        "embedding-parameter-server": [["--port", 0, *configs]],
    }
    job = PersiaJob(folder, {}, **VARIABLES, KARVAN_CHECKPOINTS=str(folder / "checkpoint"), **variables)
    job.environment["PERSIA_EMBEDDING_CONFIG"] = ""  # trainers have it from the embedding worker
    try:
        return job.run(roles, list(roles)), job.output(list(job.processes)[-1])
    finally:
        job.close()


def test_the_example_trains_dumps_and_loads_by_roles_in_any_order(example):
    output, server = run_roles(example, BATCHES="10", PERSIA_CKPT_DIR=str(example / "checkpoint" / "one"))
    ((rows, auc),) = results_of(output).values()
    assert rows == [8 * 9]
    assert auc > 0.6
    assert "loaded" in output
    net = torch.jit.load(example / "checkpoint" / "one" / "jit_dense.pt")
    assert net.eval()([torch.zeros(1, 5)], [torch.zeros(1, 8)] * 8).shape == (1, 1)
    for key in ("enable_metrics=True", "push_interval_sec", "incremental_channel_capacity", "index_prefix"):
        assert len(re.findall(rf"{key} of PERSIA has no effect here", server)) == 1


def launch(folder, **variables):
    """What `karvan launch` prints for two trainers."""
    environment = {
        **os.environ,
        **VARIABLES,
        "PERSIA_EMBEDDING_CONFIG": str(folder / "config" / "embedding_config.yml"),
        "PERSIA_GLOBAL_CONFIG": str(folder / "config" / "global_config.yml"),
        "KARVAN_JOBS": str(folder / "jobs"),
        **variables,
    }
    command = [sys.executable, "-m", "karvan", "launch", "job.yaml"]
    return run_forked(command, timeout=580, env=environment, cwd=folder)


@pytest.mark.slow
def test_a_launched_example_refuses_a_dump_outside_of_its_folder_before_it_trains(example):
    ended = launch(example, BATCHES="10", PERSIA_CKPT_DIR=str(example / "elsewhere"))
    assert ended.returncode != 0
    assert "the program dumps there, but" in ended.stdout + ended.stderr
    assert "batch 0 loss" not in ended.stdout + ended.stderr


@needs_adult
@pytest.mark.slow
def test_the_example_reaches_its_auc_twice_with_identical_bits(adult):
    ((rows, auc),) = results_of(run_roles(adult)[0]).values()
    assert rows == [102]
    assert auc >= GATE
    dumps = str(adult / "checkpoint" / "again")
    again, _ = run_roles(adult, EXPECTED_AUC=repr(auc), PERSIA_CKPT_DIR=dumps)  # which the program compares
    assert results_of(again) == {0: (rows, auc)}
    assert "loaded" in again


@needs_adult
@pytest.mark.slow
def test_two_trainers_agree_by_roles_and_by_launch(adult):
    dumps = {"PERSIA_CKPT_DIR": str(adult / "checkpoint" / "launched")}
    ended = launch(adult, **dumps)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    launched = results_of(ended.stdout)
    by_roles = results_of(run_roles(adult, trainers=2)[0])
    assert launched == by_roles
    (rows, auc), (same_rows, other_auc) = launched[0], launched[1]
    assert rows == same_rows
    assert auc == pytest.approx(other_auc, abs=1e-3)  # batch norm has statistics of the trainer's own batches
    assert min(auc, other_auc) >= GATE
    assert (adult / "checkpoint" / "launched" / "jit_dense.pt").exists()


@pytest.mark.slow
def test_the_lines_of_a_procfile_run_as_they_are(example):
    port = free_port()
    environment = {
        **os.environ,
        **VARIABLES,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PERSIA_NATS_IP": f"nats://127.0.0.1:{port}",
        "NATS_PORT": str(port),
        "NPROC_PER_NODE": "1",
        "PERSIA_EMBEDDING_CONFIG": "config/embedding_config.yml",
        "KARVAN_CHECKPOINTS": "checkpoint",
        "BATCHES": "10",
    }
    lines = [line for line in (example / "Procfile").read_text().splitlines() if line[0] != "#"]
    processes = {}
    try:
        for line in lines:
            name, _, command = line.partition(": ")
            output = open(example / f"{name}.txt", "w+")  # noqa: SIM115
            processes[name] = subprocess.Popen(
                f"exec {command}" if "&&" not in command else command,
                shell=True,
                cwd=example,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        texts = (example / "nn_worker.txt", example / "data_loader.txt")
        assert processes["nn_worker"].wait(300) == 0, [text.read_text() for text in texts]
        processes["data_loader"].stdin.close()  # which ends `cat`
        assert processes["data_loader"].wait(60) == 0, texts[1].read_text()
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(30)
    assert len(results_of(texts[0].read_text())) == 1
