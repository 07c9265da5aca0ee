"""The moments of a fit, and what is told of it in files and on the screen."""

import csv
import io
import itertools
import json
import math
import re
import sys
import time

import pytest
import torch
from forked_programs import run_forked
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train_helpers import StopAt, batches, model, trainer

import karvan as kv
from karvan.train import BarProgress, PlainProgress, Report
from karvan.train.callbacks import EarlyStopping
from karvan.train.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
from karvan.train.reporter import report_period


class Moments(kv.callbacks.Callback):
    """Writes down everything it is called with."""

    def __init__(self):
        self.seen = []

    def on_fit_begin(self, trainer):
        self.seen.append("fit begin")

    def on_epoch_begin(self, trainer, epoch):
        self.seen.append(f"epoch {epoch} begin")

    def on_step_end(self, trainer, logs):
        assert trainer.model.training
        assert trainer.step == logs.step
        self.seen.append(f"step {logs.step} of epoch {logs.epoch}")

    def on_evaluate_end(self, trainer, metrics):
        assert trainer.model.training
        assert set(metrics) == {"loss"}
        self.seen.append("evaluate end")

    def on_checkpoint(self, trainer, step):
        self.seen.append(f"checkpoint {step}")

    def on_epoch_end(self, trainer, epoch):
        self.seen.append(f"epoch {epoch} end")

    def on_fit_end(self, trainer, result):
        self.seen.append(f"fit end {result.step}")


def test_the_moments_of_a_fit_come_in_their_order(tmp_path):
    moments = Moments()
    fit = trainer(checkpoints=tmp_path, checkpoint_every=3, callbacks=[moments])
    fit.fit(batches(2), epochs=2, eval_data=batches(1))
    assert moments.seen == [
        "fit begin",
        "epoch 0 begin",
        "step 1 of epoch 0",
        "step 2 of epoch 0",
        "checkpoint 2",  # before the first evaluation
        "evaluate end",
        "epoch 0 end",
        "epoch 1 begin",
        "step 3 of epoch 1",
        "checkpoint 3",
        "step 4 of epoch 1",
        "evaluate end",
        "epoch 1 end",
        "checkpoint 4",
        "fit end 4",
    ]


def test_an_epoch_that_is_resumed_does_not_begin_again(tmp_path):
    moments = Moments()
    trainer(checkpoints=tmp_path, callbacks=[StopAt(1)]).fit(batches(2))
    trainer(checkpoints=tmp_path, callbacks=[moments]).fit(batches(2))
    assert moments.seen == ["fit begin", "step 2 of epoch 0", "epoch 0 end", "checkpoint 2", "fit end 2"]


class Asked:
    """Stands for a Trainer."""

    stopped = None

    def stop(self, reason, final=False):
        self.stopped = reason


@given(
    scores=st.lists(st.sampled_from([0.1, 0.2, 0.3, math.nan]), min_size=1, max_size=8),
    patience=st.integers(1, 3),
    mode=st.sampled_from(["max", "min"]),
)
def test_early_stopping_stops_when_nothing_was_better_for_its_patience(scores, patience, mode):
    stopping, asked = EarlyStopping("auc", patience, mode), Asked()
    better = max if mode == "max" else min
    since, known = 0, []
    for score in scores:
        known.append(score)
        real = [s for s in known if not math.isnan(s)]
        best_at = known.index(better(real)) if real else -1
        since = len(known) - 1 - best_at
        stopping.on_evaluate_end(asked, {"auc": score})
        assert (asked.stopped is not None) == (since >= patience)
        if asked.stopped:
            assert asked.stopped.startswith("early: auc was best at")
            return
        restored = EarlyStopping("auc", patience, mode)
        restored.load_state_dict(stopping.state_dict())
        stopping = restored


def test_early_stopping_counts_gains_above_its_delta_and_names_what_it_misses():
    stopping, asked = EarlyStopping("auc", 2, min_delta=0.05), Asked()
    for score in (0.5, 0.54, 0.549):
        stopping.on_evaluate_end(asked, {"auc": score})
    assert asked.stopped
    with pytest.raises(KeyError, match="EarlyStopping needs 'auc', but there are: loss"):
        stopping.on_evaluate_end(asked, {"loss": 1.0})


