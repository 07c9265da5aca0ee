"""Datasets, the Trainer and its checkpoints under RecIS's names, and the same in Karvan's."""

import re
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pytest
import torch
from pyarrow import orc
from recis_clicks import RECORDS, Model, batches, dataset, make, state
from torch import nn

import karvan as kv
from karvan.checkpoint import CheckpointError
from karvan.compat.recis.features.op import Hash
from karvan.compat.recis.framework.model_bank import load_bank
from karvan.compat.recis.framework.trainer import Trainer, TrainingArguments
from karvan.compat.recis.hooks import HashTableFilterHook, Hook
from karvan.compat.recis.io.orc_dataset import OrcDataset
from karvan.compat.recis.nn.hashtable_hook import AdmitHook
from karvan.compat.recis.nn.modules.hashtable import filter_out_sparse_param
from karvan.compat.recis.optim import SparseAdamW
from karvan.compat.recis.serialize import CheckpointReader, Loader, Saver
from karvan.compat.unsupported import UnsupportedError
from karvan.data.loading.rank_shares import merge


def test_a_dataset_gives_its_batches_and_then_the_end(files):
    data = dataset(files, read_threads_num=1)
    given = list(data)
    assert [is_end for is_end, _ in given] == [False] * 5 + [True]
    assert given[-1][1] is None
    first = given[0][1]
    assert first["label"].shape == (8, 1)
    assert first["dense"].tolist()[3] == [1.0, 2.0]  # the default
    assert first["items"].offsets()[0].tolist()[:5] == [0, 0, 1, 3, 6]
    users = [user for _, batch in given[:-1] for user in batch["user"].values().tolist()]
    assert users == list(range(RECORDS))


def test_hashes_bytes_and_weights(files):
    data = OrcDataset(RECORDS)
    data.add_paths([files / "day" / "part-0.orc"])  # a file
    data.varlen_feature("word", trans_int8=True)
    data.varlen_feature("liked")
    ((end, (table,)), _) = list(data)
    assert not end
    assert bytes(table["word"].values()[:7].tolist()) == b"word 0w"
    assert table["word"].dtype is torch.int8
    assert table["liked"].weight().tolist() == [0.5] * 20
    for bucket, wants in ((0, lambda h: h & (2**63 - 1)), (1000, lambda h: (h % 2**64) % 1000)):
        hashed = OrcDataset(RECORDS)
        hashed.add_path(files / "day" / "part-0.orc")
        hashed.varlen_feature("word", hash_type="farm", hash_bucket=bucket)
        ((_, (table,)), _) = list(hashed)
        expected = [wants(int(kv.ids.farm([f"word {i}"])[0])) for i in range(20)]
        assert table["word"].values().tolist() == expected


def test_strings_as_bytes_have_the_offsets_of_rows_and_of_strings(tmp_path):
    table = pa.table(
        {
            "word": ["ab", None, "", "cd"],
            "bytes": pa.array([b"\xff\x00", b"", b"x", b"yy"]),
            "words": [["a", "bc"], None, [], ["", None, "d"]],
        }
    )
    orc.write_table(table, tmp_path / "words.orc")
    found = {}
    for size in (4, 1):  # batches with and without missing strings have one form
        data = OrcDataset(size)
        data.add_path(tmp_path)
        for name in table.column_names:
            data.varlen_feature(name, trans_int8=True)
        rows = {name: [] for name in table.column_names}
        for is_end, tables in data:
            for name, entry in () if is_end else tables[0].items():
                assert entry.dtype is torch.int8
                outer, inner = (each.tolist() for each in entry.offsets())
                text = bytes(entry.values().view(torch.uint8).tolist())
                strings = [text[a:b] for a, b in pairwise(inner)]
                rows[name] += [strings[a:b] for a, b in pairwise(outer)]
                ids = Hash("farm")(entry)  # as many ids as strings, in the same rows
                assert ids.offsets()[0].tolist() == outer
                assert ids.values().tolist() == [int(kv.ids.farm([each])[0]) for each in strings]
        found[size] = rows
    assert found[4] == found[1]
    assert found[4]["word"] == [[b"ab"], [], [b""], [b"cd"]]
    assert found[4]["bytes"] == [[b"\xff\x00"], [b""], [b"x"], [b"yy"]]
    assert found[4]["words"] == [[b"a", b"bc"], [], [], [b"", b"d"]]


