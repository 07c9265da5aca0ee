"""Checkpoints of RecIS, written with stock safetensors from the facts, as checkpoints of Karvan."""

import json
import sys

import numpy as np
import pytest
import torch
from cluster_helpers import serving
from foreign_files import write_recis
from forked_programs import run_forked
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.checkpoint import CheckpointError, DamagedCheckpointError, import_recis
from karvan.checkpoint.foreign_recis import read_recis
from karvan.checkpoint.foreign_writing import no_progress, write

OPTIMIZERS = {
    "sparse_adam_": ("Adam", ["exp_avg", "exp_avg_sq"]),
    "sparse_adamw_": ("Adam", ["exp_avg", "exp_avg_sq"]),
    "sparse_adamw_tf_": ("Adam", ["exp_avg", "exp_avg_sq"]),
    "sparse_adagrad_": ("Adagrad", ["state_sum"]),
    "sparse_row_wise_adagrad_": ("Adagrad by row", ["state_sum"]),
    "": (None, []),
}


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(keys, dim, prefix="sparse_adam_", dtype=torch.float32, seed=0, filtered=False):
    kind, slots = OPTIMIZERS[prefix]
    width = 1 if kind == "Adagrad by row" else dim
    made = {"id": keys, "embedding": numbers(len(keys), dim, seed=seed, dtype=dtype)}
    for number, slot in enumerate(slots):
        made[f"{prefix}{slot}"] = numbers(len(keys), width, seed=seed + 1 + number, dtype=dtype)
    if filtered:
        made["step_filter"] = torch.arange(len(keys)).reshape(-1, 1)
    return made


def rows_of(path, name):
    """Every row of a table: {key: (vector, state, last step)}."""
    found = {}
    for part in kv.checkpoint.Checkpoint(path).parts(name):
        for key, vector, state, _, last in zip(*part, strict=True):
            found[int(key)] = (vector.tolist(), state.tolist(), int(last))
    return found


def expected_rows(slots, prefix, step):
    names = [f"{prefix}{slot}" for slot in OPTIMIZERS[prefix][1]]
    last = slots.get("step_filter")
    return {
        key: (
            slots["embedding"][at].float().tolist(),
            [value for name in names for value in slots[name][at].float().tolist()],
            step if last is None else int(last[at]),
        )
        for at, key in enumerate(slots["id"])
    }


KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=20)


