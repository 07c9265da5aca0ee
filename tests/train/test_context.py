"""Hand-written loops in a context: the numbers of the Trainer and of a plain loop, and what may go wrong."""

import pytest
import torch
from test_trainer import plain_loop
from torch.nn import functional
from train_helpers import Small, assert_same, batches, everything, loader, model, newest, trainer

import karvan as kv
from karvan.checkpoint import Checkpoint


def loss_of(output, labels):
    return functional.binary_cross_entropy_with_logits(output, labels)


def context(net=None, **options):
    given = {
        "dense_optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
        "sparse_optimizer": kv.optim.Adagrad(lr=0.1),
    } | options
    return kv.TrainContext(net or model(), **given)


def train(ctx, data, epochs=1, until=None, after=lambda ctx: None):
    """The loop that a user writes; it goes on where the context is."""
    with ctx:
        for _ in range(ctx.epoch, epochs):
            for batch in ctx.loader(data):
                output, labels = ctx.forward(batch)
                ctx.backward(loss_of(output, labels))
                after(ctx)
                if ctx.step == until:
                    return ctx
    return ctx


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("data", [batches, loader])
def test_a_loop_has_the_bits_of_a_plain_one_and_of_the_trainer(data, ahead):
    ctx = train(context(prefetch=ahead), data(), epochs=2)
    assert (ctx.step, ctx.epoch, ctx.skipped, ctx.counts.samples) == (24, 2, 0, 24 * 16)
    assert_same(ctx.model, plain_loop(data(), epochs=2))
    fitted = model()
    trainer(fitted, prefetch=ahead).fit(data(), epochs=2)
    assert_same(ctx.model, fitted)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 5},
        {"clip_norm": 0.05, "clip_value": 0.02},
        {"gradient_accumulation_steps": 2, "clip_norm": 0.1},
    ],
)
def test_options_do_what_they_do_in_the_trainer(options):
    ctx = train(context(**options), batches(), epochs=2)
    fitted = model()
    result = trainer(fitted, **options).fit(batches(), epochs=2)
    assert ctx.step == result.step
    assert_same(ctx.model, fitted)


@pytest.mark.filterwarnings("ignore:This CPU has no instructions")
@pytest.mark.parametrize("mixed", ["bf16", "auto"])
def test_bf16_has_the_numbers_of_the_trainer_and_outputs_in_float32(mixed):
    with context(precision=mixed) as ctx:
        for batch in ctx.loader(batches()):
            output, labels = ctx.forward(batch)
            assert output.dtype == torch.float32
            ctx.backward(loss_of(output, labels))
    fitted = model()
    trainer(fitted, precision="bf16").fit(batches())
    assert_same(ctx.model, fitted)
    assert not torch.equal(fitted.last.weight, plain_loop(batches()).last.weight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mixed", ["fp32", "bf16", "fp16"])
def test_loops_on_a_gpu_have_the_numbers_of_the_trainer(mixed):
    ctx = train(context(model(dropout=0.0), precision=mixed, device="cuda"), batches(), epochs=2)
    fitted = model(dropout=0.0)
    trainer(fitted, precision=mixed, device="cuda").fit(batches(), epochs=2)
    assert ctx.model.last.weight.is_cuda
    for name, value in everything(fitted).items():
        torch.testing.assert_close(everything(ctx.model)[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_overflow_of_fp16_leaves_out_both_steps_and_lowers_the_scale():
    with context(model(dropout=0.0), precision="fp16", device="cuda", nonfinite="raise") as ctx:
        batch, other = batches(2)
        output, labels = ctx.forward(batch)
        assert ctx.backward(loss_of(output, labels))
        before, scale = everything(ctx.model), ctx.precision.state_dict()["scale"]
        output, labels = ctx.forward(batch)
        assert not ctx.backward(loss_of(output, labels) * 1e38)  # times the scale it is infinite
        after = everything(ctx.model)
        kept = [name for name in before if "counts" not in name and "last_steps" not in name]
        assert all(torch.equal(before[name], after[name]) for name in kept)
        assert ctx.precision.state_dict()["scale"] == scale / 2
        output, labels = ctx.forward(other)
        assert ctx.backward(loss_of(output, labels))
        assert (ctx.step, ctx.skipped) == (3, 1)


def test_labels_have_their_names_and_losses_may_be_several():
    net = model(heads=["ctr", "cvr"])
    with context(net, label=["label", "click"]) as ctx:
        for batch in ctx.loader(batches(3)):
            output, labels = ctx.forward(batch)
            assert list(labels) == ["label", "click"]
            losses = {"ctr": loss_of(output["ctr"], labels["label"])}
            losses["cvr"] = loss_of(output["cvr"], labels["click"]) * 0.5
            ctx.backward(losses)
    fitted = model(heads=["ctr", "cvr"])
    loss = kv.losses.Sum(
        {
            "ctr": kv.losses.BinaryCrossEntropy(output="ctr"),
            "cvr": kv.losses.BinaryCrossEntropy("click", "cvr"),
        },
        weights={"cvr": 0.5},
    )
    trainer(fitted, loss=loss).fit(batches(3))
    assert_same(net, fitted)


def test_schedulers_of_torch_move_the_optimizers():
    ctx = context()
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.9)
        for each in (ctx.dense_optimizer, ctx.sparse_optimizer)
    ]
    train(ctx, batches(), after=lambda ctx: [each.step() for each in schedulers])
    fitted = model()
    trainer(fitted, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)).fit(batches())
    assert_same(ctx.model, fitted)


