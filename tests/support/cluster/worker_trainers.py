"""One of two trainers that wait for each other: `python worker_trainers.py FOLDER GENERATION BATCHES`.

Trains with ids of its own, then with ids that embedding workers keep, and writes down what came of each.
"""

import os
import sys
import time
from pathlib import Path

import torch
from worker_helpers import Loader, all_layouts, batches, loss_of, rows_of, tensors

import karvan as kv
from karvan.cluster.embedding_worker.client import WorkerClient
from karvan.discovery.directory import directory_from_environment
from karvan.ragged import REFERENCE, IdsReference


class Cluster:
    """Where the workers are."""

    def __init__(self):
        self.directory = directory_from_environment()

    def client(self, worker):
        return WorkerClient(worker, lambda: self.directory.find("embedding-worker", worker, 5), deadline=60)


def train(send, rank, count):
    engine = kv.EmbeddingEngine(all_layouts(), seed=5)
    optimizer = kv.optim.Adagrad(engine, lr=0.1)
    seen = []
    for number, batch in enumerate(batches(count, seed=rank + 1)):
        sent = send(batch)
        if (number, rank) == (count - 1, 1):  # its data has ended
            sent = {REFERENCE: IdsReference(0, "", 0)}
        outputs = engine(sent)
        seen += [tensor.detach().clone() for tensor in tensors(outputs)]
        loss = loss_of(outputs)
        if number == 1:  # a feature without a gradient, on one of them
            loss = outputs["user"].sum() if rank else loss
        if number == 2 and rank == 0:
            loss = loss + (outputs["root"] * torch.nan).sum()
        loss.backward()
        optimizer.step()
    own = rows_of(engine)
    skipped = {table.name: table.stats()["skipped_updates"] for table in engine.tables()}
    return {"seen": seen, "rows": own, "skipped": skipped, "most": engine.store.window.most}


def next_generation(folder, rank):
    """Have the test begin another generation."""
    if rank == 0:
        (folder / "wanted").touch()
    while not (begun := folder / "begun").exists() or not begun.read_text():
        time.sleep(0.05)
    return int(begun.read_text())


def main():
    folder, generation, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ["RANK"])
    made = []
    for number, workers in enumerate((0, 2)):
        if number:  # with empty tables
            generation = next_generation(folder, rank)
        os.environ |= {"KARVAN_GENERATION": str(generation), "KARVAN_EMBEDDING_WORKER_COUNT": str(workers)}
        connection = kv.connect("remote", timeout=60)
        if not workers:
            made.append(train(dict, rank, count))
            continue
        cluster = Cluster()
        loader = Loader(cluster, workers, f"trainer {rank}").serve(connection)
        made.append(train(loader.send, rank, count))
        loader.close()
        cluster.directory.close()
    torch.save(made, folder / f"{rank}.pt")
    kv.distributed.disconnect()


if __name__ == "__main__":
    main()