@given(
    keys=st.lists(KEYS, min_size=1, max_size=3),
    dims=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    prefixes=st.lists(st.sampled_from(list(OPTIMIZERS)), min_size=3, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    filtered=st.booleans(),
    ranks=st.integers(1, 4),
    files=st.integers(1, 3),
    step=st.integers(0, 2**32 - 1),
)
def test_every_id_vector_and_state_is_imported(
    tmp_path_factory, keys, dims, prefixes, dtype, filtered, ranks, files, step
):
    folder = tmp_path_factory.mktemp("recis")
    tables = {
        f"item.{number}": table(ids, dims[number], prefixes[number], dtype, number * 10, filtered)
        for number, ids in enumerate(keys)
    }
    extra = {"global_step": torch.tensor([step])}
    source = write_recis(folder / "ckpt", tables, ranks=ranks, files=files, extra=extra, dense={})
    made = import_recis(source, folder / "out")
    assert made.step == step
    for number, (name, slots) in enumerate(tables.items()):
        kind, _ = OPTIMIZERS[prefixes[number]]
        found = made.tables[number]
        assert (found.name, found.rows, found.dim) == (name, len(slots["id"]), dims[number])
        assert (found.optimizer, found.dtype) == (kind, str(dtype).removeprefix("torch."))
        assert rows_of(folder / "out", name) == expected_rows(slots, prefixes[number], step)
    assert kv.checkpoint.verify(folder / "out") == []
    left = {path.name for path in folder.iterdir() if not path.name.startswith(".karvan-lock")}
    assert left == {"ckpt", "out"}


@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, min_size=30, max_size=60),
    rows=st.integers(6, 40),
)
def test_a_large_table_has_several_parts(tmp_path_factory, keys, rows):
    """Parts are those of `kv.checkpoint.save`: found by hash, in its order."""
    folder = tmp_path_factory.mktemp("parts")
    slots = table(keys, 4)
    source = write_recis(folder / "ckpt", {"item": slots}, ranks=3)
    contents = read_recis(source, optimizer_state=True, betas=(0.9, 0.999), dense_prefix="")
    write(contents, folder / "out", no_progress, part_bytes=rows * 64)
    entry = kv.checkpoint.Checkpoint(folder / "out").manifest.tables["item"]
    assert len(entry.parts) == 1 << max(0, -(-len(keys) * 64 // (rows * 64)) - 1).bit_length()
    assert rows_of(folder / "out", "item") == expected_rows(slots, "sparse_adam_", 0)
    engine = kv.EmbeddingEngine({"item": kv.Table(4)})
    kv.optim.Adam(engine)
    kv.checkpoint.find(folder / "out").load(engine)
    snapshot = engine.table("item").snapshot()
    order = [int(key) for part in kv.checkpoint.Checkpoint(folder / "out").parts("item") for key in part.keys]
    assert order == snapshot.keys.tolist()
    for key in keys[:5]:
        row = kv.checkpoint.row(folder / "out", "item", key)
        assert row.vector.tolist() == slots["embedding"][keys.index(key)].tolist()


def powers(steps, betas=(0.9, 0.999), prefix="sparse_adam_", dtype=torch.float32):
    """What RecIS saves beside rows: products of float32 numbers, and a step that it does not count."""
    values = [torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype)]
    for _ in range(steps):
        values = [value * beta for value, beta in zip(values, betas, strict=True)]
    made = {f"{prefix}beta{number + 1}": value for number, value in enumerate(values)}
    return {**made, f"{prefix}step": torch.zeros(1, dtype=torch.int64)}


@pytest.mark.parametrize("steps", [0, 1, 7, 500, 3000])
def test_adams_steps_are_found_by_the_powers_of_its_betas(tmp_path, steps):
    source = write_recis(tmp_path / "ckpt", {"item": table([1, 2], 2)}, scalars=powers(steps))
    import_recis(source, tmp_path / "out")
    state = kv.checkpoint.find(tmp_path / "out").state()
    assert state["table_steps"]["item"] == pytest.approx(steps, rel=1e-3 if steps > 600 else 0)


def test_other_betas_have_to_be_given(tmp_path):
    source = write_recis(tmp_path / "ckpt", {"item": table([1, 2], 2)}, scalars=powers(9, (0.8, 0.99)))
    text = "expected the powers of Adam's betas 0.9 and 0.999 after some steps, got 0.134218 and 0.913517"
    with pytest.raises(CheckpointError, match=text):
        import_recis(source, tmp_path / "out")
    import_recis(source, tmp_path / "out", betas=(0.8, 0.99))
    assert kv.checkpoint.find(tmp_path / "out").state()["table_steps"] == {"item": 9}
    import_recis(source, tmp_path / "other", optimizer_state=False)
    assert "table_steps" not in kv.checkpoint.find(tmp_path / "other").state()


def test_dense_tensors_optimizer_and_step_come_along(tmp_path):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    plain = optimizer.state_dict()
    names = ["weight", "bias"]
    named = {  # as RecIS's NamedAdam saves it
        "state": {names[number]: entry for number, entry in plain["state"].items()},
        "param_groups": [{**plain["param_groups"][0], "params": names, "param_names": names}],
    }
    dense = {**net.state_dict(), "item@filter_global_step": torch.tensor([3])}
    for number, saved in enumerate((plain, named)):
        extra = {"global_step": 12, ("dense_optimizer", "recis.dense.optim.")[number]: saved}
        source = write_recis(tmp_path / f"ckpt{number}", {"item": table([1], 2)}, dense=dense, extra=extra)
        made = import_recis(source, tmp_path / f"out{number}", dense_prefix="net.")
        assert made.dense == ["net.weight", "net.bias"]
        found = kv.checkpoint.find(tmp_path / f"out{number}")
        state = found.state()
        assert (found.step, found.origin) == (12, "RecIS")
        assert torch.equal(state["model"]["net.weight"], net.weight)
        other = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
        other.load_state_dict(state["dense_optimizer"])
        assert other.param_groups[0]["lr"] == 0.02
        for one, its in zip(other.state.values(), optimizer.state.values(), strict=True):
            assert torch.equal(one["exp_avg"], its["exp_avg"])
            assert one["step"] == its["step"] == 1


def test_the_newest_of_an_output_dir_is_taken(tmp_path):
    for number in (1, 2):
        write_recis(tmp_path / "run" / f"ckpt_{number}", {"item": table([number], 2)})
    (tmp_path / "run" / "checkpoint").write_text("ckpt_1\nckpt_2\n")
    import_recis(tmp_path / "run", tmp_path / "out")
    assert list(rows_of(tmp_path / "out", "item")) == [2]
    (tmp_path / "run" / "checkpoint").write_text("../elsewhere\n")
    with pytest.raises(CheckpointError, match=r"expected names of folders beside it, got '\.\./elsewhere'"):
        import_recis(tmp_path / "run", tmp_path / "other")


class Reader:
    """An object of a program's own code, as RecIS's window datasets are in extra.pt."""


def test_code_in_extra_is_not_run_and_the_step_may_be_given(tmp_path):
    extra = {"global_step": 12, "train_window_io": Reader()}
    dense = {"weight": torch.ones(2), "_extra_state": {"kind": "x"}}
    source = write_recis(tmp_path / "ckpt", {"item": table([1], 2)}, extra=extra, dense=dense)
    made = import_recis(source, tmp_path / "out")
    assert (made.step, made.dense) == (0, ["weight"])
    assert any("extra.pt has objects of RecIS's code, which does not run here" in note for note in made.notes)
    assert "model.pt: not imported, because it is not a tensor: '_extra_state'." in made.notes
    assert import_recis(source, tmp_path / "other", step=12).step == 12
    with pytest.raises(ValueError, match="step expects a number from 0 to"):
        import_recis(source, tmp_path / "third", step=-1)


def test_slots_of_other_optimizers_are_left_and_reported(tmp_path):
    slots = {**table([1, 2], 2, ""), "sparse_ftrl_z": numbers(2, 2)}
    made = import_recis(write_recis(tmp_path / "ckpt", {"item": slots}), tmp_path / "out")
    assert made.tables[0].optimizer is None
    assert "Table 'item': 'sparse_ftrl_z' not imported; it starts from its initial values." in made.notes
    assert any("no model.pt" in note for note in made.notes)
    assert any("the step is 0" in note for note in made.notes)


def test_ids_that_recis_has_cut_are_reported_and_found_by_their_remainder(tmp_path):
    """RecIS merges tables: it keeps the lower 52 bits of an id."""
    ids = torch.randint(-(2**63), 2**63 - 1, (40,), generator=torch.Generator().manual_seed(1))
    slots = table([key % 2**52 for key in ids.tolist()], 3)
    source = write_recis(tmp_path / "ckpt", {"hashed": slots, "plain": table([0, 2**40], 3)})
    notes = [note for note in import_recis(source, tmp_path / "out").notes if "cut to 52 bits" in note]
    assert len(notes) == 1
    assert notes[0].startswith("Ids of 'hashed' seem to be cut")
    engine = kv.EmbeddingEngine({"hashed": kv.Table(3), "plain": kv.Table(3)})
    kv.checkpoint.find(tmp_path / "out").load(engine)
    data = kv.FeatureEngine([kv.Feature("hashed").mod(2**52), kv.Feature("plain")])
    batch = data(kv.Batch({"hashed": ids, "plain": torch.zeros(40, dtype=torch.int64)}))
    assert torch.equal(engine.eval()(batch)["hashed"], slots["embedding"])
    whole = write_recis(tmp_path / "whole", {"hashed": table(ids.tolist(), 3)})
    assert not any("cut to" in note for note in import_recis(whole, tmp_path / "other").notes)


# A process of its own: what else a process of tests allocates meanwhile would count.
PEAK = """
import sys, tracemalloc
from pathlib import Path
from karvan.checkpoint import foreign_recis as recis
from karvan.checkpoint.foreign_writing import no_progress, write

recis.PIECE_ROWS = 1000
contents = recis.read_recis(Path(sys.argv[1]), optimizer_state=True, betas=(0.9, 0.999), dense_prefix="")
tracemalloc.start()
write(contents, Path(sys.argv[2]), no_progress, part_bytes=200_000)
print(tracemalloc.get_traced_memory()[1])
"""


def test_a_table_is_never_in_memory_as_a_whole(tmp_path):
    count, dim = 60_000, 16
    source = write_recis(tmp_path / "ckpt", {"item": table(list(range(count)), dim)}, ranks=2)
    ran = run_forked([sys.executable, "-c", PEAK, str(source), str(tmp_path / "out")])
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < count * (8 + 3 * 4 * dim) / 3
    assert kv.checkpoint.summary(tmp_path / "out").tables[0].rows == count


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def break_index(folder):
    (folder / "index").unlink()


def break_names(folder):
    (folder / "tensorkey.json").unlink()


def break_name(folder):
    edit_json(folder / "tensorkey.json", lambda names: names.update({"item.id/part_0_2": "item-id"}))


def break_file(folder):
    next(folder.glob("*.safetensors")).unlink()


def break_length(folder):
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-3])


