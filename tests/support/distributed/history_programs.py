"""What the ranks do in `test_history_ranks.py`."""

import io
from pathlib import Path

from trainer_programs import Net, shares, trainer_of

import karvan as kv


def train_and_resume(place):
    """The history of this rank after one epoch, and after a second one that another Trainer resumed for."""
    kv.connect("sharded")
    seen = []
    for epochs in (1, 2):
        trainer = trainer_of(Net(), checkpoints=Path(place) / "run", log_every=1)
        trainer.fit(shares(2), epochs=epochs, eval_data=shares(2, seed=1))
        seen.append(trainer.history.drop(columns="time").to_dict("records"))
    return seen


def train_and_show():
    """What this rank shows of a fit of 12 steps, and the steps of its history."""
    kv.connect("sharded")
    stream = io.StringIO()
    trainer = trainer_of(Net())
    if trainer.connection.rank == 0:
        trainer.progress = kv.train.PlainProgress(stream)
    trainer.fit(shares(2) * 3, max_steps=12)
    return stream.getvalue(), list(trainer.history["step"])
