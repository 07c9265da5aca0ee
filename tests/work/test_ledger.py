"""The ledger of a job's work: every record is done once in every epoch, whoever dies, and whenever."""

import json
import random
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from subprocess import PIPE

import pytest
from forked_programs import ForkedProgram, run_forked
from ledger_helpers import PARTS, every_record, finish, lease_of, release

from karvan.work.ledger import JobFailedError, Ledger, LedgerDiskError, LedgerError, NoTask, TaskFailure
from karvan.work.task import TaskKind, WorkSpec


@pytest.fixture
def open_ledger(tmp_path):
    """open_ledger(...) opens the ledger of this test; the one that was open is closed."""
    opened = []

    def begin(size=3, **options):
        for ledger in opened:
            ledger.close()
        opened.clear()
        opened.append(Ledger(tmp_path / "ledger.db", WorkSpec(PARTS, size, **options)))
        return opened[0]

    yield begin
    for ledger in opened:
        ledger.close()


def run_to_the_end(ledger, holder="a"):
    """Work alone; returns how often each record was done in each epoch."""
    seen = Counter()
    while (lease := lease_of(ledger, holder)) is not NoTask.DONE:
        task = lease.task
        seen.update((task.epoch, task.path, task.first + i) for i in range(task.done, task.records))
        finish(ledger, lease)
    return seen


def test_elasticdl_3_every_record_comes_once_in_every_epoch(open_ledger):
    assert run_to_the_end(open_ledger(epochs=3, seed=5)) == every_record(3)


def test_elasticdl_3_epochs_do_not_overlap(open_ledger):
    ledger = open_ledger(epochs=2)
    first = lease_of(ledger, "a")
    for _ in range(7):
        finish(ledger, lease_of(ledger, "b"))
    assert lease_of(ledger, "b") is NoTask.WAIT
    finish(ledger, first)
    assert lease_of(ledger, "b").task.epoch == 1


