"""Features on a GPU: the bits of the CPU, and no waiting for the GPU where sizes follow from shapes."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from feature_helpers import same
from gpu_columns import WAITING_ONCE, WITHOUT_WAITING, columns, strings_of
from many_features import many_features
from slow_hashes import MASK, signed, slow_farm, slow_murmur

import karvan.native
from karvan import ids
from karvan.features import Feature, FeatureEngine
from karvan.ragged import Ragged, values_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_core = pytest.mark.skipif(not karvan.native.is_built(), reason="compares with the native core")

LENGTHS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 193, 200]
EDGES = [-1, -2, 0, 1, 7, -(1 << 63), (1 << 63) - 1, 1 << 31, 1 << 32]
SIZES = [1, 2, 10, (1 << 31) - 1, 1 << 31, (1 << 62) + 1, (1 << 63) - 1]
SLOW = {"farm": slow_farm, "murmur": slow_murmur}


@pytest.fixture
def no_waiting():
    """Whatever waits for the GPU is an error."""
    before = torch.cuda.get_sync_debug_mode()
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode(before)


def bucketed(value, size):
    if size is None:
        return signed(value)
    return value % size if size else value & (MASK >> 1)


@pytest.mark.parametrize("kind", SLOW)
@pytest.mark.parametrize("before", range(8))
def test_strings_hash_as_the_slow_reference_at_every_address(kind, before):
    random = np.random.default_rng(before)
    rows, strings = strings_of([*LENGTHS, *random.integers(0, 300, 300).tolist()], before, before)
    for size in (None, 0, *SIZES):
        expected = [bucketed(SLOW[kind](row), size) for row in rows]
        made = ids.hash_strings(strings, kind, size)
        assert made.is_cuda
        assert made.tolist() == expected
    assert ids.hash_strings(strings, f"{kind}63").tolist() == [bucketed(SLOW[kind](row), 0) for row in rows]


@pytest.mark.parametrize("kind", SLOW)
def test_no_strings_empty_strings_and_single_lengths(kind):
    for lengths in ([], [0], [0, 0, 0], *([n] * 3 for n in LENGTHS)):
        rows, strings = strings_of(lengths, 1)
        assert ids.hash_strings(strings, kind).tolist() == [signed(SLOW[kind](row)) for row in rows]
    one_byte = Ragged(torch.arange(5, dtype=torch.uint8, device="cuda"))
    assert ids.hash_strings(one_byte, kind).tolist() == [signed(SLOW[kind](bytes([i]))) for i in range(5)]


def test_remainders_and_buckets_are_those_of_unsigned_numbers():
    random = np.random.default_rng(2)
    numbers = [*EDGES, *random.integers(-(1 << 63), (1 << 63) - 1, 3000).tolist()]
    on_gpu = torch.tensor(numbers, device="cuda")
    for size in SIZES:
        expected = [x % (1 << 64) % size for x in numbers]
        assert ids.mod(on_gpu, size).tolist() == expected
        assert ids.mod(on_gpu, torch.tensor([size], device="cuda")).tolist() == expected
        assert ids.mod(on_gpu, torch.full_like(on_gpu, size)).tolist() == expected
        assert ids.bucket(on_gpu, size).tolist() == expected
    assert ids.bucket(on_gpu).tolist() == [x & (MASK >> 1) for x in numbers]
    assert ids.mod(on_gpu[:0], 7).tolist() == []
    assert torch.equal(ids.prefix(on_gpu, 3, 8).cpu(), ids.prefix(on_gpu.cpu(), 3, 8))


def test_hash_stacks_are_those_of_the_slow_reference():
    keys = torch.tensor(EDGES, device="cuda")
    for rounds, size in ((1, 1), (2, 100), (4, (1 << 61) - 1)):
        expected = []
        for key in EDGES:
            row, word = [], key & MASK
            for turn in range(rounds):
                word = slow_farm(word.to_bytes(8, "little")) & MASK
                row.append(word % size + turn * size)
            expected.append(row)
        assert ids.hash_stack(keys, rounds, size).tolist() == expected


@needs_core
@pytest.mark.parametrize("seed", range(6))
def test_all_steps_give_the_same_as_on_the_cpu(seed):
    features, batch = many_features(seed)
    expected = FeatureEngine(features)(batch)
    made = FeatureEngine(features)({name: entry.to("cuda") for name, entry in batch.items()})
    for name, entry in expected.items():
        assert values_of(made[name]).is_cuda
        if values_of(entry).is_floating_point():  # logarithms differ in the last bits
            torch.testing.assert_close(values_of(made[name]).cpu(), values_of(entry), equal_nan=True)
        else:
            assert same(made[name].to("cpu"), entry), name


def test_an_engine_does_not_wait_for_the_gpu(no_waiting):
    engine = FeatureEngine(WITHOUT_WAITING)
    engine(columns(1000, seed=1))  # compiles kernels, copies constants
    batch = columns(777, seed=2)
    torch.cuda.synchronize()
    no_waiting()
    made = engine(batch)
    torch.cuda.set_sync_debug_mode("default")
    assert all(values_of(entry).is_cuda for entry in made.values())
    assert made["age"].shape == (777,)


@needs_core
def test_what_does_not_wait_gives_the_same_as_on_the_cpu():
    batch = columns(777, seed=2)
    made = FeatureEngine(WITHOUT_WAITING)(batch)
    expected = FeatureEngine(WITHOUT_WAITING)({name: entry.to("cpu") for name, entry in batch.items()})
    for name, entry in expected.items():
        if values_of(entry).is_floating_point():
            torch.testing.assert_close(values_of(made[name]).cpu(), values_of(entry))
        else:
            assert same(made[name].to("cpu"), entry), name


@pytest.mark.parametrize("step", WAITING_ONCE)
def test_steps_whose_results_have_a_size_that_depends_on_data_wait_once_for_all_features(step, recwarn):
    engine = FeatureEngine(WAITING_ONCE[step])
    engine(columns(500, seed=1))
    batch = columns(500, seed=2)
    recwarn.clear()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        engine(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in recwarn if "called a synchronizing" in str(each.message)]
    # bucketize and to_ids are two stages.
    assert len(waits) <= (2 if step == "bucketize" else 1), [str(each.message) for each in waits]


@needs_core
@pytest.mark.parametrize("features", [*WAITING_ONCE.values(), [Feature("history").truncate(3, "right")]])
def test_steps_that_wait_give_the_same_as_on_the_cpu(features):
    batch = columns(500, seed=3)
    batch["price"][::7] = float("nan")
    expected = FeatureEngine(features)({name: entry.to("cpu") for name, entry in batch.items()})
    made = FeatureEngine(features)(batch)
    for name in (output for feature in features for output in feature.outputs()):
        assert same(made[name].to("cpu"), expected[name]), name


def test_wrong_offsets_stop_the_program_and_say_why():
    script = (
        "import torch; from karvan import ids; from karvan.ragged import Ragged\n"
        "text = Ragged(torch.zeros(3, dtype=torch.uint8), torch.tensor([0, 2, 1, 3])).to('cuda')\n"
        "ids.farm(text); torch.cuda.synchronize(); print('unnoticed')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert done.returncode != 0
    assert "unnoticed" not in done.stdout
    assert "offsets must not decrease" in done.stderr
