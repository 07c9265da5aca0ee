"""A fit in a process of its own, to be killed: fit_process.py FOLDER STEPS; it tells every step on stdout."""

import random
import sys

import numpy as np
import torch
from train_helpers import Small, loader, trainer

import karvan as kv


class Tell(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        print(logs.step, flush=True)


def fit(folder, steps, callbacks=()):
    net = Small()
    made = trainer(
        net,
        metrics={"auc": kv.metrics.AUC(bins=64)},
        checkpoints=kv.Checkpoints(folder, full_every=3),
        checkpoint_every=10,
        callbacks=[*callbacks],
        progress="plain",
    )
    return made.fit(loader(16 * 100, shuffle=200), max_steps=steps)


if __name__ == "__main__":
    kv.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    torch.set_num_threads(1)
    result = fit(sys.argv[1], int(sys.argv[2]), [Tell()])
    print("stopped", result.stopped, "step", result.step, flush=True)
