"""Checkpoints of PERSIA, written by hand from the facts, as checkpoints of Karvan."""

import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
import yaml
from foreign_files import mark_done, pack_entry, pack_list, sign_of, write_persia
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.checkpoint import CheckpointError, DamagedCheckpointError, import_persia
from karvan.checkpoint.foreign_persia import read_entries
from karvan.settings import SettingsError

STATES = {
    "Adam": lambda dim: 2 * dim,
    "Adagrad": lambda dim: dim,
    "Adagrad by row": lambda dim: 1,
    None: lambda dim: 0,
}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def config(folder, content=None, **options):
    path = folder / "embedding_config.yml"
    slots = {"slots_config": {"user": {"dim": 2}, "item": {"dim": 3}}}
    path.write_text(yaml.safe_dump({**(content or slots), **options}, sort_keys=False))
    return path


def rows_of(path, table):
    """Every row of a table: {key: (vector, state, last step)}."""
    found = {}
    for part in kv.checkpoint.Checkpoint(path).parts(table):
        for key, vector, state, count, last in zip(*part, strict=True):
            assert count == 1
            found[int(key)] = (vector.tolist(), state.tolist(), int(last))
    return found


@st.composite
def jobs(draw):
    """A configuration with groups, and the rows of each group."""
    bits = draw(st.integers(4, 16))
    kind = draw(st.sampled_from(list(STATES)))
    shared = draw(st.integers(0, 2))
    dims = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    slots = {f"alone{number}": {"dim": dim} for number, dim in enumerate(dims)}
    groups = {}
    for number in range(shared):
        dim = draw(st.integers(2, 5))
        groups[f"group{number}"] = [f"one{number}", f"two{number}"]
        slots |= {slot: {"dim": dim} for slot in groups[f"group{number}"]}
    order = [*groups, *(f"alone{number}" for number in range(len(dims)))]
    keys = st.integers(0, 2 ** (64 - bits) - 2)
    ids = {name: draw(st.lists(keys, unique=True, max_size=12)) for name in order}
    content = {"feature_index_prefix_bit": bits, "slots_config": slots, "feature_groups": groups}
    return content, kind, order, ids


@given(
    job=jobs(),
    servers=st.integers(1, 3),
    shards=st.integers(1, 3),
    free=st.lists(st.integers(0, 20), max_size=8),
    step=st.integers(0, 2**32 - 1),
)
def test_every_id_vector_and_state_is_imported(tmp_path_factory, job, servers, shards, free, step):
    folder = tmp_path_factory.mktemp("persia")
    content, kind, order, ids = job
    bits, expected, rows = content["feature_index_prefix_bit"], {}, []
    for number, name in enumerate(order):
        slots = content["feature_groups"].get(name, [name])
        dim = content["slots_config"][slots[0]]["dim"]
        vectors = numbers(len(ids[name]), dim, seed=number)
        states = numbers(len(ids[name]), STATES[kind](dim), seed=number + 100)
        expected[name] = {
            key: (vector.tolist(), state.tolist(), step)
            for key, vector, state in zip(ids[name], vectors, states, strict=True)
        }
        rows += [
            (sign_of(key, number, bits), vector, state)
            for key, vector, state in zip(ids[name], vectors, states, strict=True)
        ]
    np.random.default_rng(1).shuffle(rows)  # tables and dims are mixed in the files
    source = write_persia(folder / "dump", rows, servers=servers, shards=shards, free_after=free)
    made = import_persia(source, folder / "out", config(folder, content), step=step)
    has_rows = any(ids.values())
    assert [(table.name, table.rows) for table in made.tables] == [(name, len(ids[name])) for name in order]
    assert {table.optimizer for table in made.tables} == {kind if has_rows else None}
    for name in order:
        assert rows_of(folder / "out", name) == expected[name]
    assert kv.checkpoint.verify(folder / "out") == []
    assert kv.checkpoint.summary(folder / "out").step == step
    left = {path.name for path in folder.iterdir() if not path.name.startswith(".karvan-lock")}
    assert left == {"dump", "embedding_config.yml", "out"}


