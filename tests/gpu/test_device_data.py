"""Batches of `kv.data.read(…, device="cuda")`: those of the CPU, on the GPU, without waiting for it."""

import copy

import pytest
import torch

pa = pytest.importorskip("pyarrow")
pytest.importorskip("karvan._native")

import pyarrow.parquet as pq  # noqa: E402
from gpu_waits import no_synchronization  # noqa: E402
from train_helpers import batches as train_batches  # noqa: E402
from train_helpers import everything, model, trainer  # noqa: E402

import karvan as kv  # noqa: E402
from karvan.cli.commands.doctor import doctor  # noqa: E402
from karvan.devices import CopiedBatch, tensors_of  # noqa: E402
from karvan.train.device_placement import CudaPlacement  # noqa: E402
from karvan.train.types import same  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECORDS = 1000


def table():
    """Columns of all kinds, some with missing values."""
    some = range(RECORDS)
    return pa.table(
        {
            "label": pa.array([n % 2 for n in some], pa.float32()),
            "user": pa.array([n * 7919 for n in some], pa.int64()),
            "id": pa.array([None if n % 5 == 0 else n for n in some], pa.int64()),
            "text": pa.array([None if n % 7 == 0 else f"text {n}" for n in some]),
            "list": pa.array([list(range(n % 4)) for n in some], pa.list_(pa.int64())),
            "texts": pa.array([[f"{n}"] * (n % 3) for n in some]),
            "dense": pa.array([[n, n + 0.5] for n in some], pa.list_(pa.float32(), 2)),
        }
    )


@pytest.fixture(params=["parquet", "memory"])
def data(request, tmp_path):
    if request.param == "memory":
        return table()
    pq.write_table(table(), tmp_path / "part.parquet", row_group_size=300)
    return tmp_path / "part.parquet"


def assert_same(there, here):
    assert list(there) == list(here)
    for name, entry in here.items():
        assert type(there[name]) is type(entry)
        for moved, tensor in zip(tensors_of(there[name]), tensors_of(entry), strict=True):
            assert moved.device == torch.device("cuda", torch.cuda.current_device())
            assert moved.dtype == tensor.dtype
            assert torch.equal(moved.cpu(), tensor)


@pytest.mark.parametrize("options", [{}, {"shuffle": 400, "seed": 5, "epochs": 2}, {"steps_per_epoch": 9}])
def test_batches_are_those_of_the_cpu(data, options):
    here, there = kv.data.read(data, 64, **options), kv.data.read(data, 64, device="cuda", **options)
    assert there.device == torch.device("cuda", torch.cuda.current_device())
    count = 0
    for moved, batch in zip(there, here, strict=True):
        assert_same(moved, batch)
        assert there.state_dict() == here.state_dict()
        count += 1
    assert count == len(here)


def test_iterating_does_not_wait_for_the_gpu(data):
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    with no_synchronization():
        for batch in kv.data.read(data, 64, device="cuda", epochs=3):
            total += batch["dense"].double().sum()
            torch.cuda._sleep(1_000_000)
    assert float(total) == 3 * sum(2 * n + 0.5 for n in range(RECORDS))


def test_a_transform_that_is_no_row_wise_function_runs_before_the_copy(data):
    def double(batch):
        assert batch["dense"].is_cpu
        return {**batch, "dense": batch["dense"] * 2}

    (batch,) = kv.data.read(data, RECORDS, device="cuda", transform=double)
    assert float(batch["dense"].double().sum()) == 2 * sum(2 * n + 0.5 for n in range(RECORDS))


def test_a_loader_resumes_in_the_middle(data):
    options = {"shuffle": 300, "seed": 1}
    first = kv.data.read(data, 64, device="cuda", **options)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    position = first.state_dict()
    batches.close()
    rest = kv.data.read(data, 64, device="cuda", **options)
    rest.load_state_dict(position)
    expected = list(kv.data.read(data, 64, **options))[5:]
    for moved, batch in zip(rest, expected, strict=True):
        assert_same(moved, batch)


def test_ranks_get_their_shares(data):
    users = []
    for rank in range(3):
        for batch in kv.data.read(data, 64, device="cuda", rank=rank, world_size=3):
            users += batch["user"].tolist()
    assert sorted(users) == [n * 7919 for n in range(RECORDS)]


def test_an_error_comes_after_the_batches_before_it(data):
    def fail(batch):
        if 200 * 7919 in batch["user"]:
            raise ValueError("user 200")
        return batch

    batches = iter(kv.data.read(data, 64, device="cuda", transform=fail))
    assert [next(batches).samples for _ in range(3)] == [64] * 3
    with pytest.raises(ValueError, match="user 200"):
        next(batches)


