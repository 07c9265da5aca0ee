"""`Layers` in mixed precision on a GPU: the numbers of torch's autocast."""

import copy
import itertools

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from karvan.models import parts
from karvan.models.parts import mlp


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", [None, 1])
def test_they_have_the_numbers_of_autocast(dtype, out, monkeypatch):
    torch.manual_seed(0)
    net = mlp(479, (1024, 512, 64), out).cuda()
    values = torch.randn(4096, 479, device="cuda")
    calls = []
    real = parts.mixed_layers
    monkeypatch.setattr(parts, "mixed_layers", lambda *given: calls.append(1) or real(*given))
    found = []
    for plain in (True, False):
        x = values.clone().requires_grad_()
        net.zero_grad()
        with torch.autocast("cuda", dtype):
            output = nn.Sequential(*net)(x) if plain else net(x)
        factors = torch.linspace(-1, 2, output.numel(), device="cuda").view(output.shape)
        (output.float() * factors).mean().backward()
        found.append([output.detach(), x.grad, *(parameter.grad for parameter in net.parameters())])
    assert calls == [1]
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype
        scale = one.abs().max()
        assert scale > 0
        torch.testing.assert_close(one / scale, other / scale, rtol=0.02, atol=0.01)


def numbers_of(net, steps, *, graphs):
    """Outputs and gradients of steps on inputs of one shape, in bf16."""
    found = []
    for step in range(steps):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(64, 13, device="cuda", generator=generator).requires_grad_()
        net.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            output = net(x) if graphs else parts.mixed_layers(x, *net._plain_layers(), torch.bfloat16)
        (
            output.float() * torch.linspace(-1, 1, output.numel(), device="cuda").view(output.shape)
        ).sum().backward()
        found.append([output.detach(), x.grad, *(parameter.grad for parameter in net.parameters())])
        with torch.no_grad():  # as an optimizer's step does
            for parameter in net.parameters():
                parameter -= 0.01 * parameter.grad
    return found


def kind_of(output):
    return type(output.grad_fn).__name__


def test_replays_have_the_numbers_of_passes_without_graphs():
    torch.manual_seed(0)
    net = mlp(13, (32, 16), 4).cuda()
    other = copy.deepcopy(net)
    for one, two in zip(numbers_of(net, 5, graphs=True), numbers_of(other, 5, graphs=False), strict=True):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    assert len(net._graphs._recorded) == 1


def test_gradients_and_outputs_of_earlier_replays_stay():
    net = mlp(13, (32,), 4).cuda()
    found = numbers_of(net, 4, graphs=True)
    values = [[each.clone() for each in step] for step in found]
    numbers_of(net, 3, graphs=True)
    assert all(map(torch.equal, itertools.chain(*found), itertools.chain(*values)))


def test_gradients_of_several_passes_are_summed():
    net = mlp(13, (32,), 4).cuda()
    numbers_of(net, 3, graphs=True)
    found = []
    for graphs in (True, False):
        net.zero_grad()
        for step in range(3):
            x = torch.full((64, 13), step + 1.0, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16):
                output = net(x) if graphs else parts.mixed_layers(x, *net._plain_layers(), torch.bfloat16)
            output.sum().backward()
        found.append([parameter.grad for parameter in net.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_two_forward_passes_before_their_backward_passes():
    net = mlp(13, (32,), 4).cuda()
    numbers_of(net, 3, graphs=True)
    xs = [torch.randn(64, 13, device="cuda", requires_grad=True) for _ in range(2)]
    with torch.autocast("cuda", torch.bfloat16):
        outputs = [net(x) for x in xs]
        others = [parts.mixed_layers(x, *net._plain_layers(), torch.bfloat16) for x in xs]
    assert [type(each.grad_fn).__name__ for each in outputs] == [
        "_GraphedLayersBackward",
        "_MixedLayersBackward",
    ]
    for x, output, other in zip(xs, outputs, others, strict=True):
        (found,) = torch.autograd.grad(output.sum(), x)
        (expected,) = torch.autograd.grad(other.sum(), x)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_an_output_without_backward_frees_the_graph_and_a_late_backward_is_an_error():
    net = mlp(13, (32,), 4).cuda()
    numbers_of(net, 3, graphs=True)
    x = torch.randn(64, 13, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        net(x)
        first = net(x)
        first.sum().backward(retain_graph=True)
        first.sum().backward(retain_graph=True)
        second = net(x)
    assert kind_of(second) == "_GraphedLayersBackward"
    with pytest.raises(RuntimeError, match="a second time"):
        first.sum().backward()


def test_weights_that_move_are_recorded_again():
    net = mlp(13, (32,), 4).cuda()
    numbers_of(net, 3, graphs=True)
    for parameter in net.parameters():
        parameter.data = parameter.data * 2
    one, other = (
        numbers_of(copy.deepcopy(net) if not graphs else net, 4, graphs=graphs) for graphs in (False, True)
    )
    for a, b in zip(itertools.chain(*one), itertools.chain(*other), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.05)