def break_rank(folder):
    edit_json(
        folder / "index",
        lambda index: [
            index["block_index"].pop(name) for name in list(index["block_index"]) if "part_1" in name
        ],
    )


def break_block(folder):
    edit_json(folder / "index", lambda index: index["block_index"].update({"item.other/part_0_2": 0}))


def break_step(folder):
    torch.save({"global_step": "many"}, folder / "extra.pt")


def break_optimizer(folder):
    torch.save(
        {"global_step": 1, "dense_optimizer": {"state": {5: {}}, "param_groups": [{"params": [0]}]}},
        folder / "extra.pt",
    )


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (break_index, "with the file 'index', which RecIS writes last, got none: it is incomplete"),
        (break_names, "tensorkey.json: expected a file that can be read, got No such file"),
        (break_name, "expected names like TABLE@SLOT.BEGIN@END@SIZE, got 'item-id' for 'item.id/part_0_2'"),
        (break_file, "expected the file 'model-.*safetensors', which its index lists, got none"),
        (break_length, r"safetensors: expected \d+ bytes, as the header says, got"),
        (
            break_rank,
            "the parts of all ranks of table 'item', up to slice 65536, got none that begins at slice 32768",
        ),
        (break_block, "expected tensor 'item.other/part_0_2' in model-.*, got none"),
        (break_step, "extra.pt: expected a global_step of at least 0, got 'many'"),
        (break_optimizer, "extra.pt: expected the state dict of a torch optimizer, got dict"),
    ],
)
def test_what_is_not_whole_is_refused_and_nothing_is_left(tmp_path, damage, text):
    source = write_recis(tmp_path / "ckpt", {"item": table(list(range(10)), 3)}, ranks=2)
    damage(source)
    with pytest.raises(CheckpointError, match=text):
        import_recis(source, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        (
            {"embedding": numbers(2, 3).double()},
            "vectors of float32, float16 or bfloat16, got F64 of shape .3.",
        ),
        ({"embedding": numbers(2, 3).to(torch.int8)}, "got I8 of shape"),
        ({"embedding": numbers(2, 3, 4)}, r"got F32 of shape \[3, 4\] for each row"),
        (
            {"sparse_adam_exp_avg": numbers(2, 2)},
            "slot 'sparse_adam_exp_avg' of table 'item' with 3 floats a row",
        ),
        ({"sparse_adagrad_state_sum": numbers(2, 3)}, "has the state of several optimizers"),
    ],
)
def test_tables_that_have_no_counterpart_are_refused_by_name(tmp_path, slots, text):
    source = write_recis(tmp_path / "ckpt", {"item": {**table([1, 2], 3), **slots}})
    with pytest.raises(CheckpointError, match=text):
        import_recis(source, tmp_path / "out")


