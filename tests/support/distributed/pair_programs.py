"""What the ranks do in `test_pairs.py`: train a classifier on pairs of tensors, in two ways."""

import torch

import karvan as kv
from karvan import distributed

CLASSES = 3
LOSS = kv.losses.CrossEntropy(classes=CLASSES)


def pairs(seed, sizes, kind=tuple):
    """Batches of features and labels; labels follow from features."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        features = torch.randn(size, 4, generator=random)
        made.append(kind((features, features[:, :CLASSES].argmax(1))))
    return made


def shares(world):
    """Rank 1 has fewer batches than rank 0; in one process, the batches of a round are joined."""
    sizes = [[4, 6, 5, 2], [3, 7]]
    every = [pairs(rank, sizes[rank]) for rank in range(2)]
    here = distributed.current()
    if here.world_size == world:
        return every[here.rank]
    return [
        tuple(map(torch.cat, zip(*[each[i] for each in every if i < len(each)], strict=True)))
        for i in range(4)
    ]


class Net(torch.nn.Sequential):
    """Reports the mean of its inputs, and that of large batches once more."""

    def forward(self, features):
        kv.train.report("mean", features.mean())
        if len(features) > 5:
            kv.train.report("large", features[:6].mean())
        return super().forward(features)


def net():
    torch.manual_seed(3)
    return Net(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, CLASSES))


class Reports(kv.loggers.Logger):
    """Holds what was reported."""

    def __init__(self):
        self.values = []

    def open(self, step):
        pass

    def write(self, report):
        names = ("mean", "large")
        self.values.append((report.kind, {name: report.values.get(name) for name in names}))

    def close(self):
        pass


def fit(world):
    """A fit with an evaluation, and predictions of features alone."""
    trainer = kv.Trainer(
        net(),
        LOSS,
        dense_optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        metrics={"accuracy": kv.metrics.ClassAccuracy()},
        progress="none",
        loggers=[log := Reports()],
        log_every=2,
    )
    result = trainer.fit(shares(world), epochs=3, eval_data=shares(world))
    scores = [output for output, _ in trainer.predict([features for features, _ in shares(world)])]
    return {
        "dense": dict(trainer.model.state_dict()),
        "metrics": trainer.evaluate(shares(world)),
        "predicted": sum(map(len, scores)),
        "samples": result.samples,
        "log": log.values,
    }


def loop(world):
    """The same by a custom loop."""
    model = net()
    with kv.TrainContext(model, dense_optimizer=lambda p: torch.optim.SGD(p, lr=0.5)) as ctx:
        for _ in range(3):
            for features, labels in ctx.loader(shares(world)):
                output, given = ctx.forward((features, labels))
                assert torch.equal(given, labels)
                ctx.backward(LOSS(output, {"label": given}) if len(labels) else output.sum())
    return dict(model.state_dict())


def both():
    kv.connect("sharded", timeout=60)
    torch.set_num_threads(1)
    return {"fit": fit(2), "loop": loop(2)}
