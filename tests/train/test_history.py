"""The history of a run: in memory, in the run folder, and as a DataFrame."""

import json
import math
import resource
import signal
import sys

import pytest
from forked_programs import ForkedProgram
from hypothesis import given
from hypothesis import strategies as st
from train_helpers import StopAt, batches, trainer

import karvan as kv
from karvan.train import Report
from karvan.train.loggers import FILE, History, LoggerGroup


def run(folder=None, stop_at=None, **options):
    fit = trainer(
        metrics={"auc": kv.metrics.AUC(), "calibration": kv.metrics.Calibration()},
        log_every=3,
        checkpoints=folder,
        checkpoint_every=4 if folder else None,
        callbacks=[StopAt(stop_at)],
        **options,
    )
    fit.fit(batches(), epochs=2, eval_data=batches(2, seed=1), eval_every=8)
    return fit


def entries(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_history_has_a_row_for_each_report_without_checkpoints():
    history = run().history
    assert list(history.columns[:5]) == ["kind", "step", "epoch", "samples", "time"]
    assert list(history[history.kind == "train"].step) == [3, 6, 9, 12, 15, 18, 21, 24]
    assert list(history[history.kind == "eval"].step) == [8, 16, 24]
    train = history[history.kind == "train"]
    assert list(train.samples) == [16 * step for step in train.step]
    assert {"loss", "auc", "calibration", "lr/dense", "lr/sparse", "samples_per_second"} <= set(history)
    assert (train["rows/user"] + train["rows/item"] == train.rows).all()
    assert train["rows/user"].iloc[-1] == 40
    assert history[history.kind == "eval"].rows.isna().all()
    assert history.time.is_monotonic_increasing


def test_history_continues_with_every_fit_and_is_empty_before_the_first():
    fit = trainer(log_every=1)
    assert list(fit.history.columns) == ["kind", "step", "epoch"]
    assert len(fit.history) == 0
    for steps in ([1, 2], [1, 2, 3, 4]):
        fit.fit(batches(2))
        assert list(fit.history.step) == steps
    fit.fit(batches(2), resume=False)
    assert list(fit.history.step) == [1, 2]


def test_the_run_folder_has_the_same_history(tmp_path):
    history = run(tmp_path).history
    for entry, (_, row) in zip(entries(tmp_path), history.iterrows(), strict=True):
        assert entry == {name: value for name, value in row.items() if value == value}


def test_a_resumed_run_continues_its_history_without_doubled_steps(tmp_path):
    straight = run(tmp_path / "straight").history
    run(tmp_path / "run", stop_at=13)
    with (tmp_path / "run" / FILE).open("a") as file:  # as after a crash behind the last checkpoint
        file.write('{"kind": "train", "step": 15, "epoch": 1, "loss": 9.0}\n{"kind": "tra')
    history = run(tmp_path / "run").history
    history = history[history.step != 13]  # stopping reports what there is
    assert list(zip(history.kind, history.step, strict=True)) == list(
        zip(straight.kind, straight.step, strict=True)
    )
    assert list(history.auc) == list(straight.auc)
    assert [entry["step"] for entry in entries(tmp_path / "run") if entry["step"] != 13] == list(history.step)


def test_the_history_survives_kill_9(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from train_helpers import batches, trainer\n"
        "import karvan as kv\n"
        "class Kill(kv.callbacks.Callback):\n"
        "    def on_step_end(self, trainer, logs):\n"
        "        if logs.step == 9: trainer.saver._checkpoints.wait(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "trainer(checkpoints=sys.argv[1], checkpoint_every=4, log_every=1, callbacks=[Kill()]).fit(batches())"
    )
    (program := tmp_path / "program.py").write_text(script)
    folder = tmp_path / "run"
    assert ForkedProgram([sys.executable, program, folder]).wait(60) == -signal.SIGKILL
    assert [entry["step"] for entry in entries(folder)] == list(range(1, 9))  # the 9th was not reported
    with (folder / FILE).open("a") as file:
        file.write('{"kind"')
    fit = trainer(checkpoints=folder, log_every=1)
    fit.fit(batches())
    assert list(fit.history.step) == list(range(1, 13))
    assert [entry["step"] for entry in entries(folder)] == list(range(1, 13))


@pytest.mark.parametrize(
    "damage", [b"\0\0\0\0\n", b"{}\n", b"[1]\n", b'{"step": "x"}\n', b"\xff\xfe\n", b'{"st']
)
def test_damaged_lines_do_not_stop_a_run_from_resuming(tmp_path, damage):
    trainer(checkpoints=tmp_path, log_every=1).fit(batches(2))
    with (tmp_path / FILE).open("ab") as file:
        file.write(damage)
    fit = trainer(checkpoints=tmp_path, log_every=1)
    fit.fit(batches(2), epochs=2)
    assert list(fit.history.step) == [1, 2, 3, 4]
    assert [entry["step"] for entry in entries(tmp_path)] == [1, 2, 3, 4]


class Folder:
    """A run folder of several processes; each trains some steps, may save them, and may be killed."""

    def __init__(self, path):
        self.path = path
        self.saved = 0
        self.expected = []

    def train(self, steps, saves, torn):
        history = History(self.path, writes=True)
        history.open(self.saved)
        self.expected = [step for step in self.expected if step <= self.saved]
        step = self.saved
        for _ in range(steps):
            step += 1
            history.write(Report("train", step, 0, {"loss": 1 / step}))
            self.expected.append(step)
            if saves:
                self.saved = step
        if torn:
            with (self.path / FILE).open("a") as file:
                file.write('{"kind": "train", "st')
        else:
            history.close()
        assert list(history.frame().step) == self.expected


@given(lives=st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), max_size=6))
def test_any_sequence_of_crashes_and_resumes_keeps_each_step_once(tmp_path_factory, lives):
    folder = Folder(tmp_path_factory.mktemp("run"))
    for life in lives:
        folder.train(*life)
    folder.train(1, True, False)
    assert [entry["step"] for entry in entries(folder.path)] == folder.expected


