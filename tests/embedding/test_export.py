"""torch.compile of a model with an engine works; torch.export says what to export instead."""

import pytest
import torch
from torch import nn

import karvan as kv


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine(
            {"user": kv.Table(4, init=kv.init.Normal()), "item": kv.Table(4, init=kv.init.Normal())}
        )
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def vectors(self, batch):
        out = self.embeddings(batch)
        return torch.cat([out["user"], out["item"]], 1)

    def forward(self, batch):
        return self.net(self.vectors(batch))


def batch(seed=0, rows=6):
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randint(20, (rows,), generator=random) for name in ("user", "item")}


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = Model()
    made(batch())  # a training forward, so that rows exist
    return made.eval()


@pytest.mark.parametrize(
    "export",
    [
        lambda model: torch.export.export(model, (batch(),)),
        lambda model: torch.export.export(model, (batch(),), strict=True),
        lambda model: torch.jit.trace(model, (batch(),), strict=False),
    ],
    ids=["export", "strict export", "trace"],
)
def test_an_engine_in_an_export_says_what_to_export_instead(model, export):
    with pytest.raises(Exception, match="Export the rest of the model") as told:
        export(model)
    assert "torch.export.export(model.net, (vectors,))" in str(told.value)
    assert model(batch()).shape == (6, 1)  # and the model is as it was


def test_the_dense_part_is_exported_with_the_vectors_of_the_engine(model, tmp_path):
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(model.net, (model.vectors(batch()),), dynamic_shapes=({0: rows},))
    torch.export.save(exported, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    for other in (batch(), batch(1, rows=9)):
        torch.testing.assert_close(loaded(model.vectors(other)), model(other))


def test_a_compiled_model_gives_the_same_outputs_and_trains(model):
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(batch()), model(batch()))
    model.train()
    sparse = kv.optim.SGD(model, lr=0.1)
    before = model.embeddings.table("user").snapshot().vectors.copy()
    compiled(batch()).sum().backward()
    sparse.step()
    assert (model.embeddings.table("user").snapshot().vectors != before).any()