def test_an_id_that_two_ranks_have_saved_is_damage(tmp_path):
    source = write_recis(
        tmp_path / "ckpt", {"item": table([4, 7], 3)}, ranks=2, owner=lambda key, ranks: key % 2
    )
    other = write_recis(tmp_path / "other", {"item": table([4], 3)}, ranks=2, owner=lambda key, ranks: 1)
    name = "model-000001-of-000002.safetensors"
    (source / name).write_bytes((other / name).read_bytes())
    with pytest.raises(DamagedCheckpointError, match="each id of table 'item' once, got the id 4 twice"):
        import_recis(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"item": kv.Table(3)})
        self.net = torch.nn.Linear(3, 1)

    def forward(self, batch):
        return self.net(self.embeddings(batch)["item"])[:, 0]


def test_a_trainer_evaluates_it_and_refuses_to_continue_it(tmp_path):
    keys = [5, -6, 2**62]
    slots, net = table(keys, 3, "sparse_adagrad_"), torch.nn.Linear(3, 1)
    source = write_recis(
        tmp_path / "ckpt", {"item": slots}, dense=net.state_dict(), extra={"global_step": 8}, ranks=2
    )
    import_recis(source, tmp_path / "out", dense_prefix="net.")
    model = Model()
    trainer = kv.Trainer(
        model,
        kv.losses.MeanSquaredError(),
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD,
    )
    trainer.load(tmp_path / "out")
    assert model.embeddings.step == 8
    model.eval()
    with torch.no_grad():
        assert torch.equal(model({"item": torch.tensor(keys)}), net(slots["embedding"])[:, 0])
    with (
        kv.TrainContext(model, sparse_optimizer=kv.optim.Adagrad(lr=0.1), frozen="net.*") as ctx,
        pytest.raises(ValueError, match="was imported from RecIS, so it has no run to continue"),
    ):
        ctx.load(tmp_path / "out")


