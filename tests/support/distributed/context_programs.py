"""What the ranks do in `test_context_ranks.py`: loops in contexts, beside fits of the Trainer."""

import torch
from trainer_programs import loader, net_of, shares, trainer_of

import karvan as kv
from karvan import distributed

LOSS = kv.losses.BinaryCrossEntropy()


def context_of(net, **options):
    return kv.TrainContext(
        net,
        dense_optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
        **options,
    )


def train(ctx, data, epochs=1, after=lambda ctx: None):
    """The loop of a user; this many of its batches had no rows."""
    empty = 0
    with ctx:
        for _ in range(ctx.epoch, epochs):
            for batch in ctx.loader(data):
                empty += batch.samples == 0
                output, _ = ctx.forward(batch)
                if ctx.backward(LOSS(output, batch)):
                    after(ctx)
    return empty


def numbers(net):
    dense = {name: value for name, value in net.state_dict().items() if isinstance(value, torch.Tensor)}
    return dense, {table.name: tuple(table.snapshot()) for table in net.embeddings.tables()}


def uneven(world, **options):
    """A loop, with evaluations in it, and a fit on the same data."""

    def evaluate(ctx):
        if ctx.step != 2:
            return
        with ctx.eval() as evaluation:
            for batch in evaluation.loader(shares(world, seed=5)):
                assert batch.samples
                evaluation.forward(batch)

    ctx = context_of(net_of(), **options)
    empty = train(ctx, shares(world), 2, evaluate)
    context, sizes = numbers(ctx.model), ctx.sizes()
    ctx.clear()  # on servers the tables of the next model are the same
    trainer = trainer_of(net_of(), metrics={}, **options)
    result = trainer.fit(shares(world), epochs=2)
    trained = numbers(trainer.model)
    ctx.clear()
    return {
        "context": context,
        "trainer": trained,
        "empty": empty,
        "counts": ((ctx.step, ctx.counts.samples), (result.step, result.samples)),
        "sizes": sizes,
    }


def anywhere(world):
    """Batches that are of no loader, with other numbers of rows on each rank."""
    with context_of(net_of()) as ctx:
        for batch in shares(world)[:3]:
            output, _ = ctx.forward(batch)
            ctx.backward(LOSS(output, batch))
    context = numbers(ctx.model)
    ctx.clear()
    trainer = trainer_of(net_of(), metrics={})
    trainer.fit(shares(world)[:3])
    made = {"context": context, "trainer": numbers(trainer.model)}
    ctx.clear()
    return made


def resumed(world, path):
    """A loop that was left, and one that goes on from its checkpoint, beside one that never stopped."""

    def made():
        torch.manual_seed(20 + distributed.current().rank)
        ctx = context_of(net_of(dropout=0.3))
        torch.manual_seed(50 + distributed.current().rank)
        return ctx

    straight = made()
    train(straight, loader(rows=85), 2)
    expected = numbers(straight.model)
    straight.clear()
    train(made(), loader(rows=85), 1, lambda ctx: ctx.step == 5 and ctx.save(path, block=False))
    again = made()
    again.load(f"{path}/step-{5:012d}")
    train(again, loader(rows=85), 2)
    both = expected, numbers(again.model)
    again.clear()
    return {
        "both": both,
        "steps": (straight.step, again.step),
        "samples": (straight.counts.samples, again.counts.samples),
        "sizes": again.sizes(),
    }


def run_all(path, kind, **options):
    torch.set_num_threads(1)
    kv.connect(kind, timeout=60, **options)
    made = {
        "uneven": uneven(2),
        "accumulated": uneven(2, gradient_accumulation_steps=2),
        "anywhere": anywhere(2),
        "resumed": resumed(2, path),
    }
    distributed.disconnect()
    return made
