"""`Layers` in mixed precision on a GPU: the numbers of torch's autocast."""

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from karvan.models import layers
from karvan.models.parts import mlp


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", [None, 1])
def test_they_have_the_numbers_of_autocast(dtype, out, monkeypatch):
    torch.manual_seed(0)
    net = mlp(479, (1024, 512, 64), out).cuda()
    values = torch.randn(4096, 479, device="cuda")
    calls = []
    real = layers.mixed_layers
    monkeypatch.setattr(layers, "mixed_layers", lambda *given: calls.append(1) or real(*given))
    found = []
    for plain in (True, False):
        x = values.clone().requires_grad_()
        net.zero_grad()
        with torch.autocast("cuda", dtype):
            output = nn.Sequential(*net)(x) if plain else net(x)
        (
            output.float() * torch.linspace(-1, 1, output.numel(), device="cuda").view(output.shape)
        ).mean().backward()
        found.append([output.detach(), x.grad, *(parameter.grad for parameter in net.parameters())])
    assert calls == [1]
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype
        scale = one.abs().max()
        assert scale > 0
        torch.testing.assert_close(one / scale, other / scale, rtol=0.02, atol=0.01)