@pytest.mark.parametrize("with_steps", [True, False])
def test_a_warm_start_continues_adam_where_it_was(tmp_path, with_steps):
    """One more step is that of the formula with the imported moments and number of steps."""
    slots, steps, betas, lr, eps = table([7], 3), 20, (0.9, 0.999), 0.05, 1e-8
    slots["sparse_adam_exp_avg_sq"] = slots["sparse_adam_exp_avg_sq"].abs()
    source = write_recis(tmp_path / "ckpt", {"item": slots}, scalars=powers(steps))
    import_recis(source, tmp_path / "out")
    model = Model()
    optimizer = kv.optim.Adam(model, lr=lr, betas=betas, eps=eps)
    report = kv.checkpoint.warm_start(
        model, tmp_path / "out", sparse_optimizer=optimizer if with_steps else None
    )
    assert report.rows == {"item": 1}
    out = model.embeddings({"item": torch.tensor([7])})["item"]
    gradient = torch.tensor([[1.0, -2.0, 0.5]])
    out.backward(gradient)
    optimizer.step()
    t = (steps if with_steps else 0) + 1
    g = gradient[0].numpy().astype(np.float64)
    m = betas[0] * slots["sparse_adam_exp_avg"][0].numpy() + (1 - betas[0]) * g
    v = betas[1] * slots["sparse_adam_exp_avg_sq"][0].numpy() + (1 - betas[1]) * g * g
    alpha = lr * np.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)
    expected = slots["embedding"][0].numpy() - alpha * m / (np.sqrt(v) + eps)
    row = model.embeddings.table("item").snapshot()
    np.testing.assert_allclose(row.vectors[0], expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(row.state[0], [*m, *v], rtol=2e-5, atol=1e-6)
    assert optimizer.table_steps() == {"item": t}


@pytest.mark.parametrize("load", [lambda path, engine: kv.checkpoint.find(path).load(engine), None])
def test_parameter_servers_load_their_rows(tmp_path, load):
    keys = list(range(-50, 50))
    slots = table(keys, 3, "sparse_adagrad_")
    import_recis(write_recis(tmp_path / "ckpt", {"item": slots}, ranks=3), tmp_path / "out")
    with serving(2) as addresses:
        kv.connect("remote", servers=addresses)
        engine = kv.EmbeddingEngine({"item": kv.Table(3)})
        kv.optim.Adagrad(engine, lr=0.1)
        if load is not None:
            load(tmp_path / "out", engine)
        else:
            kv.checkpoint.warm_start(engine, tmp_path / "out")
        rows = engine.table("item").snapshot()
    found = {
        int(key): (vector.tolist(), state.tolist(), 0)
        for key, vector, state in zip(rows.keys, rows.vectors, rows.state, strict=True)
    }
    assert found == expected_rows(slots, "sparse_adagrad_", 0)


def test_a_target_at_a_url_is_written_there(tmp_path, store):
    slots = table(list(range(-40, 40)), 3)
    source = write_recis(tmp_path / "ckpt", {"item": slots}, ranks=2)
    url = store.url("imported")
    import_recis(source, url)
    assert rows_of(url, "item") == expected_rows(slots, "sparse_adam_", 0)
    assert kv.checkpoint.verify(url) == []
    with pytest.raises(CheckpointError, match="expected a folder that does not exist yet"):
        import_recis(source, url)
    with pytest.raises(ValueError, match="Expected the path of a file of this machine, got the URL s3://"):
        import_recis(url, tmp_path / "other")


def test_a_damaged_import_leaves_nothing_at_a_url(tmp_path, store):
    source = write_recis(tmp_path / "ckpt", {"item": table([4, 7], 3)}, ranks=2, owner=lambda key, ranks: 0)
    other = write_recis(tmp_path / "other", {"item": table([4], 3)}, ranks=2, owner=lambda key, ranks: 1)
    name = "model-000001-of-000002.safetensors"
    (source / name).write_bytes((other / name).read_bytes())
    with pytest.raises(DamagedCheckpointError, match="twice"):
        import_recis(source, store.url("damaged"))
    with pytest.raises(CheckpointError, match="no such folder"):
        kv.checkpoint.find(store.url("damaged"))
