"""Leased work over sockets: masters and holders are processes, and are killed."""

import json
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from subprocess import PIPE

import pytest
from forked_programs import ForkedProgram
from free_ports import free_port
from small_disk import small_disk
from wire_helpers import wait_for

from karvan.activity import activity
from karvan.data.work_client import WorkClient
from karvan.errors import is_temporary
from karvan.protocol.master import ACKNOWLEDGE_RECORDS, FAIL_TASK, LEASE_TASKS, TAKE_POSITION
from karvan.wire import Client, RefusedError, Server
from karvan.work.ledger import Ledger, LedgerFile
from karvan.work.service import WorkService
from karvan.work.task import WorkSpec

MASTER = """
import sys
from pathlib import Path
from karvan.wire import Server
from karvan.work.service import WorkService
work = WorkService(Path(sys.argv[1]))
server = Server(work, "127.0.0.1", int(sys.argv[2]))
print(server.address, flush=True)
for line in sys.stdin:
    work.release(line.strip())
    print("released", flush=True)
"""

HOLDER = """
import sys, time
from dataclasses import asdict
from karvan.wire import Client
from karvan.work.task import WorkSpec
name = sys.argv[2]
client = Client("master", sys.argv[1], forgetful=True)
client.call("open_work", {"spec": asdict(WorkSpec((("f", 900),), 7, seed=1, epochs=2))})
while True:
    got = client.call("lease_tasks", {"holder": name, "last_token": 0, "kinds": ["train"], "most": 2}).head
    if got["answer"] == "done":
        break
    if got["answer"] == "wait":
        time.sleep(0.01)
    for lease in got["leases"]:
        for done in range(lease["task"]["done"] + 1, lease["task"]["records"] + 1):
            client.call("acknowledge_records", {"holder": name, "done": [[lease["token"], done]]})
            print(done, flush=True)
"""