def test_a_position_survives_and_workers_have_shares(files):
    data = dataset(files)
    iterator = iter(data)
    for _ in range(2):
        next(iterator)
    state = data.dump_io_state()
    rest = dataset(files)
    rest.load_io_state(state)
    assert batches(rest)[0]["user"].values().tolist() == list(range(16, 24))
    assert dataset(files, save_interval=None).dump_io_state() is None
    shares = [dataset(files, worker_idx=i, worker_num=3) for i in range(3)]
    for share in shares:
        next(iter(share))
    joined = merge([share.dump_io_state() for share in shares])  # to another number of workers
    users = [user for i in range(2) for user in _rest_of(files, i, 2, joined)]
    seen = {user for i in range(3) for user in _first_of(files, i, 3)}
    assert sorted([*users, *seen]) == list(range(RECORDS))


def _rest_of(files, index, count, state):
    share = dataset(files, worker_idx=index, worker_num=count)
    share.load_io_state(state)
    return [user for batch in batches(share) for user in batch["user"].values().tolist()]


def _first_of(files, index, count):
    return batches(dataset(files, worker_idx=index, worker_num=count))[0]["user"].values().tolist()


def test_training_is_that_of_a_karvan_trainer(files, tmp_path, capsys):
    trainer = make(files, tmp_path / "run", train_epoch=2)
    trainer.train()
    lines = re.findall(
        r"<gstep=(\d+)> <lstep=(\d+)> .* <epoch=(\d)> <loss=[\d.]+> <mean=", capsys.readouterr().out
    )
    assert "mean" in trainer.karvan_trainer.history  # what the model has reported
    assert lines == [("2", "2", "0"), ("4", "4", "0"), ("6", "6", "1"), ("8", "8", "1"), ("10", "10", "1")]

    class Native(nn.Module):
        def __init__(self):
            super().__init__()
            init = kv.init.Normal(std=0.1)
            torch.manual_seed(3)
            self.engine = kv.EmbeddingEngine(
                {
                    "user": kv.Table(4, init=init),
                    "items": kv.Table(4, init=init, combiner="mean"),
                },
                seed=3,
            )
            self.net = nn.Linear(10, 1)

        def forward(self, batch):
            made = self.engine(batch)
            return self.net(torch.cat([made["user"], made["items"], made["dense"]], 1))

    native = Native()
    data = kv.data.read(
        str(files),
        8,
        columns=[
            kv.data.Fixed("label", [0.0]),
            kv.data.Fixed("dense", [1.0, 2.0], 2),
            kv.data.Varlen("user"),
            kv.data.Varlen("items"),
        ],
    )
    dense = torch.optim.Adam(native.parameters(), lr=0.05)
    kv.Trainer(
        native,
        lambda output, batch: nn.functional.binary_cross_entropy_with_logits(output[:, 0], batch["label"]),
        dense_optimizer=dense,
        sparse_optimizer=kv.optim.AdamW(native.engine, lr=0.05),
        scheduler=torch.optim.lr_scheduler.StepLR(dense, 2),
        progress="none",
    ).fit(data, epochs=2)
    assert state(trainer.model) == state(native)


def test_a_run_that_stopped_continues_and_keeps_some_checkpoints(files, tmp_path):
    whole = make(files, tmp_path / "whole")
    whole.train()
    make(files, tmp_path / "run", train_steps=3, save_steps=1, max_to_keep=2).train()
    assert [one.step for one in kv.Checkpoints(tmp_path / "run").list()] == [2, 3]
    rest = make(files, tmp_path / "run", save_steps=None)
    rest.train()
    assert rest.karvan_trainer.step == 5
    assert state(rest.model) == state(whole.model)


