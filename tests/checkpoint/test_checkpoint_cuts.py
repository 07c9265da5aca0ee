"""Tables whose files are cut anywhere, as ranks of any number do it, and manifests that do not say where."""

import json
import shutil
import zlib
from dataclasses import asdict, replace

import numpy as np
import pytest
from checkpoint_helpers import Model, same_rows
from few_examples import few_examples
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.checkpoint import Checkpoint, manifest
from karvan.checkpoint.manifest import SPACE, WHOLE, PartEntry, between, pieces, share_of
from karvan.checkpoint.safetensors_file import FileEntry, Throttle, stored, write_arrays
from karvan.checkpoint.table_files import join, own_extra, read_extras, read_part, select, to_arrays
from karvan.store.messages import hashes_of, owners_of

STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A full checkpoint and two deltas, and the rows of each step."""
    folder = tmp_path_factory.mktemp("saved")
    model = Model(admit=kv.admission.MinCount(2, slots=64))
    checkpoints = kv.Checkpoints(folder, full_every=3, part_bytes=1000)
    rows = {}
    for step in STEPS:
        model.train_on(12, seed=step)
        model.embeddings.table("user").evict_keys(model.embeddings.table("user").keys()[::7])
        checkpoints.save(step, {"step": step}, model, block=True)
        rows[step] = model.rows()
    assert [one.kind for one in checkpoints.list()] == ["full", "delta", "delta"]
    return folder, rows


def path_of(folder, step):
    return folder / f"step-{step:012d}"


def recut(path, cuts, base):
    """Cut the files of all tables at other hashes."""
    old = manifest.read(path)
    tables = {}
    for name, table in old.tables.items():
        pieces = [read_part(path, table, part, old.kind == "delta") for part in table.parts]
        rows, gone = join([rows for rows, _ in pieces]), np.concatenate([gone for _, gone in pieces])
        parts = []
        for range_ in between(cuts):
            mine, left = select(rows, range_.has(rows.keys)), gone[range_.has(gone)]
            arrays = to_arrays(mine, left if old.kind == "delta" else None, table.dtype)
            file = write_arrays(path, f"tables/{name}/cut-{range_.first}.safetensors", arrays, Throttle())
            parts.append(PartEntry(**asdict(file), rows=len(mine.keys), erased=len(left), first=range_.first))
        tables[name] = replace(table, parts=parts)
    new = replace(old, tables=tables, base=old.base and replace(old.base, checksum=base))
    (path / manifest.NAME).write_bytes(manifest.to_bytes(new))
    return manifest.read(path).checksum


some_cuts = st.one_of(
    st.integers(1, 7).map(lambda ranks: [share_of(rank, ranks).first for rank in range(ranks)]),
    st.sets(st.integers(1, SPACE - 1), max_size=6).map(lambda cuts: [0, *sorted(cuts)]),
)


@few_examples(6)
@given(st.tuples(*[some_cuts] * len(STEPS)), st.integers(1, 6))
def test_a_full_checkpoint_and_deltas_may_be_cut_anywhere(tmp_path_factory, saved, cuts, ranks):
    folder = tmp_path_factory.mktemp("cut") / "run"
    shutil.copytree(saved[0], folder)
    checksum = None
    for step, its_cuts in zip(STEPS, cuts, strict=True):
        checksum = recut(path_of(folder, step), its_cuts, checksum)
    assert kv.checkpoint.verify(folder) == []
    for step in STEPS:
        expected = saved[1][step]
        checkpoint = Checkpoint(path_of(folder, step))
        model = Model(admit=kv.admission.MinCount(2, slots=64))
        checkpoint.load(model)
        assert same_rows(model.rows(), expected)
        for rank in range(ranks):
            mine = join(list(checkpoint.parts("user", share_of(rank, ranks))))
            owned = owners_of(hashes_of(expected["user"].keys), ranks) == rank
            assert same_rows({"user": mine}, {"user": select(expected["user"], owned)})
        for key in expected["user"].keys[:3].tolist():
            assert kv.checkpoint.row(checkpoint.path, "user", key).key == key
        assert checkpoint.row("user", 10**15) is None


def resign(folder, change):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content)
    rest = json.dumps(content)[1:].encode()
    path.write_bytes(f'{{"checksum": "crc32:{zlib.crc32(rest):08x}",\n'.encode() + rest)


def test_a_manifest_without_cuts_has_equal_parts_and_one_extra(tmp_path, saved):
    def as_it_was(content):
        for table in content["tables"].values():
            assert len(table["parts"]) > 1
            for part in table["parts"]:
                del part["first"]
            extras = table.pop("extras")
            table["extra"] = extras[0] if extras else None

    old = shutil.copytree(path_of(saved[0], 1), tmp_path / "old")
    resign(old, as_it_was)
    models = [Model(admit=kv.admission.MinCount(2, slots=64)) for _ in range(2)]
    Checkpoint(old).load(models[0])
    Checkpoint(path_of(saved[0], 1)).load(models[1])
    assert same_rows(models[0].rows(), saved[1][1])
    counts = [model.embeddings.store.table("user").extra()["filter_counts"] for model in models]
    assert counts[0].any()
    assert np.array_equal(*counts)
    resign(
        old,
        lambda content: content["tables"]["user"]["parts"].append(
            {"name": "x", "bytes": 0, "checksum": "0", "rows": 0}
        ),
    )
    with pytest.raises(kv.checkpoint.CheckpointError, match=r"table 'user' has \d+ parts"):
        Checkpoint(old)


@given(st.integers(1, 1000), st.integers(0, 12))
def test_the_parts_of_all_ranks_cover_all_hashes_once(ranks, bits):
    cuts = []
    for rank in range(ranks):
        share = share_of(rank, ranks)
        mine = pieces(1 << bits, share)
        assert mine[min(mine)].first == share.first
        assert mine[max(mine)].end == share.end
        cuts += [range_.first for range_ in mine.values()]
    assert cuts == sorted(set(cuts))
    assert cuts[0] == 0
    assert between(cuts)[-1].end == WHOLE.end


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 3))
def test_a_filter_survives_any_numbers_of_ranks(tmp_path_factory, worlds, thousands):
    """Its counters belong to hashes: whoever owns a hash finds its counters again."""
    folder = tmp_path_factory.mktemp("extras")
    size = 64 * 256 * thousands
    counters = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    of_ranks = [{"filter_counts": counters, "clock_steps": np.array([1, 2])}]
    for number, world in enumerate([*worlds, 1]):
        files = []
        for rank, extra in enumerate(of_ranks):
            arrays = {k: stored(a) for k, a in own_extra(extra, rank, len(of_ranks)).items()}
            files.append(write_arrays(folder, f"{number}-{rank}.safetensors", arrays, Throttle()))
        assert sum(file.bytes for file in files) < size + len(files) * 1000
        of_ranks = [read_extras(folder, files, share_of(rank, world)) for rank in range(world)]
        assert all(extra["clock_steps"].tolist() == [1, 2] for extra in of_ranks)
    assert np.array_equal(of_ranks[0]["filter_counts"], counters)


def test_a_rank_without_anything_besides_rows_is_left_out(tmp_path):
    assert read_extras(tmp_path, [], WHOLE) == {}
    assert read_extras(tmp_path, [None, None], WHOLE) == {}
    file = write_arrays(tmp_path, "a", {"filter_counts": stored(np.ones(64, np.uint8))}, Throttle())
    found = read_extras(tmp_path, [None, FileEntry(**asdict(file))], WHOLE)
    assert found["filter_counts"].sum() == 64
