"""`kv.Trainer` and `kv.TrainContext` with `kv.connect("cuda")`; test_steps_gpu.py needs fewer packages."""

import logging

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import karvan as kv
from karvan.native import is_built

try:
    import karvan.train.trainer
except ModuleNotFoundError as missing:
    pytest.skip(f"kv.Trainer needs {missing.name}", allow_module_level=True)

from train_helpers import StopAt, batches, everything, model, trainer

PRECISIONS = ["fp32", "bf16", "fp16"]
needs_core = pytest.mark.skipif(not is_built(), reason="needs the native core")


@pytest.fixture(autouse=True)
def tables_on_the_gpu():
    kv.connect("cuda")
    yield
    kv.disconnect()


def loss_of(output, labels):
    return torch.nn.functional.binary_cross_entropy_with_logits(output, labels)


def numbers(net):
    """All that steps change, on the CPU, with rows in the order of their keys."""
    found = {name: value.cpu() for name, value in everything(net).items()}
    for table in net.embeddings.tables():
        order = found.pop(f"{table.name}.keys").argsort()
        for part in ("vectors", "state"):
            found[f"{table.name}.{part}"] = found[f"{table.name}.{part}"][order]
        for part in ("counts", "last_steps"):  # skipped steps look up, too
            del found[f"{table.name}.{part}"]
    return found


def assert_close(one, other, tolerance):
    one, other = numbers(one), numbers(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)


class WithoutWaiting(kv.callbacks.Callback):
    """From one step to another, a call that waits for the GPU is an error, also on the feed's thread."""

    def __init__(self, begin, end):
        self.begin, self.end, self.steps = begin, end, 0

    def on_step_end(self, trainer, logs):
        if logs.step == self.begin:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        elif self.begin < logs.step <= self.end:
            self.steps += 1
        if logs.step == self.end:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def debug_mode():
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("debug_mode")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_fit_waits_for_nothing(precision, prefetch):
    net, watch = model(dropout=0.0), WithoutWaiting(30, 50)
    fit = trainer(
        net,
        device="cuda",
        precision=precision,
        prefetch=prefetch,
        metrics={"auc": kv.metrics.AUC(), "loss": kv.metrics.BinaryCrossEntropy()},
        callbacks=[watch],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999),
        log_every=1000,
        checkpoint_seconds=None,
    )
    assert fit.update.optimizers["dense"].param_groups[0]["fused"]  # chosen, as the program left it open
    result = fit.fit(batches(60))
    assert watch.steps == 20
    assert net.embeddings.store.device.type == "cuda"
    assert result.metrics["auc"] > 0.55