def test_steps_are_batches_also_if_gradients_accumulate(files, tmp_path):
    trainer = make(files, tmp_path / "run", gradient_accumulation_steps=2, train_steps=4, log_steps=1)
    trainer.train()
    assert trainer.karvan_trainer.step == 2


class Users(Hook):
    """Notes the users of each training batch."""

    def __init__(self):
        self.seen = []

    def after_data(self, is_train=True, *args, data, **options):
        if is_train:
            self.seen.append(data["user"].values().tolist())


@pytest.mark.parametrize("steps", [2, 7])
@pytest.mark.parametrize("kind", ["files", "pairs"])
def test_train_steps_limit_each_epoch_which_starts_at_the_first_batch(files, tmp_path, steps, kind):
    def data():
        made = dataset(files)
        return made if kind == "files" else list(made)

    users = Users()
    trainer = make(files, tmp_path / "run", hooks=[users], data=data(), train_steps=steps, train_epoch=3)
    trainer.train()
    epoch = [batch["user"].values().tolist() for batch in batches(dataset(files))][:steps]
    assert users.seen == epoch * 3
    stopped, users.seen = Users(), []

    class Stop(Hook):
        def after_step(self, is_train, metrics, global_step):
            if global_step == len(epoch) + 1:
                first.karvan_trainer.stop("here")

    options = {"train_steps": steps, "train_epoch": 3, "save_steps": 1}
    first = make(files, tmp_path / "again", hooks=[stopped, Stop()], data=data(), **options)
    first.train()
    make(files, tmp_path / "again", hooks=[stopped], data=data(), **options).train()
    assert stopped.seen == epoch * 3


@pytest.mark.parametrize("steps", [2, 7])
def test_training_and_evaluation_take_turns_by_steps(files, tmp_path, steps):
    users = Users()
    trainer = make(files, tmp_path / "run", hooks=[users], eval_dataset=dataset(files), train_steps=steps)
    trainer.train_and_evaluate(epochs=3, eval_steps=1)
    epoch = [batch["user"].values().tolist() for batch in batches(dataset(files))][:steps]
    assert users.seen == epoch * 3


def test_a_model_bank_starts_a_model_by_names(files, tmp_path):
    first = make(files, tmp_path / "first", train_steps=1)
    first.train()
    second = make(files, tmp_path / "second")
    second.train()
    bank = [
        {"path": str(tmp_path / "first"), "load": ["*"]},
        {"path": str(tmp_path / "second"), "load": ["user", "net.bias"]},
        {"path": str(tmp_path / "none"), "ignore_error": True},
        {"path": str(tmp_path / "none"), "skip": True},
    ]
    started = make(files, tmp_path / "third", model_bank=bank, eval_dataset=dataset(files))
    started.evaluate(eval_steps=1)
    rows, dense = state(started.model)
    assert rows["user"] == state(second.model)[0]["user"]
    assert rows["items"] == state(first.model)[0]["items"]
    assert dense["weight"] == state(first.model)[1]["weight"]
    assert dense["bias"] == state(second.model)[1]["bias"]


def test_a_model_bank_has_the_models_names_first(files, tmp_path):
    """In `oname` the model's name is the key, and the checkpoint's the value."""
    saved = make(files, tmp_path / "saved")
    saved.train()
    tables, dense = state(saved.model)

    def started(name, **entry):
        bank = [{"path": str(tmp_path / "saved"), **entry}]
        trainer = make(files, tmp_path / name, model_bank=bank, eval_dataset=dataset(files))
        trainer.evaluate(eval_steps=1)
        return trainer.model

    rows, _ = state(started("one", load=["items"], oname=[{"items": "user"}]))
    assert rows == {"items": tables["user"], "user": []}
    rows, same = state(started("two", load=["*"], oname=[{"items@*": "user@*"}]))  # one for two tables
    assert rows == {"items": tables["user"], "user": tables["user"]}
    assert same == dense
    other = started("three", load=["net*"], exclude=["net.bias", "io_state"])
    assert state(other) == ({"items": [], "user": []}, {**dense, "bias": Model().net.bias.tolist()})
    model = started("four", load=["user*"], exclude=["user@*avg*"])
    found = filter_out_sparse_param(model)["user"].handle.snapshot()
    assert (len(found.keys), found.state.any()) == (RECORDS, False)
    before = filter_out_sparse_param(saved.model)["user"].handle.snapshot()
    assert before.state.any()

    class Renamed(Model):
        def __init__(self):
            super().__init__()
            self.deep = self.net
            del self.net

    model = Renamed()
    load_bank(model, [{"path": str(tmp_path / "saved"), "load": ["deep*"], "oname": [{"deep*": "net*"}]}])
    assert model.deep.weight.tolist() == dense["weight"]


