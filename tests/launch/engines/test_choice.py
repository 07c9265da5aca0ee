"""The choice of an engine, what a job needs of machines, and what travels to the nodes of a cluster."""

import sys
import threading

import pytest
from engine_helpers import HAS_RAY, NEEDS_RAY
from forked_programs import run_forked
from launch_helpers import spec_of
from pydantic import ValidationError

from karvan.launch.engines.base import Needs, check_machine, total_needs
from karvan.launch.engines.choice import check_engine, uses_network
from karvan.launch.engines.ray.actor import OutputBuffer
from karvan.launch.engines.ray.cluster import MOST_BYTES, runtime_environment

TLS = {"cert": "c", "key": "k", "ca": "a"}


@pytest.mark.parametrize(
    ("name", "roles", "more", "said"),
    [
        ("k8s", {}, {}, "--engine expects one of local, ray, got 'k8s'"),
        ("local", {}, {"address": "auto"}, "expected --engine ray, got --engine local"),
        ("local", {"trainers": {"resources": {"tpu": 1}}}, {}, r"roles\.trainers\.resources names resources"),
        ("ray", {"loaders": {"replicas": 1, "resources": {"a": 1}}}, {}, r"roles\.loaders\.resources names"),
        (
            "local",
            {"trainers": {"replicas": 999, "cpus": 9}},
            {},
            r"need 8991 CPU together \(roles\.\*\.cpus\)",
        ),
        ("local", {"parameter_servers": {"memory": "900TiB"}}, {}, "need 9.22e.05 GiB memory together"),
        ("local", {"trainers": {"gpus": 99}}, {}, "need 99 GPU together"),
        ("ray", {}, {"address": "ray://head:10001"}, "expects auto or host:port of a Ray cluster"),
    ],
)
def test_a_job_that_does_not_fit_the_engine_is_refused(name, roles, more, said):
    if name == "ray" and not HAS_RAY:
        pytest.skip(NEEDS_RAY)
    with pytest.raises(ValueError, match=said):
        check_engine(name, spec_of(roles), **more)


def test_without_ray_the_engine_says_what_to_install():
    script = (
        "import sys; from importlib import util; find = util.find_spec;"
        "util.find_spec = lambda name, *rest: None if name == 'ray' else find(name, *rest);"
        "from karvan.launch.engines.choice import check_engine; from launch_helpers import spec_of;"
        "check_engine('ray', spec_of({}))"
    )
    found = run_forked([sys.executable, "-c", script])
    assert found.stderr.endswith('ValueError: --engine ray needs: pip install "karvan[ray]"\n')


def test_a_process_needs_what_its_role_says_and_a_cpu_for_each_thread():
    spec = spec_of(
        {
            "trainers": {"replicas": 2, "threads": 3, "gpus": 0.5, "memory": "1.5GiB"},
            "parameter_servers": {"replicas": 2, "cpus": 0.5, "memory": 1024, "resources": {"disk": 2}},
        }
    )
    assert Needs.of(spec.roles.trainers) == Needs(3.0, 0.5, 3 << 29)
    assert Needs.of(spec.roles.parameter_servers) == Needs(0.5, 0.0, 1024, {"disk": 2.0})
    assert total_needs(spec) == Needs(7.0, 1.0, 2048 + (3 << 30))
    assert str(Needs.of(spec.roles.trainers)) == "3 CPU, 0.5 GPU, 1.5 GiB memory"


def test_threads_alone_are_not_held_against_a_machine():
    check_machine(spec_of({"trainers": {"replicas": 999, "threads": 9}}))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"gpus": 1.5}, "a part of one GPU, or a whole number"),
        ({"cpus": 0}, "greater than 0"),
        ({"cpus": float("inf")}, "finite"),
        ({"memory": "4GB"}, "expected bytes, such as 4GiB or 4294967296, got '4GB'"),
        ({"memory": 0}, "greater than or equal to 1"),
        ({"resources": {"CPU": 1}}, "CPU is set by the key cpus"),
        ({"resources": {"disk": -1}}, "greater than 0"),
    ],
)
def test_wrong_needs_are_refused(section, said):
    with pytest.raises(ValidationError, match=said):
        spec_of({"trainers": section})


class Somewhere:
    def __init__(self, here):
        self.on_this_machine = here


def test_a_cluster_of_several_machines_needs_a_host_of_the_network():
    assert not uses_network(spec_of({}), Somewhere(True))
    assert not uses_network(spec_of({}, tls=TLS), Somewhere(True))
    assert uses_network(spec_of({}, tls=TLS, host="0.0.0.0"), Somewhere(True))
    assert uses_network(spec_of({}, host="10.0.0.1"), Somewhere(False))
    with pytest.raises(ValueError, match=r"expected an address of this machine, got host: 127\.0\.0\.1"):
        uses_network(spec_of({}, tls=TLS), Somewhere(False))


class TestFolder:
    """The copy of the job's folder for nodes that do not see it."""

    def test_what_nodes_do_not_need_is_left_out(self, tmp_path):
        found = runtime_environment(tmp_path, [tmp_path / "out/run", tmp_path.parent / "logs"])
        assert found["working_dir"] == str(tmp_path)
        assert ".git" in found["excludes"]
        assert [name for name in found["excludes"] if name.startswith("/")] == ["/out/run"]

    def test_a_folder_that_is_too_large_names_the_largest_parts(self, tmp_path):
        for name, size in {
            "data/a": MOST_BYTES,
            "out/b": 5 << 20,
            ".git/c": MOST_BYTES,
            "train.py": 1,
        }.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                file.truncate(size)
        with pytest.raises(
            ValueError, match=r"got 105 MiB; the largest: data \(100 MiB\), out \(5 MiB\), train"
        ):
            runtime_environment(tmp_path)
        runtime_environment(tmp_path, [tmp_path / "data"])
        (tmp_path / ".rayignore").write_text("# large\ndata/\n")
        runtime_environment(tmp_path)


class TestOutputBuffer:
    """Lines that wait for a master."""

    def test_lines_are_kept_until_they_were_written(self):
        buffer = OutputBuffer()
        for number in range(5):
            buffer.append(f"line {number}")
        first = buffer.take(0, 1.0)
        assert (len(first.lines), first.following, first.code) == (5, 5, None)
        assert buffer.take(0, 1.0) == first  # to a master that has not seen them
        assert buffer.take(5, 0.0).lines == []
        assert buffer.take(0, 0.0).lines == []
        buffer.append("last")
        buffer.end(3)
        assert buffer.take(5, 1.0).lines == ["last"]
        assert buffer.take(5, 1.0).code is None  # not before the last line was taken
        assert buffer.take(6, 1.0).code == 3

    def test_batches_are_small_and_whole(self):
        buffer = OutputBuffer()
        lines = ["x" * 30_000] * 5 + ["y" * 100_000]
        for line in lines:
            buffer.append(line)
        taken, following = [], 0
        while len(taken) < len(lines):
            batch = buffer.take(following, 1.0)
            assert len(batch.lines) <= 2
            taken += batch.lines
            following = batch.following
        assert taken == lines

    def test_append_waits_if_nobody_takes_the_lines(self):
        buffer = OutputBuffer(most=10)
        writer = threading.Thread(target=lambda: [buffer.append(str(number)) for number in range(100)])
        writer.start()
        taken, following = [], 0
        while len(taken) < 100:
            batch = buffer.take(following, 10.0)
            assert len(batch.lines) <= 7
            taken += batch.lines
            following = batch.following
        writer.join()
        assert taken == [str(number) for number in range(100)]