def run_with_logs(folder, stop_at=None, epochs=2):
    csv_log, json_log = CSVLogger(folder / "log.csv"), JSONLinesLogger(folder / "log.jsonl")
    fit = trainer(
        metrics={"auc": kv.metrics.AUC()},
        loggers=[csv_log, json_log, TensorBoardLogger(folder / "board")],
        log_every=3,
        checkpoints=folder / "run",
        checkpoint_every=4,
        callbacks=[StopAt(stop_at)],
    )
    return fit.fit(batches(), epochs=epochs, eval_data=batches(2, seed=1), eval_every=8)


def test_logs_have_the_numbers_of_training_and_evaluation(tmp_path):
    result = run_with_logs(tmp_path)
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [e["step"] for e in entries if e["kind"] == "train"] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert [e["step"] for e in entries if e["kind"] == "eval"] == [8, 16, 24]
    train = next(e for e in entries if e["kind"] == "train")
    names = {"samples_per_second", "loss", "auc", "rows", "memory", "lr/dense", "lr/sparse"}
    assert names <= set(train)
    assert entries[-1]["auc"] == pytest.approx(result.evaluation["auc"])
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [(r["kind"], int(r["step"])) for r in rows] == [(e["kind"], e["step"]) for e in entries]
    assert [float(r["loss"]) for r in rows] == [e["loss"] for e in entries]
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [(s.step, s.value) for s in board.Scalars("eval/auc")] == [
        (e["step"], pytest.approx(e["auc"])) for e in entries if e["kind"] == "eval"
    ]


def test_a_resumed_run_logs_each_step_once_and_the_same_numbers(tmp_path):
    (tmp_path / "straight").mkdir()
    run_with_logs(tmp_path / "straight")
    run_with_logs(tmp_path, stop_at=13)
    # As after a crash: entries behind the last checkpoint, and a last line that was cut off.
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 15, "epoch": 1, "loss": 9.0}\n{"kind": "tra')
    with (tmp_path / "log.csv").open("a") as file:
        file.write("train,15,1\ntrain,1")
    run_with_logs(tmp_path)

    def told(folder):
        entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        rows = list(csv.DictReader((folder / "log.csv").open()))
        assert [(r["kind"], int(r["step"])) for r in rows] == [(e["kind"], e["step"]) for e in entries]
        timeless = ("kind", "step", "epoch", "loss", "auc", "rows")
        return [{name: e.get(name) for name in timeless} for e in entries]

    expected = told(tmp_path / "straight")
    found = [e for e in told(tmp_path) if e["step"] != 13]  # stopping told what there was
    at_15 = [e["step"] for e in expected].index(15)
    del expected[at_15]["loss"], found[at_15]["loss"]  # the mean since that report
    assert found == expected


def test_a_csv_gets_columns_when_they_come_and_json_has_null_for_nan(tmp_path):
    log, lines = CSVLogger(tmp_path / "a.csv"), JSONLinesLogger(tmp_path / "a.jsonl")
    for one in (log, lines):
        one.open(0)
        one.write(Report("train", 1, 0, {"loss": 0.5}))
        one.write(Report("eval", 1, 0, {"auc": math.nan, "loss": 0.25}))
        one.close()
    assert (tmp_path / "a.csv").read_text() == "kind,step,epoch,loss,auc\ntrain,1,0,0.5,\neval,1,0,0.25,nan\n"
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[1])["auc"] is None


@pytest.mark.parametrize(
    "damage",
    [",,\n", "\0" * 200_000 + "\n", "train,x,1\n", '"3,0,1\n', "3,0,0.34,0,0.2\n", "3,0\0,0.", "é\n"],
)
def test_a_run_resumes_with_a_csv_that_a_crash_or_a_full_disk_has_damaged(tmp_path, damage):
    path = tmp_path / "a.csv"
    path.write_text(f"kind,step,loss\ntrain,1,0.5\ntrain,2,0.4\n{damage.replace('3', 'train,3', 1)}")
    log = CSVLogger(path)
    log.open(step=2)
    log.close()
    assert path.read_text() == "kind,step,loss\ntrain,1,0.5\ntrain,2,0.4\n"


def test_without_tensorboard_the_log_says_what_to_install():
    script = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "import karvan as kv\n"
        "try: kv.loggers.TensorBoardLogger('x')\n"
        "except ImportError as error: print(error)"
    )
    done = run_forked([sys.executable, "-c", script])
    assert "pip install 'karvan[monitor]'" in done.stdout


