"""Every socket on which a process of a launched job listens is known, and on the job's host.

`test_chaos_master.py` checks it, too, before it kills the master of its job.
"""

import socket
import time

import pytest
from chaos_helpers import LaunchedJob, mutual_tls
from port_helpers import check_ports, sockets_of


def wait_for_steps(job, trainers):
    """Wait until every trainer has trained."""
    until = time.monotonic() + 120
    while not all((job.folder / "notes" / f"step-{rank}").exists() for rank in range(trainers)):
        assert job.process.poll() is None, job.log.read_text()
        assert time.monotonic() < until, job.log.read_text()
        time.sleep(0.05)


def test_no_port_of_a_job_on_one_machine_is_open_but_those_of_torch(tmp_path):
    with LaunchedJob(tmp_path, "hybrid", 4, trainers=2, loaders=1, workers=1, pause=1.0) as job:
        wait_for_steps(job, 2)
        check_ports(job, sockets_of(job))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hybrid", "async"])
def test_every_listening_socket_of_a_job_with_mutual_tls_is_known(tmp_path, mode):
    with LaunchedJob(
        tmp_path, mode, 4, trainers=2, loaders=1, workers=1, pause=1.0, extra=mutual_tls(tmp_path)
    ) as job:
        wait_for_steps(job, 2)
        check_ports(job, "127.0.0.1")
        job.kill("trainer", 2)  # the next generation has ports of its own
        job.wait_for_line("Generation 1 begins")
        for note in (tmp_path / "notes").glob("step-*"):
            note.unlink(missing_ok=True)
        wait_for_steps(job, 2)
        check_ports(job, "127.0.0.1")


@pytest.mark.slow
def test_all_of_a_job_with_an_address_of_the_machine_listens_there(tmp_path):
    try:
        host = socket.gethostbyname(socket.getfqdn())
    except OSError:
        host = "127.0.0.1"
    if host.startswith("127."):
        pytest.skip("this machine has no address besides loopback")
    secured = mutual_tls(tmp_path, host)
    with LaunchedJob(tmp_path, "sync", 1, trainers=2, loaders=1, workers=1, pause=1.0, extra=secured) as job:
        wait_for_steps(job, 2)
        check_ports(job, host)
