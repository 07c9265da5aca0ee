"""Batches to train models on, a plain loop, and how well the model ranks afterwards."""

import torch
from torch import nn

import karvan as kv


def train(model, draw, steps, *, rows=512, lr=0.1, dense_lr=3e-3, labels=("label",)):
    """Train on freshly drawn batches, the learning rates falling to 0."""
    sparse = kv.optim.Adagrad(model, lr=lr)
    dense = torch.optim.Adam(model.parameters(), lr=dense_lr)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.02, total_iters=steps) for o in (sparse, dense)]
    for _ in range(steps):
        batch = draw(rows)
        made = outputs(model, batch)
        loss = sum(nn.functional.binary_cross_entropy_with_logits(made[name], batch[name]) for name in labels)
        loss.backward()
        for each in (sparse, dense, *schedules):
            each.step()
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
    return model


def outputs(model, batch):
    made = model(batch)
    return made if isinstance(made, dict) else {"label": made}


@torch.no_grad()
def auc(model, batch, label="label"):
    """The AUC on a batch; nothing is inserted."""
    model.eval()
    metric = kv.metrics.AUC(exact=True, label=label, output=label)
    metric.update(outputs(model, batch), batch)
    model.train()
    return metric.compute()
