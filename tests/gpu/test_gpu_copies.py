"""Packed copies of batches to a GPU: equal, beside the computation, and waited for by no thread.

They need nothing but torch and a GPU.
"""

import threading

import pytest
import torch
from gpu_waits import no_synchronization

from karvan.devices import ColumnCopies, copy_columns, exact_device, tensors_of
from karvan.ragged import Batch, IdsReference, NestedRagged, OptionalRagged, OptionalText, Ragged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def offsets(rows, generator, most=4):
    lengths = torch.randint(0, most, (rows,), generator=generator)
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def numbers(dtype, shape, generator):
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def batch_of(rows, seed):
    """Columns of all kinds; with no rows, too."""
    generator = torch.Generator().manual_seed(seed)
    made = {f"tensor-{dtype}": numbers(dtype, (rows,), generator) for dtype in DTYPES}
    made["matrix"] = numbers(torch.float32, (rows, 13), generator)
    made["transposed"] = numbers(torch.float32, (3, rows), generator).T
    made["nothing"] = torch.empty(rows, 0)
    outer = offsets(rows, generator)
    inner = offsets(int(outer[-1]), generator)
    values = numbers(torch.int64, (int(outer[-1]),), generator)
    made["ragged"] = Ragged(values, outer)
    made["weighted"] = Ragged(values, outer, torch.rand(len(values), generator=generator))
    made["single"] = Ragged(numbers(torch.int64, (rows,), generator))
    made["nested"] = NestedRagged(numbers(torch.int64, (int(inner[-1]),), generator), inner, outer)
    made["text"] = OptionalText(numbers(torch.uint8, (int(inner[-1]),), generator), inner, outer)
    some = offsets(rows, generator, 2)
    made["optional"] = OptionalRagged(numbers(torch.int64, (int(some[-1]),), generator), some)
    made["reference"] = IdsReference(0, "batch", rows)
    return Batch(made)


def assert_same(there, here, device):
    assert list(there) == list(here)
    assert there.samples == here.samples
    for name, entry in here.items():
        assert type(there[name]) is type(entry)
        for moved, tensor in zip(tensors_of(there[name]), tensors_of(entry), strict=True):
            assert moved.device == device
            assert moved.dtype == tensor.dtype
            assert moved.data_ptr() % 256 == 0 or not moved.numel()
            assert torch.equal(moved.cpu(), tensor)


@pytest.mark.parametrize("rows", [0, 1, 7, 1000])
def test_a_copy_equals_the_batch_and_is_slices_of_one_buffer(rows):
    device, batch = exact_device("cuda"), batch_of(rows, rows)
    copied = ColumnCopies(device).start(batch).receive()
    assert_same(copied, batch, device)
    tensors = [tensor for entry in copied.values() for tensor in tensors_of(entry) if tensor.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert copied["ragged"].offsets is copied["weighted"].offsets


def test_no_thread_waits_for_the_gpu():
    device = exact_device("cuda")
    copies, expected = ColumnCopies(device), [batch_of(500, seed) for seed in range(20)]
    with copies.on_stream():
        torch.cuda._sleep(50_000_000)  # no copy ends, so that there is page-locked memory for all of them
    for each in [copies.start(batch) for batch in expected]:
        each.receive()
    with no_synchronization():
        torch.cuda._sleep(2_000_000_000)  # about a second: the computation is behind, the copies are not
        copied = [copies.start(batch).receive() for batch in expected]
        still_computing = not torch.cuda.current_stream(device).query()
    assert still_computing
    for batch, there in zip(expected, copied, strict=True):
        assert_same(there, batch, device)


def test_the_source_may_be_written_to_as_soon_as_a_copy_has_started():
    device, source = exact_device("cuda"), torch.zeros(4_000_000)
    copies, copied = ColumnCopies(device), []
    for number in range(20):
        source.fill_(number)
        copied.append(copies.start(Batch({"x": source})))
    assert [float(each.receive()["x"].amax()) for each in copied] == list(range(20))
    assert all(int(each.receive()["x"].unique().numel()) == 1 for each in copied)


def test_memory_is_reused_only_after_the_stream_that_received_it_is_done():
    device, total = exact_device("cuda"), torch.zeros((), dtype=torch.float64, device="cuda")
    copies, stream = ColumnCopies(device), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(50):
            torch.cuda._sleep(2_000_000)
            batch = copies.start(Batch({"x": torch.full((100_000,), float(number))})).receive()
            total += batch["x"].double().sum()
            del batch
    torch.cuda.synchronize()
    assert float(total) == 100_000 * sum(range(50))


def test_several_threads_copy_at_the_same_time():
    device, found = exact_device("cuda"), {}
    copies = ColumnCopies(device)

    def copy(first):
        for seed in range(first, 40, 4):
            found[seed] = copies.start(batch_of(200, seed))

    threads = [threading.Thread(target=copy, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(40):
        assert_same(found[seed].receive(), batch_of(200, seed), device)


def test_columns_on_the_gpu_stay_as_they_are():
    device = exact_device("cuda")
    there = {"x": torch.ones(3, device=device), "ids": Ragged(torch.arange(3, device=device))}
    copied = copy_columns({**there, "y": torch.ones(2)}, device)
    assert copied["x"] is there["x"]
    assert copied["ids"] is there["ids"]
    assert copied["y"].device == device


def test_tensors_that_cannot_be_packed_are_copied_one_by_one():
    device, weight = exact_device("cuda"), torch.ones(2, requires_grad=True)
    copied = copy_columns({"sparse": torch.eye(2).to_sparse(), "trained": weight * 2}, device)
    assert copied["sparse"].is_sparse
    assert copied["sparse"].device == device
    copied["trained"].sum().backward()
    assert weight.grad.tolist() == [2, 2]


def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="expects that GPU, but there are"):
        exact_device("cuda:99")
