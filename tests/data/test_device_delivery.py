"""Batches that go to a device, here by the same copies on the CPU; tests/gpu has those to a GPU."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from loader_helpers import TableSource, decode, no_threads_left, records_of
from train_helpers import batches as train_batches
from train_helpers import everything, model, trainer

import karvan as kv
from karvan.cluster.loader.epoch_service import serve
from karvan.data.loading.loader import Loader
from karvan.data.loading.pipeline import DeviceDelivery
from karvan.data.streams import Stream
from karvan.devices import CopiedBatch, tensors_of
from karvan.train.losses import no_check


def delivered(data, device="cpu"):
    """The same loader or stream, whose batches go to the device."""
    data._delivery = DeviceDelivery(torch.device(device))
    return data


def label_loader(labels, **options):
    return kv.data.read({"label": labels, "x": list(range(len(labels)))}, 2, **options)


def test_batches_and_positions_are_those_of_a_loader_without_a_device():
    def loader():
        return Loader(TableSource([300, 41]), decode, 16, shuffle=100, epochs=2, seed=3)

    plain, moved = loader(), delivered(loader())
    pairs = [
        (a["record"].tolist(), plain.state_dict(), b["record"].tolist(), moved.state_dict())
        for a, b in zip(plain, moved, strict=True)
    ]
    assert len(pairs) == 2 * 22
    assert all(a == b and before == after for a, before, b, after in pairs)
    assert no_threads_left()


def test_a_loader_with_a_device_resumes_in_the_middle():
    first = delivered(Loader(TableSource([100]), decode, 8, shuffle=50, seed=1))
    batches = iter(first)
    taken = [next(batches) for _ in range(5)]
    batches.close()
    other = delivered(Loader(TableSource([100]), decode, 8, shuffle=50, seed=1))
    other.load_state_dict(first.state_dict())
    assert sorted(records_of([*taken, *other])) == list(range(100))


def test_all_kinds_of_columns_of_a_file_arrive(tmp_path):
    table = pa.table(
        {
            "id": pa.array([5, None, 7, 8, 9], pa.int64()),
            "text": pa.array(["a", "bc", None, "", "d"]),
            "list": pa.array([[1], [], [2, 3], [4], []], pa.list_(pa.int64())),
            "texts": pa.array([["x"], [], ["yz", ""], [], ["w"]]),
            "number": pa.array([0.5, 1.5, 2.5, 3.5, 4.5], pa.float32()),
        }
    )
    pq.write_table(table, tmp_path / "file.parquet")
    plain = list(kv.data.read(tmp_path / "file.parquet", 2))
    moved = list(delivered(kv.data.read(tmp_path / "file.parquet", 2)))
    assert len(plain) == len(moved) == 3
    for a, b in zip(plain, moved, strict=True):
        assert isinstance(b, CopiedBatch)
        assert {name: type(entry) for name, entry in a.items()} == {n: type(e) for n, e in b.items()}
        for name in a:
            pairs = zip(tensors_of(a[name]), tensors_of(b[name]), strict=True)
            assert all(torch.equal(x, y) for x, y in pairs)


def test_a_transform_runs_before_the_copy():
    engine = kv.FeatureEngine([kv.Feature("x").mod(3)])
    batches = list(delivered(label_loader([0, 1, 1, 0], transform=engine)))
    assert [batch["x"].tolist() for batch in batches] == [[0, 1], [2, 0]]
    assert all(isinstance(batch, CopiedBatch) for batch in batches)


def test_a_check_raises_at_its_batch_and_ends_with_its_context():
    def check(batch):
        if 3 in batch["x"]:
            raise ValueError("three")

    loader = delivered(label_loader([0, 1, 1, 0, 1]))
    with loader.check_batches(check):
        batches = iter(loader)
        first = next(batches)
        assert first.checks == (check,)
        with pytest.raises(ValueError, match="three"):
            next(batches)
    loader.start_epoch(0)
    assert [batch.checks for batch in loader] == [()] * 3


def test_a_loader_without_a_device_leaves_checks_to_the_trainer():
    loader = label_loader([0, 1])
    with loader.check_batches(lambda batch: pytest.fail("it is not called")):
        assert [batch.samples for batch in loader] == [2]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_trainer_finds_wrong_labels_of_batches_that_go_to_a_device(prefetch):
    columns = {name: torch.cat([b[name] for b in train_batches(4)]) for name in train_batches(1)[0]}
    columns["label"][40] = 7
    data = delivered(kv.data.read({name: each.numpy() for name, each in columns.items()}, 16))
    fit = trainer(prefetch=prefetch)
    with pytest.raises(ValueError, match="1 of 16 labels outside of 0 to 1, such as 7"):
        fit.fit(data)
    assert fit.step <= 2


def test_training_on_delivered_batches_has_the_same_bits():
    columns = {name: torch.cat([b[name] for b in train_batches()]).numpy() for name in train_batches(1)[0]}
    nets = [model(dropout=0.0), model(dropout=0.0)]
    trainer(nets[0]).fit(kv.data.read(columns, 16, shuffle=32, seed=3), epochs=2)
    trainer(nets[1]).fit(delivered(kv.data.read(columns, 16, shuffle=32, seed=3)), epochs=2)
    one, other = everything(nets[0]), everything(nets[1])
    assert one.keys() == other.keys()
    assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)


def test_a_stream_delivers_batches_and_plain_mappings_in_order():
    stream = delivered(Stream([kv.Batch({"x": torch.tensor([0])}), {"x": torch.tensor([1])}]))
    with stream.check_batches(no_check):
        batches = list(stream)
    assert [int(batch["x"]) for batch in batches] == [0, 1]
    assert all(batch.checks == (no_check,) for batch in batches)


def test_a_stream_passes_checks_on_to_its_iterable():
    inner = delivered(label_loader([0, 1]))
    with Stream(inner).check_batches(no_check):
        assert [batch.checks for batch in inner] == [(no_check,)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match=r"device='cuda' expects a GPU and a torch .*torch"):
        kv.data.read(tmp_path / "no such file.parquet", 2, device="cuda")
    with pytest.raises(ValueError, match="expects a GPU"):
        Stream([], device="cuda:1")


def test_the_cpu_is_today_s_behaviour():
    loader = label_loader([0, 1], device="cpu")
    assert loader.device == torch.device("cpu")
    assert not any(isinstance(batch, CopiedBatch) for batch in loader)
    assert Stream(loader).device == torch.device("cpu")


def test_a_loader_that_sends_its_batches_refuses_those_on_a_gpu():
    class OnGpu:
        device = torch.device("cuda:0")

    with pytest.raises(ValueError, match=r"expects them on the CPU, got data with device='cuda:0'"):
        serve(None, OnGpu())
