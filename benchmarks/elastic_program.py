"""The trainers' program of the jobs of `elastic.py`: FOLDER EPOCHS. It notes the time of every step."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import train
from train import BATCH, DIM, IDS, NUMBERS

import karvan as kv


class Times(kv.callbacks.Callback):
    """Writes a line for each step of this process: the time, its number, samples and trainers."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def on_step_end(self, trainer: kv.callbacks.TrainerView, logs: kv.callbacks.StepLogs) -> None:
        """Write the line."""
        group = trainer.connection.group
        world = trainer.connection.world_size if group is None else group.world_size
        self._file.write(f"{time.time()} {logs.step} {logs.samples} {world}\n")


def main() -> None:
    """Train."""
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    kv.connect("remote")
    model = kv.models.DLRM(NUMBERS, IDS, DIM)
    trainer = train.karvan_trainer("fp32", model, [Times(folder / "times" / str(os.getpid()))])
    data = kv.data.read(folder / "train.parquet", BATCH)
    trainer.fit(data, epochs=epochs)


if __name__ == "__main__":
    main()
