"""Checkpoints at URLs of several processes: killed ones, owners, ranks and parameter servers."""

import os
import random
import select
import signal
import subprocess
import sys

import pytest
import torch
from checkpoint_helpers import Model, same_rows
from cluster_helpers import serving
from forked_programs import ForkedProgram
from ranks_helpers import run
from support_paths import support_path

import karvan as kv
from karvan.checkpoint import CheckpointError
from karvan.checkpoint.files import lease_object
from karvan.job.checkpoint_url import local_path
from karvan.owner import LeaseLostError, OwnerError, OwnerRecord, own


def own_url(url):
    path = local_path(url)
    return own(path, place=lease_object(path))


def trained(steps):
    """The rows of an uninterrupted run."""
    model = Model()
    for step in range(steps):
        model.train_on(1, seed=step)
    return model


def kill_rounds(store, monkeypatch, tmp_path, rounds):
    url, random_ = store.url(f"killed-{rounds}"), random.Random(rounds)
    command = [sys.executable, support_path("checkpoint/saver.py"), url]
    reached = 0
    with ForkedProgram(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as saver:
        for number in range(rounds):
            saver.stdin.write("\n")
            saver.stdin.flush()
            lines = [saver.stdout.readline(), saver.stdout.readline()]  # in either order
            child = int(next(line for line in lines if not line.startswith("from")))
            assert int(next(line for line in lines if line.startswith("from")).split()[1]) == reached
            for _ in range(random_.randrange(0, 5)):
                saver.stdout.readline()
            select.select([], [], [], random_.random() * 0.1)  # a moment within a save
            os.kill(child, signal.SIGKILL)
            while not saver.stdout.readline().startswith("ended"):
                pass
            monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / f"fresh-{number}"))
            newest = kv.Checkpoints(url).latest()
            if newest is None:
                continue
            assert newest.step >= reached
            reached = newest.step
            assert kv.checkpoint.verify(url) == []
            loaded = Model()
            loaded.restore(newest.load(loaded))
            assert same_rows(loaded.rows(), trained(reached).rows())
        saver.stdin.close()
    assert reached


def test_a_killed_process_leaves_only_complete_checkpoints(store, monkeypatch, tmp_path):
    kill_rounds(store, monkeypatch, tmp_path, 2)


@pytest.mark.slow
def test_a_process_that_is_killed_again_and_again_leaves_only_complete_checkpoints(
    store, monkeypatch, tmp_path
):
    kill_rounds(store, monkeypatch, tmp_path, 40)


def test_a_run_on_another_machine_is_refused(store, monkeypatch, tmp_path):
    url = store.url("owned")
    first = own_url(url)
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / "other"))
    with pytest.raises(OwnerError, match="s3://bucket/owned belongs to a run that is training"):
        own_url(url)
    first.release()
    assert store.names("owned") == []
    own_url(url).release()


def other_owner(seconds=1.0, **changes):
    """An owner on another machine."""
    record = OwnerRecord.of_this_process(seconds)
    return OwnerRecord(**{**vars(record), "machine": "another", **changes})


def test_a_run_whose_lease_was_taken_stops_saving(store):
    url = store.url("taken")
    owned = own_url(url)
    checkpoints, model = kv.Checkpoints(url), Model().train_on(1)
    checkpoints.save(1, model.state(), model, block=True)
    store.write("taken/.karvan-owner.json", other_owner().content())
    with pytest.raises(LeaseLostError, match="s3://bucket/taken was taken over"):
        checkpoints.save(2, model.state(), model, block=True)
    assert [one.step for one in kv.Checkpoints(url).list()] == [1]
    owned.release()
    assert ".karvan-owner.json" in store.names("taken")  # of the other


def test_a_silent_owner_elsewhere_is_replaced_and_one_that_renews_is_not(store, monkeypatch, caplog):
    url = store.url("silent")
    store.write("silent/.karvan-owner.json", other_owner().content())
    own_url(url).release()
    assert "did not renew its lease for 1 s" in caplog.text
    silent = other_owner(seconds=30.0)
    store.write("silent/.karvan-owner.json", silent.content())
    renewed = OwnerRecord(**{**vars(silent), "renewals": 1})
    path = local_path(url)

    class Renewing:
        """The object of an owner that renews it after the first read."""

        def __init__(self):
            self.place, self.reads = lease_object(path), 0

        def read(self):
            self.reads += 1
            if self.reads == 2:
                self.place.write(renewed.content())
            return self.place.read()

    with pytest.raises(OwnerError, match="belongs to a run that is training"):
        own(path, place=Renewing())


def test_ranks_on_several_machines_save_and_resume_together(store, tmp_path):
    results = run(2, "checkpoint_programs:at_url", url=store.url("ranks"), caches=str(tmp_path / "caches"))
    for result in results:
        assert (result["kind"], result["step"]) == ("delta", 2)
        for name, rows in result["saved"].items():
            assert all((a == b).all() for a, b in zip(rows, result["loaded"][name], strict=True))


def test_a_server_of_a_folder_refuses_urls(store, tmp_path):
    (tmp_path / "run").mkdir()
    with serving(1, tmp_path / "run") as addresses:
        kv.connect("remote", servers=addresses)
        engine = kv.EmbeddingEngine({"user": kv.Table(4)})
        engine({"user": torch.arange(5)})
        with pytest.raises(
            CheckpointError,
            match=r"expected a folder below .*run, the job's .* got s3://bucket/refused\. Save there",
        ):
            kv.Checkpoints(store.url("refused")).require_writable()


def test_parameter_servers_save_their_shares_and_read_them(store):
    url = store.url("servers")
    with serving(2, url) as addresses:
        kv.connect("remote", servers=addresses)
        engine = kv.EmbeddingEngine({"user": kv.Table(4), "item": kv.Table(2)})
        vectors = engine({"user": torch.arange(50), "item": torch.arange(50) % 30})["user"].detach()
        checkpoints = kv.Checkpoints(url, part_bytes=400)
        checkpoints.require_writable()
        checkpoints.save(1, {"a": 1}, engine, block=True)
        with pytest.raises(CheckpointError, match="expected a folder below s3://bucket/servers"):
            kv.Checkpoints(store.url("elsewhere")).require_writable()
    with serving(3, url) as addresses:
        kv.connect("remote", servers=addresses)
        engine = kv.EmbeddingEngine({"user": kv.Table(4), "item": kv.Table(2)}, seed=5)
        _, state = kv.Checkpoints(url).resume(engine)
        assert state == {"a": 1}
        assert torch.equal(
            engine.eval()({"user": torch.arange(50), "item": torch.arange(50) % 30})["user"], vectors
        )
        assert engine.table("item").rows == 30
    assert kv.checkpoint.verify(url) == []
    assert all("/save-" in name or name.endswith("manifest.json") for name in store.names("servers"))