@given(
    sizes=st.lists(st.sampled_from([0, 0, 3, 3, 3, 5]), min_size=1, max_size=200),
    piece=st.integers(1, 400),
)
def test_entries_of_any_lengths_are_read_in_pieces_of_any_size(tmp_path_factory, sizes, piece):
    """0 is a free node; runs of one length are found together."""
    path = tmp_path_factory.mktemp("nodes") / "list.emb"
    entries, nodes = [], []
    for number, size in enumerate(sizes):
        if size:
            vector = numbers(size, seed=number)
            entries.append((number, vector.tolist()))
            nodes.append(struct.pack("<IIB", number, number, 1) + pack_entry(number, vector, ()))
        else:
            nodes.append(struct.pack("<IIB", 1, 0, 0))
    head = struct.pack("<QIIIII", len(entries), 1, 2, 3, len(nodes), len(nodes))
    path.write_bytes(head + b"".join(nodes))
    read = []
    found = []
    for part in read_entries(path, read.append, piece):
        found += [(int(entry["id"]), entry["values"].tolist()) for entry in part]
        assert all(entry["dim"] == len(entry["values"]) for entry in part)
    assert sorted(found) == entries
    assert sum(read) == path.stat().st_size
    for size in (len(head) + sum(map(len, nodes)) - 1, len(head), 5):
        path.write_bytes((head + b"".join(nodes))[:size])
        with pytest.raises(DamagedCheckpointError, match="got the end of the file"):
            list(read_entries(path, read.append, piece))
    path.write_bytes(head + b"".join(nodes) + b"x")
    with pytest.raises(
        DamagedCheckpointError, match="expected the end of the file after its nodes, got more"
    ):
        list(read_entries(path, read.append, piece))


@pytest.fixture
def dump(tmp_path):
    """Two servers with Adagrad's state, a dense net, and the path of a new checkpoint."""
    rows = [
        (sign_of(key, key % 2), numbers(2 + key % 2, seed=key), numbers(2 + key % 2, seed=-key % 99))
        for key in range(40)
    ]
    net = {"module.layer.weight": torch.arange(6.0).reshape(2, 3), "module.layer.bias": torch.ones(2)}
    return write_persia(tmp_path / "dump", rows, servers=2, shards=3, dense=net)


def test_dense_tensors_have_the_names_of_the_adapters_model(dump, tmp_path):
    made = import_persia(dump, tmp_path / "out", config(tmp_path))
    assert made.dense == ["net.layer.weight", "net.layer.bias"]
    state = kv.checkpoint.find(tmp_path / "out").state()
    assert torch.equal(state["model"]["net.layer.weight"], torch.arange(6.0).reshape(2, 3))
    assert state["origin"] == {"system": "PERSIA", "source": "dump"}
    import_persia(dump, tmp_path / "other", config(tmp_path), dense_prefix="model.")
    assert "model.layer.bias" in kv.checkpoint.find(tmp_path / "other").state()["model"]
    assert any("modulo 72057594037927935" in note for note in made.notes)
    assert any("dense optimizer" in note for note in made.notes)


def test_state_may_be_left_out_and_is_not_imported_then(dump, tmp_path):
    made = import_persia(dump, tmp_path / "out", config(tmp_path), optimizer_state=False)
    assert [(table.optimizer, table.state) for table in made.tables] == [(None, 0)] * 2
    assert any("optimizer state of rows was not imported" in note for note in made.notes)
    assert all(state == [] for _, state, _ in rows_of(tmp_path / "out", "user").values())


def test_a_dim_of_one_does_not_tell_the_optimizer(tmp_path):
    slots = config(tmp_path, {"slots_config": {"price": {"dim": 1}}})
    rows = [(sign_of(key, 0), numbers(1), numbers(1)) for key in range(3)]
    source = write_persia(tmp_path / "dump", rows)
    with pytest.raises(CheckpointError, match="Adagrad and Adagrad by row equally well where the dim is 1"):
        import_persia(source, tmp_path / "out", slots)
    made = import_persia(source, tmp_path / "out", slots, optimizer="adagrad_by_row")
    assert made.tables[0].optimizer == "Adagrad by row"
    with pytest.raises(CheckpointError, match="expected rows with the state of Adam, got floats of state"):
        import_persia(source, tmp_path / "again", slots, optimizer="adam")
    with pytest.raises(ValueError, match="optimizer expects one of adam, adagrad, adagrad_by_row, got 'sgd'"):
        import_persia(source, tmp_path / "again", slots, optimizer="sgd")