@pytest.mark.parametrize("epochs", [None, 0, -1])
def test_elasticdl_3_without_a_number_of_epochs_it_never_ends(open_ledger, epochs):
    ledger = open_ledger(epochs=epochs, size=10)
    leases = []
    for _ in range(50):
        leases.append(lease_of(ledger, "a"))
        finish(ledger, leases[-1])
    assert [lease.task.epoch for lease in leases] == [number // 2 for number in range(50)]


def test_elasticdl_4_the_tasks_of_a_dead_holder_return_and_no_others(open_ledger):
    ledger = open_ledger()
    lost = [lease_of(ledger, "dead").task for _ in range(3)]
    held = lease_of(ledger, "alive")
    assert release(ledger, "dead") == lost
    assert ledger.leases == [held]
    assert [lease_of(ledger, "new").task for _ in range(3)] == lost
    finish(ledger, held)


def test_elasticdl_5_a_task_that_fails_once_in_two_epochs_is_issued_three_times(open_ledger):
    ledger = open_ledger(epochs=2)
    issued = Counter()
    while (lease := lease_of(ledger, "a")) is not NoTask.DONE:
        issued[lease.task.number] += 1
        if lease.token == 1:
            assert ledger.fail(lease.token, "no luck") == TaskFailure(tries=1)
        else:
            finish(ledger, lease)
    assert issued == Counter(dict.fromkeys(range(8), 2)) + Counter([0])


def test_elasticdl_6_a_task_outlives_any_number_of_holders(open_ledger):
    ledger = open_ledger(most_tries=1)
    for number in range(100):
        lease_of(ledger, f"holder {number}")
        release(ledger, f"holder {number}")
    assert run_to_the_end(ledger) == every_record(1)


def test_elasticdl_6_a_task_that_fails_too_often_fails_the_job_and_is_named(open_ledger):
    ledger = open_ledger(most_tries=3)
    for tries in (1, 2, 3):
        lease = lease_of(ledger, "a")
        assert lease.task.number == 0
        failed = ledger.fail(lease.token, "KeyError: 'price'")
        assert (failed.tries, failed.failure is None) == (tries, tries < 3)
    message = r"records 0 to 2 of f1 \(epoch 0\) failed 3 times. The last error: KeyError: 'price'"
    with pytest.raises(JobFailedError, match=message):
        lease_of(ledger, "a")
    with pytest.raises(JobFailedError, match="failed 3 times"):
        lease_of(open_ledger(), "b")  # a new master knows it, too


def test_elasticdl_7_a_late_report_changes_nothing(open_ledger):
    ledger = open_ledger()
    late = lease_of(ledger, "a")
    release(ledger, "a")
    now = lease_of(ledger, "b")
    assert now.task == late.task
    before = ledger.state_dict()
    assert ledger.acknowledge({late.token: 3}) == [late.token]
    assert ledger.fail(late.token, "too late") == TaskFailure()
    ledger.give_back([late.token])
    assert ledger.state_dict() == before
    finish(ledger, now)
    assert ledger.acknowledge({now.token: 3}) == [now.token]  # twice
    assert ledger.position.records == 3


def test_elasticdl_9_records_are_acknowledged_one_by_one(open_ledger):
    ledger = open_ledger()
    one, two = lease_of(ledger, "a"), lease_of(ledger, "a")
    ledger.acknowledge({one.token: 3, two.token: 1})  # a batch of four records
    assert ledger.position.records == 4
    ledger.acknowledge({two.token: 1})
    assert ledger.position.records == 4
    (rest,) = release(ledger, "a")
    assert (rest.number, rest.done, rest.left) == (1, 1, 2)
    assert lease_of(ledger, "b").task == rest


def test_more_records_than_a_task_has_are_an_error(open_ledger):
    ledger = open_ledger()
    lease = lease_of(ledger, "a")
    with pytest.raises(ValueError, match="Expected 0 to 3 records of records 0 to 2 of f1"):
        ledger.acknowledge({lease.token: 4})


def test_bad_records_are_skipped_and_counted_up_to_the_limit(open_ledger):
    ledger = open_ledger(most_tries=1, skip_bad_records=2)
    for bad in (1, 0):
        assert ledger.fail(lease_of(ledger, "a").token, "bad", record=bad).skipped
    lease = lease_of(ledger, "a")
    assert (lease.task.skipped, lease.task.tries, ledger.position.bad_records) == ((0, 1), 0, 2)
    failed = ledger.fail(lease.token, "ValueError: one too many", record=2, number=7)
    assert failed.failure == (
        "record 7 of f1 (epoch 0) failed 1 time. 2 bad records were skipped before. "
        "The last error: ValueError: one too many"
    )


def test_a_job_that_is_started_again_may_have_more_tries_but_no_other_data(tmp_path, open_ledger):
    ledger = open_ledger(most_tries=1)
    ledger.change_settings(replace(ledger.spec, most_tries=2, skip_bad_records=1))
    assert ledger.fail(lease_of(ledger, "a").token, "bad").failure is None
    with pytest.raises(ValueError, match="records_per_task was 3, and is now 4"):
        ledger.change_settings(replace(ledger.spec, records_per_task=4))
    ledger.close()
    again = Ledger.existing(tmp_path / "ledger.db")
    assert (again.spec.most_tries, again.spec.skip_bad_records) == (2, 1)
    again.close()


@pytest.mark.parametrize("epochs", [1, None])
def test_a_job_that_is_started_again_has_other_data_when_the_earlier_data_is_trained(open_ledger, epochs):
    ledger = open_ledger(epochs=epochs)
    tomorrow = replace(ledger.spec, parts=(("f9", 4),), records_per_task=2)
    lease_of(ledger, "a")
    with pytest.raises(ValueError, match=r"numbers of records of the files was.*to its end first"):
        ledger.change_settings(tomorrow)
    release(ledger, "a")
    while ledger.position.records < 20:
        finish(ledger, lease_of(ledger))
    with pytest.raises(ValueError, match="records_per_task was 3, and is now 2"):
        ledger.change_settings(replace(ledger.spec, records_per_task=2))
    ledger.change_settings(tomorrow)
    tasks = [lease_of(ledger).task for _ in range(2)]
    assert [(task.epoch, task.path, task.first, task.records) for task in tasks] == [
        (0, "f9", 0, 2),
        (0, "f9", 2, 2),
    ]


def test_the_rest_of_other_data_can_be_dropped(open_ledger):
    ledger = open_ledger()
    lease = lease_of(ledger, "a")
    ledger.change_settings(ledger.spec, drops_rest=True)  # the same data continues
    assert [each.token for each in ledger.leases] == [lease.token]
    ledger.change_settings(replace(ledger.spec, parts=(("f9", 4),)), drops_rest=True)
    assert not ledger.leases
    assert lease_of(ledger).task.path == "f9"


def test_evaluation_tasks_come_first_and_do_not_stop_an_epoch(open_ledger):
    ledger = open_ledger(size=10, epochs=2)
    held = lease_of(ledger, "slow")
    ledger.begin_evaluation(1, [("valid", 5)], 5)
    lease = lease_of(ledger, "a", [TaskKind.EVALUATE])
    assert lease.task.path == "valid"
    finish(ledger, held)
    finish(ledger, lease_of(ledger, "slow", [TaskKind.TRAIN]))
    assert lease_of(ledger, "slow", [TaskKind.TRAIN]).task.epoch == 1  # the evaluation still runs
    assert ledger.position.records == 20
    finish(ledger, lease)
    assert ledger.position.records == 20


def test_an_evaluation_begins_once_and_ends_with_the_next(open_ledger):
    ledger = open_ledger(size=20, epochs=None)
    finish(ledger, lease_of(ledger))
    for _ in range(2):  # by each trainer
        ledger.begin_evaluation(1, [("valid", 5)], 2)
    lost = lease_of(ledger, "a", [TaskKind.EVALUATE])
    finish(ledger, lease_of(ledger, "a", [TaskKind.EVALUATE]))
    release(ledger, "a")
    records = [lease_of(ledger, "b", [TaskKind.EVALUATE]).task.first for _ in range(2)]
    assert records == [4, 0]
    assert lease_of(ledger, "b", [TaskKind.EVALUATE]) is NoTask.WAIT
    assert (ledger.position.epoch, ledger.state_dict()["tasks"]) == (0, [])
    ledger.begin_evaluation(2, [("valid", 5)], 5)
    assert [task.epoch for task in ledger.waiting] == [2]
    assert ledger.leases == []
    assert ledger.acknowledge({lost.token: 2}) == [lost.token]
    ledger.load_state_dict(ledger.state_dict())
    ledger.begin_evaluation(2, [("valid", 5)], 5)  # in the next run, whose numbers begin again
    assert len(ledger.waiting) == 1


def test_the_last_task_is_one_export(open_ledger):
    ledger = open_ledger(size=10, export=True)
    one, two = lease_of(ledger, "a"), lease_of(ledger, "b")
    finish(ledger, one)
    assert lease_of(ledger, "a") is NoTask.WAIT
    finish(ledger, two)
    export = lease_of(ledger, "a")
    assert export.task.kind is TaskKind.EXPORT
    assert lease_of(ledger, "b") is NoTask.WAIT
    release(ledger, "a")
    again = lease_of(ledger, "b")
    assert again.task == export.task
    finish(ledger, again)
    assert lease_of(ledger, "a") is NoTask.DONE


@pytest.mark.parametrize("export", [True, False])
def test_a_ledger_is_complete_when_nobody_gets_a_task_any_more(open_ledger, export):
    ledger = open_ledger(size=10, epochs=2, export=export)
    while not isinstance(lease := lease_of(ledger), NoTask):
        assert not ledger.complete
        finish(ledger, lease)
    assert lease is NoTask.DONE
    assert ledger.complete
    ledger.begin_prediction(1, PARTS, 20)
    assert not ledger.complete
    for lease in ledger.lease("a", {TaskKind.PREDICT}, most=2, epoch=1):
        assert not ledger.complete
        finish(ledger, lease)
    assert ledger.complete


def test_trainers_ask_for_the_export_and_what_is_trained_after_it_needs_another(open_ledger):
    ledger = open_ledger(size=10, epochs=None)
    finish(ledger, lease_of(ledger, "a"))
    finish(ledger, lease_of(ledger, "a"))
    lost = ledger.begin_export("a")
    assert ledger.state_dict()["tasks"] == []
    export = ledger.begin_export("b")  # whether or not the first one is dead
    assert ledger.acknowledge({lost.token: 0}) == [lost.token]
    assert ledger.position.exported == 0
    finish(ledger, export)
    assert (ledger.position.exported, ledger.leases) == (1, [])
    lease_of(ledger, "a", [TaskKind.TRAIN])
    assert ledger.position.exported == 0


def test_a_checkpoint_has_the_position_and_a_rollback_returns_to_it(open_ledger):
    ledger = open_ledger(epochs=2, seed=1)
    for _ in range(5):
        finish(ledger, lease_of(ledger, "a"))
    half = lease_of(ledger, "a")
    ledger.acknowledge({half.token: 1})
    saved = json.loads(json.dumps(ledger.state_dict()))
    lost = [lease_of(ledger, "a").token for _ in range(2)]
    ledger.load_state_dict(saved)
    assert ledger.position.records == saved["position"]["records"]
    assert ledger.acknowledge(dict.fromkeys(lost, 1)) == lost  # leases of before the rollback
    seen = run_to_the_end(ledger)
    assert sum(seen.values()) == 40 - saved["position"]["records"]
    assert max(seen.values()) == 1


def test_a_ledger_of_other_data_is_an_error_that_says_what_differs(open_ledger):
    open_ledger().lease("a")
    with pytest.raises(ValueError, match="records_per_task was 3, and is now 4"):
        open_ledger(size=4)
    saved = open_ledger().state_dict()
    saved["spec"]["seed"] = 9
    with pytest.raises(ValueError, match="seed was 9, and is now None"):
        open_ledger().load_state_dict(saved)


def test_a_job_that_is_started_again_may_train_its_data_for_longer(open_ledger):
    run_to_the_end(open_ledger(size=10, epochs=1))
    ledger = open_ledger(size=10, epochs=2)
    assert run_to_the_end(ledger) == every_record(2) - every_record(1)


def test_a_ledger_of_another_version_is_an_error_that_says_what_to_do(open_ledger, tmp_path):
    open_ledger().close()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        database.execute("UPDATE ledger SET version = 2")
        database.commit()
    with pytest.raises(LedgerError, match=r"Expected version 3 of .*, got 2, .* or remove the file"):
        open_ledger()


def test_a_new_master_needs_no_spec_and_a_new_ledger_does(open_ledger, tmp_path):
    first = open_ledger(epochs=3)
    finish(first, lease_of(first))
    first.close()
    ledger = Ledger(tmp_path / "ledger.db")
    assert (ledger.spec, ledger.position.records) == (WorkSpec(PARTS, 3, epochs=3), 3)
    ledger.close()
    with pytest.raises(LedgerError, match="is new, so it needs a spec"):
        Ledger(tmp_path / "other.db")
    with pytest.raises(ValueError, match="no records"):
        Ledger(tmp_path / "another.db", WorkSpec((("empty", 0),), 3))


def test_a_second_master_is_refused(open_ledger, tmp_path):
    ledger = open_ledger()
    lease_of(ledger, "a")
    program = (
        "import sys; from pathlib import Path; from karvan.work.ledger import LedgerFile\n"
        "LedgerFile(Path(sys.argv[1]))"
    )
    result = run_forked([sys.executable, "-c", program, tmp_path / "ledger.db"])
    assert "is in use: another master runs this job" in result.stderr
    finish(ledger, lease_of(ledger, "b"))  # the first one is not disturbed


def test_a_file_that_is_no_ledger_is_an_error_that_says_what_to_do(tmp_path, open_ledger):
    (tmp_path / "ledger.db").write_bytes(b"not a database, and long enough to be looked at" * 100)
    with pytest.raises(LedgerError, match="Remove it: the job then continues from its newest checkpoint"):
        open_ledger()


def test_a_full_disk_changes_nothing(open_ledger):
    ledger = open_ledger()
    lease = lease_of(ledger, "a")
    before = ledger.state_dict()
    pages = ledger._file._database.execute("PRAGMA page_count").fetchone()[0]
    ledger._file._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerDiskError, match=r"could not be written, nothing was changed: .*full"):
        ledger.begin_evaluation(1, [("x" * 3000, 10)], 1)
    assert ledger.state_dict() == before
    finish(ledger, lease)
    assert open_ledger().position.records == 3


