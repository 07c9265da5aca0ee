"""The fit of one day in a process of its own: daily_process.py FOLDER DAY; it tells every step on stdout."""

import random
import sys

import numpy as np
import torch
from fit_process import Tell
from train_helpers import Small, loader, trainer

import karvan as kv

if __name__ == "__main__":
    kv.set_num_threads(1)
    torch.set_num_threads(1)
    folder, day = sys.argv[1], int(sys.argv[2])
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    made = trainer(
        Small(),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 20, gamma=0.7),
        checkpoints=kv.Checkpoints(folder, keep_last=None, full_every=3),
        checkpoint_every=10,
        callbacks=[Tell()],
    )
    result = made.fit(loader(16 * 50, shuffle=200, seed=day))
    print("step", result.step, "trained", result.trained, flush=True)