@pytest.mark.parametrize(
    ("entry", "kind", "text"),
    [
        ({"load": ["carts"]}, ValueError, "expects names of the model, got 'carts'"),
        ({"load": ["user"], "oname": [{"user": "carts"}]}, CheckpointError, "'carts' for 'user'"),
        ({"load": ["io_state"]}, UnsupportedError, "data starts at its beginning"),
        ({"exclude": ["user@id"]}, UnsupportedError, "exclude the whole table"),
        ({"oname": [{"user*": "items"}]}, ValueError, "one '\\*' in both names or none"),
        ({"is_dynamic": True}, UnsupportedError, "before training alone"),
    ],
)
def test_a_model_bank_says_what_it_cannot_load(files, tmp_path, entry, kind, text):
    make(files, tmp_path / "saved", train_steps=1).train()
    with pytest.raises(kind, match=text):
        load_bank(Model(), [{"path": str(tmp_path / "saved"), **entry}])


def test_batches_without_transforms_are_lists_of_tables(files, tmp_path):
    class OfLists(Model):
        def forward(self, tables):
            assert isinstance(tables, list)
            return super().forward(tables[0])

    data = OrcDataset(8)
    data.add_path(files)
    data.fixedlen_feature("label", [0.0])
    data.fixedlen_feature("dense", [1.0, 2.0])
    data.varlen_feature("user")
    data.varlen_feature("items")
    model = OfLists()
    Trainer(
        model,
        TrainingArguments(output_dir=str(tmp_path / "run"), train_steps=2),
        data,
        dense_optimizers=(torch.optim.Adam(model.parameters()), None),
        sparse_optimizer=SparseAdamW(filter_out_sparse_param(model)),
    ).train()


def test_other_datasets_give_pairs(files, tmp_path):
    pairs = [(False, batch) for batch in batches(dataset(files))] + [(True, None)]
    trainer = make(files, tmp_path / "run", data=pairs)
    trainer.train()
    assert trainer.karvan_trainer.step == 5


@pytest.mark.parametrize(
    ("make_it", "text"),
    [
        (lambda: OrcDataset(8, is_compressed=True), "is_compressed=True is not supported"),
        (lambda: OrcDataset(8, ragged_format=False), "to_sparse"),
        (lambda: TrainingArguments(save_end=False), "save_end=False is not supported"),
        (lambda: TrainingArguments(window_iter=2), "windows"),
        (lambda: Trainer(nn.Linear(1, 1), saver=object()), "Trainer saver"),
        (lambda: Saver(filter_func=list), "save fewer tables or tensors"),
        (lambda: Loader("checkpoint", filter_func=list), "model_bank"),
        (lambda: Loader("checkpoint", parallel=2), "parallel=2"),
        (lambda: Trainer(nn.Linear(1, 1), hooks=[Clipping()]), "after_backward of Clipping"),
    ],
)
def test_options_without_a_counterpart_are_refused(make_it, text):
    with pytest.raises(UnsupportedError, match=text):
        make_it()


class Clipping(Hook):
    def after_backward(self, *args, **options):
        pass