def steps_of(lines):
    """The steps of the lines with numbers of training."""
    found = [re.match(r"step +([\d,]+)/", line) for line in lines if "eval" not in line]
    return [int(match[1].replace(",", "")) for match in found if match]


def test_plain_progress_tells_evaluations_at_once_and_training_now_and_then():
    stream = io.StringIO()
    fit = trainer(progress=PlainProgress(stream), log_every=2, metrics={"auc": kv.metrics.AUC()})
    fit.fit(batches(), eval_data=batches(1))
    lines = [line for line in stream.getvalue().splitlines() if not line.startswith(("Karvan ", "  "))]
    assert lines[0].startswith("step  2/12  loss")
    for word in ("/s", "loss", "AUC", "rows", "process ", "GiB"):
        assert word in lines[0]
    assert not any("lr/" in line for line in lines)  # they do not change
    assert lines[1].startswith("step  6/12  ")
    assert lines[2].startswith("step 10/12  ")
    assert lines[3].startswith("step 12/12  eval  loss")
    assert lines[4].startswith("step 12/12  ")  # the last numbers, though little time has passed
    assert lines[5].startswith("Trained 12 steps in ")
    assert len(lines) == 6


class Log(kv.loggers.Logger):
    """Remembers the reports that it gets."""

    def __init__(self):
        self.reports = []

    def open(self, step):
        pass

    def close(self):
        pass

    def write(self, report):
        self.reports.append(report)


def test_people_see_numbers_after_the_first_steps_and_logs_keep_their_period():
    stream, log = io.StringIO(), Log()
    fit = trainer(progress=PlainProgress(stream), loggers=[log], metrics={"auc": kv.metrics.AUC()})
    fit.fit(iter(batches(20) * 11))  # of unknown length
    shown = [int(step) for step in re.findall(r"^step +(\d+) ", stream.getvalue(), re.M)]
    assert shown == [1, 2, 5, 10, 20, 50, 100, 200, 220]
    assert [report.step for report in log.reports] == [100, 200, 220]
    assert list(fit.history["step"]) == [100, 200, 220]
    fixed = Log()
    other = trainer(progress="none", loggers=[fixed], log_every=100, metrics={"auc": kv.metrics.AUC()})
    other.fit(iter(batches(20) * 11))
    assert [each.values["loss"] for each in log.reports] == [each.values["loss"] for each in fixed.reports]
    assert [each.values["auc"] for each in log.reports] == [each.values["auc"] for each in fixed.reports]


@pytest.mark.parametrize(
    ("steps", "period"), [(0, 1), (54, 1), (99, 1), (220, 4), (4_999, 99), (5_200, 100), (None, 100)]
)
def test_the_period_of_reports_suits_the_length_of_a_fit(steps, period):
    assert report_period(steps) == period


def test_a_short_fit_has_at_least_50_reports_or_one_a_step():
    for data, goal, expected in (
        (batches(20) * 11, {}, range(4, 221, 4)),
        (iter(batches(20) * 6), {"max_steps": 110}, range(2, 111, 2)),
        (batches(4), {"epochs": 3}, range(1, 13)),
    ):
        log = Log()
        trainer(loggers=[log]).fit(data, **goal)
        assert [report.step for report in log.reports] == list(expected)


def test_a_resumed_fit_and_the_next_data_keep_the_period_of_a_fit(tmp_path):
    made = []
    for stop_at in (50, None):
        fit = trainer(checkpoints=tmp_path, callbacks=[StopAt(stop_at)])
        fit.fit(batches(20) * 11, data_name="first")
    made.append(list(fit.history["step"]))
    fit.fit(batches(20) * 5, data_name="second")
    made.append(list(fit.history["step"])[len(made[0]) :])
    assert made == [[*range(4, 49, 4), 50, *range(52, 221, 4)], list(range(222, 321, 2))]


