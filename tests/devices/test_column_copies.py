import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from karvan import Batch, Ragged
from karvan.devices import (
    ALIGNMENT,
    ColumnCopies,
    Packing,
    check_device,
    copy_columns,
    data_device,
    exact_device,
    tensors_of,
)
from karvan.ragged import IdsReference, NestedRagged, OptionalRagged, OptionalText

CPU = torch.device("cpu")
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def filled(dtype, shape, seed):
    """A tensor of random bytes, or of random truth values."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    bytes_ = torch.randint(0, 256, (torch.Size(shape).numel() * size,), generator=generator)
    return bytes_.to(torch.uint8).view(dtype).view(shape)


def bits(tensor):
    """The bytes of a tensor: NaN equals itself, and -0 does not equal 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(a, b):
    return type(a) is type(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))
        for x, y in zip(tensors_of(a), tensors_of(b), strict=True)
    )


@st.composite
def tensors(draw, rows=None, most_dims=3, dtypes=DTYPES):
    shape = draw(st.lists(st.integers(0, 5), max_size=most_dims))
    shape = [*([] if rows is None else [rows]), *shape]
    made = filled(draw(st.sampled_from(dtypes)), shape, draw(st.integers(0, 2**32)))
    return made.transpose(0, -1).contiguous().transpose(0, -1) if made.dim() and draw(st.booleans()) else made


@st.composite
def offsets(draw, rows):
    lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


@st.composite
def columns(draw, rows):
    kind = draw(st.sampled_from(["tensor", "ragged", "plain", "optional", "nested", "text", "reference"]))
    if kind == "tensor":
        return draw(tensors(rows))
    if kind == "reference":
        return IdsReference(0, "batch", rows)
    if kind == "plain":
        return Ragged(draw(tensors(rows, 0)))
    outer = draw(offsets(rows))
    if kind == "optional":
        outer = (outer.diff() > 0).cumsum(0)
        outer = torch.cat([torch.zeros(1, dtype=torch.int64), outer])
        return OptionalRagged(draw(tensors(int(outer[-1]), 0)), outer)
    if kind == "ragged":
        count = int(outer[-1])
        weighted = draw(st.booleans())
        weights = draw(tensors(count, 0, [torch.float32, torch.float64])) if weighted else None
        return Ragged(draw(tensors(count, 1)), outer, weights)
    inner = draw(offsets(int(outer[-1])))
    made = OptionalText if kind == "text" else NestedRagged
    return made(draw(tensors(int(inner[-1]), 0)), inner, outer)


@st.composite
def batches(draw):
    rows = draw(st.integers(0, 9))
    names = draw(st.lists(st.sampled_from("abcdefgh"), unique=True))
    return Batch({name: draw(columns(rows)) for name in names})


@given(batches())
def test_a_copy_has_the_bits_and_kinds_of_the_batch_and_none_of_its_memory(batch):
    copied = ColumnCopies(CPU).start(batch).receive()
    assert list(copied) == list(batch)
    assert copied.samples == batch.samples
    for name, entry in batch.items():
        assert same(copied[name], entry)
        for old, new in zip(tensors_of(entry), tensors_of(copied[name]), strict=True):
            assert new.is_contiguous()
            assert not old.nbytes or old.data_ptr() != new.data_ptr()
    before = {name: [bits(t).clone() for t in tensors_of(entry)] for name, entry in copied.items()}
    for entry in batch.values():
        for tensor in tensors_of(entry):
            bits(tensor).zero_() if tensor.is_contiguous() else tensor.zero_()
    after = {name: [bits(t) for t in tensors_of(entry)] for name, entry in copied.items()}
    assert all(torch.equal(x, y) for name in before for x, y in zip(before[name], after[name], strict=True))


@given(st.lists(tensors(), max_size=12))
def test_packed_tensors_begin_at_multiples_of_the_alignment_and_do_not_overlap(made):
    packing = Packing(made)
    buffer = torch.full((packing.nbytes,), 0xEE, dtype=torch.uint8)  # what is not written to is noticed
    packing.fill(buffer)
    there = packing.unpack(buffer.clone())
    places = [(t.storage_offset() * t.itemsize, t.nbytes) for t in there.values() if t.nbytes]
    ends = 0
    for start, size in sorted(places):
        assert start % ALIGNMENT == 0
        assert start >= ends
        ends = start + size
    assert ends <= packing.nbytes
    assert all(same(there[id(tensor)], tensor) for tensor in made)


def test_a_tensor_that_columns_share_is_copied_once_and_shared_afterwards():
    shared = torch.tensor([0, 1, 3])
    batch = Batch({"a": Ragged(torch.arange(3), shared), "b": Ragged(torch.arange(3) * 1.0, shared)})
    copied = copy_columns(batch, CPU)
    assert copied["a"].offsets is copied["b"].offsets
    assert Packing([shared, shared]).nbytes == ALIGNMENT


def test_writing_to_a_column_changes_the_version_of_no_other():
    copied = copy_columns({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3, 2)}, CPU)
    copied["a"].add_(1)
    assert copied["b"]._version == copied["c"]._version == 0
    assert copied["b"].tolist() == [1, 1, 1]


def test_tensors_that_cannot_be_packed_are_copied_one_by_one():
    weight = torch.ones(2, requires_grad=True)
    batch = {"sparse": torch.eye(2).to_sparse(), "trained": weight * 2, "plain": torch.arange(2)}
    copied = copy_columns(batch, CPU)
    assert copied["sparse"].is_sparse
    copied["trained"].sum().backward()
    assert weight.grad.tolist() == [2, 2]
    assert copied["plain"].tolist() == [0, 1]


def test_checks_that_a_batch_has_passed_come_with_it():
    def check(batch):
        pass

    assert ColumnCopies(CPU).start(Batch({"a": torch.ones(1)}), [check]).receive().checks == (check,)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match='device expects "cpu", "cuda" or "cuda:1", got \'gpu\''):
        check_device("gpu")
    with pytest.raises(ValueError, match=r'Batches go to "cpu", "cuda" or a certain GPU.*got .meta.'):
        data_device("meta")
    assert exact_device("cpu") == CPU
    assert data_device("cpu") is data_device(None) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_missing_is_said():
    with pytest.raises(ValueError, match="expects a GPU and a torch that is built with CUDA, but torch"):
        data_device("cuda")
