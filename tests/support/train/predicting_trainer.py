"""A trainer of an elastic job that fits and predicts, and writes its predictions in files.

Arguments: DATA CHECKPOINTS NOTES EPOCHS. Settings by variables: CALLS, such as fit,predict,fit,predict: the
n-th fit trains up to n times EPOCHS; "load" loads the newest checkpoint; "write" writes with
`write_predictions`; "peek" takes two predictions and closes the iterator. PAUSE, seconds
between writing a prediction and asking for the next, until there is a note that says hurry; STEP_PAUSE after
each step; ROWS=1 for rows on servers; CHECKPOINTS=0 for none; POISON, a record that raises an error when it
is predicted.

The n-th prediction is in the folder predictions-n of the notes, a file for each batch, which appears by a
rename. A record has a parameter and a row of its own, which are both the number of times that it was trained;
the prediction is their sum.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import karvan as kv

data, checkpoints, notes = map(Path, sys.argv[1:4])
epochs = int(sys.argv[4])
rows = os.environ.get("ROWS") == "1"
records = int((data / "records").read_text())
kv.connect("remote" if rows else "sharded", timeout=60)
STEP = 2.0**20  # gradients are clipped to its reciprocal, so that every update adds exactly 1


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.times = torch.nn.Parameter(torch.zeros(records))
        if rows:
            self.embeddings = kv.EmbeddingEngine({"record": kv.Table(1, init=kv.init.Constant(0.0))})

    def forward(self, batch):
        if not self.training and int(os.environ.get("POISON", "-1")) in batch["record"].tolist():
            raise ValueError("this record is poison")
        times = self.times[batch["record"].long()]
        if not rows:
            return times
        row = self.embeddings({"record": batch["record"]})["record"].squeeze(1)
        return times - row if self.training else times + row


class Note(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        (notes / f"step-{os.getpid()}").write_text(f"{trainer.step} {trainer.connection.group.world_size}")
        if not (notes / "hurry").exists():
            time.sleep(float(os.environ.get("STEP_PAUSE", "0")))


def upwards(parameters):
    return torch.optim.SGD(parameters, lr=STEP, maximize=True)


trainer = kv.Trainer(
    Model(),
    lambda output, batch: output.mean() + 1.0,
    dense_optimizer=upwards,
    sparse_optimizer=kv.optim.SGD(lr=STEP, clip_value=1 / STEP) if rows else None,
    clip_value=1 / STEP,
    checkpoints=checkpoints if os.environ.get("CHECKPOINTS") != "0" else None,
    checkpoint_every=20,
    callbacks=[Note()],
    progress="plain",
)
read = kv.data.read(str(data / "*.parquet"), batch_size=8, shuffle=64, split_records=24)
valid = kv.data.read(str(data / "*.parquet"), batch_size=7, split_records=10)


def write(folder, prediction):
    made = {"record": prediction.columns["record"].tolist(), "output": prediction.output.tolist()}
    made |= vars(prediction.records)
    written = folder / f".{prediction.records.number}.{os.getpid()}"
    written.write_text(json.dumps(made))
    written.rename(folder / f"{prediction.records.number:08d}")
    with (notes / f"predicted-{os.getpid()}").open("a") as noted:
        noted.write(f"{folder.name} {prediction.records.number}\n")


def slowly(found):
    for prediction in found:
        yield prediction
        with (notes / f"predicted-{os.getpid()}").open("a") as noted:
            noted.write(f"predictions-1 {prediction.records.number}\n")
        if not (notes / "hurry").exists():
            time.sleep(float(os.environ.get("PAUSE", "0")))


fits = predictions = 0
for call in os.environ["CALLS"].split(","):
    if call == "fit":
        fits += 1
        trainer.fit(read, epochs=fits * epochs, eval_data=valid)
        continue
    if call == "write":
        kv.train.write_predictions(slowly(trainer.predict(valid, columns=["record"])), notes / "written")
        continue
    if call == "both":
        next(zip(trainer.predict(valid), trainer.predict(valid), strict=True))
    if call == "load":
        trainer.load()
        (notes / f"loaded-{os.getpid()}").touch()
        continue
    predictions += 1
    folder = notes / f"predictions-{predictions}"
    folder.mkdir(exist_ok=True)
    found = trainer.predict(valid, columns=["record"])
    for place, prediction in enumerate(found):
        write(folder, prediction)
        if not (notes / "hurry").exists():
            time.sleep(float(os.environ.get("PAUSE", "0")))
        if call == "peek" and place == 1:
            found.close()
    with (notes / f"predicted-{os.getpid()}").open("a") as noted:
        noted.write(f"{folder.name} ended\n")
written = notes / f"result-{os.getpid()}.new"
written.write_text(json.dumps({"step": trainer.step}))
written.rename(notes / f"result-{os.getpid()}")
