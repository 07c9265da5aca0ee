"""Dumps: the files of PERSIA beside Karvan's checkpoint, and folders that are checked before training."""

import sys

import numpy as np
import pytest
import torch
from torch import Tensor


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 1)

    def forward(self, non_ids: list[Tensor], embeddings: list[Tensor]) -> Tensor:
        return self.layer(torch.cat([non_ids[0], embeddings[0]], 1)).sigmoid()


def make_context(net, **options):
    from persia.ctx import TrainCtx
    from persia.embedding.optim import SGD

    dense = torch.optim.Adam(net.parameters())
    return TrainCtx(
        model=net,
        **{
            "embedding_optimizer": SGD(lr=0.1),
            "dense_optimizer": dense,
            "mixed_precision": False,
            **options,
        },
    )


def make_batch():
    from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch

    return PersiaBatch(
        [IDTypeFeatureWithSingleID("user", np.arange(4, dtype=np.uint64))],
        [NonIDTypeFeature(np.ones((4, 1), np.float32))],
        [Label(np.ones((4, 1), np.float32))],
    )


def test_a_dump_has_the_net_as_torchscript_beside_the_checkpoint(configure, tmp_path):
    from persia.ctx import eval_ctx

    net = Net()
    with make_context(net) as ctx:
        output, _ = ctx.forward(ctx.get_embedding_from_data(make_batch()))
        ctx.backward(output.sum())
        ctx.dump_checkpoint(str(tmp_path / "run"), with_jit_model=True)
        ctx.dump_checkpoint(str(tmp_path / "other"), with_jit_model=True, jit_dense_model_filename="net.pt")
        with eval_ctx(model=net) as evaluation:
            data = evaluation.get_embedding_from_data(make_batch())
            non_ids, embeddings, _ = evaluation.prepare_features(data)
            evaluation.dump_checkpoint(str(tmp_path / "evaluated"), with_jit_model=True)
    expected = net(non_ids, embeddings)
    for file in ("run/jit_dense.pt", "other/net.pt", "evaluated/jit_dense.pt"):
        assert torch.equal(torch.jit.load(tmp_path / file)(non_ids, embeddings), expected)
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name[0] != ".") == [
        "jit_dense.pt",
        "step-000000000001",
    ]
    with make_context(net) as ctx:
        ctx.load_checkpoint(str(tmp_path / "run"))


def test_states_of_models_and_optimizers_are_written_and_read(configure, tmp_path):
    net, other = Net(), Net()
    with make_context(net) as ctx:
        ctx.dump_torch_state_dict(net, str(tmp_path / "new"), "dense.pt")
        ctx.dump_torch_state_dict(ctx.dense_optimizer, str(tmp_path / "new"), "opt.pt")
        ctx.load_torch_state_dict(other, str(tmp_path / "new" / "dense.pt"))
        ctx.load_torch_state_dict(ctx.dense_optimizer, str(tmp_path / "new" / "opt.pt"), map_location="cpu")
        assert torch.equal(other.layer.weight, net.layer.weight)
        ctx.model = None
        with pytest.raises(ValueError, match="with_jit_model expects a context with a model"):
            ctx.dump_checkpoint("out", with_jit_model=True)


PROGRAM = """
import os, sys
from pathlib import Path
base = sys.argv[0]
again = "a"
again = "b"
class Options:
    out = "from-options"
args = Options()
def other(ctx, folder):
    ctx.dump_checkpoint(folder)
def main(parameter):
    folder = os.environ.get("TEST_DUMPS", None)
    missing = os.environ.get("TEST_NOTHING", None)
    ctx.dump_checkpoint(folder, with_jit_model=True)
    ctx.dump_checkpoint(dst_dir=os.path.join(folder, "joined"))
    ctx.dump_embedding("literal")
    ctx.dump_embedding(base + "/plus")
    ctx.dump_embedding(f"{base}/format")
    ctx.dump_embedding(Path(base) / "path")
    ctx.dump_embedding(args.out)
    for name in (parameter, again, missing, unknown, make(), args.nothing):
        pass
    ctx.dump_embedding(parameter)
    ctx.dump_embedding(again)
    ctx.dump_embedding(missing)
    ctx.dump_embedding(unknown)
    ctx.dump_embedding(make())
    ctx.dump_embedding(os.environ["TEST_NOTHING"])
    ctx.dump_embedding(args.nothing)
"""


def test_folders_of_dumps_are_read_from_the_program(tmp_path, monkeypatch):
    from persia.dumps import dump_targets

    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("TEST_DUMPS", "from-environment")
    module = type(sys)("__main__")
    module.__file__ = str(tmp_path / "program.py")
    monkeypatch.setattr(sys, "argv", ["base"])
    exec(PROGRAM, vars(module))
    monkeypatch.setitem(sys.modules, "__main__", module)
    assert [str(target) for target in dump_targets()] == [
        *("from-environment", "from-environment/joined", "literal"),
        *("base/plus", "base/format", "base/path", "from-options"),
    ]
