"""Hooks, evaluations, clipping, reports and logs of RecIS's Trainer."""

import json

import pytest
import torch
from recis_clicks import RECORDS, Model, batches, dataset, make, state
from torch import nn

from karvan.compat.recis.framework.metrics import add_metric, get_log_metrics
from karvan.compat.recis.framework.trainer import Trainer, TrainingArguments
from karvan.compat.recis.hooks import (
    ClipGradNormHook,
    Hook,
    LoggerHook,
    MetricReportHook,
    ProfilerHook,
)
from karvan.compat.recis.hooks.monitor_report_hook import ReportArguments
from karvan.compat.recis.metrics.auroc import AUROC
from karvan.compat.recis.nn.modules.hashtable import filter_out_sparse_param
from karvan.compat.recis.optim import SparseAdamW
from karvan.compat.recis.utils.logger import Logger
from karvan.compat.unsupported import UnsupportedError


class Noting(Hook):
    """Notes the moments at which it is called."""

    def __init__(self):
        self.calls = []
        self.data = []

    def start(self, is_train=True, *args, **options):
        self.calls.append(("start", is_train))

    def end(self, is_train=True, *args, **options):
        self.calls.append(("end", is_train))

    def before_epoch(self, is_train=True, *args, **options):
        self.calls.append(("before_epoch", is_train))

    def after_epoch(self, is_train=True, *args, **options):
        self.calls.append(("after_epoch", is_train))

    def after_data(self, is_train=True, *args, data, **options):
        self.data.append(data)

    def after_step(self, is_train=True, *args, metrics, global_step, **options):
        self.calls.append(("step", is_train, global_step, "mean" in metrics))

    def after_train(self, *args, **options):
        self.calls.append(("after_train",))

    def after_eval(self, *args, **options):
        self.calls.append(("after_eval",))


def test_hooks_are_called_in_training_and_evaluation(files, tmp_path):
    hook = Noting()
    trainer = make(files, tmp_path / "run", hooks=[hook], eval_dataset=dataset(files), train_steps=2)
    trainer.train()
    before = state(trainer.model)
    found = trainer.evaluate(eval_steps=1)
    assert set(found) == {"loss", "mean"}  # of the evaluation alone
    assert hook.calls == [
        ("start", True),
        ("before_epoch", True),
        ("step", True, 1, True),
        ("step", True, 2, True),
        ("after_train",),
        ("after_epoch", True),
        ("end", True),
        ("start", False),
        ("before_epoch", False),
        ("step", False, 2, True),
        ("after_eval",),
        ("after_epoch", False),
        ("end", False),
    ]
    assert hook.data[0]["user"].values().tolist() == list(range(8))
    assert state(trainer.model) == before


def test_two_trainers_of_one_model_have_their_own_hooks(files, tmp_path):
    first, second = Noting(), Noting()
    trainer = make(files, tmp_path / "run", hooks=[first], train_steps=1)
    other = Trainer(
        trainer.model,
        TrainingArguments(output_dir=str(tmp_path / "run")),
        eval_dataset=dataset(files),
        hooks=[second],
    )
    trainer.train()
    other.evaluate(eval_steps=1)
    assert [call for call in first.calls if call[0] == "step"] == [("step", True, 1, True)]
    assert [call[:2] for call in second.calls if call[0] == "step"] == [("step", False)]
    assert trainer.model(batches(dataset(files))[0]).requires_grad  # called by itself, it takes samples


def test_training_and_evaluation_take_turns(files, tmp_path):
    hook = Noting()
    trainer = make(
        files, tmp_path / "run", hooks=[hook], eval_dataset=dataset(files), eval_steps=1, train_epoch=2
    )
    trainer.train_and_evaluate()
    steps = [(call[1], call[2]) for call in hook.calls if call[0] == "step"]
    assert steps == [
        *((True, i) for i in range(1, 6)),
        (False, 5),
        *((True, i) for i in range(6, 11)),
        (False, 10),
    ]
    assert [call for call in hook.calls if call[0] in ("start", "end")] == [("start", True), ("end", True)]


class FirstGeneration:
    """A hook as RecIS 1.0 calls it, which need not be a `Hook`."""

    def __init__(self):
        self.calls = []

    def after_step(self, metrics, step):
        self.calls.append((sorted(metrics), step.item()))

    def end(self):
        self.calls.append("end")


class Named(FirstGeneration, Hook):
    """One with the documented names."""

    def after_step(self, metrics, global_step):
        super().after_step(metrics, global_step)


class Starred(FirstGeneration):
    """One that takes what there is."""

    def after_step(self, *args):
        super().after_step(*args)