def test_batches_from_anywhere_are_steps_too():
    with context() as ctx:
        for number, batch in enumerate(batches()):
            changed = kv.Batch(dict(batch)) if number % 2 else batch
            output, labels = ctx.forward(changed)
            assert ctx.backward(loss_of(output, labels))
    assert_same(ctx.model, plain_loop(batches()))
    with context() as ctx:
        for batch in ctx.loader(batches()):
            output, labels = ctx.forward(dict(batch))  # made of the loader's one
            ctx.backward(loss_of(output, labels))
    assert (ctx.counts.samples, ctx.counts.step) == (12 * 16, 12)
    assert_same(ctx.model, plain_loop(batches()))


def test_an_evaluation_inside_of_training_changes_nothing():
    outputs = []

    def evaluate(ctx):
        if ctx.step % 3:
            return
        ctx.model.net.eval()  # a mode of the user's own
        with ctx.eval() as evaluation:
            others = torch.utils.data.DataLoader(batches(3, seed=9), batch_size=None, shuffle=True)
            for batch in evaluation.loader(others):
                output, labels = evaluation.forward(batch)
                assert not output.requires_grad
                outputs.append(loss_of(output, labels))
            torch.rand(3)
        assert (ctx.model.training, ctx.model.net.training) == (True, False)
        ctx.model.net.train()

    watched = train(context(), batches(), epochs=2, after=evaluate)
    assert len(outputs) == 8 * 3
    assert_same(watched.model, plain_loop(batches(), epochs=2))


def test_an_evaluation_is_that_of_the_trainer_and_inserts_nothing():
    net = train(context(), batches()).model
    before = everything(net)
    with kv.EvalContext(net) as ctx:
        losses = [loss_of(*ctx.forward(batch)) for batch in ctx.loader(batches(4, seed=5))]
        again = [loss_of(*ctx.forward(batch)) for batch in batches(4, seed=5)]
    assert losses == again
    expected = trainer(net).evaluate(batches(4, seed=5))["loss"]
    assert float(sum(losses)) / 4 == pytest.approx(expected)
    after = everything(net)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("data", [batches, loader])
@pytest.mark.parametrize(("accumulate", "until"), [(1, 7), (1, 12), (3, 2), (1, 17)])
def test_a_loop_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, data, accumulate, until):
    straight = train(context(gradient_accumulation_steps=accumulate), data(), epochs=2)
    train(
        context(gradient_accumulation_steps=accumulate),
        data(),
        epochs=2,
        until=until,
        after=lambda ctx: ctx.step == until and ctx.save(tmp_path, extra={"best": 0.5}),
    )
    again = context(gradient_accumulation_steps=accumulate)
    torch.manual_seed(2)  # dropout goes on with the generators of the checkpoint
    assert again.load(tmp_path) == {"best": 0.5}
    assert again.step == until
    train(again, data(), epochs=2)
    assert (again.step, again.epoch, again.counts.samples) == (straight.step, 2, 24 * 16)
    assert_same(again.model, straight.model)


