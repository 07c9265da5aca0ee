"""Hand-written loops with rows on parameter servers: the bits of memory, and lookups within the bound."""

import time

import pytest
import torch
from cluster_helpers import serving
from test_remote_training import Net, assert_same_checkpoint, batches, loss

import karvan as kv
from karvan import distributed


def context(net=None, **options):
    return kv.TrainContext(
        net or Net(),
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        sparse_optimizer=kv.optim.Adam(lr=0.05),
        **options,
    )


def train(ctx, epochs=2, after=lambda ctx: None):
    with ctx:
        for _ in range(ctx.epoch, epochs):
            for batch in ctx.loader(batches()):
                output, _ = ctx.forward(batch)
                ctx.backward(loss(output, batch))
                after(ctx)
    return ctx


def evaluate(ctx):
    if ctx.step % 4 == 0:
        with ctx.eval() as evaluation:
            for batch in evaluation.loader(batches(3, rows=30)):
                evaluation.forward(batch)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 5}])
def test_synchronous_servers_hold_what_memory_would(tmp_path, options):
    def run(folder):
        ctx = train(context(**options), after=evaluate)
        ctx.save(folder)
        return ctx.sizes()

    sizes = run(tmp_path / "memory")
    fitted = Net()
    trainer = kv.Trainer(
        fitted,
        loss,
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        sparse_optimizer=kv.optim.Adam(lr=0.05),
        checkpoints=tmp_path / "trainer",
        progress="none",
        **options,
    )
    step = trainer.fit(batches(), epochs=2).step
    for servers in (1, 3):
        with serving(servers) as addresses:
            distributed.connect("remote", servers=addresses)
            assert run(tmp_path / f"{servers}") == sizes
    for name in ("1", "3", "trainer"):
        assert_same_checkpoint(tmp_path / name / f"step-{step:012d}", tmp_path / f"memory/step-{step:012d}")


@pytest.mark.parametrize("bound", [2, 4])
def test_lookups_run_ahead_within_the_bound(bound):
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses, staleness=bound)
        net = Net()
        window = net.embeddings.store.window

        def wait_and_evaluate(ctx):
            until = time.monotonic() + 60
            while window.lookups < min(ctx.step + 2, 12):  # one ahead comes without being asked for
                assert time.monotonic() < until
                time.sleep(0.002)
            evaluate(ctx)

        ctx = train(context(net), epochs=3, after=wait_and_evaluate)
        assert (ctx.step, window.lookups) == (36, 36)
        assert 2 <= window.most <= bound
        sizes = ctx.sizes()
        assert sizes["item"] == 20
        ctx.clear("item")
        assert ctx.sizes() == {"user": sizes["user"], "item": 0}


def test_inference_takes_rows_from_servers_and_inserts_none(tmp_path):
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses)
        ctx = train(context())
        ctx.save(tmp_path)
        sizes = ctx.sizes()
        with kv.EvalContext(ctx.model) as evaluation:
            expected = [evaluation.forward(batch)[0] for batch in batches(3)]
    for servers in (0, 1, 2):
        with serving(servers) as addresses:
            if servers:
                distributed.connect("remote", servers=addresses)
            net = Net()
            with kv.InferContext(net, tmp_path) as infer:
                unknown = {"user": torch.tensor([10**9]), "item": torch.tensor([10**9])}
                assert torch.equal(infer.predict(unknown), net.out.bias)
                outputs = [infer.predict(batch) for batch in batches(3)]
            assert {table.name: table.rows for table in net.embeddings.tables()} == sizes
            other = Net()
            if servers:  # the rows are there already
                other.load_state_dict(net.state_dict())
                with kv.InferContext(other) as infer:
                    outputs += [infer.predict(batch) for batch in batches(3)]
        assert all(torch.equal(one, two) for one, two in zip(outputs, expected * 2, strict=False))


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 5}])
def test_one_trainer_with_dense_parameters_on_servers_has_the_bits_of_memory(tmp_path, options):
    def run(folder):
        def save(ctx):
            evaluate(ctx)
            if ctx.step == 3:
                ctx.save(folder)

        first = train(context(**options), epochs=1, after=save)
        ctx = context(**options)
        ctx.load(folder / "step-000000000003")
        train(ctx, after=evaluate)
        ctx.save(folder)
        bias = ctx.model.out.bias.detach().clone()
        return first.model.out.bias.detach().clone(), bias, ctx.step

    expected = run(tmp_path / "memory")
    for servers in (1, 3):
        with serving(servers) as addresses:
            distributed.connect("remote", servers=addresses, mode="async", staleness=1)
            assert run(tmp_path / f"{servers}") == expected
        step = f"step-{expected[2]:012d}"
        assert_same_checkpoint(tmp_path / f"{servers}" / step, tmp_path / "memory" / step)


def test_a_loop_of_ones_own_cannot_compute_a_step_again():
    with serving(1) as addresses:
        distributed.connect("remote", servers=addresses, mode="async", tolerance=1)
        with pytest.raises(ValueError, match=r"cannot compute it again.*kv\.Trainer"):
            context()