def test_hooks_of_both_generations_are_called_by_their_signatures(files, tmp_path):
    hooks = [FirstGeneration(), Named(), Starred(), Noting()]
    trainer = make(files, tmp_path / "run", hooks=hooks, eval_dataset=dataset(files), train_steps=2)
    trainer.train()
    trainer.evaluate(eval_steps=1)
    trained = [(["epoch", "loss", "mean"], 1), (["epoch", "loss", "mean"], 2), "end"]
    for hook in hooks[:3]:
        assert hook.calls == [*trained, (["mean"], 2), "end"]
    assert ("step", True, 1, True) in hooks[3].calls


class Calling:
    """Calls a function of the program, which each has its own."""

    def __init__(self, function):
        self.after_step = function


def test_hooks_of_one_class_may_have_functions_with_other_arguments(files, tmp_path):
    numbers = []
    hooks = [
        Calling(lambda metrics, step: numbers.append(("old", int(step)))),
        Calling(lambda is_train, global_step, **options: numbers.append(("new", int(global_step)))),
        Calling(lambda: numbers.append(("short",))),
    ]
    make(files, tmp_path / "run", hooks=hooks, train_steps=1).train()
    assert numbers == [("old", 1), ("new", 1), ("short",)]


def test_a_hook_that_cannot_be_called_says_so_when_it_is_added(files, tmp_path):
    class Documented(Hook):
        def after_step(self, trainer):
            """As a page of RecIS's documentation has it, which it does not call either."""

    trainer = make(files, tmp_path / "run")
    with pytest.raises(
        TypeError,
        match=r"after_step of Documented, which takes \(trainer\), expects arguments among is_train",
    ):
        trainer.add_hook(Documented())


def test_hooks_are_called_after_each_batch_of_a_step(files, tmp_path, capsys):
    class Losses(Hook):
        def after_step(self, is_train=True, *args, metrics, global_step, **options):
            losses.append(float(metrics["loss"]))
            steps.append(int(global_step))

    def trained(folder, steps):
        trainer = make(
            files,
            tmp_path / folder,
            data=dataset(files, batch_size=4),
            hooks=[Losses()],
            gradient_accumulation_steps=4,
            train_steps=steps,
        )
        trainer.train()
        return trainer

    losses, steps = [], []
    trainer = trained("run", None)
    assert steps == list(range(1, 11))  # of 10 batches, which make 3 steps
    assert trainer.karvan_trainer.step == 3
    whole, losses, steps = losses, [], []
    assert len(set(whole)) == 10
    assert [line.split("<lstep=")[1].split(">")[0] for line in capsys.readouterr().out.splitlines()] == [
        "2", "4", "6", "8", "10"
    ]  # fmt: skip
    trained("again", 4)
    trained("again", None)  # continues
    assert steps == list(range(1, 11))
    assert losses == pytest.approx(whole)


def test_a_fresh_trainer_evaluates_the_newest_checkpoint(files, tmp_path):
    trained = make(files, tmp_path / "run")
    trained.train()
    fresh = make(files, tmp_path / "run", eval_dataset=dataset(files))
    fresh.evaluate()
    assert state(fresh.model) == state(trained.model)


class Scored(Model):
    """Reports the AUC of all batches, and returns something else than its loss in evaluations."""

    def __init__(self):
        super().__init__()
        self.auc = AUROC()

    def forward(self, samples):
        made = self.engine(samples)
        score = self.net(torch.cat([made["user"], made["items"], made["dense"]], 1)).sigmoid()
        self.auc.update(score[:, 0], made["label"][:, 0])
        add_metric("auc", self.auc.compute())
        add_metric("scores", score[:, 0])
        add_metric("samples", len(score))
        loss = nn.functional.binary_cross_entropy(score, made["label"])
        return loss if self.training else {"score": score}


def test_an_evaluation_gives_means_over_all_samples(files, tmp_path):
    trainer = make(files, tmp_path / "run", eval_dataset=dataset(files, batch_size=16))
    found = trainer.evaluate()
    trainer.model.eval()
    losses, means = [], []
    for batch in batches(dataset(files, batch_size=16)):  # 16, 16 and 8 samples
        count = len(batch["label"])
        with torch.no_grad():
            losses.append((trainer.model(batch).item(), count))
        means.append((get_log_metrics()["mean"].item(), count))
    for name, numbers in (("loss", losses), ("mean", means)):
        assert found[name] == pytest.approx(sum(n * count for n, count in numbers) / RECORDS)
        assert found[name] != pytest.approx(numbers[-1][0])  # that of the last batch


def test_an_evaluation_gives_the_newest_of_what_counts_all_batches(files, tmp_path):
    model = Scored()
    trainer = Trainer(
        model, TrainingArguments(output_dir=str(tmp_path)), eval_dataset=dataset(files, batch_size=16)
    )
    found = trainer.evaluate()
    assert set(found) == {"auc", "scores", "samples"}  # no loss, since there is none
    assert found["samples"] == pytest.approx((16 * 16 + 16 * 16 + 8 * 8) / RECORDS)
    assert found["scores"].shape == (8,)  # not a number: that of the last batch
    expected = AUROC()
    with torch.no_grad():
        for batch in batches(dataset(files)):
            expected.update(model.eval()(batch)["score"][:, 0], batch["label"][:, 0])
    assert found["auc"].item() == pytest.approx(expected.compute().item())


