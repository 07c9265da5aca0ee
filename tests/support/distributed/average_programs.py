"""What the ranks do in `test_average_ranks.py`: fits with averages of parameters, one after the other."""

import torch
from train_helpers import batches, model, trainer

import karvan as kv
from karvan import distributed


def fit(folder, epochs):
    """Fit, or resume; the averages, and the metrics of an evaluation with them.

    Each rank has its share of 16 samples of every batch, so the steps are those of one process.
    """
    here = distributed.current()
    size = 16 // here.world_size
    share = slice(here.rank * size, (here.rank + 1) * size)
    whole = [batches(4), batches(2, seed=5)]
    data, valid = (
        [kv.Batch({name: column[share] for name, column in batch.items()}) for batch in each]
        for each in whole
    )
    ema = kv.train.EMA(0.8)
    made = trainer(model(dropout=0.0), callbacks=[ema], checkpoints=folder, checkpoint_every=2)
    result = made.fit(data, epochs=epochs, eval_data=valid)
    own = {name: value.detach().clone() for name, value in made.model.named_parameters()}
    return {"averages": ema.state_dict(), "parameters": own, "evaluation": result.evaluation}


def straight_and_stopped(runs, begun):
    """A fit of two epochs; one that was resumed; and one that another number of processes has begun."""
    torch.set_num_threads(1)
    kv.connect("sharded")
    straight = fit(f"{runs}/straight", 2)
    for name in ("stopped", "begun"):
        fit(f"{runs}/{name}", 1)
    return straight, fit(f"{runs}/stopped", 2), fit(begun, 2)
