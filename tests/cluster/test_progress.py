"""What heartbeats say of progress, tasks and waits, as the registry tells it."""

import gc
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from forked_programs import run_forked
from role_loaders import Loaders, close_all

import karvan as kv
from karvan.activity import Activity, activity
from karvan.discovery.directory import Membership
from karvan.discovery.registry import Registry
from karvan.wire import Client, Message, Server, Service, WireError


def wait_for(condition, seconds=60.0):
    due = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < due, "waited in vain"
        time.sleep(0.01)
    return value


def waits_of(report):
    return set(report.waits) - {"registry"}


@pytest.fixture(autouse=True)
def _no_waits_of_earlier_tests():
    """Streams that earlier tests of this process have not closed wait until they are collected.

    Those for a service that was killed wait for minutes, in threads that nobody ends.
    """
    gc.collect()
    activity._waits.clear()


@pytest.fixture
def trainer():
    registry = Registry()
    member = Membership(registry.address, "trainer", 0, "h:1", beat=0.05)
    yield lambda: registry.activities().get(("trainer", 0))
    member.leave()
    registry.close()


def test_heartbeats_tell_progress_task_and_waits(trainer):
    with activity.task("fit"), activity.waiting("loader-3"):
        report = wait_for(lambda: (said := trainer()) and said.task and said)
        assert (report.task, waits_of(report)) == ("fit", {"loader-3"})
        older = wait_for(lambda: (said := trainer()).idle > 0.2 and said)
        assert older.waits["loader-3"] > 0.2
        activity.advance()
        newer = wait_for(lambda: (said := trainer()).progress > older.progress and said)
        assert newer.idle < older.idle
    assert waits_of(wait_for(lambda: (said := trainer()).task == "" and said)) == set()


def test_tasks_within_tasks_are_the_outer_one():
    one = Activity()
    with one.task("fit"):
        with one.task("evaluate"):
            assert one.report().task == "fit"
        assert one.report().task == "fit"
    assert one.report().task == ""


class Slow(Service):
    name = "parameter server 4"

    def __init__(self):
        self.gate = threading.Event()

    def welcome(self, caller):
        self.gate.wait(60)
        return {}


def test_who_waits_for_an_answer_says_for_whom():
    service = Slow()
    with Server(service) as server, Client("parameter server 4", server.address) as peer:
        answered = threading.Thread(target=lambda: peer.call("ping"))
        answered.start()
        wait_for(lambda: "parameter-server-4" in activity.report().waits)
        before = activity.report().progress
        service.gate.set()
        answered.join(60)
        assert "parameter-server-4" not in activity.report().waits
        assert activity.report().progress > before  # a call was answered, here in the same process
        assert isinstance(peer.call("ping"), Message)


def test_batches_steps_and_checkpoints_are_progress(tmp_path):
    seen = []

    class Look(kv.callbacks.Callback):
        def on_step_end(self, trainer, logs):
            seen.append(activity.report())

    model = torch.nn.Linear(2, 1)
    batches = [{"x": torch.ones(4, 2)} for _ in range(3)]
    net = torch.nn.Module()
    net.net, net.forward = model, lambda batch: model(batch["x"]).squeeze(1)
    trainer = kv.Trainer(
        net,
        lambda output, batch: output.square().mean(),
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        callbacks=[Look()],
        checkpoints=tmp_path,
        progress="none",
    )
    trainer.fit(batches)
    assert [each.task for each in seen] == ["fit"] * 3
    assert seen[0].progress < seen[1].progress < seen[2].progress
    before = activity.report().progress
    trainer.evaluate(batches)
    assert activity.report().progress >= before + 3
    assert activity.report().task == ""


def test_a_trainer_says_which_loader_it_waits_for():
    with Loaders(1, "stuck", 40, 4) as loaders:
        one = loaders.stream()

        def take():
            with suppress(WireError):
                list(one)

        taking = threading.Thread(target=take, daemon=True)
        taking.start()
        wait_for(lambda: activity.report().waits.get("loader-0", 0) > 1)
        assert waits_of(activity.report()) == {"loader-0"}
        close_all([one])
        taking.join(60)
        assert not taking.is_alive()
        assert waits_of(activity.report()) == set()


STACKS = """
import os, signal, sys
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
if sys.argv[1] == "own":
    signal.signal(signal.SIGQUIT, lambda *_: print("my own", file=sys.stderr))
from karvan.activity import dump_stacks_on_signal
print(dump_stacks_on_signal(), flush=True)
def here():
    os.kill(os.getpid(), signal.SIGQUIT)
here()
"""


@pytest.mark.parametrize("before", ["default", "ignored", "own"])
def test_stacks_are_shown_on_sigquit_unless_the_program_uses_it(before):
    ended = run_forked([sys.executable, "-c", STACKS, before])
    assert ended.returncode == 0
    assert ended.stdout == f"{before != 'own'}\n"
    assert ("in here" in ended.stderr) == (before != "own")
    assert ("my own" in ended.stderr) == (before == "own")
