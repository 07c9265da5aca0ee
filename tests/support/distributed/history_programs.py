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
    """What this rank shows of a fit of 12 steps, and the steps of its history; and those of a longer fit.

    Of that, ranks would choose different periods by the lengths of their data.
    """
    kv.connect("sharded")
    stream = io.StringIO()
    trainer = trainer_of(Net())
    if trainer.connection.rank == 0:
        trainer.progress = kv.train.PlainProgress(stream)
    trainer.fit(shares(2) * 3, max_steps=12)
    steps = list(trainer.history["step"])
    other = trainer_of(Net())
    other.fit(shares(2)[:1] * (60 if other.connection.rank == 0 else 110))
    return stream.getvalue(), steps, list(other.history["step"])
