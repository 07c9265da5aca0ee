"""Checkpoints of jobs of several real processes: any number of ranks loads what any other has saved."""

import json
import signal
import zlib

import checkpoint_programs
import numpy as np
import pytest
import torch
from checkpoint_programs import RARE, Model
from forked_programs import ForkedProgram
from ranks_helpers import run, start

import karvan as kv
from karvan.checkpoint import CheckpointError


def joined(contents):
    """The rows of all ranks; each has a range of hashes, and its rows in their order."""
    return {
        name: [
            np.concatenate(arrays) for arrays in zip(*(content[name] for content in contents), strict=True)
        ]
        for name in contents[0]
    }


def same(a, b):
    """Bit for bit."""
    return a.keys() == b.keys() and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for name in a
        for x, y in zip(a[name], b[name], strict=True)
    )


def loaded_alone(path):
    model = Model()
    state = kv.checkpoint.find(path).load(model)
    return model, state


def step_folder(folder, step):
    return folder / f"step-{step:012d}"


@pytest.mark.parametrize("worlds", [(2, 3), pytest.param((2, 4, 3), marks=pytest.mark.slow)])
def test_rows_survive_any_numbers_of_ranks_bit_for_bit(tmp_path, worlds):
    model = Model()
    model.train_on(0)
    for key in (*RARE, *RARE):
        model.step([key], [1])
    assert not set(RARE) & set(model.content()["user"][0].tolist())
    alone = kv.Checkpoints(tmp_path / "1", full_every=2, part_bytes=checkpoint_programs.PART_BYTES)
    alone.save(1, {"rank": 0}, model, block=True)
    model.train_on(1)
    alone.save(2, {"rank": 0}, model, block=True)
    assert alone.latest().kind == "delta"
    before, expected = tmp_path / "1", model.content()
    for world in worlds:
        arguments = {"before": str(before), "place": str(tmp_path / str(world)), "see_rare": world == 3}
        results = run(world, "checkpoint_programs:go_on", **arguments)
        assert same(joined([r["loaded"] for r in results]), expected), world
        assert all(r["state"]["rank"] == 0 for r in results)
        before = tmp_path / str(world)
        steps = list(results[0]["saved"])
        kinds = list(zip(steps, ["full", "delta", "delta", "full"], strict=True))
        assert all(r["kinds"] == kinds for r in results)
        for step in steps:
            model, state = loaded_alone(step_folder(before, step))
            expected = joined([r["saved"][step] for r in results])
            assert same(model.content(), expected), (world, step)
            assert torch.equal(state["dense"], torch.arange(3.0) + step)
        assert kv.checkpoint.verify(before) == []
        firsts = [part.first for part in kv.checkpoint.find(before).manifest.tables["item"].parts]
        assert len(firsts) > 2 * world
        # Third sights of rare keys: what two different numbers of ranks have handed on is counted.
        assert (set(RARE) <= set(expected["user"][0].tolist())) == (world == 3)
    key = int(expected["item"][0][7])
    assert np.array_equal(kv.checkpoint.row(before, "item", key).vector, expected["item"][1][7])


def test_trouble_on_one_rank_is_an_error_on_all_and_harms_nothing(tmp_path):
    results = run(2, "checkpoint_programs:trouble", place=str(tmp_path))
    first = results[0]

    def all_say(what, *texts):
        assert len({r[what] for r in results}) == 1, [r[what] for r in results]
        assert first[what] is not None
        for text in texts:
            assert text in first[what]

    for file in ("dense", "first part", "last part", "extra"):
        all_say(f"flipped {file}", "CheckpointError", f"{tmp_path / file}", "expected crc32:")
    assert all(r["untouched"] for r in results)
    for what in ("full disk", "told by the next save"):
        all_say(what, "CheckpointError", "rank 1: ", "File too large", "untouched")
    assert first["left"] == first["left later"] == ["step-000000000001"]
    assert all(r["one before"][0] == 1 and same(*map(_named, r["one before"][1:])) for r in results)
    all_say("bad state", "rank 0: ", "object")
    all_say("other steps", "all ranks to save the same step, got [5, 6]")
    all_say("not shared", "rank 1: ", "elsewhere", "storage that all ranks share")
    all_say("not seen", "storage that all ranks share")
    # 12 could not be a delta on rank 1; 1 and 10 are not needed any more.
    assert [r["kinds"] for r in results] == [[(12, "full"), (13, "delta")]] * 2
    assert first["folders"] == ["step-000000000012", "step-000000000013"]
    assert [r["at once"] for r in results] == [[20, 20]] * 2
    rows, taken, given = zip(*(r["warm"] for r in results), strict=True)
    taken, given = joined(taken), joined(given)
    assert rows[0] == rows[1] == {"item": len(given["item"][0])}
    assert all(np.array_equal(taken["item"][i], given["item"][i]) for i in range(4))
    assert dict(first["summary"]) == {name: len(rows[0]) for name, rows in given.items()}
    assert [r["waited for"] for r in results] == [21, 21]
    for r in results:
        assert "create engines after kv.connect" in r["disconnected"]
    _check_odd_manifests(tmp_path / "two", given)


