"""Saves that the disk refuses: training continues, nothing saved before is lost, and the end is saved."""

import logging
import threading
import time

import pytest
import torch
from small_disk import small_disk
from train_helpers import assert_same, batches, loader, model, trainer

import karvan as kv
from karvan.checkpoint import CheckpointError

STEPS = 12


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as made:
        yield made


class At(kv.callbacks.Callback):
    """Does something after a step, when what was to be saved before has been."""

    def __init__(self, **actions):
        self.actions = {int(name.removeprefix("step")): action for name, action in actions.items()}

    def on_step_end(self, trainer, logs):
        if action := self.actions.get(logs.step):
            wait = getattr(trainer.saver, "_checkpoints", None)
            if wait is not None and wait._pending is not None:
                wait._pending.join()
            action()


def warnings_of(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def fit(disk, *, every=2, tolerate=3, actions=None, net=None, **options):
    run = options.pop("checkpoints", None) or disk.folder / "run"
    made = trainer(
        net or model(),
        checkpoints=run,
        checkpoint_every=every,
        tolerate_failed_saves=tolerate,
        callbacks=[At(**(actions or {}))],
        **options,
    )
    return made, made.fit(loader())


def steps(folder):
    return [each.step for each in kv.Checkpoints(folder).list()]


def test_a_full_disk_is_a_warning_and_later_saves_succeed(disk, caplog):
    actions = {"step3": disk.fill, "step7": disk.empty}
    run = kv.Checkpoints(disk.folder / "run", keep_last=None)
    made, result = fit(disk, checkpoints=run, actions=actions)
    assert result.step == STEPS
    assert result.checkpoint == str(disk.folder / "run" / f"step-{STEPS:012d}")
    assert steps(disk.folder / "run") == [2, 8, 10, 12]
    first, second = warnings_of(caplog)  # each failure once
    assert "step 4 was NOT saved (failure 1 in a row, 3 are tolerated)" in first
    assert "No space left on device" in first
    assert f"The newest checkpoint is {disk.folder / 'run' / 'step-000000000002'}." in first
    assert "step 6 was NOT saved (failure 2 in a row, 3 are tolerated)" in second
    untroubled = trainer()
    untroubled.fit(loader())
    assert_same(made.model, untroubled.model)
    assert kv.checkpoint.verify(disk.folder / "run") == []


def test_a_read_only_disk_is_survived_as_well(disk, caplog):
    actions = {"step3": disk.make_read_only, "step5": disk.make_writable}
    _, result = fit(disk, actions=actions)
    assert result.step == STEPS
    assert steps(disk.folder / "run")[-1] == STEPS
    assert any("Read-only file system" in each for each in warnings_of(caplog))


def test_one_failure_too_many_ends_the_fit_and_keeps_what_there_was(disk, caplog):
    made = []
    with pytest.raises(CheckpointError, match=r"could not be saved 3 times in a row \(tolerate_failed_") as e:
        made.append(fit(disk, tolerate=2, actions={"step3": disk.fill}))
    assert e.value.temporary
    assert "No space left on device" in str(e.value)
    assert "step-000000000002." in str(e.value)
    assert len(warnings_of(caplog)) == 2  # the third is the error
    assert steps(disk.folder / "run") == [2]
    disk.empty()
    _, result = fit(disk)
    assert result.trained == STEPS - 2
    assert steps(disk.folder / "run")[-1] == STEPS


def test_failures_that_are_not_in_a_row_are_not_added_up(disk):
    actions = {"step1": disk.fill, "step3": disk.empty, "step5": disk.fill, "step7": disk.empty}
    assert fit(disk, tolerate=1, actions=actions)[1].step == STEPS


def test_none_are_tolerated_if_asked(disk):
    with pytest.raises(CheckpointError, match=r"could not be saved once \(tolerate_failed_saves is 0\)"):
        fit(disk, tolerate=0, actions={"step3": disk.fill})


@pytest.mark.parametrize("every", [None, STEPS], ids=["only then", "begun before the end"])
def test_the_last_save_is_repeated_until_there_is_room(disk, caplog, every):
    def empty_when_told():
        until = time.monotonic() + 60
        while not any("It is tried again" in each for each in warnings_of(caplog)):
            assert time.monotonic() < until
            time.sleep(0.01)
        disk.empty()

    thread = threading.Thread(target=empty_when_told)
    thread.start()
    _, result = fit(disk, every=every, actions={"step3": disk.fill})
    thread.join()
    assert result.step == STEPS
    assert steps(disk.folder / "run") == [STEPS]
    assert kv.checkpoint.verify(disk.folder / "run") == []


def test_a_fit_whose_last_state_cannot_be_saved_is_an_error(disk):
    with pytest.raises(
        CheckpointError, match=r"the last checkpoint, of step 12, could not be saved in 0.3 "
    ) as e:
        fit(disk, every=3, actions={"step11": disk.fill}, save_retry_seconds=0.3)
    assert e.value.temporary
    assert "The newest checkpoint is" in str(e.value)
    assert "step-000000000009." in str(e.value)
    assert steps(disk.folder / "run")[-1] == 9


def test_a_disk_that_is_full_from_the_start_is_an_error_before_training(disk):
    disk.fill()
    with pytest.raises(CheckpointError, match="checkpoints cannot be written here: No space left") as e:
        fit(disk)
    assert e.value.temporary


def test_after_a_failure_the_next_checkpoint_of_a_chain_of_deltas_is_full(disk):
    run = kv.Checkpoints(disk.folder / "run", full_every=10, keep_last=None)
    made, _ = fit(disk, checkpoints=run, actions={"step5": disk.fill, "step7": disk.empty})
    kinds = {each.step: each.manifest.kind for each in run.list()}
    assert kinds == {2: "full", 4: "delta", 8: "full", 10: "delta", 12: "full"}  # 12 is saved twice
    other = trainer(checkpoints=run)
    other.load()
    assert_same(other.model, made.model)
    assert kv.checkpoint.verify(disk.folder / "run") == []


def test_what_the_program_does_wrong_is_not_tolerated(tmp_path):
    class Odd(kv.callbacks.Callback):
        def state_dict(self):
            return {"odd": object()}

    made = trainer(checkpoints=tmp_path / "run", checkpoint_every=2, callbacks=[Odd()])
    with pytest.raises((TypeError, ValueError), match="object"):
        made.fit(loader())
    assert made.step == 2


@pytest.mark.parametrize("given", [-1, 1.5])
def test_a_number_that_makes_no_sense_is_an_error(given, tmp_path):
    with pytest.raises((ValueError, TypeError), match="tolerate_failed_saves"):
        trainer(checkpoints=tmp_path, tolerate_failed_saves=given)


def loop(disk, caplog, *, wait=True, tolerate=3, fill_at=3, empty_at=7, save_at=range(2, 13, 2)):
    """A hand-written loop that saves now and then."""
    net = model()
    with kv.TrainContext(
        net,
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
        dense_optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        tolerate_failed_saves=tolerate,
        save_retry_seconds=0.3,
    ) as ctx:
        for batch in ctx.loader(batches(STEPS)):
            output, _ = ctx.forward(batch)
            ctx.backward(kv.losses.BinaryCrossEntropy()(output, batch))
            if ctx.step in save_at:
                pending = ctx.save(disk.folder / "run", block=wait)
            if ctx.step in (fill_at, empty_at):
                pending.join()
                (disk.fill if ctx.step == fill_at else disk.empty)()
    return net


@pytest.mark.parametrize("wait", [True, False])
def test_a_loop_of_ones_own_survives_a_full_disk(disk, caplog, wait):
    loop(disk, caplog, wait=wait)
    assert steps(disk.folder / "run") == [8, 10, 12]
    first, second = warnings_of(caplog)
    assert "step 4 was NOT saved" in first
    assert "step 6 was NOT saved" in second


def test_a_loop_of_ones_own_ends_after_too_many_failures(disk, caplog):
    with pytest.raises(CheckpointError, match="could not be saved 2 times in a row"):
        loop(disk, caplog, tolerate=1, empty_at=None)


def test_leaving_a_context_repeats_its_last_save(disk, caplog):
    with pytest.raises(CheckpointError, match="the last checkpoint, of step 12, could not be saved"):
        loop(disk, caplog, fill_at=11, empty_at=None)
    assert steps(disk.folder / "run") == [6, 8, 10]


def test_leaving_a_context_that_has_trained_on_raises_the_failure(disk, caplog):
    with pytest.raises(CheckpointError, match="No space left on device"):
        loop(disk, caplog, fill_at=7, empty_at=None, save_at=[2, 8])


def test_a_checkpoint_folder_whose_disk_is_unmounted_is_an_outage(disk, caplog):
    with pytest.raises(CheckpointError, match="is it mounted") as raised:
        fit(disk, tolerate=1, actions={"step3": disk.take_away})
    assert raised.value.temporary
    assert any("was NOT saved" in each for each in warnings_of(caplog))
    assert not (disk.folder / "run").exists()  # nothing is written to the disk below


def test_the_last_save_is_repeated_also_if_it_was_due_by_steps(disk):
    def fill_and_empty_later():
        disk.fill()
        threading.Timer(1.0, disk.empty).start()

    run = disk.folder / "run"
    options = {"checkpoints": run, "checkpoint_every": 6, "tolerate_failed_saves": 0}
    made = trainer(model(), callbacks=[At(step5=fill_and_empty_later)], **options)
    assert made.fit(loader(), max_steps=6).step == 6
    assert steps(run) == [6]


class WideLog(kv.loggers.Logger):
    """A log with lines that are larger than what a full disk still takes."""

    def __init__(self, path):
        self._path = path

    def open(self, step):
        self._file = self._path.open("wb", buffering=0)

    def write(self, report):
        self._file.write(b"%d %s\n" % (report.step, bytes(8192)))

    def close(self):
        self._file.close()


def test_a_full_disk_under_a_log_is_one_warning_and_training_continues(disk, tmp_path, caplog):
    log = WideLog(disk.folder / "log")
    actions = {"step3": disk.fill, "step7": disk.empty}
    fit(disk, checkpoints=tmp_path / "run", actions=actions, loggers=[log], log_every=1)
    (warning,) = [each for each in warnings_of(caplog) if "WideLog" in each]
    assert "is incomplete from step" in warning
    assert f"\n{STEPS} ".encode() in (disk.folder / "log").read_bytes()
