"""A click model in a page: synthetic clicks, DLRM, a plain PyTorch loop."""

import torch

import karvan as kv

log = kv.data.synthetic.ClickLog(users=200, items=100, categories=10)  # labels come from a planted model
features = kv.FeatureEngine([kv.Feature("price").log1p(), kv.Feature("recency").log1p()])
clicks = kv.data.read(log.source(200_000), batch_size=1024, transform=features)

ids = [
    "user",
    "item",
    "category",
    "device",
    "hour",
    "history",
]  # any 64-bit numbers, rows appear as they come
model = kv.models.DLRM(numbers=["price", "recency"], ids=ids, dim=16, bottom=(64,), top=(128, 64))
sparse = kv.optim.Adagrad(model, lr=0.2)  # the rows of the embedding tables
dense = torch.optim.Adam(model.parameters(), lr=2e-3)  # the nets
auc = kv.metrics.AUC()

for step, batch in enumerate(clicks, 1):
    logits = model(batch)
    auc.update(logits, batch)  # before the model has learned from the batch: an honest AUC
    torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"]).backward()
    for optimizer in (sparse, dense):
        optimizer.step()
        optimizer.zero_grad()
    if step % 49 == 0:
        print(f"AUC {auc.compute():.4f} of {log.best_auc:.4f} reachable, after {step} steps")
        auc.reset()