@pytest.mark.parametrize(
    ("make_it", "text"),
    [
        (
            lambda: TrainingArguments(gradient_accumulation_steps=0),
            "gradient_accumulation_steps of at least 1",
        ),
        (lambda: TrainingArguments(train_epoch=0), "train_epoch of at least 1, got 0"),
        (lambda: HashTableFilterHook(0), "an interval of at least 1, got 0"),
        (lambda: AdmitHook("ReadOnly", {"count": 2}), "ReadOnly expects no parameters"),
        (lambda: OrcDataset(8, device="gpu"), "expects device 'cpu', 'cuda' or 'pin', got 'gpu'"),
        (lambda: OrcDataset(8).varlen_feature("a", hash_type="md5"), "'farm' or 'murmur', got 'md5'"),
        (lambda: declared_twice(), "Feature 'a' is declared twice, as Varlen"),
    ],
)
def test_wrong_arguments_are_errors(make_it, text):
    with pytest.raises(ValueError, match=text):
        make_it()


def declared_twice():
    data = OrcDataset(8)
    data.varlen_feature("a")
    data.varlen_feature("a")  # the same again
    data.fixedlen_feature("a", [0.0])


def test_a_checkpoint_is_read_by_the_names_of_its_tensors(files, tmp_path):
    trainer = make(files, tmp_path / "run")
    trainer.train()
    reader = CheckpointReader(str(tmp_path / "run"))
    names = reader.tensor_names()
    assert {"user@id", "user@embedding", "items@id", "items@embedding", "net.weight", "net.bias"} <= set(
        names
    )
    table = filter_out_sparse_param(trainer.model)["user"]
    found = zip(reader.read_tensor("user@id").tolist(), reader.read_tensor("user@embedding"), strict=True)
    vectors = dict(zip(table.ids().tolist(), table.embeddings(), strict=True))
    assert all(torch.equal(vectors.pop(key), vector) for key, vector in found)
    assert not vectors
    assert torch.equal(reader.read_tensor("net.weight"), trainer.model.net.weight)
    assert (reader.tensor_shape("user@embedding"), reader.tensor_dtype("user@id")) == (
        [RECORDS, 4],
        torch.int64,
    )
    with pytest.raises(KeyError, match="has no tensor 'user@other'"):
        reader.read_tensor("user@other")


def test_the_trainer_shows_what_it_was_given_and_names_what_it_lacks(files, tmp_path):
    trainer = make(files, tmp_path / "run", gradient_accumulation_steps=2)
    assert isinstance(trainer.dense_optimizer, torch.optim.Adam)
    assert trainer.dense_lr_scheduler.optimizer is trainer.dense_optimizer
    assert (type(trainer.sparse_optimizer), trainer.gradient_accumulation_steps) == (SparseAdamW, 2)
    with pytest.raises(UnsupportedError, match=r"Trainer\.accelerator is not supported"):
        _ = trainer.accelerator
    with pytest.raises(UnsupportedError, match=r"train_and_evaluate\(10\) .* epochs in RecIS 1.0"):
        trainer.train_and_evaluate(10)


@dataclass
class Column:
    """As RecIS's FeatureIOConf."""

    name: str
    varlen: bool = True
    hash_type: str | None = None
    hash_bucket_size: int = 0
    trans_int: bool = False
    dim: int = 1


def test_columns_are_declared_by_records_and_batches_changed_in_order(files):
    def note(word):
        return lambda tables: order.append(word) or tables

    order = []
    data = OrcDataset(RECORDS, transform_fn=[note("transform"), lambda tables: tables[0]])
    data.add_path(files)
    columns = [Column("label", varlen=False), Column("dense", False, dim=2), Column("word", True, "farm", 10)]
    data.parse_from(columns)
    data.map(note("map"))
    data.transform_ragged_batch(note("ragged"))
    (batch,) = batches(data)
    assert order == ["ragged", "map", "transform"]
    assert (batch["label"].shape, batch["dense"].shape) == ((RECORDS, 1), (RECORDS, 2))
    assert 0 <= int(batch["word"].values().min()) <= int(batch["word"].values().max()) < 10