def test_rows_of_two_optimizers_come_without_state(tmp_path):
    rows = [(sign_of(key, 0), numbers(2), numbers(2 * (1 + key % 2))) for key in range(4)]
    source = write_persia(tmp_path / "dump", rows)
    text = "rows of 'user' with 2 floats of optimizer state, got 4; import them without optimizer state"
    with pytest.raises(CheckpointError, match=text):
        import_persia(source, tmp_path / "out", config(tmp_path))
    made = import_persia(source, tmp_path / "out", config(tmp_path), optimizer_state=False)
    assert made.tables[0].rows == 4


def test_rows_that_the_list_does_not_count_are_imported_and_reported(tmp_path):
    rows = [pack_entry(sign_of(key, 0), numbers(2), numbers(2)) for key in range(3)]
    source = write_persia(tmp_path / "dump", [])
    (source / "s0" / "replica_0_shard_0.emb").write_bytes(pack_list(rows, count=5))
    made = import_persia(source, tmp_path / "out", config(tmp_path))
    assert len(rows_of(tmp_path / "out", "user")) == 3
    assert any("replica_0_shard_0.emb says that it has 5 rows, and has 3" in note for note in made.notes)


def broken(dump, tmp_path, what):
    """Damage a dump; the text of the error that this is."""
    file = dump / "s1" / "replica_1_shard_2.emb"
    if what == "no marker":
        (dump / "embedding_dump_done").unlink()
        return "with the file 'embedding_dump_done', which PERSIA writes last, got none: it is incomplete"
    if what == "no marker of a server":
        (dump / "s1" / "embedding_dump_done").unlink()
        return "s1: expected a PERSIA checkpoint, with the file 'embedding_dump_done'"
    if what == "empty marker":
        (dump / "embedding_dump_done").write_text("")
        return "expected num_shards and num_internal_shards, got an empty file: an early version"
    if what == "marker of nonsense":
        (dump / "embedding_dump_done").write_text("num_shards: many\n")
        return "expected num_shards and num_internal_shards of at least 1, got"
    if what == "missing file":
        file.unlink()
        return r"s1: expected 3 files replica_1_shard_\*.emb, got no replica_1_shard_2.emb"
    if what == "missing server":
        for folder in (dump, dump / "s0", dump / "s1"):
            mark_done(folder, 3, 3)
        return "expected the folders of 3 servers, s0 to s2, got no s2"
    if what == "another number of servers":
        mark_done(dump / "s1", 3, 3)
        return "s1/embedding_dump_done: expected num_shards 2, got 3"
    if what == "another file":
        (dump / "s1" / "replica_1_shard_3.emb").write_bytes(b"")
        return "expected 3 files of rows, got also replica_1_shard_3.emb"
    if what == "truncated":
        file.write_bytes(file.read_bytes()[:-7])
        return "replica_1_shard_2.emb: expected 1 more nodes, got the end of the file"
    if what == "twice":
        rows = [pack_entry(sign_of(1, 0), numbers(2), numbers(2))] * 2
        file.write_bytes(pack_list(rows))
        return "expected each id of table 'user' once, got the id 1 twice"
    if what == "a node of another kind":
        file.write_bytes(pack_list([])[:-4] + struct.pack("<I", 1) + bytes(8) + b"\x07")
        return "expected a node that is used or free .1 or 0., got 7"
    if what == "no floats":
        file.write_bytes(pack_list([struct.pack("<IQQ", 0, 2, sign_of(1, 0))]))
        return "expected an entry with floats, got 0 of them"
    if what == "dense is code":
        torch.save({"model": torch.nn.Linear(2, 2)}, dump / "dense.pt")
        return "dense.pt: expected a file of torch.save with tensors and plain values alone"
    if what == "dense is damaged":
        (dump / "dense.pt").write_bytes(b"PK\x03\x04 nothing")
        return "dense.pt: expected a whole file of torch.save, got"
    assert what == "dense is a number"
    torch.save({"step": 3}, dump / "dense.pt")
    return "dense.pt: expected a state dict of tensors by name, got int as 'step'"


