"""A click model in a page: a synthetic click log, DLRM, kv.Trainer: python examples/quickstart.py."""

import tempfile

import torch

import karvan as kv

log = kv.data.synthetic.ClickLog(users=200, items=100, categories=10)  # labels come from a planted model
features = kv.FeatureEngine([kv.Feature("price").log1p(), kv.Feature("recency").log1p()])
trainer = kv.Trainer(
    kv.models.DLRM(
        numbers=["price", "recency"],
        ids=["user", "item", "category", "device", "hour", "history"],  # any 64-bit numbers: rows appear
        bottom=(64,),
        top=(128, 64),
    ),
    kv.losses.BinaryCrossEntropy(),
    dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),  # the nets
    sparse_optimizer=kv.optim.Adagrad(lr=0.2),  # the rows of the embedding tables
    metrics={"auc": kv.metrics.AUC()},
)
with tempfile.TemporaryDirectory() as folder:
    log.write(folder, rows=200_000, files=10)
    train = kv.data.read(f"{folder}/part-0000[0-8].parquet", batch_size=1024, transform=features)
    test = kv.data.read(f"{folder}/part-00009.parquet", batch_size=1024, transform=features)
    result = trainer.fit(train, eval_data=test)
print(f"AUC {result.evaluation['auc']:.4f} of {log.best_auc:.4f} reachable, after {result.step} steps")
