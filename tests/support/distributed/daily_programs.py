"""What the ranks do in `test_daily_ranks.py`: days of data, one after the other, by one Trainer for each."""

from pathlib import Path

import torch
from trainer_programs import Net, batch_of, numbers_of, records, trainer_of

import karvan as kv

ROWS, BATCH = 48, 4


class StopAt(kv.callbacks.Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, logs):
        if logs.step == self.step:
            trainer.stop("enough")


def data(day):
    """This rank's share of a day."""
    whole = batch_of(records(ROWS, [day]), dict)
    return kv.data.read(whole, BATCH, shuffle=8, seed=1)


def fit_day(folder, day, stop_at=None, **options):
    torch.manual_seed(7)
    trainer = trainer_of(
        Net(dropout=0.1), metrics={}, checkpoints=folder, prefetch=0, callbacks=[StopAt(stop_at)]
    )
    return numbers_of(trainer, trainer.fit(data(day), **options))


def days(place):
    """Straight, with a stop on the second day, and some that others continue."""
    kv.connect("sharded")
    folder = Path(place)
    made = {}
    for day in (1, 2):
        made["straight"] = fit_day(folder / "straight", day)
    fit_day(folder / "stopped", 1)
    fit_day(folder / "stopped", 2, stop_at=9)
    made["stopped"] = fit_day(folder / "stopped", 2)
    fit_day(folder / "one day", 1)
    fit_day(folder / "half", 1)
    fit_day(folder / "half", 2, stop_at=9)
    try:
        fit_day(folder / "half", 3)
    except ValueError as error:
        made["error"] = str(error)
    return made