def test_a_file_that_cannot_be_written_is_a_warning_and_the_history_stays_in_memory(tmp_path, caplog):
    history = History(tmp_path, writes=True)
    loggers = LoggerGroup([history])  # as a Trainer has it
    loggers.open(0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for step in (1, 2):
            loggers.write(Report("train", step, 0, {"loss": 0.5}))
        loggers.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(history.frame().step) == [1, 2]
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / FILE} is incomplete from step 1 on: [Errno 27] File too large"
    ]


def test_infinite_and_missing_numbers_are_null_in_the_file_and_nan_after_it_is_read(tmp_path):
    history = History(tmp_path, writes=True)
    history.open(0)
    history.write(Report("train", 1, 0, {"loss": math.nan, "auc": 0.5}))
    history.write(Report("train", 2, 0, {"loss": math.inf}))
    history.close()
    assert [entry["loss"] for entry in entries(tmp_path)] == [None, None]
    other = History(tmp_path, writes=False)
    other.open(2)
    frame = other.frame()
    assert frame.loss.isna().all()
    assert frame.auc.isna().tolist() == [False, True]


def test_a_rank_that_does_not_write_reads_the_history_of_before(tmp_path):
    run(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    reader = History(tmp_path, writes=False)
    reader.open(6)
    reader.write(Report("train", 7, 0, {}))
    reader.close()
    assert list(reader.frame().step) == [3, 6, 7]
    assert (tmp_path / FILE).read_bytes() == before


def test_without_pandas_the_history_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        print(trainer().history)


def test_rows_of_an_epochs_end_have_its_number_whatever_log_every_is(tmp_path):
    for every in (1, 2, 3, 7):
        made = trainer(log_every=every)
        made.fit(batches(4), epochs=2, eval_data=batches(1))
        epochs = made.history.groupby("step").epoch.unique()
        assert {step: list(found) for step, found in epochs.items() if step in (4, 8)} == {4: [0], 8: [1]}
