"""What is saved comes back bit for bit, in files that others can read."""

import json
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_helpers import OPTIMIZERS, Model, contents, same_rows, same_tree
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import karvan as kv
from karvan.checkpoint.safetensors_file import DTYPES
from karvan.checkpoint.state_tree import as_tensor, decode, encode

VARIANTS = {
    "plain": {},
    "bf16": {"dtype": torch.bfloat16},
    "f16": {"dtype": torch.float16},
    "min count": {"admit": kv.admission.MinCount(2, slots=64)},
    "probability": {"admit": kv.admission.Probability(0.5)},
    "probability each": {"admit": kv.admission.Probability(0.2, each=True)},
    "lru": {"evict": kv.eviction.LRU(50)},
    "lfu": {"evict": kv.eviction.LFU(50)},
    "age": {"evict": kv.eviction.Age(3, every=1)},
    "norm": {"evict": kv.eviction.Norm(0.01, every=2)},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on_as_if_it_had_never_stopped(tmp_path, optimizer):
    _check_goes_on(tmp_path, optimizer, {})


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_table_goes_on_as_if_it_had_never_stopped(tmp_path, variant):
    _check_goes_on(tmp_path, "Adam", VARIANTS[variant])


def _check_goes_on(tmp_path, optimizer, options):
    # An odd dim: halves then end in the middle of a word.
    torch.manual_seed(1)
    straight = Model(5, optimizer, **options).train_on(10, seed=1)
    kv.checkpoint.save(tmp_path / "c", straight.state(), straight, step=10, part_bytes=2000)
    resumed = Model(5, optimizer, **options).train_on(3, seed=9)  # what it holds is replaced
    resumed.restore(kv.checkpoint.Checkpoint(tmp_path / "c").load(resumed))
    assert same_rows(straight.rows(), resumed.rows())
    for model in (straight, resumed):
        model.train_on(10, seed=2)
    assert same_rows(straight.rows(), resumed.rows())
    assert same_tree(straight.state(), resumed.state())


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
def test_vectors_lie_in_their_own_dtype_for_any_safetensors_reader(tmp_path, dtype, size):
    model = Model(8, "Adam", dtype=dtype).train_on(4)
    made = kv.checkpoint.save(tmp_path / "c", model.state(), model, part_bytes=3000)
    rows = model.rows()["user"]
    files = [made.path / part.name for part in made.manifest.tables["user"].parts]
    assert len(files) == 4
    read = [load_file(file) for file in files]
    joined = {name: torch.cat([part[name] for part in read]) for name in read[0]}
    assert joined["vectors"].dtype == dtype
    assert joined["vectors"].element_size() == size
    assert np.array_equal(joined["vectors"].float().numpy(), rows.vectors)
    assert np.array_equal(joined["state"].numpy(), rows.state)
    assert np.array_equal(joined["keys"].numpy(), rows.keys)
    assert np.array_equal(joined["counts"].numpy(), rows.counts)
    assert np.array_equal(joined["last_steps"].numpy(), rows.last_steps)
    assert all((8 + struct.unpack("<Q", file.read_bytes()[:8])[0]) % 64 == 0 for file in files)
    dense = load_file(made.path / "dense.safetensors")
    assert torch.equal(dense["model/net.weight"], model.net.weight)


def test_parts_are_a_power_of_two_and_no_larger_than_asked_for(tmp_path):
    model = Model().train_on(20, keys=2000, size=256)
    for part_bytes in (1 << 20, 20_000, 5_000):
        made = kv.checkpoint.save(tmp_path / str(part_bytes), {}, model, part_bytes=part_bytes)
        parts = made.manifest.tables["user"].parts
        assert len(parts).bit_count() == 1
        assert max(part.rows for part in parts) * made.manifest.tables["user"].row_bytes < 1.3 * part_bytes
        assert sum(part.rows for part in parts) == model.embeddings.table("user").rows


def test_the_manifest_tells_everything_and_its_checksum_can_be_checked_by_anyone(tmp_path):
    model = Model().train_on(3)
    made = kv.checkpoint.save(tmp_path / "c", model.state(), model, step=3, metrics={"auc": 0.75})
    text = (made.path / "manifest.json").read_bytes()
    first, rest = text.split(b"\n", 1)
    assert f"crc32:{zlib.crc32(rest):08x}".encode() in first
    content = json.loads(text)
    assert (content["format"], content["version"], content["mix"]) == ("karvan-checkpoint", 1, 1)
    assert (content["kind"], content["step"], content["karvan"]) == ("full", 3, kv.__version__)
    assert content["metrics"] == {"auc": 0.75}
    user = content["tables"]["user"]
    assert (user["dim"], user["dtype"], user["optimizer"], user["state"]) == (4, "float32", "Adagrad", 4)
    for file in [content["dense"], *user["parts"]]:
        data = (made.path / file["name"]).read_bytes()
        assert (len(data), f"crc32:{zlib.crc32(data):08x}") == (file["bytes"], file["checksum"])


def test_table_names_of_any_kind_are_fine(tmp_path):
    names = ["a/b", "..", ".hidden", "ключ", "x" * 300, "a b%", "A\\B", "1" * 220 + "/"]
    engine = kv.EmbeddingEngine({name: kv.Table(2) for name in names})
    engine({name: torch.tensor([i]) for i, name in enumerate(names)})
    kv.checkpoint.save(tmp_path / "c", {}, engine)
    other = kv.EmbeddingEngine({name: kv.Table(2) for name in names})
    kv.checkpoint.find(tmp_path / "c").load(other)
    assert [other.table(name).keys().tolist() for name in names] == [[i] for i in range(len(names))]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_the_same_state_gives_the_same_files(tmp_path):
    model = Model().train_on(3)
    a, b = (kv.checkpoint.save(tmp_path / name, model.state(), model) for name in "ab")
    manifest = "manifest.json"
    assert {k: v for k, v in contents(a.path).items() if k != manifest} == {
        k: v for k, v in contents(b.path).items() if k != manifest
    }


def test_an_optimizer_that_is_not_there_is_left_out_and_another_one_is_an_error(tmp_path):
    model = Model(optimizer="Adam").train_on(3)
    made = kv.checkpoint.save(tmp_path / "c", model.state(), model)
    for_evaluation = Model(optimizer=None)
    made.load(for_evaluation)
    assert np.array_equal(for_evaluation.rows()["user"].vectors, model.rows()["user"].vectors)
    other = Model(optimizer="Adagrad").train_on(1)
    before = other.rows()
    with pytest.raises(kv.checkpoint.CheckpointError, match="'user' with 4 floats of Adagrad state, got 8"):
        made.load(other)
    assert same_rows(before, other.rows())
    bare = kv.checkpoint.save(tmp_path / "bare", {}, for_evaluation)
    bare.load(other)
    assert np.array_equal(other.rows()["user"].vectors, model.rows()["user"].vectors)
    assert not other.rows()["user"].state.any()


_tensors = st.builds(
    lambda dtype, shape, seed: (
        torch.randint(
            0, 255, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        .view(dtype)
        .reshape(shape)
        if dtype is not torch.bool
        else torch.rand(shape) > 0.5
    ),
    st.sampled_from(list(DTYPES)),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 100),
)
_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | _tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers() | st.just("$tensor"), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4) | st.integers() | st.just("__metadata__"), _trees, max_size=4))
def test_any_tree_of_state_comes_back(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("tree") / "c"
    made = kv.checkpoint.save(path, state)
    assert same_tree(made.load(None), state)
    load_file(path / "dense.safetensors")


def test_every_kind_of_nan_keeps_its_bits():
    bits = [
        0x7FF8000000000000,
        0x7FF8000000000001,
        0xFFF8000000000000,
        0x7FF0000000000000,
        0xFFF0000000000000,
    ]
    values = [struct.unpack(">d", struct.pack(">Q", each))[0] for each in bits]
    tree, _ = encode(values)
    assert same_tree(decode(json.loads(json.dumps(tree, allow_nan=False)), {}), values)
    assert tree[0] == {"$float": "nan"}


def test_strided_and_shared_tensors_come_back_by_value():
    base = torch.arange(12.0).reshape(3, 4)
    state = {"t": base.t(), "row": base[1], "wide": base[:1].expand(5, 4), "p": torch.nn.Parameter(base)}
    tree, tensors = encode(state)
    base += 1  # copies were taken
    back = decode(tree, {name: as_tensor(array) for name, array in tensors.items()})
    assert all(torch.equal(back[name] + 1, state[name]) for name in ("t", "row", "wide", "p"))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"a": {"b": object()}}, "'a/b'.*got builtins.object"),
        ({"a": {1.5: 1}}, "keys of str or int, got 1.5"),
        ({"a": b"x"}, "got builtins.bytes"),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, "'a'.*complex128"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "'a'.*dense tensor"),
    ],
)
def test_state_of_other_kinds_is_an_error_that_says_where(tmp_path, state, says):
    with pytest.raises(TypeError, match=says):
        kv.checkpoint.save(tmp_path / "c", state)
    assert not (tmp_path / "c").exists()


def test_nothing_is_pickled(tmp_path):
    model = Model().train_on(2)
    made = kv.checkpoint.save(tmp_path / "c", model.state(), model)
    suffixes = {name.rsplit(".", 1)[1] for name in contents(made.path)}
    assert suffixes == {"json", "safetensors"}
    source = subprocess.run(
        ["grep", "-rlE", r"\b(import pickle|torch\.(save|load)\()", kv.checkpoint.__path__[0]],
        capture_output=True,
        text=True,
        check=False,
    )
    files = [line for line in source.stdout.splitlines() if line.endswith(".py")]
    # Checkpoints of other systems have files of torch.save, of which nothing is run.
    assert [file.rsplit("/", 1)[1] for file in files] == ["foreign_writing.py"]
    assert "weights_only=True" in Path(files[0]).read_text()