def test_a_stop_before_the_first_step_of_an_epoch_shows_no_metric_of_nothing():
    class Stop(kv.callbacks.Callback):
        def on_epoch_begin(self, trainer, epoch):
            if epoch == 1:
                trainer.stop("enough")

    stream, log = io.StringIO(), Log()
    options = {"progress": PlainProgress(stream), "loggers": [log], "log_every": 10}
    fit = trainer(metrics={"auc": kv.metrics.AUC()}, callbacks=[Stop()], **options)
    result = fit.fit(batches(), epochs=2)
    assert "nan" not in stream.getvalue()
    assert [(report.step, "loss" in report.values, "auc" in report.values) for report in log.reports] == [
        (10, True, True),
        (12, True, False),
    ]
    assert math.isnan(result.metrics["auc"])


def test_a_loss_that_is_nan_is_shown():
    stream = io.StringIO()
    options = {"loss": lambda output, batch: output.sum() * math.nan, "nonfinite": "apply"}
    fit = trainer(progress=PlainProgress(stream), **options)
    fit.fit(batches(2))
    assert "loss nan" in stream.getvalue()


class Slow(kv.callbacks.Callback):
    """Steps that take a while."""

    def on_step_end(self, trainer, logs):
        time.sleep(0.02)


def test_slow_steps_are_shown_by_time_and_a_chosen_period_is_obeyed():
    shown = {}
    for every in (None, 7):
        stream = io.StringIO()
        fit = trainer(progress=PlainProgress(stream, seconds=0.1), log_every=every, callbacks=[Slow()])
        fit.fit(batches(30))
        shown[every] = steps_of(stream.getvalue().splitlines())
    assert shown[None][:2] == [1, 2]
    assert all(later - earlier <= 6 for earlier, later in itertools.pairwise(shown[None]))
    assert len(shown[None]) >= 7
    assert shown[7] == [7, 14, 21, 28, 30]


def test_learning_rates_are_shown_once_a_schedule_changes_them():
    stream = io.StringIO()
    fit = trainer(
        progress=PlainProgress(stream),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5),
    )
    fit.fit(batches(10))
    rates = {
        step: line.partition("lr/dense ")[2].partition("  ")[0]
        for line in stream.getvalue().splitlines()
        for step in steps_of([line])
    }
    assert rates == {1: "", 2: "", 5: "0.005", 10: "0.0025"}


def test_the_last_numbers_are_shown_once():
    stream = io.StringIO()
    trainer(progress=PlainProgress(stream)).fit(batches(10), eval_data=batches(1))
    assert steps_of(stream.getvalue().splitlines()) == [1, 2, 5, 10]


def test_lines_are_aligned_and_name_whose_memory_it_is():
    stream = io.StringIO()
    plain = PlainProgress(stream, seconds=0.0)
    plain.begin(0, 12_500)
    for step, rate, memory_of in ((1, 59.0, "process"), (2, 123_456.0, "4 processes"), (5, 1_000.0, "GPU")):
        values = {"samples_per_second": rate, "loss": 0.5, "rows": 1000.0, "memory": 2.0**30}
        plain.report(Report("train", step, 0, values, memory_of=memory_of))
    assert stream.getvalue().splitlines() == [
        "step      1/12,500  loss 0.5000  59/s  1,000 rows  process 1.00 GiB",
        "step      2/12,500  loss 0.5000  123k/s  1,000 rows  4 processes 1.00 GiB",
        "step      5/12,500  loss 0.5000  1,000/s  1,000 rows          GPU 1.00 GiB",
    ]


@pytest.mark.parametrize(
    ("rate", "rows", "memory", "shown"),
    [
        (252_081.0, 443_354.0, 1.274, "252k/s  443k rows  process 1.27 GiB"),
        (18_835.4, 999_999.0, 0.3, "18.8k/s  1.00M rows  process 0.30 GiB"),
        (9_999.6, 12_345_678.0, 24.0, "10.0k/s  12.3M rows  process 24.0 GiB"),
        (1_250_000.0, 2_000_000_000.0, 130.2, "1.25M/s  2.00B rows  process 130 GiB"),
    ],
)
def test_a_line_of_training_fits_into_80_columns(rate, rows, memory, shown):
    stream = io.StringIO()
    plain = PlainProgress(stream)
    plain.begin(0, 1_905)
    values = {"loss": 0.3824, "auc": 0.8054, "samples_per_second": rate, "rows": rows}
    plain.report(Report("train", 1_000, 0, {**values, "memory": memory * 2**30}, memory_of="process"))
    [line] = stream.getvalue().splitlines()
    assert line == f"step 1,000/1,905  loss 0.3824  AUC 0.8054  {shown}"
    assert len(line) <= 80