def test_a_stream_delivers_to_the_gpu():
    numbers = [kv.Batch({"x": torch.full((1000,), n)}) for n in range(50)]
    total = torch.zeros(1000, dtype=torch.int64, device="cuda")
    with no_synchronization():
        for batch in kv.data.Stream(numbers, device="cuda"):
            total += batch["x"]
    assert total.tolist() == [sum(range(50))] * 1000


def test_a_stream_over_a_loader_on_the_gpu_hands_its_batches_on(data):
    stream = kv.data.Stream(kv.data.read(data, 64, device="cuda"), device="cuda")
    for moved, batch in zip(stream, kv.data.read(data, 64), strict=True):
        assert_same(moved, batch)


def test_another_stream_may_consume_the_batches(data):
    stream = torch.cuda.Stream()
    sums = []
    with torch.cuda.stream(stream):
        for batch in kv.data.read(data, 64, device="cuda"):
            torch.cuda._sleep(1_000_000)
            sums.append(batch["user"].sum())
    stream.synchronize()
    assert sum(map(int, sums)) == 7919 * sum(range(RECORDS))


def test_a_gpu_that_is_not_there_is_an_error_before_the_data_is_opened(tmp_path):
    with pytest.raises(ValueError, match="device='cuda:99' expects that GPU"):
        kv.data.read(tmp_path / "no such file.parquet", 8, device="cuda:99")


def training_columns():
    made = train_batches()
    return {name: torch.cat([batch[name] for batch in made]).numpy() for name in made[0]}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_trainer_trains_the_same_on_batches_that_are_on_the_gpu(prefetch, caplog):
    nets = [model(dropout=0.0), model(dropout=0.0)]
    for net, device in zip(nets, (None, "cuda"), strict=True):
        data = kv.data.read(training_columns(), 16, shuffle=32, seed=3, device=device)
        trainer(net, device="cuda", prefetch=prefetch).fit(data, epochs=2)
    expected, found = (everything(net) for net in nets)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), torch.as_tensor(value))
    copied_back = [record for record in caplog.records if "is copied back" in record.message]
    assert len(copied_back) == 1  # ids, because the rows of this model are on the CPU


def test_wrong_labels_are_found_before_the_copy():
    columns = training_columns()
    columns["label"][40] = 7
    data = kv.data.read(columns, 16, device="cuda")
    with pytest.raises(ValueError, match="1 of 16 labels outside of 0 to 1, such as 7"):
        trainer(device="cuda").fit(data)


def test_a_batch_on_the_gpu_is_neither_copied_nor_checked_again():
    net, checked = model().to("cuda"), []

    def check(batch):
        checked.append(batch["label"].device.type)

    placement = CudaPlacement(net, next(net.parameters()).device, same, [], check)
    data = kv.data.read({"label": [0.0, 1.0], "x": [1.0, 2.0]}, 2, device="cuda")
    with placement.checked_by(data):
        (batch,) = data
    placed = placement.place(batch, training=True)
    placement.receive(placed)
    assert isinstance(batch, CopiedBatch)
    assert placed["x"] is batch["x"]
    assert placed["label"] is batch["label"]
    assert checked == ["cpu"]


METRICS = {
    "auc": kv.metrics.AUC,
    "exact auc": lambda: kv.metrics.AUC(exact=True),
    "gauc": kv.metrics.GAUC,
    "ndcg": kv.metrics.NDCG,
    "hit rate": kv.metrics.HitRate,
    "logloss": kv.metrics.BinaryCrossEntropy,
    "accuracy": kv.metrics.Accuracy,
    "calibration": kv.metrics.Calibration,
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_counts_batches_on_the_gpu_without_waiting_for_it(name):
    here, there = METRICS[name](), METRICS[name]()
    random = torch.Generator().manual_seed(0)
    users, labels = torch.arange(400) % 20, (torch.rand(400, generator=random) < 0.4).float()
    samples = kv.Batch({"user": users, "label": labels})
    outputs = [torch.randn(400, generator=random) for _ in range(6)]
    moved, scores = samples.to("cuda"), [output.cuda() for output in outputs]
    there.update(scores[0], moved)  # the first moves the sums to the GPU
    with no_synchronization():
        for output in scores[1:]:
            torch.cuda._sleep(5_000_000)
            there.update(output, moved)
    for output in outputs:
        here.update(output, samples)
    assert copy.deepcopy(there).compute() == pytest.approx(here.compute(), abs=1e-9)
    assert there.compute() == pytest.approx(here.compute(), abs=1e-9)


def test_doctor_shows_the_gpu(capsys, tmp_path):
    doctor(folder=tmp_path, json_path="-")
    shown = capsys.readouterr().out
    assert torch.cuda.get_device_name(0) in shown
    assert "compute capability" in shown
    assert "Triton" in shown
