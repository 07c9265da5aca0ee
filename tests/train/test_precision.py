"""bf16 and fp16: the numbers of autocast, on machines with and without instructions for them."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from train_helpers import assert_same, batches, everything, model, trainer

import karvan as kv
from karvan.train import precision
from karvan.train.optimizer_step import OptimizerStep, OptimizerStepSettings
from karvan.train.precision import Bf16Products, Precision


class Net(nn.Module):
    """Every kind of product that models have."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 6, bias=False)
        self.convolution = nn.Conv1d(2, 3, 2)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        out = self.second(hidden)
        pairs = torch.bmm(out.unsqueeze(2), out.unsqueeze(1)).sum((1, 2))
        other = torch.einsum("bi,ij,bj->b", out, self.second.weight[:, :6], out)
        mixed = self.convolution(hidden.view(-1, 2, 8)).mean((1, 2))
        return out @ out.T, pairs + other + mixed


def forward_and_backward(emulated):
    torch.manual_seed(3)
    net = Net()
    x = torch.randn(5, 8, requires_grad=True)
    with Bf16Products() if emulated else torch.enable_grad():
        with torch.autocast("cpu", torch.bfloat16):
            square, rest = net(x)
        (square.float().square().mean() + rest.float().mean()).backward()
    return [square, rest, x.grad, *(p.grad for p in net.parameters())]


def test_products_in_fp32_of_rounded_operands_have_the_numbers_of_autocast():
    for found, expected in zip(forward_and_backward(True), forward_and_backward(False), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-7)


def test_the_operands_are_rounded_and_sums_are_not():
    a, b = torch.full((1, 3), 1 + 2**-10), torch.ones(3, 1)
    with Bf16Products(), torch.autocast("cpu", torch.bfloat16):
        product = a @ b
    assert product.dtype == torch.bfloat16
    assert product.item() == 3.0  # 1 + 2**-10 is 1 in bf16
    with Bf16Products():
        assert (a @ b).dtype == torch.float32  # what is not bf16 is left alone
        assert (a @ b).item() > 3.0


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_trains_and_says_when_the_cpu_is_slow_at_it(monkeypatch, fast):
    monkeypatch.setattr(precision, "fast_bf16", lambda: fast)
    net = model(dropout=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = trainer(net, precision="bf16", metrics={"auc": kv.metrics.AUC()})
        result = fit.fit(batches(), epochs=4)
    ours = [w for w in caught if "no instructions for bf16" in str(w.message)]
    assert len(ours) == (0 if fast else 1)
    assert result.metrics["auc"] > 0.7
    assert all(value.dtype != torch.bfloat16 for value in everything(net).values())
    exact = model(dropout=0.0)
    trainer(exact).fit(batches(), epochs=4)
    assert not torch.equal(exact.last.weight, net.last.weight)
    expected, found = (each.evaluate(batches(4))["loss"] for each in (trainer(exact), fit))
    assert found == pytest.approx(expected, abs=0.02)
    (prediction,) = fit.predict(batches(1))
    assert prediction.output.dtype == torch.bfloat16


def test_scaled_gradients_reach_the_rows_unscaled():
    plain, scaled = model(dropout=0.0), model(dropout=0.0)
    for net, scale in ((plain, 1.0), (scaled, 1024.0)):
        dense, sparse = torch.optim.SGD(net.parameters(), lr=0.1), kv.optim.Adagrad(net, lr=0.1)
        net.embeddings.gradient_scale = scale
        for batch in batches(3):
            loss = functional.binary_cross_entropy_with_logits(net(batch), batch["label"])
            (loss * scale).backward()
            for parameter in net.parameters():
                parameter.grad /= scale
            for optimizer in (dense, sparse):
                optimizer.step()
                optimizer.zero_grad()
    assert_same(plain, scaled)


class FakeScale(Precision):
    """A scaled loss as fp16 on CUDA has it, with a scaler written out."""

    always_checks = True

    def __init__(self, net):
        self.net, self.size, self.overflows = net, 2.0**16, 0

    def scale(self, loss):
        self.net.embeddings.gradient_scale = self.size
        return loss * self.size

    def unscale(self, optimizer, sparse_finite):
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        self.overflows += not (sparse_finite and all(bool(g.isfinite().all()) for g in gradients))
        for gradient in gradients:
            gradient /= self.size


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_overflow_leaves_out_the_dense_and_the_sparse_step(accumulate):
    net = model(dropout=0.0)
    dense, sparse = torch.optim.SGD(net.parameters(), lr=0.1), kv.optim.SGD(net, lr=0.1)
    scaled = FakeScale(net)
    update = OptimizerStep(dense, sparse, OptimizerStepSettings(accumulate, nonfinite="apply"), scaled)
    data = batches(accumulate)

    def step(factor):
        for batch in data:
            loss = functional.binary_cross_entropy_with_logits(net(batch), batch["label"])
            update.backward(loss * factor, accumulate)
        return update.apply()

    assert step(1.0)
    before = everything(net)
    assert not step(1e38)  # times the scale it is infinite
    after = everything(net)
    kept = [name for name in before if "counts" not in name and "last_steps" not in name]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert scaled.overflows == 1
    assert step(1.0)
    assert not torch.equal(everything(net)["user.vectors"], before["user.vectors"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_training_on_a_gpu_with_rows_on_the_cpu(name, ahead):
    exact, net = model(dropout=0.0), model(dropout=0.0)
    trainer(exact).fit(batches(), epochs=2)
    fit = trainer(net, precision=name, device="cuda", prefetch=ahead, metrics={"auc": kv.metrics.AUC()})
    result = fit.fit(batches(), epochs=2, eval_data=batches(2, seed=1))
    assert net.last.weight.is_cuda
    assert result.step - result.skipped > 20
    tolerance = 1e-4 if name == "fp32" else 0.1
    torch.testing.assert_close(net.last.weight.cpu(), exact.last.weight, rtol=tolerance, atol=tolerance)
    assert next(fit.predict(batches(1))).output.is_cpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_scale_falls_after_an_overflow_of_the_rows_alone():
    net = model(dropout=0.0).to("cuda")
    fit = trainer(net, precision="fp16")
    scaler = fit.precision._scaler
    fit.fit(batches(1))
    before, rows = scaler.get_scale(), everything(net)
    fit.update.backward(net.embeddings(batches(1)[0])["user"].sum().cuda() * 1e38, 1)
    assert not fit.update.apply()
    assert scaler.get_scale() == before / 2
    assert torch.equal(everything(net)["user.vectors"], rows["user.vectors"])
