"""What the ranks do in `test_owner_ranks.py`: a fit on a folder that another process may own."""

import torch
import trainer_programs

import karvan as kv
from karvan.owner import OwnerError


def fit(place):
    kv.connect("sharded", timeout=60)
    torch.manual_seed(5)
    trainer = kv.Trainer(
        trainer_programs.net_of(),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
        checkpoints=place,
        progress="none",
    )
    try:
        return {"step": trainer.fit(trainer_programs.loader(), max_steps=2).step, "error": None}
    except OwnerError as error:
        return {"step": trainer.step, "error": str(error)}
