"""A loader's program for tests: `python loader_program.py MODE ROWS BATCH_SIZE [COUNTER]`.

Records are numbers from 0 on, in a feature `id`. COUNTER is a file that grows by a byte with every batch.
"""

import logging
import sys
import threading

import numpy as np
import torch

import karvan as kv
from karvan.ragged import NestedRagged


class Counted:
    """Batches that are counted as they are read."""

    def __init__(self, loader, counter):
        self.loader = loader
        self.counter = counter

    def __iter__(self):
        for batch in self.loader:
            if self.counter:
                with open(self.counter, "ab") as file:
                    file.write(b".")
            yield batch


class Positioned(Counted):
    def state_dict(self):
        return self.loader.state_dict()

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


def failing(epoch):
    yield {"id": torch.arange(2)}
    yield {"id": torch.arange(2)}
    raise LookupError("there is no such shelf")


def stuck(epoch):
    yield {"id": torch.arange(2)}
    threading.Event().wait()


def of_all_kinds(epoch):
    dtypes = [torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
    dtypes += [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    batch = {str(dtype): torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype) for dtype in dtypes}
    batch["strided"] = torch.arange(12.0).view(3, 4)[:, ::2]
    batch["ragged"] = kv.Ragged.from_lists([[1, 2], [], [2**62]], weights=[[0.5, 1.0], [], [2.0]])
    batch["nested"] = NestedRagged(
        torch.tensor([7, 8, 9], dtype=torch.uint8), torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1, 2])
    )
    yield batch
    yield {name: entry for name, entry in batch.items() if isinstance(entry, torch.Tensor)}


def main(mode, rows, batch_size, counter=""):
    logging.basicConfig(level=logging.INFO)
    with kv.LoaderContext(queue=2) as data:
        ids = {"id": np.arange(int(rows))}
        settings = {"shuffle": 7, "seed": 3, "split_records": 5}
        match mode:
            case "serve":
                data.serve(Positioned(data.read(ids, int(batch_size), **settings), counter))
            case "plain":  # without positions; the same order in every epoch
                data.serve(lambda epoch: Counted(data.read(ids, int(batch_size), **settings), counter))
            case "epochs":
                for epoch in data.epochs():
                    for number, batch in enumerate(data.read(ids, int(batch_size))):
                        if not data.send(dict(batch), meta={"epoch": epoch, "number": number}):
                            break
            case "once":
                for batch in data.read(ids, int(batch_size)):
                    data.send(batch)
            case "fail":
                data.serve(failing)
            case "kinds":
                data.serve(of_all_kinds)
            case "stuck":
                data.serve(stuck)
            case "unequal":
                data.send({"a": torch.arange(2), "b": torch.arange(3)})


if __name__ == "__main__":
    main(*sys.argv[1:])
