"""What a model reports from inside of its forward: means over intervals, batches and samples."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import karvan as kv
from karvan import distributed
from karvan.train.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
from karvan.train.losses import collecting
from karvan.train.results import ReportWindow


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.top = torch.nn.Linear(1, 1)

    def forward(self, batch):
        x = batch["x"]
        kv.train.report("mean", x.mean().half())
        kv.train.report("half", 0.0)
        kv.train.report("half", 1)
        if x[0] > 2:
            kv.train.report("large", x.mean())
        return self.top(x.unsqueeze(1))[:, 0]


def _batches(*numbers):
    return [{"x": torch.full((2,), float(n)), "label": torch.tensor([0.0, 1.0])} for n in numbers]


def _trainer(model=None, **options):
    return kv.Trainer(
        model or Model(),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        progress="none",
        **options,
    )


class Steps(kv.callbacks.Callback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer, logs):
        assert set(logs.losses) == {"loss"}
        self.seen.append({name: float(value) for name, value in logs.reports.items()})


def test_reports_are_means_of_the_interval_in_every_log(tmp_path):
    logs = [JSONLinesLogger(tmp_path / "a.jsonl"), CSVLogger(tmp_path / "a.csv"), TensorBoardLogger(tmp_path)]
    steps = Steps()
    trainer = _trainer(loggers=logs, log_every=3, callbacks=[steps])
    result = trainer.fit(_batches(1, 2, 3, 4, 6, 2), eval_data=_batches(1, 3, 5))
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    found = [[line["kind"], line["mean"], line["half"], line.get("large")] for line in lines]
    assert found == [["train", 2, 0.5, 3], ["train", 4, 0.5, 5], ["eval", 3, 0.5, 4]]
    assert steps.seen[:3] == [
        {"mean": 1, "half": 0.5},
        {"mean": 2, "half": 0.5},
        {"mean": 3, "half": 0.5, "large": 3},
    ]
    assert result.evaluation["large"] == 4
    assert "large" in (tmp_path / "a.csv").read_text()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("train/mean")] == [2, 4]


def test_evaluations_weigh_by_samples_and_a_plain_loop_has_no_reports():
    trainer = _trainer()
    some = [{"x": torch.full((size,), float(size)), "label": torch.ones(size)} for size in (1, 3, 4)]
    found = trainer.evaluate(some)
    assert found["mean"] == pytest.approx((1 + 9 + 16) / 8)
    assert found["large"] == pytest.approx((9 + 16) / 7)
    trainer.model(some[0])
    assert [len(output) for output, _ in trainer.predict(some)] == [1, 3, 4]


def test_a_window_of_a_checkpoint_has_the_reports_before_it():
    windows = [ReportWindow(), ReportWindow()]
    for number in (1.0, 2.0, 6.0):
        with collecting() as reported:
            kv.train.report("mean", number)
            if number > 1:
                kv.train.report("large", number)
        windows[0].add({"loss": torch.tensor(number), **reported.entries(())})
        state = json.loads(json.dumps(windows[0].state_dict()))
    windows[1].load_share([state, state], 0)
    for window in windows:
        found = window.means(distributed.current().main)
        assert found["mean"] == 3
        assert found["large"] == 4


def test_accumulated_batches_count_alike():
    steps = Steps()
    _trainer(gradient_accumulation_steps=2, callbacks=[steps]).fit(_batches(1, 3, 4, 6))
    assert steps.seen == [{"mean": 2, "half": 0.5, "large": 3}, {"mean": 5, "half": 0.5, "large": 5}]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss", 1.0, "a name that is not used yet, got 'loss'"),
        ("rows/user", 1.0, "a name that is not used yet, got 'rows/user'"),
        ("", 1.0, "expects a name, got ''"),
        ("x", torch.zeros(2), r"one number for 'x', such as a mean, got shape \(2,\)"),
        ("x", "1", "expects a number for 'x', got str"),
        ("auc", 1.0, "names that differ from the Trainer's metrics, got 'auc'"),
    ],
)
def test_what_cannot_be_reported_is_an_error(name, value, message):
    class Wrong(Model):
        def forward(self, batch):
            kv.train.report(name, value)
            return super().forward(batch)

    trainer = _trainer(Wrong(), metrics={"auc": kv.metrics.AUC()})
    with pytest.raises((TypeError, ValueError), match=message):
        trainer.fit(_batches(1))
    with pytest.raises((TypeError, ValueError), match=message):
        trainer.evaluate(_batches(1))
