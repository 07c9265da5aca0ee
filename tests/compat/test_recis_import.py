"""A RecIS program continues from a checkpoint of RecIS, which was imported."""

import numpy as np
import pytest
import torch
from foreign_files import write_recis
from torch import nn

import karvan as kv
from karvan.checkpoint import import_recis
from karvan.cli.main import main
from karvan.compat.recis.framework.trainer import Trainer, TrainingArguments
from karvan.compat.recis.nn import EmbeddingEngine, EmbeddingOption
from karvan.compat.recis.nn.initializers import NormalInitializer
from karvan.compat.recis.nn.modules.hashtable import filter_out_sparse_param
from karvan.compat.recis.optim import SparseAdagrad, SparseAdam, SparseAdamW, SparseRowWiseAdagrad

OPTIMIZERS = {
    SparseAdam: ("sparse_adam_", ["exp_avg", "exp_avg_sq"]),
    SparseAdamW: ("sparse_adamw_", ["exp_avg", "exp_avg_sq"]),
    SparseAdagrad: ("sparse_adagrad_", ["state_sum"]),
    SparseRowWiseAdagrad: ("sparse_row_wise_adagrad_", ["state_sum"]),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        init = NormalInitializer(std=0.1)
        self.engine = EmbeddingEngine(
            {
                name: EmbeddingOption(4, shared_name=f"{name}_emb", initializer=init)
                for name in ("user", "item")
            }
        )
        self.net = nn.Linear(8, 1)

    def forward(self, samples):
        made = self.engine(samples)
        score = self.net(torch.cat([made["user"], made["item"]], 1))
        return nn.functional.binary_cross_entropy_with_logits(score, made["label"])


def samples(number):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(-(2**62), 2**62, (40,), generator=torch.Generator().manual_seed(99))
    user, item = (ids[torch.randint(40, (16,), generator=generator)] for _ in range(2))
    return {"user": user, "item": item, "label": (user % 2).float()[:, None]}


def trained(kind, folder, first, last, **arguments):
    model = Model()
    sparse = kind(filter_out_sparse_param(model), lr=0.05)
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(False, samples(number)) for number in range(first, last)]
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **arguments),
        data,
        dense_optimizers=(dense, None),
        sparse_optimizer=sparse,
    )
    trainer.train()
    return model


def rows_of(model):
    return {table.name: table.snapshot() for table in model.engine.engine.tables()}


def powers(prefix, steps):
    if "adagrad" in prefix:
        return {f"{prefix}step": torch.tensor([steps])}
    values = [torch.ones(1), torch.ones(1)]
    for _ in range(steps):
        values = [value * beta for value, beta in zip(values, (0.9, 0.999), strict=True)]
    return {f"{prefix}beta1": values[0], f"{prefix}beta2": values[1], f"{prefix}step": torch.zeros(1)}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_continues_with_the_bits_of_one_that_never_stopped(tmp_path, kind):
    """The rows of the first half are written as RecIS does, and imported."""
    whole = trained(kind, tmp_path / "whole", 0, 24)
    half = trained(kind, tmp_path / "half", 0, 10)
    prefix, slots = OPTIMIZERS[kind]
    tables = {}
    for name, rows in rows_of(half).items():
        states = torch.from_numpy(rows.state).chunk(len(slots), dim=1)
        tables[name] = {
            "id": rows.keys.tolist(),
            "embedding": torch.from_numpy(rows.vectors),
            **{f"{prefix}{slot}": state for slot, state in zip(slots, states, strict=True)},
        }
    source = write_recis(
        tmp_path / "ckpt",
        tables,
        ranks=2,
        files=3,
        scalars=powers(prefix, 10),
        dense=dict(half.net.state_dict(prefix="net.")),
        extra={"global_step": 10},
    )
    import_recis(source, tmp_path / "imported")
    rest = trained(kind, tmp_path / "rest", 10, 24, model_bank=[str(tmp_path / "imported")])
    for name, expected in rows_of(whole).items():
        found = rows_of(rest)[name]
        assert np.array_equal(found.keys, expected.keys)
        assert np.array_equal(found.vectors, expected.vectors)
        assert np.array_equal(found.state, expected.state)
    assert all(map(torch.equal, rest.net.parameters(), whole.net.parameters()))


PROGRAM = """
import sys
import torch
from recis.framework.trainer import Trainer, TrainingArguments
from recis.nn import EmbeddingEngine, EmbeddingOption
from recis.nn.modules.hashtable import filter_out_sparse_param
from recis.optim import SparseAdagrad


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.engine = EmbeddingEngine({"item": EmbeddingOption(2, shared_name="item_emb")})
        self.net = torch.nn.Linear(2, 1, bias=False)

    def forward(self, samples):
        return self.net(self.engine(samples)["item"]).sum()


model = Model()
Trainer(
    model,
    TrainingArguments(output_dir=sys.argv[2], model_bank=[{"path": sys.argv[1], "load": ["*"]}]),
    [(False, {"item": torch.tensor([3])})],
    dense_optimizers=(torch.optim.SGD(model.parameters(), lr=1e-9), None),
    sparse_optimizer=SparseAdagrad(filter_out_sparse_param(model), lr=0.5),
).train()
"""


def test_a_program_run_as_recis_trains_the_imported_rows(tmp_path):
    slots = {
        "id": [3, -4],
        "embedding": torch.tensor([[1.0, 2.0], [5.0, 6.0]]),
        "sparse_adagrad_state_sum": torch.tensor([[5.0, 9.0], [1.0, 1.0]]),
    }
    write_recis(tmp_path / "ckpt", {"item_emb": slots}, dense={"net.weight": torch.tensor([[2.0, 4.0]])})
    (tmp_path / "train.py").write_text(PROGRAM)
    folders = [str(tmp_path / name) for name in ("ckpt", "imported", "run")]
    assert main(["import-checkpoint", "--from", "recis", *folders[:2]]) == 0
    assert main(["run", "--as", "recis", str(tmp_path / "train.py"), *folders[1:]]) == 0
    row = kv.checkpoint.row(tmp_path / "run", "item_emb", 3)
    # The gradient is (2, 4).
    np.testing.assert_allclose(row.state, [5 + 4, 9 + 16], rtol=1e-6)
    np.testing.assert_allclose(row.vector, [1 - 0.5 * 2 / 3, 2 - 0.5 * 4 / 5], rtol=1e-5)
    other = kv.checkpoint.row(tmp_path / "run", "item_emb", -4)
    assert (other.vector.tolist(), other.state.tolist()) == ([5, 6], [1, 1])