@pytest.mark.usefixtures("debug_mode")
def test_a_loop_of_a_context_waits_for_nothing():
    net = model(dropout=0.0)
    adam = lambda p: torch.optim.Adam(p, lr=0.01)  # noqa: E731
    made = []
    with kv.TrainContext(
        net, dense_optimizer=adam, sparse_optimizer=kv.optim.Adagrad(lr=0.1), device="cuda"
    ) as ctx:
        for number, batch in enumerate(ctx.loader(batches(40))):
            if number == 25:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            output, labels = ctx.forward(batch)
            made.append(ctx.backward(loss_of(output, labels)))
        torch.cuda.set_sync_debug_mode("default")
        assert all(isinstance(each, torch.Tensor) for each in made)
        assert all(bool(each) for each in made)
        assert (ctx.step, ctx.skipped) == (40, 0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_context_has_the_numbers_of_the_trainer(precision):
    fitted, looped = model(dropout=0.0), model(dropout=0.0)
    trainer(fitted, device="cuda", precision=precision).fit(batches(), epochs=2)
    with kv.TrainContext(
        looped,
        dense_optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
        device="cuda",
        precision=precision,
    ) as ctx:
        for _ in range(2):
            for batch in ctx.loader(batches()):
                output, labels = ctx.forward(batch)
                ctx.backward(loss_of(output, labels))
    assert_close(fitted, looped, 1e-4 if precision == "fp32" else 1e-2)


@needs_core
@pytest.mark.parametrize("precision", PRECISIONS)
def test_tables_on_the_gpu_train_like_those_in_memory(precision):
    kv.disconnect()
    in_memory = trainer(model(dropout=0.0))
    in_memory.fit(batches(), epochs=2)
    expected = in_memory.evaluate(batches(4, seed=1))["loss"]
    kv.connect("cuda")
    on_gpu = trainer(model(dropout=0.0), device="cuda", precision=precision)
    result = on_gpu.fit(batches(), epochs=2)
    assert result.skipped == 0 or precision == "fp16"
    assert on_gpu.evaluate(batches(4, seed=1))["loss"] == pytest.approx(expected, abs=0.03)
    if precision == "fp32":
        assert_close(on_gpu.model, in_memory.model, 2e-3)


def test_accumulated_batches_are_one_large_batch():
    large, small = model(dropout=0.0), model(dropout=0.0)
    trainer(large, device="cuda").fit(batches(6, size=32))
    trainer(small, device="cuda", gradient_accumulation_steps=2).fit(batches(12, size=16))
    assert_close(large, small, 1e-3)


@needs_core
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_fit_that_was_stopped_continues_with_the_same_numbers(tmp_path, precision):
    """Also from one skipped step to the next: its count is in the checkpoint."""
    data = batches(16)
    data[2]["price"][:] = torch.inf

    def fit(folder, *callbacks):
        net = model()  # with dropout
        made = trainer(
            net, device="cuda", precision=precision, checkpoints=tmp_path / folder, callbacks=callbacks
        )
        return net, made.fit(data, epochs=2), made

    whole, result, _ = fit("whole")
    _, stopped, _ = fit("parts", StopAt(9))
    assert stopped.stopped == "enough"
    rest, continued, made = fit("parts")
    assert (continued.step, made.run_progress.counts.skipped) == (result.step, result.skipped)
    assert_close(whole, rest, 1e-6)


def test_a_step_that_is_not_finite_is_skipped_and_reported(caplog):
    data = batches(12)
    data[4]["price"][3] = torch.nan
    net = model(dropout=0.0)
    with caplog.at_level(logging.WARNING, "karvan.train"):
        result = trainer(net, device="cuda").fit(data)
    assert result.skipped == 1
    assert "Step 5 was skipped: a gradient is not finite. Column 'price' has NaN in 1 of 16" in caplog.text
    assert "1 of 12 steps were skipped" in caplog.text
    assert all(torch.isfinite(value).all() for value in everything(net).values() if value.is_floating_point())


def test_a_fit_of_bad_steps_alone_is_an_error():
    data = batches(30)
    for batch in data:
        batch["price"][0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"The first 1\d steps were all skipped.*'price' has NaN"):
        trainer(model(), device="cuda").fit(data)


def test_who_wants_an_error_gets_it_in_the_step_itself():
    data = batches(6)
    data[2]["price"][0] = torch.nan
    with pytest.raises(FloatingPointError, match="Step 3 was skipped"):
        trainer(model(), device="cuda", nonfinite="raise").fit(data)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_dense_part_can_be_compiled(precision):
    plain, compiled = model(dropout=0.0), model(dropout=0.0)
    compiled.net = torch.compile(compiled.net)
    for net in (plain, compiled):
        trainer(net, device="cuda", precision=precision).fit(batches())
    torch.testing.assert_close(
        compiled.last.weight, plain.last.weight, rtol=0.05, atol=5e-3 if precision == "fp32" else 0.05
    )


@needs_core
def test_a_table_in_memory_beside_others_on_the_gpu():
    class Placed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            tables = {"user": kv.Table(4, device="cpu"), "item": kv.Table(8, dtype=torch.float16)}
            self.embeddings = kv.EmbeddingEngine(tables)
            self.last = torch.nn.Linear(12, 1)

        def forward(self, batch):
            out = self.embeddings(batch)
            return self.last(torch.cat([out["user"], out["item"]], 1)).squeeze(1)

    for precision in PRECISIONS:
        net = Placed()
        fit = trainer(net, device="cuda", precision=precision, metrics={"auc": kv.metrics.AUC()})
        result = fit.fit(batches(12), epochs=3)
        assert result.metrics["auc"] > 0.6
        assert net.embeddings.store.of("user").device.type == "cpu"
        assert net.embeddings.table("item").stats()["device_bytes"] > 0


@needs_core
def test_a_config_trains_tables_on_the_gpu(tmp_path):
    pytest.importorskip("typer")
    from cli_helpers import write_clicks, write_jobs

    from karvan.cli.config import make_job, read_config

    kv.disconnect()
    write_clicks(tmp_path)
    write_jobs(tmp_path)
    settings = {"connect": "cuda", "train.precision": "bf16", "data.device": "cuda"}
    job = make_job(read_config(tmp_path / "config.yaml", settings), progress="none")
    assert job.trainer.device.type == "cuda"  # as the tables, unless the config says where
    assert job.trainer.model.embeddings.store.device == job.trainer.device
    result = job.fit()
    assert result.evaluation["auc"] > 0.5
    assert result.skipped == 0


def test_a_model_goes_to_its_tables():
    fit = trainer(model())
    assert fit.device == fit.model.embeddings.store.device
    assert fit.model.last.weight.is_cuda
    with pytest.raises(ValueError, match="expects tables in memory, but the model has some on cuda:0"):
        trainer(model(), device="cpu")
