"""Trains a model of which each row counts how often its id was trained, on the batches of loaders."""

import torch

import karvan as kv


class Count(torch.nn.Module):
    """The row of an id is how often it was trained."""

    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"id": kv.Table(1, init=kv.init.Constant(0.0))})

    def forward(self, batch):
        return self.embeddings(batch)["id"]

    def times(self):
        table = self.embeddings.table("id")
        keys = table.keys()
        return dict(zip(keys.tolist(), table.vectors(keys).squeeze(1).tolist(), strict=True))


def fit(stream, folder, stop_at=None, **options):
    class Stop(kv.callbacks.Callback):
        def on_step_end(self, trainer, logs):
            if logs.step == stop_at:
                trainer.stop("enough")

    model = Count()
    trainer = kv.Trainer(
        model,
        loss=lambda output, batch: -output.sum(),
        sparse_optimizer=kv.optim.SGD(lr=1.0),
        checkpoints=folder,
        callbacks=[Stop()],
        progress="none",
    )
    result = trainer.fit(stream, **options)
    stream.close()
    return result, model.times()