def test_a_checkpoint_goes_from_the_trainer_to_a_context_and_back(tmp_path):
    expected = model()
    trainer(expected).fit(loader(), epochs=2)
    trainer(checkpoints=tmp_path).fit(loader(), max_steps=5, epochs=2)
    ctx = context()
    ctx.load(tmp_path)
    train(ctx, loader(), epochs=2, until=15, after=lambda ctx: ctx.step == 15 and ctx.save(tmp_path))
    back = model()
    result = trainer(back, checkpoints=tmp_path, metrics={"auc": kv.metrics.AUC()}).fit(loader(), epochs=2)
    assert (result.step, result.trained) == (24, 9)
    assert_same(back, expected)


def test_a_save_that_is_not_waited_for_is_complete_when_the_context_is_left(tmp_path):
    ctx = train(context(), batches(), after=lambda ctx: ctx.save(tmp_path, block=False))
    assert newest(tmp_path)["step"] == 12
    with ctx:
        ctx.save(kv.Checkpoints(tmp_path / "others", keep_last=1))
    assert Checkpoint(tmp_path / "others" / "step-000000000012").verify() == []


def test_a_loader_that_is_left_goes_on_behind_the_last_step():
    for ahead in (0, 2):
        data, seen = loader(), []
        with context(prefetch=ahead, gradient_accumulation_steps=2) as ctx:
            for number, batch in enumerate(ctx.loader(data)):
                if number == 5:  # the third step is not complete
                    break
                seen.append(batch.samples)
                ctx.backward(loss_of(*ctx.forward(batch)))
            assert ctx.step == 2
            rest = 0
            for batch in ctx.loader(data):
                rest += batch.samples
                ctx.backward(loss_of(*ctx.forward(batch)))
        assert (rest, ctx.step, ctx.epoch) == (12 * 16 - 4 * 16, 6, 1)


def test_sizes_and_clear():
    ctx = train(context(), batches())
    sizes = ctx.sizes()
    assert sizes == {table.name: table.rows for table in ctx.model.embeddings.tables()}
    assert min(sizes.values()) > 0
    ctx.clear("user")
    assert ctx.sizes() == {"user": 0, "item": sizes["item"]}
    with pytest.raises(KeyError, match="No table 'age' in this model; it has: user, item"):
        ctx.clear(["age"])
    ctx.clear()
    assert ctx.sizes() == {"user": 0, "item": 0}
    assert train(ctx, batches(), epochs=2).sizes() == sizes


def another_model():
    torch.manual_seed(99)
    return Small()


def test_inference_has_the_outputs_of_the_trained_model(tmp_path):
    ctx = train(context(), batches(), after=lambda ctx: ctx.step == 12 and ctx.save(tmp_path))
    with kv.EvalContext(ctx.model) as evaluation:
        expected = [evaluation.forward(batch)[0] for batch in batches(3, seed=4)]
    net = another_model()
    with kv.InferContext(net, tmp_path) as infer:
        assert infer.step == 12
        outputs = [infer.predict(batch) for batch in batches(3, seed=4)]
        unlabelled = {name: batches(1)[0][name] for name in ("user", "item", "price")}
        infer.predict(unlabelled | {"user": unlabelled["user"] + 10**6})
    assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
    assert {table.name: table.rows for table in net.embeddings.tables()} == ctx.sizes()
    assert net.training


@pytest.mark.parametrize("part", ["dense", "rows"])
def test_a_gradient_that_is_not_finite_leaves_out_both_steps(part, caplog):
    with context(model(dropout=0.0)) as ctx:
        for number, batch in enumerate(ctx.loader(batches(4))):
            output, labels = ctx.forward(batch)
            loss = loss_of(output, labels)
            if number == 2:
                before = everything(ctx.model)
                loss = loss * torch.nan if part == "rows" else loss + ctx.model.last.bias.sum() * torch.inf
            assert ctx.backward(loss) == (number != 2)
            if number == 2:
                after = everything(ctx.model)
                kept = [name for name in before if "counts" not in name and "last_steps" not in name]
                assert all(torch.equal(before[name], after[name]) for name in kept)
    assert (ctx.step, ctx.skipped) == (4, 1)
    assert "Step 3 was skipped" in caplog.text


