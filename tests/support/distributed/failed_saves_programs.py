"""What the ranks do in `test_failed_saves_ranks.py`: fits on a disk that refuses files of one rank."""

import logging
import resource
from pathlib import Path

import torch
import trainer_programs

import karvan as kv
from karvan import distributed
from karvan.checkpoint import CheckpointError


class Lines(logging.Handler):
    """Warnings and errors of Karvan."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Limit(kv.callbacks.Callback):
    """Lets rank 1 write no file of more than a few bytes, from one step to another."""

    def __init__(self, first, last):
        self.first, self.last = first, last
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step_end(self, trainer, logs):
        pending = trainer.saver._checkpoints._pending
        if pending is not None:
            pending.join()
        if distributed.current().rank == 1 and logs.step in (self.first, self.last):
            soft = 10 if logs.step == self.first else self.before[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, self.before[1]))


def fit(folder, first, last, tolerate):
    lines = Lines()
    logging.getLogger("karvan").addHandler(lines)
    torch.manual_seed(5)
    trainer = kv.Trainer(
        trainer_programs.net_of(),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
        checkpoints=kv.Checkpoints(folder, keep_last=None),
        checkpoint_every=2,
        tolerate_failed_saves=tolerate,
        save_retry_seconds=0.5,
        callbacks=[Limit(first, last)],
        progress="none",
    )
    seen = {"error": None, "temporary": None}
    try:
        trainer.fit(trainer_programs.loader(), max_steps=8)
    except CheckpointError as error:
        seen |= {"error": str(error), "temporary": error.temporary}
    resource.setrlimit(resource.RLIMIT_FSIZE, trainer.callbacks._callbacks["Limit"].before)
    logging.getLogger("karvan").removeHandler(lines)
    return {**seen, "lines": lines.lines, "steps": [each.step for each in kv.Checkpoints(folder).list()]}


def run(place):
    kv.connect("sharded", timeout=60)
    return {
        "survived": fit(str(Path(place) / "a"), 3, 5, 3),
        "last": fit(str(Path(place) / "c"), 7, 100, 3),
        "too many": fit(str(Path(place) / "b"), 3, 100, 1),  # nobody can train afterwards
    }
