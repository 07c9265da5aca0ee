"""A folder has one owner: others are refused, and what a killed one leaves behind holds up nobody."""

import json
import os
import signal
import threading
import time

import pytest
from owner_helpers import OwnerProcess

from karvan.owner import FILE, LeaseLostError, OwnerError, OwnerRecord, own


def change(folder, **values):
    """Another content of the lease, as another host would write it."""
    path = folder / FILE
    record = OwnerRecord(**{**json.loads(path.read_bytes()), **values})
    path.write_bytes(record.content())


def test_a_second_process_is_refused_with_who_owns_it(tmp_path):
    with OwnerProcess(tmp_path) as first:
        assert first.line() == "owned"
        with pytest.raises(OwnerError) as raised:
            own(tmp_path)
        said = str(raised.value)
        record = json.loads((tmp_path / FILE).read_text())
        for part in (str(tmp_path), f"process {first.process.pid} ", record["host"], record["taken"]):
            assert part in said
        assert "owner_program.py" in said
        assert "use another folder" in said
        first.end()
    own(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_a_killed_owner_is_replaced_at_once_and_that_is_said(tmp_path, caplog):
    with OwnerProcess(tmp_path) as first:
        assert first.line() == "owned"
        first.process.kill()
        first.process.wait()
        own(tmp_path).release()
    assert f"is taken over from process {first.process.pid} " in caplog.text
    assert "which is gone" in caplog.text


def test_a_zombie_is_gone(tmp_path):
    with OwnerProcess(tmp_path) as first:
        assert first.line() == "owned"
        os.kill(first.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        own(tmp_path).release()


def test_a_process_number_that_is_used_again_is_another_process(tmp_path):
    owner = own(tmp_path)
    change(tmp_path, id="other", start="1")
    with pytest.raises(LeaseLostError):
        owner.check()
    owner.release()
    with OwnerProcess(tmp_path) as second:  # pid is this process's, but it started at another time
        assert second.line() == "owned"


def test_a_process_owns_a_folder_several_times_over(tmp_path):
    first, second = own(tmp_path), own(tmp_path / "." / "")
    first.release()
    first.release()
    with OwnerProcess(tmp_path) as other:
        assert other.line().startswith("refused")
    second.check()
    second.release()
    assert os.listdir(tmp_path) == []


def test_threads_of_one_process_share_a_lease(tmp_path):
    owners = []
    threads = [threading.Thread(target=lambda: owners.append(own(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({owner.id for owner in owners}) == 1
    for owner in owners:
        owner.release()
    assert os.listdir(tmp_path) == []


def test_of_many_processes_exactly_one_gets_a_folder(tmp_path):
    folder = tmp_path / "a" / "b"
    with OwnerProcess(folder) as dead:
        assert dead.line() == "owned"
    processes = [OwnerProcess(folder) for _ in range(5)]
    lines = [each.line() for each in processes]
    assert sorted(line.partition(":")[0] for line in lines) == ["owned"] + ["refused"] * 4
    [owner] = [each for each, line in zip(processes, lines, strict=True) if line == "owned"]
    assert owner.ask() == "mine"
    assert os.listdir(folder) == [FILE]
    for each in processes:
        each.__exit__()


def test_an_owner_on_another_host_that_renews_is_refused(tmp_path):
    first = own(tmp_path)
    change(tmp_path, id="elsewhere", machine="another", host="far.example", seconds=60.0)
    with OwnerProcess(tmp_path) as second:
        while "waiting 60 s for a renewal" not in second.process.stderr.readline():
            assert second.process.poll() is None
        change(tmp_path, renewals=7)
        line = second.line()
    assert line.startswith("refused")
    assert "on far.example" in line
    first.release()


def test_an_owner_on_another_host_that_does_not_renew_is_replaced(tmp_path, caplog):
    first = own(tmp_path)
    change(tmp_path, id="elsewhere", machine="another", host="far.example", seconds=1.0)
    first.release()
    owner = own(tmp_path)
    assert "waiting 1 s for a renewal" in caplog.text
    assert "did not renew its lease for 1 s" in caplog.text
    owner.check()
    owner.release()


def test_a_lease_that_cannot_be_understood_is_waited_for_as_well(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("KARVAN_LEASE_SECONDS", "1")
    (tmp_path / FILE).write_text("{")
    own(tmp_path).release()
    assert "an owner that cannot be read" in caplog.text


def test_an_owner_that_was_stopped_for_longer_than_its_lease_notices_that_it_is_replaced(tmp_path):
    with OwnerProcess(tmp_path, "1") as first:
        assert first.line() == "owned"
        os.kill(first.process.pid, signal.SIGSTOP)
        owner = own(tmp_path)  # after a second
        os.kill(first.process.pid, signal.SIGCONT)
        line = first.ask()
        assert line.startswith("lost: ")
        assert f"taken over by process {os.getpid()} " in line
        owner.check()
        first.end()
        owner.check()  # the other one has removed nothing
    owner.release()


def test_a_lease_that_somebody_removed_is_made_again(tmp_path):
    owner = own(tmp_path)
    (tmp_path / FILE).unlink()
    owner.check()
    with OwnerProcess(tmp_path) as second:
        assert second.line().startswith("refused")
    owner.release()


def test_a_lease_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setenv("KARVAN_LEASE_SECONDS", "1")
    owner = own(tmp_path)
    seen = []
    deadline = time.monotonic() + 60
    while len(set(seen)) < 3 and time.monotonic() < deadline:
        seen.append(json.loads((tmp_path / FILE).read_text())["renewals"])
        time.sleep(0.01)
    owner.release()
    assert len(set(seen)) == 3
    assert seen == sorted(seen)


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path):
    first = own(tmp_path)
    change(tmp_path, taken="1999-01-01T00:00:00+00:00")
    with OwnerProcess(tmp_path) as second:
        assert second.line().startswith("refused")
    first.release()


@pytest.mark.parametrize("text", ["0", "-1", "x", "1e9", "nan"])
def test_wrong_seconds_are_an_error(tmp_path, monkeypatch, text):
    monkeypatch.setenv("KARVAN_LEASE_SECONDS", text)
    with pytest.raises(ValueError, match="KARVAN_LEASE_SECONDS expects seconds"):
        own(tmp_path)


def test_the_processes_of_a_launched_job_belong_to_its_launcher(tmp_path, monkeypatch):
    with OwnerProcess(tmp_path) as launcher:
        assert launcher.line() == "owned"
        monkeypatch.setenv("KARVAN_CHECKPOINTS", str(tmp_path))
        monkeypatch.setenv("KARVAN_OWNER", json.loads((tmp_path / FILE).read_text())["id"])
        owner = own(tmp_path)
        owner.check()
        owner.release()
        assert launcher.ask() == "mine"
        elsewhere = own(tmp_path / "other")  # not the job's folder
        assert (tmp_path / "other" / FILE).exists()
        elsewhere.release()
        monkeypatch.setenv("KARVAN_OWNER", "of a job that has lost the folder")
        with pytest.raises(LeaseLostError):
            own(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_plain_file_is_refused_and_not_waited_for(tmp_path, make):
    make(tmp_path / ".karvan-owner.json")
    with pytest.raises(OwnerError, match="is not a plain file"):
        own(tmp_path)


def test_a_successor_takes_the_lease_at_once_and_the_one_before_has_lost_it(tmp_path):
    with OwnerProcess(tmp_path) as first:
        assert first.line() == "owned"
        before = json.loads((tmp_path / FILE).read_text())
        os.kill(first.process.pid, signal.SIGSTOP)  # others would wait, and are refused if it renews
        again = own(tmp_path, before["id"])
        assert again.id == before["id"]
        again.check()
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
        change(tmp_path, pid=before["pid"], start=before["start"])  # a third one, of the same job
        with pytest.raises(LeaseLostError):
            again.check()
        again.release()
        os.kill(first.process.pid, signal.SIGKILL)
