"""Processes that train and save without end, for tests that kill them.

`python saver.py FOLDER` begins one for each line of its input, says its number, and how it ended. They are
forked, as importing torch takes longer than all the rest.
"""

import os
import sys

import torch
from checkpoint_helpers import Model

import karvan as kv


def save_forever(folder, seed):
    model = Model()
    checkpoints = kv.Checkpoints(folder, keep_last=2, full_every=3, part_bytes=4000)
    latest = checkpoints.latest()
    step = 0
    if latest is not None:
        assert latest.verify() == []
        state = latest.load(model)
        model.restore(state)
        step = state["step"]
        assert step == latest.step == model.embeddings.step
    print(f"from {step}", flush=True)
    while True:
        model.train_on(1, seed=step)
        step += 1
        checkpoints.save(step, {**model.state(), "step": step}, model)
        print(step, flush=True)
        if step % 5 == seed % 5:  # the same step once more takes the place of what is there
            checkpoints.save(step, {**model.state(), "step": step}, model)


def main():
    kv.set_num_threads(1)  # threads do not survive a fork
    torch.set_num_threads(1)
    Model().train_on(1)  # torch imports much of itself only now
    for number, _ in enumerate(sys.stdin):
        child = os.fork()
        if not child:
            save_forever(sys.argv[1], number)
        print(child, flush=True)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