def _named(content):
    return dict(content)


def _check_odd_manifests(folder, content):
    """Cuts that do not cover all hashes once are refused."""
    for change in (
        lambda t: t["parts"][0].update(first=1),
        lambda t: t["parts"][1].update(first=0),
        lambda t: t["parts"][-1].update(first=1 << 32),
        lambda t: t["parts"].reverse(),
        lambda t: t["parts"][1].pop("first"),
        lambda t: t["parts"].clear(),
        lambda t: t["parts"][1].update(first=0.5),
    ):
        kept = (folder / "manifest.json").read_bytes()
        resign(folder, change)
        with pytest.raises(CheckpointError, match="parts"):
            kv.checkpoint.find(folder)
        (folder / "manifest.json").write_bytes(kept)
    assert same(loaded_alone(folder)[0].content(), content)


def resign(folder, change):
    """Change the entry of table 'user' in a manifest and give it a checksum that fits."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content["tables"]["user"])
    rest = json.dumps(content)[1:].encode()
    path.write_bytes(f'{{"checksum": "crc32:{zlib.crc32(rest):08x}",\n'.encode() + rest)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_checkpoint_before_survives_the_death_of_a_rank_that_writes(tmp_path, victim):
    results, folder = tmp_path / "results", tmp_path / "run"
    results.mkdir()
    processes = start(2, "checkpoint_programs:die", results, ForkedProgram, place=str(folder), victim=victim)
    try:
        codes = [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    log = "\n".join(file.read_text() for file in results.glob("*.log"))
    assert codes[victim] == -signal.SIGKILL, log
    assert codes[1 - victim] == 0, log
    heard = torch.load(results / f"{1 - victim}.pt", weights_only=False)
    assert heard["error"].startswith("RankError"), heard["error"]
    assert f"Rank {victim} (process" in heard["error"] or victim == 0
    assert [one.step for one in kv.Checkpoints(folder).list()] == [1]
    model, _ = loaded_alone(folder)
    rows = model.content()
    for name, saved in heard["saved"].items():
        mine = np.isin(rows[name][0], saved[0])
        assert all(np.array_equal(a[mine], b) for a, b in zip(rows[name], saved, strict=True))
    kv.Checkpoints(folder, keep_last=None).save(3, {}, model, block=True)
    assert sorted(p.name for p in folder.iterdir()) == ["step-000000000001", "step-000000000003"]


def test_all_ranks_resume_from_the_same_whole_checkpoint(tmp_path):
    results = run(2, "checkpoint_programs:recover", place=str(tmp_path))
    for seen in results:
        assert seen["step"] == (3, 3)
        assert same(*seen["rows"])
        assert "step-000000000009, got none of that name; there are: step-000000000001" in seen["chosen"]
        assert "CheckpointError" in seen["not shared"]
        assert not seen["not shared"].startswith("Damaged")  # a checkpoint that a rank cannot see is whole
        assert seen["left"] == [
            "damaged-step-000000000004",
            *(f"step-{step:012d}" for step in (1, 2, 3)),
        ]
        assert seen["none"].startswith("DamagedCheckpointError")
    assert results[0]["none"] == results[1]["none"]
