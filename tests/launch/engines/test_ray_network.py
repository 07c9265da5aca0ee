"""A Ray cluster of several machines: addresses, TLS, and code on a node that does not see its folder."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
from chaos_helpers import mutual_tls
from engine_helpers import HAS_RAY, NEEDS_RAY
from launch_helpers import PATIENCE, wait_until
from ray_jobs import DetachedElasticJob, DetachedJob, karvan
from support_paths import support_path
from two_machines import can_make_namespaces, kill_far, launched_far, one_more_node, two_machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_RAY, reason=NEEDS_RAY),
    pytest.mark.skipif(not can_make_namespaces(), reason="needs the right to make namespaces"),
]

ENTRY = """
import json, os, socket
import beside
names = ["HOST", "ADVERTISE", "CHECKPOINTS", "TOKEN_FILE", "TLS_KEY"]
values = {name: os.environ.get(f"KARVAN_{name}") for name in names}
values["gloo"] = os.environ["GLOO_SOCKET_IFNAME"]
values["secrets"] = [open(values[name]).read() for name in ("TOKEN_FILE", "TLS_KEY")]
values["beside"] = beside.NUMBER
values["files"] = sorted(os.listdir("."))
socket.create_server((values["HOST"], 0)).close()
print(json.dumps(values))
"""
TEXT = "name: far\nentry: train.py\ncheckpoints: out/run\nroles: {trainers: {replicas: 1}}\n"


def run(folder, environment, *arguments):
    program = [sys.executable, str(support_path("launch/far_program.py")), *arguments]
    return subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE
    )


def test_a_process_on_another_machine_has_the_code_the_secrets_and_an_address_of_its_own(tmp_path):
    (job := tmp_path / "job").mkdir()
    (job / "out/run").mkdir(parents=True)
    (job / "out/run/large").touch()
    (job / "train.py").write_text(ENTRY)
    (job / "beside.py").write_text("NUMBER = 7\n")
    for name in ("token", "key", "cert"):
        (job / name).write_text(f"the {name}")
        (job / name).chmod(0o600)
    (job / "open.yaml").write_text(TEXT)
    number = os.getpid() % 250
    tls = f"token_file: token\nhost: 10.77.{number}.1\ntls: {{cert: cert, key: key}}\n"
    (job / "job.yaml").write_text(f"{TEXT}{tls}")
    with two_machines(tmp_path, job, number) as (address, there, environment):
        refused = run(job, environment, address, "open.yaml", "train.py")
        assert "The Ray cluster has several machines" in refused.stderr
        assert "expected an address of this machine, got host: 127.0.0.1" in refused.stderr
        found = run(job, environment, address, "job.yaml", "train.py")
        *lines, code = found.stdout.splitlines()
        assert code == "0", found
    values = json.loads(lines[-1])
    assert (values["HOST"], values["ADVERTISE"]) == (there, there)
    assert values["CHECKPOINTS"] == str(job / "out/run")
    assert values["secrets"] == ["the token", "the key"]
    assert values["gloo"].startswith("kv")
    assert values["beside"] == 7
    assert {"beside.py", "train.py", "job.yaml"} <= set(values["files"])
    assert "out" not in values["files"]


def test_a_job_survives_the_machine_on_which_it_was_launched(tmp_path, monkeypatch):
    """The master is restarted on the other machine, and a server there too, so that all trainers go back.

    The launcher has made the certificate, without knowing the addresses.
    """
    (hidden := tmp_path / "hidden").mkdir()
    number = os.getpid() % 250
    here, there = f"10.77.{number}.1", f"10.77.{number}.2"
    with two_machines(tmp_path, hidden, number) as (address, _, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with DetachedJob(
            tmp_path, extra=f"host: {there}\n", address=address, before=launched_far(number)
        ) as job:
            first = job.master()
            assert job.run_folder.master()["address"].startswith(f"{there}:")
            job.wait_for_step(7, 150)
            assert first in kill_far(number)
            job.wait_for_master(first)
            assert job.run_folder.master()["address"].startswith(f"{here}:")
            job.finish()


def test_trainers_continue_when_the_machine_of_the_master_dies(tmp_path, monkeypatch):
    """Those on the other machine find the master there, and so does the server, which has its rows."""
    for name in ("hidden", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # paths of sockets are short
    number = os.getpid() % 250
    here, there = f"10.77.{number}.1", f"10.77.{number}.2"
    with ExitStack() as stack:
        address, _, environment = stack.enter_context(two_machines(tmp_path, tmp_path / "hidden", number))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        where = {"trainers": {"room": 1}, "parameter_servers": {"near": 0.1}}
        job = stack.enter_context(
            DetachedElasticJob(
                tmp_path,
                extra=mutual_tls(tmp_path, there, here),
                address=address,
                before=launched_far(number),
                servers=1,
                records=3600,
                env={"PAUSE": "1.0"},
                trainers={"min": 1, "max": 3},
                resources=where,
            )
        )
        job.wait(lambda: job.reached(2, 3))
        first, [server] = job.master(), job.pids("parameter-server")
        assert job.run_folder.master()["address"].startswith(f"{there}:")
        trainers = set(job.pids("trainer"))
        dead = trainers.intersection(lost := kill_far(number))
        near = trainers - dead
        assert first in lost
        assert (len(dead), len(near)) == (1, 2)
        job.wait_for_restart(first)
        assert job.run_folder.master()["address"].startswith(f"{here}:")
        stack.enter_context(one_more_node(tmp_path, address, environment, room=1))
        job.wait(lambda: job.reached(5, 3))
        assert near < set(job.pids("trainer"))
        assert job.pids("parameter-server") == [server]
        job.finish()
        job.check_records()
        said = karvan("logs", "chaos")
        assert "; the others continue, and it is restarted." in said
        assert "all trainers" not in said  # nobody went back
        assert {path.name for path in (tmp_path / "notes").glob("result-*")} >= {
            f"result-{pid}" for pid in near
        }
        wait_until(lambda: not list((tmp_path / "temporary").glob("karvan-*")), "no file to be left")
        assert sorted(path.name for path in job.run_folder.shared.iterdir()) == ["logs", "outcome.json"]