@pytest.mark.filterwarnings("ignore:This CPU has no instructions")
def test_clipping_and_precision_are_those_of_a_karvan_trainer(files, tmp_path):
    class Watched(Model):
        def forward(self, samples):
            autocasts.add((self.dtype, torch.is_autocast_enabled("cpu")))
            return super().forward(samples)

    def trained(name, **options):
        model = Watched()
        model.dtype = options.get("mixed_precision")
        dense = torch.optim.SGD(model.parameters(), lr=5.0)
        sparse = SparseAdamW(filter_out_sparse_param(model), lr=0.05)
        hooks = [ClipGradNormHook(model.parameters(), [], 0.01)] if options.pop("clip", None) else []
        trainer = Trainer(
            model,
            TrainingArguments(output_dir=str(tmp_path / name), **options),
            dataset(files),
            hooks=hooks,
            dense_optimizers=(dense, None),
            sparse_optimizer=sparse,
        )
        trainer.train()
        return trainer

    autocasts = set()
    free, clipped, half = trained("free"), trained("clip", clip=True), trained("half", mixed_precision="bf16")
    before, far, near = Model().net.weight, free.model.net.weight, clipped.model.net.weight
    assert (far - before).norm() > 5 * 5.0 * 0.01
    assert (near - before).norm() <= 5 * 5.0 * 0.01  # five steps, each of lr times the norm at most
    assert autocasts == {(None, False), ("bf16", True)}
    assert state(half.model) != state(free.model)
    with pytest.raises(ValueError, match="mixed_precision expects 'bf16' or 'fp16', got 'fp8'"):
        TrainingArguments(mixed_precision="fp8")


def test_reports_are_in_the_history_of_the_run(files, tmp_path):
    hook = MetricReportHook(Model(), ReportArguments(interval_step=2))
    make(files, tmp_path / "run", hooks=[hook]).train()
    reports = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [each["step"] for each in reports] == [2, 4, 5]
    assert all(each["samples_per_second"] > 0 for each in reports)
    assert reports[-1]["rows/user"] == RECORDS


@pytest.mark.parametrize(
    ("make_it", "text"),
    [
        (lambda: make_with(ClipGradNormHook([nn.Parameter(torch.ones(1))], None, 1.0)), "the same param"),
        (lambda: ClipGradNormHook([], [object()], 1.0), "parameters and rows together"),
        (lambda: ReportArguments(tflops_peak=100.0), "ProfilerHook"),
        (lambda: make_with().add_hook(MetricReportHook(nn.Linear(1, 1))), "hooks="),
        (lambda: make_with(auto_profiler_args=None), "Trainer auto_profiler_args=None"),
        (lambda: make_with(ddp_broadcast_buffers=False), "Trainer ddp_broadcast_buffers=False"),
        (lambda: make_with(mixed_precision="bf16"), "give TrainingArguments mixed_precision"),
    ],
)
def test_hooks_that_are_options_say_what_they_need(make_it, text):
    with pytest.raises(UnsupportedError, match=text):
        make_it()


def test_options_that_change_speed_alone_are_taken():
    make_with(ddp_static_graph=True, ddp_bucket_cap_mb=50, ddp_gradient_as_bucket_view=True)


def make_with(*hooks, **options):
    model = nn.Linear(1, 1)
    return Trainer(
        model, hooks=hooks, dense_optimizers=(torch.optim.SGD(model.parameters()), None), **options
    )


def test_the_profiler_writes_traces(files, tmp_path):
    hook = ProfilerHook(wait=1, warmup=1, active=1, repeat=1, output_dir=str(tmp_path / "traces"))
    make(files, tmp_path / "run", hooks=[hook]).train()
    assert list((tmp_path / "traces").glob("*.json"))


def test_logs_of_a_rank(monkeypatch, capsys):
    logger = Logger("test_logs_of_a_rank")
    logger.info("told %d", 1)
    logger.warning("careful")
    monkeypatch.setenv("RANK", "1")
    logger.info_rank0("not here")
    told = capsys.readouterr()
    assert told.out.endswith("[INFO] [test_logs_of_a_rank] told 1\n")
    assert told.err.endswith("[WARNING] [test_logs_of_a_rank] careful\n")
    line = LoggerHook().format_metrics({"auc": 0.5, "loss": torch.tensor(0.25), "epoch": 1})
    assert line == " <epoch=1> <loss=0.25> <auc=0.5>"
