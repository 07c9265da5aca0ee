"""Elastic jobs whose network is interrupted: every record counts once, and nobody waits for ever.

Limits of silence are those of launched jobs, a minute for trainers, where `karvan launch` runs the job. Where
the test has the master in its own process, they are seconds, and nobody kills a trainer that is out of reach.
"""

import subprocess
import time
from contextlib import contextmanager

import pytest
from elastic_jobs import elastic_job
from elastic_launch import ElasticLaunch
from partitions import far_network
from support_paths import support_path

MODES = ["hybrid", "sync", "async"]


class FarLaunch(ElasticLaunch):
    """A launched job of which some trainers are in a network namespace."""

    program = support_path("train/far_trainer.py")

    def __init__(self, folder, network, far, **options):
        extra = {"FAR": network.far, "FAR_TRAINERS": far, "TRANSPORT": "network"}
        servers = f'["--host", "{network.servers}"]'
        super().__init__(folder, extra=network.tls, server_arguments=servers, **extra, **options)

    def finish(self, without=()):
        """See `ElasticLaunch.finish`; nothing is left of the job afterwards."""
        text = super().finish(without)
        for role in ("trainer", "parameter-server", "master"):
            assert self.pids(role) == []
        return text


@contextmanager
def job_at(network, folder, mode, **options):
    """A job whose master is in the test: services listen at the addresses of this machine."""
    options |= {"host": network.here, "server_host": network.servers, "security": network.security}
    settings = {"PAUSE": 0.05, "TRANSPORT": "network", "KARVAN_MODE": mode, "epochs": 1, "servers": 2}
    with elastic_job(folder, program="far_trainer", least=2, **{**settings, **options}) as job:
        yield job


def check(job, results):
    """Every record was trained once, in parameters and rows."""
    for result in results:
        assert result["times"] == [float(job.epochs)] * job.records
        assert result["rows"] == [float(job.epochs)] * job.records


def interrupted(network, how):
    """The network without the connection: the link is gone, or nobody answers any more."""
    return network.pulled() if how == "link" else network.silent()


def trains(job, *trainers):
    """Wait until these, and no others, have made some more steps together."""
    target = max(job.step(each)[0] for each in trainers) + 3
    job.wait(lambda: all(job.step(each) >= (target, len(trainers)) for each in trainers))
    assert {job.step(each)[1] for each in trainers} == {len(trainers)}


def cut_off_for_long(folder, mode, how):
    """One of two trainers is out of reach for longer than the limit; nobody but itself can end it."""
    options = {"lost_after": 3.0, "records": 1200}  # enough for one more to come before the end
    with far_network(folder) as network, job_at(network, folder, mode, **options) as job:
        near, far = job.start(GLOO_SOCKET_IFNAME=network.near), job.start(FAR=network.far)
        trains(job, near, far)
        with interrupted(network, how):
            job.wait(lambda: job.step(near)[1] == 1)
            trains(job, near)
        assert far.wait(60) != 0
        assert "The trainers have continued without trainer-1" in far.log.read_text()
        another = job.start(FAR=network.far)
        job.wait(lambda: job.step(another)[1] == 2)
        job.hurry()
        job.wait(lambda: another.poll() is not None)
        check(job, job.results(1))
        assert [near.wait(60), another.wait(60)] == [0, 0], job.logs()


def test_a_trainer_that_is_cut_off_for_long_is_left_out_and_ends(tmp_path):
    cut_off_for_long(tmp_path, "sync", "silence")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["link", "silence"])
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_that_is_cut_off_for_long_commits_nothing_in_any_mode(tmp_path, mode, how):
    cut_off_for_long(tmp_path, mode, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["link", "silence"])
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_that_is_cut_off_for_seconds_stays(tmp_path, mode, how):
    with far_network(tmp_path) as network, job_at(network, tmp_path, mode, lost_after=30.0) as job:
        near, far = job.start(GLOO_SOCKET_IFNAME=network.near), job.start(FAR=network.far)
        trains(job, near, far)
        for seconds in (1.0, 4.0):
            with interrupted(network, how):
                time.sleep(seconds)
            trains(job, near, far)
        job.hurry()
        check(job, job.results(2))
        assert [near.wait(60), far.wait(60)] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.0, 15.0])  # less, and more than the limit
@pytest.mark.parametrize("mode", MODES)
def test_a_master_that_is_cut_off_from_all_trainers_loses_none(tmp_path, mode, seconds):
    with far_network(tmp_path) as network, job_at(network, tmp_path, mode, lost_after=8.0) as job:
        trainers = [job.start(FAR=network.far) for _ in range(2)]
        trains(job, *trainers)
        with network.silent(network.here):
            time.sleep(seconds)
        trains(job, *trainers)
        job.hurry()
        check(job, job.results(2))
        assert [each.wait(60) for each in trainers] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_launched_job_replaces_a_trainer_that_is_cut_off_for_long(tmp_path, mode):
    options = {"records": 6000, "epochs": 1, "pause": 0.2, "mode": mode}
    with far_network(tmp_path) as network, FarLaunch(tmp_path, network, "1", **options) as job:
        job.wait_for_world(2)
        with network.silent():
            job.wait_for_world(1, 180)
            job.wait(lambda: "trainer-1 does not answer any more" in job.log.read_text(), 180)
        job.wait_for_world(2)
        text = job.finish()
        assert subprocess.check_output(["ip", "netns", "pids", network.name]) == b""
    assert "trainer-1 was killed by SIGKILL; the others continue, and it is restarted." in text
    assert "Generation 1 begins" not in text


@pytest.mark.slow
@pytest.mark.parametrize("far", ["1", "0,1"])
@pytest.mark.parametrize("mode", MODES)
def test_a_launched_job_outlasts_seconds_without_a_network(tmp_path, mode, far):
    with far_network(tmp_path) as network, FarLaunch(tmp_path, network, far, mode=mode, records=2000) as job:
        job.wait_for_world(2)
        for cut in (network.silent(), network.pulled(), network.silent(network.here)):
            with cut:
                time.sleep(6.0)
            job.wait_for_world(2)
        text = job.finish()
    assert "does not answer" not in text
    assert "Generation 1 begins" not in text
