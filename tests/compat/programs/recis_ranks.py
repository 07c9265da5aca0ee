"""Trains for some steps, or continues on another number of ranks: what each rank has goes to a file."""

import json
import os
import sys

import torch.distributed as dist
from recis.framework.trainer import Trainer, TrainingArguments
from recis.hooks import Hook
from recis.nn.modules.hashtable import filter_out_sparse_param
from recis.optim import SparseAdamW
from recis_clicks import Model, dataset
from torch.optim import Adam


class Users(Hook):
    """Notes the users of all training batches."""

    def __init__(self):
        self.seen = []

    def after_data(self, is_train=True, *args, data, **kwargs):
        if is_train:
            self.seen += data["user"].values().tolist()


def rows(model):
    """For each table the rows of this rank: id → vector and slots of the optimizer."""
    found = {}
    for name, table in filter_out_sparse_param(model).items():
        of = table.handle.snapshot()
        keys = table.ids().tolist()
        assert sorted(keys) == sorted(of.keys.tolist())
        found[name] = {
            str(key): [vector.tolist(), state.tolist()]
            for key, vector, state in zip(of.keys, of.vectors, of.state, strict=True)
        }
    return found


def main(files, output, steps):
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, users = Model(), Users()
    trainer = Trainer(
        model,
        TrainingArguments(output_dir="run", train_steps=steps or None, log_steps=1),
        dataset(files, batch_size=4, worker_idx=rank, worker_num=ranks),
        dataset(files, batch_size=4, worker_idx=rank, worker_num=ranks),
        [users],
        dense_optimizers=(Adam(model.parameters(), lr=0.05), None),
        sparse_optimizer=SparseAdamW(filter_out_sparse_param(model), lr=0.05),
    )
    loaded = None
    if not steps:
        trainer.evaluate(eval_steps=1)  # which loads the newest checkpoint, and changes nothing
        loaded = rows(model)
    trainer.train()
    found = {"loaded": loaded, "trained": rows(model), "users": users.seen}
    with open(f"{output}-{rank}.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(os.environ["CLICKS"], sys.argv[1], int(sys.argv[2]))