class FakeTime:
    """A clock that a test sets."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@contextmanager
def serving(tmp_path, most_tries=3, **options):
    """Ten records in four tasks, served to a client."""
    work = WorkService(tmp_path / "ledger.db", **options)
    server = Server(work, "127.0.0.1")
    try:
        with Client("master", server.address) as client:
            open_work(client, WorkSpec((("f", 10),), 3, most_tries=most_tries))
            yield work.ledger, work, client
    finally:
        server.close()
        work.close()


def open_work(client, spec):
    client.call("open_work", {"spec": asdict(spec)})


def lease(client, holder="a", most=1, last_token=10**6, kinds=("train",)):
    head = {"holder": holder, "last_token": last_token, "kinds": list(kinds), "most": most}
    answer = client.call(LEASE_TASKS, head).head
    return {**vars(answer), "leases": [vars(each) for each in answer.leases]}


def acknowledge(client, done, holder="a"):
    return client.call(ACKNOWLEDGE_RECORDS, {"holder": holder, "done": list(done.items())}).head.ended


def test_tasks_are_leased_acknowledged_and_done(tmp_path):
    with serving(tmp_path) as (ledger, _, client):
        got = lease(client, most=3)
        assert [each["task"]["first"] for each in got["leases"]] == [0, 3, 6]
        last = lease(client, "b", most=5)["leases"]
        assert [each["task"]["records"] for each in last] == [1]
        assert lease(client, "c") == {"leases": [], "answer": "wait"}
        assert acknowledge(client, {each["token"]: 3 for each in got["leases"]}) == []
        assert acknowledge(client, {last[0]["token"]: 1}, "b") == []
        assert lease(client, "c") == {"leases": [], "answer": "done"}
        assert ledger.position.records == 10


def test_all_holders_must_open_the_same_work(tmp_path):
    with serving(tmp_path) as (_, _, client):
        open_work(client, WorkSpec((("f", 10),), 3))
        with pytest.raises(RefusedError, match="epochs was 1, and is now 2"):
            open_work(client, WorkSpec((("f", 10),), 3, epochs=2))
        with pytest.raises(RefusedError, match="the numbers of records of the files was"):
            open_work(client, WorkSpec((("f", 11),), 3))


def test_a_process_that_was_taken_for_dead_gets_no_more_tasks(tmp_path):
    silent, other = "trainer-0 process a", "trainer-0 process b"
    with serving(tmp_path) as (ledger, work, client):
        assert lease(client, f"{silent} loader-1")["answer"] == "tasks"
        assert len(work.release_process(silent)) == 1
        for holder in (silent, f"{silent} loader-1"):
            with pytest.raises(RefusedError, match="others have its tasks now"):
                lease(client, holder)
        assert lease(client, other)["answer"] == "tasks"
        assert {each.holder for each in ledger.leases} == {other}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_process_that_was_taken_for_dead_changes_nothing_any_more(tmp_path, restarted):
    silent, other = "trainer-0 process a", "trainer-1 process b"
    parts = [["valid", 10]]
    with serving(tmp_path) as (ledger, work, client):
        begun = lease(client, other)["leases"]
        client.call("acknowledge_records", {"holder": other, "done": [[begun[0]["token"], 2]]})
        work.refuse([silent]) if restarted else work.release_process(silent)
        before = ledger.state_dict()
        for method, head in {
            "restore_position": {"state": None},
            "take_position": {},
            "begin_export": {},
            "begin_evaluation": {"evaluation": 1, "parts": parts, "records_per_task": 5},
        }.items():
            with pytest.raises(RefusedError, match="others have its tasks now") as refused:
                client.call(method, {"holder": silent, **head})
            assert refused.value.temporary  # a process that replaces it can go on
        assert ledger.state_dict() == before
        client.call("restore_position", {"holder": other, "state": None})
        assert ledger.position.records == 0


@pytest.mark.parametrize("master_died_early", [False, True])
def test_nothing_is_leased_before_the_work_is_opened(tmp_path, master_died_early):
    if master_died_early:
        LedgerFile(tmp_path / "ledger.db").close()
    work = WorkService(tmp_path / "ledger.db")
    server = Server(work, "127.0.0.1")
    with Client("master", server.address) as client:
        assert (work.release("a"), work.overdue()) == ([], [])
        with pytest.raises(RefusedError, match="expected a call of open_work first"):
            lease(client)
        with pytest.raises(RefusedError, match="no records"):
            open_work(client, WorkSpec((), 3))
        open_work(client, WorkSpec((("f", 10),), 3))
        assert lease(client)["answer"] == "tasks"
    server.close()
    work.close()


def test_a_holder_that_lost_an_answer_gets_the_same_leases(tmp_path):
    with serving(tmp_path) as (_, _, client):
        first = lease(client, most=2)["leases"]
        assert lease(client, most=2, last_token=0)["leases"] == first
        assert lease(client, most=1, last_token=first[0]["token"])["leases"] == first[1:]


def test_elasticdl_8_a_silent_task_returns_and_its_holder_is_named(tmp_path):
    now = FakeTime()
    with serving(tmp_path, now=now, patience=300.0) as (_, work, client):
        (silent,) = lease(client, "silent")["leases"]
        (busy,) = lease(client, "busy")["leases"]
        now.seconds = 299.0
        acknowledge(client, {busy["token"]: 1}, "busy")
        assert work.overdue() == []
        now.seconds = 301.0
        (late,) = work.overdue()
        assert (late.holder, late.token) == ("silent", silent["token"])
        assert acknowledge(client, {silent["token"]: 3}, "silent") == [silent["token"]]
        (again,) = lease(client, "new")["leases"]
        assert again["task"] == silent["task"]


def test_tasks_that_are_leased_ahead_stay_with_a_holder_that_makes_progress(tmp_path):
    now = FakeTime()
    with serving(tmp_path, now=now, patience=300.0) as (_, work, client):
        first, ahead = lease(client, most=2)["leases"]
        for seconds in (200.0, 400.0):
            now.seconds = seconds
            acknowledge(client, {first["token"]: int(seconds / 200)}, "whoever trains on the batch")
            assert work.overdue() == []
        now.seconds = 701.0
        assert [each.token for each in work.overdue()] == [first["token"], ahead["token"]]


def test_elasticdl_8_slow_tasks_get_three_times_as_long_as_the_slowest(tmp_path):
    now = FakeTime()
    with serving(tmp_path, now=now, patience=300.0) as (_, work, client):
        (slow,) = lease(client)["leases"]
        now.seconds = 200.0
        acknowledge(client, {slow["token"]: 3})
        (next_,) = lease(client)["leases"]
        now.seconds = 200.0 + 599.0
        assert work.overdue() == []
        now.seconds = 200.0 + 601.0
        assert [each.token for each in work.overdue()] == [next_["token"]]


def test_a_failed_job_refuses_to_lease_and_says_why(tmp_path):
    with serving(tmp_path, most_tries=1) as (_, _, client):
        token = lease(client)["leases"][0]["token"]
        head = {"holder": "a", "token": token, "error": "KeyError: 'price'", "record": 1, "number_in_file": 1}
        failed = client.call(FAIL_TASK, head).head
        assert failed.failure == "record 1 of f (epoch 0) failed 1 time. The last error: KeyError: 'price'"
        assert lease(client) == {"leases": [], "answer": "failed", "failure": failed.failure}


def test_the_next_master_takes_other_settings_of_the_same_data_once(tmp_path):
    with serving(tmp_path, most_tries=1) as (_, _, client):
        token = lease(client)["leases"][0]["token"]
        acknowledge(client, {token: 3})
    with serving(tmp_path, most_tries=5) as (ledger, _, client):
        assert (ledger.spec.most_tries, ledger.position.records) == (5, 3)
        with pytest.raises(RefusedError, match="most_tries was 5, and is now 1"):
            open_work(client, WorkSpec((("f", 10),), 3, most_tries=1))


def test_a_holder_gives_back_only_what_it_has(tmp_path):
    with serving(tmp_path) as (ledger, _, client):
        mine, other = (lease(client, name)["leases"][0]["token"] for name in "ab")
        client.call("give_back_tasks", {"holder": "a", "tokens": [mine, other]})
        assert [each.token for each in ledger.leases] == [other]


@pytest.mark.parametrize(
    ("call", "head", "expected"),
    [
        ("lease_tasks", {"holder": "a", "last_token": 0, "kinds": [], "most": 1}, "kinds"),
        ("lease_tasks", {"holder": "a", "last_token": 0, "kinds": ["sleep"], "most": 1}, "to be one of"),
        ("lease_tasks", {"holder": "a", "last_token": 0, "kinds": ["train"], "most": 0}, "most"),
        ("acknowledge_records", {"holder": "a", "done": [[1, -1]]}, "done"),
        ("acknowledge_records", {"holder": "a", "done": [[1, 99]]}, "Expected 0 to 3 records"),
        (
            "fail_task",
            {"holder": "a", "token": 1, "error": "x", "record": 7, "number_in_file": 7},
            "Expected a record from 0 to 2",
        ),
    ],
)
def test_wrong_calls_are_refused_and_change_nothing(tmp_path, call, head, expected):
    with serving(tmp_path) as (ledger, _, client):
        lease(client)
        before = ledger.state_dict()
        with pytest.raises(RefusedError, match=expected):
            client.call(call, head)
        assert ledger.state_dict() == before


def start(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return ForkedProgram(command, stdin=PIPE, stdout=PIPE)


def test_work_ends_complete_though_masters_and_holders_are_killed(tmp_path):
    rng, port = random.Random(3), free_port()
    path = tmp_path / "ledger.db"
    master = start(MASTER, path, port)
    address = master.stdout.readline().strip()
    holders = {f"holder {number}": start(HOLDER, address, f"holder {number}") for number in range(2)}
    made = len(holders)
    for kill in range(6):
        name = rng.choice(sorted(holders))
        for _ in range(rng.randrange(1, 60)):
            assert holders[name].stdout.readline()
        if kill % 3 == 2:
            master.kill()
            master.wait()
            master = start(MASTER, path, port)
            assert master.stdout.readline().strip() == address
            continue
        dead = holders.pop(name)
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        master.stdin.write(f"{name}\n")
        master.stdin.flush()
        assert master.stdout.readline() == "released\n"
        holders[f"holder {made}"] = start(HOLDER, address, f"holder {made}")
        made += 1
    try:
        for holder in holders.values():
            holder.communicate(timeout=60)
            assert holder.returncode == 0
    finally:
        for process in [*holders.values(), master]:
            process.kill()
            process.wait()
    ledger = Ledger(path)
    assert (ledger.position.records, ledger.leases, ledger.waiting) == (1800, [], [])
    ledger.close()


@contextmanager
def _service_on_a_small_disk(tmp_path):
    """A ledger of two tasks of 5 records of file f, its service, and a function that makes clients of it."""
    with small_disk(tmp_path / "disk") as disk:
        work = WorkService(disk.folder / "work.db", patience=0.0)
        with Server(work) as server, ExitStack() as stack:

            def client(holder):
                made = WorkClient(server.address, holder)
                stack.callback(made.disconnect)
                made.open(WorkSpec((("f", 10),), 5))
                return made

            yield disk, work, client
        work.close()


def test_holders_wait_while_the_disk_of_the_ledger_is_full_and_say_so(tmp_path, caplog):
    with _service_on_a_small_disk(tmp_path) as (disk, work, client), ThreadPoolExecutor() as threads:
        first, second = client("first"), client("second")
        [lease] = first.lease()
        disk.fill()
        calls = threads.submit(first.acknowledge, {lease.token: 3}), threads.submit(second.lease)
        wait_for(lambda: len(caplog.records) >= 2)
        wait_for(lambda: "master" in activity.report().waits)
        assert not any(call.done() for call in calls)
        assert work.progress()["records"] == 0
        disk.empty()
        assert calls[0].result(10) == []
        assert [each.task.first for each in calls[1].result(10)] == [5]
        assert work.progress()["records"] == 3
        first.disconnect()
    warnings = [each.getMessage() for each in caplog.records]
    assert len(warnings) == 2, "one for each holder"
    for text in warnings:
        assert "work.db could not be written" in text
        assert "waits until it can be" in text


def test_a_holder_that_waits_for_the_disk_of_the_ledger_can_be_ended(tmp_path, caplog):
    with _service_on_a_small_disk(tmp_path) as (disk, _, client), ThreadPoolExecutor() as threads:
        holder = client("first")
        disk.fill()
        call = threads.submit(holder.lease)
        wait_for(lambda: caplog.records)
        holder.disconnect()
        assert is_temporary(call.exception(10))


def test_leases_of_the_dead_end_once_the_disk_of_the_ledger_has_room(tmp_path):
    with _service_on_a_small_disk(tmp_path) as (disk, work, client):
        dead, late, living = client("trainer-0 process a"), client("late"), client("living")
        dead.lease()
        late.lease()
        disk.fill()
        assert work.release_process("trainer-0 process a") == []
        assert not work.release_predictions("trainer-0 process a")
        assert work.overdue() == []
        assert work.progress()["leased"] == 2
        disk.empty()
        assert [lease.holder for lease in work.overdue(lambda holder: holder != "late")] == ["late"]
        assert sorted(each.task.first for each in living.lease(most=2)) == [0, 5]


def test_work_that_no_memory_holds_and_positions_of_other_data_are_refused(tmp_path):
    huge = {"parts": [["f", 2**53]], "records_per_task": 1}
    with serving(tmp_path) as (_, _, client):
        with pytest.raises(RefusedError, match="tasks in an epoch"):
            open_work(client, WorkSpec((("f", 2**53),) * 1025, 1))
        for call in ("evaluation", "prediction"):
            with pytest.raises(RefusedError, match="tasks of an evaluation or a prediction"):
                client.call(f"begin_{call}", {"holder": "h", call: 1, **huge})
        told = client.call(TAKE_POSITION, {"holder": "h"}).head.state
        state = json.loads(told)
        task = ["train", 0, 0, "f", 9, 3, 0, 0, ""]
        changes = [{"position": {**state["position"], **each}} for each in ({"epoch": "0"}, {"token": 2**53})]
        for change in (*changes, {"tasks": [task]}, {"tasks": [[]]}):
            wrong = json.dumps({**state, **change})
            with pytest.raises(RefusedError, match="position"):
                client.call("restore_position", {"holder": "h", "state": wrong})
        with pytest.raises(RefusedError, match="position"):
            client.call("restore_position", {"holder": "h", "state": "[" * 100_000})
        assert client.call(TAKE_POSITION, {"holder": "h"}).head.state == told


@pytest.mark.parametrize("kind", ["evaluation", "prediction"])
def test_a_position_with_the_largest_number_that_a_call_may_give_can_be_restored(tmp_path, kind):
    with serving(tmp_path) as (_, _, client):
        begun = {"holder": "h", kind: 2**53, "parts": [], "records_per_task": 1}
        client.call(f"begin_{kind}", begun)
        told = client.call(TAKE_POSITION, {"holder": "h"}).head.state
        assert json.loads(told)["position"][kind] == 2**53
        client.call("restore_position", {"holder": "h", "state": told})
