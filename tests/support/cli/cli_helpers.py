"""Runs commands inside this process, and makes small jobs to run."""

import json
from dataclasses import dataclass

import karvan as kv
from karvan.cli.main import main

CONFIG = """
data: {{train: {folder}/train.parquet, eval: {folder}/eval.parquet, batch_size: 64, shuffle: 500}}
features: {{price: [{{clip: {{low: 0, high: 100}}}}, log1p], liked: [{{select: history}}, {{mod: 5}}]}}
model:
  name: DLRM
  numbers: [price]
  ids: [user, item, category, liked]
  dim: 4
  bottom: [8]
  top: [8]
  tables: {{liked: {{name: category}}}}
optimizers: {{dense: {{name: Adam, lr: 1e-2}}, sparse: {{name: Adagrad, lr: 0.1}}}}
train: {{epochs: 2}}
metrics: [AUC, BinaryCrossEntropy]
checkpoints: {{folder: {folder}/run}}
predict: {{columns: [user, item]}}
"""

JOB = """
import os
import torch
import karvan as kv


class Stop(kv.callbacks.Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, logs):
        if logs.step == self.step:
            os.kill(os.getpid(), 15)


def job(
    folder: str = "{folder}/run",
    lr: float = 0.1,
    widths: list[int] = [8],
    eval_data="{folder}/eval.parquet",
    stop: int = 0,
):
    torch.manual_seed(0)
    model = kv.models.DLRM(["price"], ["user", "item"], dim=4, bottom=(8,), top=widths)
    trainer = kv.Trainer(
        model,
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=torch.optim.Adam,
        sparse_optimizer=kv.optim.Adagrad(lr=lr),
        metrics={{"auc": kv.metrics.AUC()}},
        callbacks=[Stop(stop)],
        checkpoints=folder,
        checkpoint_every=10,
        log_every=1,
        progress="plain",
    )
    data = kv.data.read("{folder}/train.parquet", 64, shuffle=500)
    return kv.TrainingJob(trainer, data, eval_data=kv.data.read(eval_data, 64), epochs=2,
    predict_columns=["user"])
"""


@dataclass(frozen=True)
class Ran:
    """An exit code, and what was printed."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


class Runner:
    """`run("train", path)` is `karvan train path`."""

    def __init__(self, capfd):
        self._capfd = capfd

    def __call__(self, *arguments):
        self._capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = self._capfd.readouterr()
        assert "Traceback" not in err or "--debug" in arguments
        return Ran(code, out, err)


def write_clicks(folder):
    """Two small files of clicks."""
    import pyarrow.parquet

    log = kv.data.synthetic.ClickLog(seed=1, users=50, items=30, categories=5, history=3)
    pyarrow.parquet.write_table(log.table(0, 1500), folder / "train.parquet")
    pyarrow.parquet.write_table(log.table(1500, 500), folder / "eval.parquet")


def write_jobs(folder):
    """config.yaml and job.py beside the clicks."""
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    (folder / "job.py").write_text(JOB.format(folder=folder))
