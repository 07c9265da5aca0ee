"""Real processes: killed while they train and save, and asked to stop by signals."""

import os
import random
import re
import signal
import sys
import threading
from subprocess import PIPE

import pytest
import torch
from forked_programs import ForkedProgram
from support_paths import support_path
from train_helpers import StopAt, batches, model, newest, trainer

import karvan as kv

PROCESS = support_path("train/fit_process.py")


def start(folder, steps, kind=ForkedProgram):
    return kind([sys.executable, PROCESS, folder, str(steps)], stdout=PIPE, stderr=PIPE)


def wait_for_step(process, step):
    for line in process.stdout:
        if line.strip().isdigit() and int(line) >= step:
            return
    pytest.fail(f"it ended before step {step}: {process.stderr.read()}")


def finish(folder, steps):
    output, errors = start(folder, steps).communicate(timeout=300)
    assert f"stopped None step {steps}" in output, errors
    return newest(folder)


def killed_and_finished(folder, steps, moments):
    for step in moments:
        process = start(folder, steps)
        wait_for_step(process, step)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    return finish(folder, steps)


def without_kind(contents):
    """Deltas count from the process's start, so that the last one of a resumed run may be a full one."""
    return {name: contents[name] for name in ("step", "state", "dense", "metrics")}


def rows_of(folder):
    checkpoint = kv.Checkpoints(folder).latest()
    return {
        table: [[part.tobytes() for part in rows] for rows in checkpoint.parts(table)]
        for table in checkpoint.manifest.tables
    }


def assert_same_end(one, other, folders):
    assert without_kind(one) == without_kind(other)
    assert rows_of(folders[0]) == rows_of(folders[1])


def test_a_fit_killed_on_the_way_ends_with_the_same_checkpoint(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    expected = finish(straight, 160)
    found = killed_and_finished(killed, 160, [75])
    assert_same_end(found, expected, (killed, straight))


@pytest.mark.slow
def test_two_thousand_steps_are_one_thousand_killed_and_one_thousand_more(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    expected = finish(straight, 2000)
    found = killed_and_finished(killed, 2000, [1000])
    assert_same_end(found, expected, (killed, straight))
    often = tmp_path / "often"
    moments = sorted(random.Random(0).sample(range(20, 1900), 8))
    assert_same_end(killed_and_finished(often, 2000, moments), expected, (often, straight))


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupt"), (signal.SIGTERM, "terminate")])
def test_a_signal_saves_a_checkpoint_says_where_and_ends_cleanly(tmp_path, number, word):
    process = start(tmp_path, 100_000)
    wait_for_step(process, 12)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    step = int(re.search(rf"stopped {word} step (\d+)", output)[1])
    latest = kv.Checkpoints(tmp_path).latest()
    latest.require_intact()
    assert latest.step == step
    by = "Ctrl-C" if word == "interrupt" else "SIGTERM"
    assert f"Stopped by {by} after step {step}; checkpoint at {latest.path}." in errors


class Raise(kv.callbacks.Callback):
    """Sends signals to the process at a step."""

    def __init__(self, step, *numbers):
        self.step, self.numbers = step, numbers

    def on_step_end(self, trainer, logs):
        if logs.step == self.step:
            for number in self.numbers:
                signal.raise_signal(number)


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupt"), (signal.SIGTERM, "terminate")])
def test_handlers_are_put_back_and_the_fit_can_be_resumed(tmp_path, number, word):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    fit = trainer(checkpoints=tmp_path, callbacks=[Raise(5, number)])
    result = fit.fit(batches())
    assert (result.step, result.stopped) == (5, word)
    assert result.checkpoint == str(tmp_path / "step-000000000005")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    if number == signal.SIGTERM:
        kv.train.reset_termination()
    assert fit.fit(batches()).trained == 7


def test_after_sigterm_no_other_fit_trains_a_step():
    """A loop over seeds ends, instead of giving models that are half trained."""
    net = model()
    optimizers = {"dense_optimizer": torch.optim.Adam, "sparse_optimizer": kv.optim.Adagrad(lr=0.1)}
    context = kv.TrainContext(net, **optimizers)
    assert trainer(callbacks=[Raise(5, signal.SIGTERM)]).fit(batches()).stopped == "terminate"
    with pytest.raises(kv.train.TerminatedError, match=r"resume from it.*reset_termination\(\)"):
        trainer(model()).fit(batches(seed=1))
    with pytest.raises(kv.train.TerminatedError), context:
        pass
    with pytest.raises(kv.train.TerminatedError):
        trainer(net).fit(batches())
    assert net.embeddings.step == 0
    assert trainer(net).evaluate(batches(1))["loss"] > 0  # what is there may be looked at


def test_after_ctrl_c_another_fit_trains():
    fit = trainer(callbacks=[Raise(5, signal.SIGINT)])
    assert [fit.fit(batches()).stopped, trainer().fit(batches()).stopped] == ["interrupt", None]


def test_a_second_interrupt_aborts_at_once(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    fit = trainer(checkpoints=tmp_path, callbacks=[Raise(5, signal.SIGTERM, signal.SIGINT)])
    with pytest.raises(KeyboardInterrupt):
        fit.fit(batches())
    assert signal.getsignal(signal.SIGINT) is before
    assert kv.Checkpoints(tmp_path).latest() is None


def test_a_signal_ends_the_wait_for_data():
    trained, more = threading.Event(), threading.Event()

    class Watch(kv.callbacks.Callback):
        def on_step_end(self, trainer, logs):
            if logs.step == 3:
                trained.set()

    def data():
        yield from batches(3)
        trained.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.3, more.set).start()
        more.wait(60)
        yield from batches(1)

    result = trainer(callbacks=[Watch()]).fit(data())
    assert (result.step, result.stopped) == (3, "terminate")


def test_a_fit_on_another_thread_leaves_signals_alone():
    seen = []

    class Watch(kv.callbacks.Callback):
        def on_step_end(self, trainer, logs):
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    results = []
    fit = trainer(callbacks=[Watch(), StopAt(3)])
    thread = threading.Thread(target=lambda: results.append(fit.fit(batches())))
    thread.start()
    thread.join(60)
    assert results[0].step == 3
    assert set(seen) == {before}