def test_who_wants_to_know_is_told_of_what_is_not_finite():
    with context(nonfinite="raise") as ctx:
        output, _ = ctx.forward(batches(1)[0])
        with pytest.raises(FloatingPointError, match="Step 1 was skipped: the loss is not finite"):
            ctx.backward(output.sum() * torch.inf)


def test_what_is_called_in_the_wrong_place_is_an_error(tmp_path):
    ctx, batch = context(), batches(1)[0]
    for call in (
        lambda: ctx.forward(batch),
        lambda: ctx.backward(torch.ones(())),
        lambda: ctx.loader([batch]),
        ctx.eval,
        lambda: kv.EvalContext(ctx.model).forward(batch),
        lambda: kv.InferContext(ctx.model).predict(batch),
    ):
        with pytest.raises(RuntimeError, match="was called outside of the context"):
            call()
    with ctx:
        with pytest.raises(RuntimeError, match="in a TrainContext already"), context(ctx.model):
            pass
        with pytest.raises(RuntimeError, match="backward was called without a forward"):
            ctx.backward(torch.ones((), requires_grad=True))
        output, labels = ctx.forward(batch)
        with pytest.raises(RuntimeError, match="forward was called twice"):
            ctx.forward(batch)
        with pytest.raises(RuntimeError, match="save was called in the middle of a step"):
            ctx.save(tmp_path)
        with pytest.raises(RuntimeError, match="load was called inside"):
            ctx.load(tmp_path)
        with pytest.raises(ValueError, match=r"The loss must be one number, .* got shape \(16,\)"):
            ctx.backward(output)
        with pytest.raises(TypeError, match="The loss must be a tensor, got float"):
            ctx.backward(1.0)
        with pytest.raises(ValueError, match="depends on nothing that is trained"):
            ctx.backward(loss_of(output, labels).detach())
        assert ctx.backward(loss_of(output, labels))
        with ctx.eval(), pytest.raises(RuntimeError, match="the model is in eval mode"):
            ctx.forward(batch)
        for _ in ctx.loader(batches(2)):
            with pytest.raises(RuntimeError, match="has not come to its end"):
                iter(ctx.loader([batch]))
            break
        with pytest.raises(KeyError, match="no label 'label' in the batch, which has: user"):
            ctx.forward({name: batch[name] for name in ("user", "item", "price")})
    assert ctx.step == 1


def test_the_batches_of_a_step_belong_together(tmp_path):
    with context(gradient_accumulation_steps=2) as ctx:
        with pytest.raises(RuntimeError, match="gradient_accumulation_steps=2 needs batches of"):
            ctx.forward(batches(1)[0])
        steps = []
        for batch in ctx.loader(batches(3)):
            steps.append(ctx.backward(loss_of(*ctx.forward(batch))))
            if len(steps) == 1:
                with pytest.raises(RuntimeError, match="save was called in the middle of a step"):
                    ctx.save(tmp_path)
        assert steps == [False, True, True]
        found = iter(ctx.loader(batches(4)))
        ctx.backward(loss_of(*ctx.forward(next(found))))
        next(found)  # and nothing is done with it
        with pytest.raises(RuntimeError, match="Of a step's 2 batches 1 were trained"):
            next(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16, auto, got 'fp8'"),
        ({"precision": "fp16"}, "'fp16' needs a CUDA device"),
        ({"nonfinite": "hope"}, "nonfinite must be one of skip, raise, skip_tables, apply, got 'hope'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, got 0"),
        ({"prefetch": -1}, "prefetch must not be negative, got -1"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0 or None, got 0.0"),
        ({"dense_optimizer": None, "sparse_optimizer": None}, "needs a dense_optimizer or"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        context(**options)


def test_a_custom_loop_does_not_train_among_trainers_that_come_and_go(monkeypatch):
    monkeypatch.setattr(kv.distributed.current(), "group", object())
    with pytest.raises(ValueError, match=r"expected a kv\.Trainer, or sharding: static"):
        context()
