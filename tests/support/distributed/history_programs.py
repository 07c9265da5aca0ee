"""What the ranks do in `test_history_ranks.py`."""

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