WORKER = """
import sys
from pathlib import Path
from karvan.work.ledger import NoTask, Ledger
from karvan.work.task import WorkSpec
ledger = Ledger(Path(sys.argv[1]), WorkSpec((("f", 20_000),), 7, seed=1, epochs=2))
for lease in ledger.leases:  # of the process before
    ledger.give_back([lease.token])
while not isinstance(got := ledger.lease("w"), NoTask):
    (lease,) = got
    for done in range(lease.task.done + 1, lease.task.records + 1):
        ledger.acknowledge({lease.token: done})
        print(ledger.position.records, flush=True)
"""


def test_a_master_that_is_killed_at_any_moment_continues_where_it_was(tmp_path):
    rng = random.Random(7)
    seen = 0
    for _ in range(6):
        worker = ForkedProgram([sys.executable, "-c", WORKER, tmp_path / "ledger.db"], stdout=PIPE)
        for _ in range(rng.randrange(1, 3000)):
            number = int(worker.stdout.readline())
            assert number in (seen + 1, seen + 2)  # one may have been committed and not printed
            seen = number
        worker.send_signal(signal.SIGKILL)
        rest = worker.communicate()[0].split()
        seen = int(rest[-1]) if rest else seen
    ledger = Ledger(tmp_path / "ledger.db", WorkSpec((("f", 20_000),), 7, seed=1, epochs=2))
    assert ledger.position.records in (seen, seen + 1)
    assert all(lease.task.done <= 7 for lease in ledger.leases)
    assert len(ledger.leases) + len(ledger.waiting) <= 2
    ledger.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE ledger SET settings = '{'",
        "UPDATE ledger SET settings = '[]'",
        "UPDATE tasks SET kind = 'x'",
        "",
    ],
)
def test_a_damaged_ledger_is_named(tmp_path, damage):
    path = tmp_path / "ledger.db"
    ledger = Ledger(path, WorkSpec((("f", 100),), 7))
    ledger.lease("a")
    ledger.close()
    if damage:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute(damage)
    else:
        content = path.read_bytes()
        path.write_bytes(content[:8192] + bytes(len(content) - 8192))
    with pytest.raises(LedgerError, match=f"{path} is not a ledger, or it is damaged"):
        Ledger.existing(path)