@pytest.mark.parametrize(
    "what",
    [
        "no marker",
        "no marker of a server",
        "empty marker",
        "marker of nonsense",
        "missing file",
        "missing server",
        "another number of servers",
        "another file",
        "truncated",
        "twice",
        "a node of another kind",
        "no floats",
        "dense is code",
        "dense is damaged",
        "dense is a number",
    ],
)
def test_what_is_not_whole_is_refused_and_nothing_is_left(dump, tmp_path, what):
    text = broken(dump, tmp_path, what)
    with pytest.raises(CheckpointError, match=text):
        import_persia(dump, tmp_path / "new" / "out", config(tmp_path))
    left = [path.name for path in (tmp_path / "new").rglob("*")] if (tmp_path / "new").exists() else []
    assert [name for name in left if not name.startswith(".karvan-lock")] == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"slots_config": {"user": {"dim": 2}}},
            "ids of the 1 feature groups of .* with the prefix 2: is it the",
        ),
        ({"slots_config": {"user": {"dim": 2}, "item": {"dim": 2}}}, "rows of 'item' of dim 2, as .* got 3"),
        ({"slots_config": {"item": {"dim": 3}, "user": {"dim": 2}}}, "rows of 'item' of dim 3, as .* got 2"),
        ({"feature_index_prefix_bit": 16}, "with the prefix 256"),
    ],
)
def test_the_configuration_of_another_job_is_refused(dump, tmp_path, change, text):
    with pytest.raises(CheckpointError, match=text):
        import_persia(dump, tmp_path / "out", config(tmp_path, **change))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"slots_config": {}}, "expected slots_config with slots"),
        ({"slots_config": {"user": {"dim": 0}}}, "expected slot 'user' with a dim of at least 1"),
        ({"slots_config": {"user": {"dim": 2}}, "feature_index_prefix_bit": 64}, "from 1 to 63, got 64"),
        (
            {"slots_config": {f"s{i}": {"dim": 2} for i in range(4)}, "feature_index_prefix_bit": 2},
            "has 4 feature groups, but feature_index_prefix_bit 2 tells only 3 apart",
        ),
        (
            {"slots_config": {"a": {"dim": 2}, "b": {"dim": 3}}, "feature_groups": {"both": ["a", "b"]}},
            "the slots of group 'both' share rows, but have dims",
        ),
        (
            {"slots_config": {"a": {"dim": 2}, "b": {"dim": 2}}, "feature_groups": {"b": ["a"]}},
            "'b' is both a slot and a feature group",
        ),
        ({"slots_config": {"a": {"dim": 2}}, "feature_groups": {"g": ["x"]}}, "expected slot 'x' with a dim"),
    ],
)
def test_a_wrong_configuration_is_refused(dump, tmp_path, content, text):
    with pytest.raises(SettingsError, match=text):
        import_persia(dump, tmp_path / "out", config(tmp_path, content))


def test_a_target_that_exists_is_refused(dump, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="expected a folder that does not exist yet"):
        import_persia(dump, tmp_path / "out", config(tmp_path))
    with pytest.raises(SettingsError, match="which does not exist"):
        import_persia(dump, tmp_path / "new", tmp_path / "nothing.yml")
    with pytest.raises(
        CheckpointError, match="expected the folder of a PERSIA checkpoint, got no such folder"
    ):
        import_persia(tmp_path / "nothing", tmp_path / "new", config(tmp_path))


def test_progress_ends_at_the_total(dump, tmp_path):
    seen = []
    import_persia(
        dump, tmp_path / "out", config(tmp_path), progress=lambda done, total: seen.append((done, total))
    )
    assert {total for _, total in seen} == {sum(done for done, _ in seen)}
    assert all(a <= b for a, b in pairwise(np.cumsum([done for done, _ in seen])))
