"""`Layers` in 16 bits, compared to torch's autocast; tests/gpu/test_layers_gpu.py has GPUs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from karvan.models.parts import Layers, mixed_layers


def layers_of(width, hidden, out):
    modules = []
    for size in hidden:
        modules += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return Layers(*modules, *([] if out is None else [nn.Linear(width, out)]))


def gradients_of(net, x, output):
    (output.float() * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    return [x.grad, *(parameter.grad for parameter in net.parameters())]


@given(
    st.integers(1, 9),
    st.integers(1, 8),
    st.lists(st.integers(1, 8), max_size=3),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_they_have_the_numbers_of_autocast(samples, width, hidden, out, dtype):
    if out is None and not hidden:
        return
    torch.manual_seed(samples + width)
    net = layers_of(width, hidden, out)
    values = torch.randn(samples, width).to(dtype)
    found = []
    for way in ("autocast", "mixed"):
        x = values.clone().requires_grad_()
        net.zero_grad()
        if way == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                output = net(x)
        else:
            output = mixed_layers(x, *net._plain_layers(), torch.bfloat16)
        assert output.dtype is torch.bfloat16
        found.append([output.detach(), *gradients_of(net, x, output)])
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_an_input_without_a_gradient():
    net = layers_of(3, [4], 2)
    mixed_layers(torch.randn(5, 3), *net._plain_layers(), torch.bfloat16).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in net[0].parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net[0].register_forward_hook(lambda *_: None),
        lambda net: net[1].register_forward_pre_hook(lambda *_: None),
        lambda net: net[0].register_full_backward_pre_hook(lambda *_: None),
        lambda net: net.append(nn.Dropout(0.5)),
        lambda net: net.append(nn.Sigmoid()),
        lambda net: net[0].double(),
        lambda net: setattr(net[0], "bias", None),
        lambda net: nn.utils.parametrizations.weight_norm(net[0]),
    ],
    ids=["hook", "early hook", "backward hook", "dropout", "sigmoid", "double", "no bias", "weight norm"],
)
def test_what_only_torch_can_do(change):
    net = layers_of(3, [4], None)
    assert net._plain_layers() is not None
    change(net)
    assert net._plain_layers() is None


def test_dropout_of_a_model_that_is_evaluated():
    net = layers_of(3, [4], None).append(nn.Dropout(0.5))
    assert net.eval()._plain_layers() is not None