def test_the_bar_shows_step_rate_loss_auc_rows_and_memory():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=200)
    fit = trainer(progress=BarProgress(console), log_every=2, metrics={"auc": kv.metrics.AUC()})
    fit.fit(batches(), eval_data=batches(1))
    shown = stream.getvalue()
    for word in ("step 12/12", "/s", "loss 0.", "AUC 0.", "rows", "GiB", "eval", "Trained 12 steps"):
        assert word in shown


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bar_keeps_step_total_and_time_left_on_any_terminal(width):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    bar = BarProgress(console)
    bar.begin(0, 1_000_000)
    values = {"samples_per_second": 123456.0, "loss": 0.4321, "auc": 0.7654, "rows": 12345678.0}
    values |= {"rows/item": 1.0, "memory": 2.0**34, "lr/dense": 1e-3}
    for step in (250_000, 500_000):
        bar.step(step)
        bar.report(Report("train", step, 0, values))
    bar.end()
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()))
    shown = [line for line in lines if "step 500,000/1,000,000" in line][-1].rstrip()
    assert len(shown) <= width
    assert re.search(r"left \d+:\d\d:\d\d", shown)
    assert "lr/dense" not in shown
    assert "rows/item" not in shown
    texts = ["loss 0.4321", "AUC 0.7654", "123k/s", "12.3M rows", "process 16.0 GiB"]
    assert [text for text in texts if text in shown] == texts[: {60: 0, 80: 2, 120: 4}[width]]
    assert shown.endswith({60: "", 80: "AUC 0.7654", 120: "rows"}[width])  # no number is cut


def test_the_bar_of_data_without_a_length_shows_elapsed_time_only():
    stream = io.StringIO()
    bar = BarProgress(Console(file=stream, force_terminal=True, width=80, color_system=None))
    fit = trainer(progress=bar, log_every=2)
    fit.fit(batch for batch in batches())
    assert "step 12 " in stream.getvalue()
    assert "left" not in stream.getvalue()


def test_losses_pick_heads_and_columns_and_weigh_samples():
    output = {"a": torch.tensor([0.5, -1.0, 2.0]), "b": torch.zeros(3)}
    batch = {"label": torch.tensor([1, 0, 1]), "weight": torch.tensor([1.0, 0.0, 3.0])}
    each = torch.nn.functional.binary_cross_entropy_with_logits(
        output["a"], batch["label"].float(), reduction="none"
    )
    assert kv.losses.BinaryCrossEntropy(output="a")(output, batch) == each.mean()
    weighted = kv.losses.BinaryCrossEntropy(output="a", weight="weight")(output, batch)
    torch.testing.assert_close(weighted, (each[0] + 3 * each[2]) / 4)
    nothing = {**batch, "weight": torch.zeros(3)}
    assert kv.losses.BinaryCrossEntropy(output="a", weight="weight")(output, nothing) == 0
    assert kv.losses.MeanSquaredError()(torch.tensor([1.0, 2.0]), {"label": torch.tensor([0.0, 4.0])}) == 2.5
    column = kv.losses.MeanSquaredError()(torch.tensor([[1.0], [2.0]]), {"label": torch.tensor([0.0, 4.0])})
    assert column == 2.5  # (B, 1) and (B,) are the same samples, not every pair of them
    for loss, message in (
        (kv.losses.BinaryCrossEntropy(), "several outputs; name one by output=: a, b"),
        (kv.losses.BinaryCrossEntropy(output="c"), "no output 'c'; it gives: a, b"),
        (
            kv.losses.BinaryCrossEntropy("click", "a"),
            "no column 'click' in the batch, which has: label, weight",
        ),
    ):
        with pytest.raises((TypeError, KeyError), match=message):
            loss(output, batch)
    with pytest.raises(ValueError, match="There is no loss for the weight of b; there are: a"):
        kv.losses.Sum({"a": kv.losses.MeanSquaredError()}, weights={"b": 1.0})


def test_nothing_optional_is_needed():
    fit = kv.Trainer(
        model(),
        lambda output, batch: torch.nn.functional.mse_loss(output, batch["label"]),
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sparse_optimizer=kv.optim.SGD(lr=0.1),
        progress="none",
    )
    assert fit.fit(batches(2)).checkpoint is None
