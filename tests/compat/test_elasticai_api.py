"""elasticai_api's elastic data shards, over the leased tasks of a master."""

import inspect
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from forked_programs import ForkedProgram
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import karvan as kv
from karvan.compat.elasticai_api.proto import elasticai_api_pb2
from karvan.compat.elasticdl.contract import TaskType
from karvan.compat.elasticdl.controller import (
    DistributedOptimizer,
    ElasticDataset,
    RecordIOReader,
    create_elastic_controller,
)
from karvan.compat.elasticdl.data_shards import (
    DataShardService,
    RecordIndexService,
    build_data_shard_service,
)
from karvan.compat.imports import SYSTEMS, import_aliases
from karvan.compat.unsupported import UnsupportedError, UsageError
from karvan.wire import Server
from karvan.work.ledger import JobFailedError
from karvan.work.service import WorkService


@pytest.fixture
def master(tmp_path, monkeypatch):
    work = WorkService(tmp_path / "work.db")
    server = Server(work)
    monkeypatch.setenv("MASTER_ADDR", server.address)
    yield work
    server.close(0.1)
    work.close()


@pytest.mark.usefixtures("master")
def test_shards_tile_the_data_set():
    service = build_data_shard_service(1, 1, 10, num_minibatches_per_shard=3)
    shards = []
    while (shard := service.fetch_shard()) is not None:
        shards.append((shard.start, shard.end - shard.start))
        assert shard.indices is None
        for number in range(shard.start, shard.end):
            assert service.report_batch_done() == (number == shard.end - 1)
    assert shards == [(0, 3), (3, 3), (6, 3), (9, 1)]


@pytest.mark.usefixtures("master")
@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle_shards": True}])
def test_shuffled_records_come_once_in_every_epoch(options):
    service = build_data_shard_service(4, 2, 30, num_minibatches_per_shard=2, **options)
    seen, starts = [], []
    while (shard := service.fetch_shard()) is not None:
        assert (shard.indices is None) == ("shuffle_shards" in options)
        seen += shard.numbers()
        starts.append(shard.start)
        service.report_batch_done(shard.end - shard.start)
    assert starts != sorted(starts)
    assert Counter(seen[:30]) == Counter(range(30))
    assert Counter(seen) == Counter([*range(30)] * 2)


class Squares(Dataset):
    length = sys.maxsize

    def __init__(self, service=None):
        self.service = service

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        index = self.service.fetch_record_index() if self.service else index
        return torch.tensor([float(index)]), index * index


EPOCH = [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81, 64, 81]]


def last_worker_first(fetched):
    """Workers of a DataLoader other than the last one begin when that one has fetched a record."""

    def begin(number):
        deadline = time.monotonic() + 30
        while number == 0 and not fetched.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return begin


@pytest.mark.usefixtures("master")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_data_set_of_record_indices_fills_the_last_batch_of_an_epoch(tmp_path, workers):
    service = RecordIndexService(4, 2, 10, num_minibatches_per_shard=1)

    class Fetched(Squares):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            (tmp_path / "fetched").touch()
            return sample

    late = last_worker_first(tmp_path / "fetched") if workers == 2 else None
    batches = []
    for _, squares in DataLoader(Fetched(service), batch_size=4, num_workers=workers, worker_init_fn=late):
        batches.append(squares.tolist())
        service.report_batch_done()
    assert batches == EPOCH * 2


@pytest.mark.usefixtures("master")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_leaves_its_data_loader_gets_again_what_was_prefetched(persistent):
    service = RecordIndexService(4, 2, 50, shuffle=True, num_minibatches_per_shard=2)
    loader = DataLoader(Squares(service), 4, num_workers=2, persistent_workers=persistent)
    seen, times = [], 0
    while len(seen) < 100:
        for batch, _ in loader:
            seen += batch.flatten().int().tolist()[: service.records_to_train]
            service.report_batch_done()
            times += 1
            if times % 9 == 0:
                break
    assert next(iter(loader), None) is None
    assert Counter(seen[:50]) == Counter(range(50))
    assert Counter(seen) == Counter([*range(50)] * 2)


@pytest.mark.usefixtures("master")
def test_a_loader_of_one_process_whose_last_batch_is_short_has_each_record_once_an_epoch():
    service = RecordIndexService(4, 2, 10, shuffle=True)
    data = Squares(service)
    data.length = 10
    for _ in range(2):
        seen = []
        for _, squares in DataLoader(data, 4):
            seen += squares.tolist()
            service.report_batch_done()
        assert sorted(seen) == [number**2 for number in range(10)]


@pytest.mark.usefixtures("master")
def test_a_finite_data_set_ends_within_an_epoch_and_its_last_batch_may_be_short():
    service = RecordIndexService(4, 1, 30)
    data = Squares(service)
    data.length = 10
    sizes = [
        len(squares) for _ in range(3) for squares in read_all(service, DataLoader(data, 4, num_workers=2))
    ]
    assert sizes == [4, 4, 2] * 3
    with pytest.raises(StopIteration):
        service.fetch_record_index()


def read_all(service, loader):
    for _, squares in loader:
        yield squares
        service.report_batch_done()


@pytest.mark.usefixtures("master")
def test_workers_of_a_data_loader_raise_what_the_process_that_trains_cannot_give():
    service = RecordIndexService(4, 1, 30)

    class Twice(Squares):
        def __getitem__(self, index):
            super().__getitem__(index)
            return super().__getitem__(index)

    class Shards(Squares):
        def __getitem__(self, index):
            return self.service.fetch_shard()

    for kind, text in ((Twice, "fetch_record_index once for each sample"), (Shards, "num_workers=0")):
        with pytest.raises(UsageError, match=text):
            next(iter(DataLoader(kind(service), 4, num_workers=1)))
    with pytest.raises(UsageError, match="multiprocessing_context='fork'"):
        iter(DataLoader(Squares(service), 4, num_workers=1, multiprocessing_context="spawn"))
    one, other = (iter(DataLoader(Squares(service), 4, num_workers=1)) for _ in range(2))
    with pytest.raises(RuntimeError, match="one DataLoader at a time"):
        [next(each) for each in (one, other, one, one, one)]


@given(records=st.integers(1, 25), batch=st.integers(1, 6), batches=st.integers(1, 3), shuffle=st.booleans())
def test_batches_of_record_indices_have_the_records_of_an_epoch(records, batch, batches, shuffle):
    with tempfile.TemporaryDirectory() as folder:
        work = WorkService(Path(folder) / "work.db")
        server = Server(work)
        service = RecordIndexService(
            batch, 2, records, shuffle=shuffle, num_minibatches_per_shard=batches, master=server.address
        )
        seen = []
        with suppress(StopIteration):
            while True:
                seen.append([service.fetch_record_index() for _ in range(batch)])
                service.report_batch_done()
        assert work.ledger.complete
        service.close()
        server.close(0.1)
        work.close()
    per_epoch = -(-records // batch)
    assert len(seen) == 2 * per_epoch
    for epoch in (seen[:per_epoch], seen[per_epoch:]):
        last = records - batch * (per_epoch - 1)
        numbers = [number for each in epoch[:-1] for number in each] + epoch[-1][:last]
        assert sorted(numbers) == list(range(records))
        assert set(epoch[-1]) == set(epoch[-1][:last])


@pytest.mark.usefixtures("master")
def test_batches_of_a_data_set_are_short_where_a_shard_ends():
    service = build_data_shard_service(4, 2, 10, num_minibatches_per_shard=1)
    loader = DataLoader(ElasticDataset(Squares(), service), batch_size=None)
    batches = []
    for _, squares in loader:
        batches.append(squares.tolist())
        service.report_batch_done(len(squares))
    assert batches == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]] * 2


WORKER = """
import sys
from elasticai_api.common.data_shard_service import RecordIndexService, build_data_shard_service
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return sys.maxsize

    def __getitem__(self, _):
        return service.fetch_record_index()

def batches():
    while (shard := service.fetch_shard()) is not None:
        numbers = shard.numbers()
        for first in range(0, len(numbers), 4):
            yield numbers[first : first + 4]

loaded, stops = sys.argv[1] == "loaded", sys.argv[2] == "stop"
make = RecordIndexService if loaded else build_data_shard_service
service = make(batch_size=4, num_epochs=2, dataset_size=100, shuffle=True, num_minibatches_per_shard=2)
loader = (each.tolist() for each in DataLoader(Numbers(), 4, num_workers=2)) if loaded else batches()
for trained, batch in enumerate(loader):
    if stops and trained == 4:
        print("holds", flush=True)
        sys.stdin.read()
    service.report_batch_done(len(batch))
    print(*batch, flush=True)
"""


def test_what_a_worker_has_not_reported_when_it_is_gone_is_trained_by_others(master):
    gone, other = (build_data_shard_service(4, 2, 30, shuffle=True) for _ in range(2))
    seen = Counter(gone.fetch_shard().numbers()[:4])
    gone.report_batch_done()
    (lease,) = master.ledger.leases
    assert lease.task.done == 4
    master.release(lease.holder)  # as the master does after five minutes of silence
    while (shard := other.fetch_shard()) is not None:
        seen.update(shard.numbers())
        other.report_batch_done(len(shard.numbers()))
    assert seen == Counter([*range(30)] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loaded", "sharded"])
def test_what_a_killed_worker_has_not_reported_is_trained_by_others(tmp_path, master, kind):
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    command = [sys.executable, "-m", "karvan", "run", "--as", "elasticdl", str(program), kind]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": dict(os.environ)}
    if kind == "loaded":  # a process that has children
        start, options = subprocess.Popen, {**options, "text": True}
    else:
        start = ForkedProgram
    killed = start([*command, "stop"], **options)
    lines = []
    while (line := killed.stdout.readline()) != "holds\n":
        assert line, "the worker has ended"
        lines.append(line)
    killed.kill()
    killed.wait()
    assert sum(lease.task.done for lease in master.ledger.leases) == 4  # of the third task
    for holder in {lease.holder for lease in master.ledger.leases}:
        master.release(holder)  # as the master does after five minutes of silence
    other = start([*command, "go"], **options)
    seen = Counter()
    for line in (*lines, *other.stdout):
        seen.update(map(int, line.split()))
    assert other.wait() == 0
    assert seen == Counter([*range(100)] * 2)


@pytest.mark.usefixtures("master")
def test_a_shard_that_raises_errors_is_tried_again_and_then_fails_the_job():
    service = build_data_shard_service(4, 1, 8, num_minibatches_per_shard=1)
    for _ in range(3):
        assert (service.fetch_shard()).start == 0
        assert service.report_batch_done(err_msg="ValueError: mine")
    with pytest.raises(JobFailedError, match="ValueError: mine"):
        service.fetch_shard()


@pytest.mark.usefixtures("master")
def test_a_controller_trains_the_loop_of_one_worker(monkeypatch):
    torch.manual_seed(0)
    controller = create_elastic_controller(batch_size=8, num_epochs=6, dataset_size=64, shuffle=True)
    model = torch.nn.Linear(1, 1)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), fixed_global_batch_size=True
    )
    controller.set_broadcast_model(model)
    controller.set_broadcast_optimizer(optimizer)

    def train_one_batch(model, optimizer, data, target):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        return loss

    class Lines(Dataset):
        def __len__(self):
            return sys.maxsize

        def __getitem__(self, _):
            index = controller.data_shard_service.fetch_record_index()
            return torch.tensor([index / 64]), torch.tensor([3 * index / 64])

    with controller.scope():
        losses = [
            controller.elastic_run(train_one_batch)(model, optimizer, data, target).item()
            for data, target in DataLoader(Lines(), batch_size=8)
        ]
    assert controller.global_completed_batch_num == len(losses) == 48
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.usefixtures("master")
def test_tasks_are_shards_with_a_number():
    service = build_data_shard_service(4, 1, 10, False, False, elasticai_api_pb2.TRAINING, 1, "data")
    assert service.get_current_task() is None
    assert service.get_minibatch_count_per_epoch() == 2
    tasks = [service.get_task(), service.get_task(elasticai_api_pb2.TRAINING)]
    assert [(each.shard.name, each.shard.start, each.shard.end) for each in tasks] == [
        ("data", 0, 4),
        ("data", 4, 8),
    ]
    assert service.get_current_task() == tasks[0]
    saved = service.get_shard_checkpoint()
    assert service.report_batch_done()
    assert service.get_current_task() == tasks[1]
    service.report_batch_done()
    assert service.restore_shard_from_checkpoint(saved)
    starts = []
    while (task := service.get_task()).type == elasticai_api_pb2.TRAINING:
        starts.append(task.shard.start)
        service.report_batch_done(task.shard.end - task.shard.start)
    assert sorted(starts) == [0, 4, 8]
    assert (task.task_id, task.shard.name) == (0, "")


@pytest.mark.usefixtures("master")
def test_shards_without_a_number_of_epochs_have_those_of_the_job(monkeypatch):
    monkeypatch.setenv("ELASTICDL_NUM_EPOCHS", "3")
    monkeypatch.setenv("ELASTICDL_NUM_MINIBATCHES_PER_TASK", "2")
    service = build_data_shard_service(batch_size=2, dataset_size=8)
    sizes = []
    while (shard := service.fetch_shard()) is not None:
        sizes.append(shard.end - shard.start)
        service.report_batch_done(sizes[-1])
    assert sizes == [4, 4] * 3


def test_defaults_and_order_of_arguments_are_those_of_elasticai_api():
    shards = "batch_size num_epochs dataset_size shuffle shuffle_shards task_type num_minibatches_per_shard"
    indices = "batch_size num_epochs dataset_size task_type shuffle num_minibatches_per_shard dataset_name"
    optimizer = "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor"
    expected = {
        build_data_shard_service: f"{shards} dataset_name",
        DataShardService: f"{shards} dataset_name seed master",
        RecordIndexService: f"{indices} options",
        create_elastic_controller: "batch_size num_epochs dataset_size shuffle shuffle_shards",
        DistributedOptimizer: f"{optimizer} global_batch_num_per_step fixed_global_batch_size",
    }
    for function, names in expected.items():
        parameters = inspect.signature(function).parameters
        assert list(parameters) == names.split()
        assert all(parameters[name].default is None for name in parameters if name == "num_epochs")


@pytest.mark.usefixtures("master")
def test_an_image_folder_gives_the_samples_of_leased_records(tmp_path, monkeypatch):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    (tmp_path / "torchvision" / "datasets.py").write_text(
        "class ImageFolder:\n"
        "    def __init__(self, root):\n"
        "        self.samples = [(f'{root}/{number}.png', number % 3) for number in range(10)]\n"
        "    def __getitem__(self, index):\n"
        "        return self.samples[index]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from karvan.compat.elasticdl.controller import ElasticImageFolder

    images = ElasticImageFolder("digits")
    assert (len(images), images[4]) == (10, ("digits/4.png", 1))
    images.set_data_shard_service(RecordIndexService(4, 1, 10))
    assert len(images) == sys.maxsize
    assert [images[0] for _ in range(10)] == images.samples
    for name in ("torchvision", "torchvision.datasets"):
        del sys.modules[name]


def test_recordio_files_are_read_by_numbers_that_count_over_all_of_them(tmp_path):
    for name, first in (("one", 0), ("two", 5)):
        with kv.data.RecordIOWriter(tmp_path / name) as writer:
            for number in range(first, first + 5):
                writer.write(str(number).encode())
    reader = RecordIOReader([str(tmp_path / "one"), str(tmp_path / "two")])
    assert list(reader.read_records(0, 10)) == [str(number).encode() for number in range(10)]
    assert list(reader.read_records(3, 7)) == [b"3", b"4", b"5", b"6"]
    with pytest.raises(UsageError, match="a list of files"):
        RecordIOReader("one")


def test_names_of_published_programs_are_there_or_say_what_to_use():
    with import_aliases(SYSTEMS["elasticdl"]):
        from elasticai_api.util.grpc_utils import build_channel
        from elasticai_api.util.log_utils import default_logger as logger
        from elasticdl.python.common.log_utils import get_logger
        from elasticdl_client.common.constants import DistributionStrategy

        assert build_channel("host:1") == "host:1"
        assert get_logger("elasticdl", "INFO") is logger
        assert DistributionStrategy.ALLREDUCE == "AllreduceStrategy"
        with pytest.raises(UnsupportedError, match="finds its master by MASTER_ADDR"):
            from elasticai_api.common.master_client import build_master_client  # noqa: F401
        with pytest.raises(UnsupportedError, match="take a folder of models as it is"):
            from elasticdl_client.api import init_zoo  # noqa: F401


def test_wrong_calls_say_what_is_expected(master, monkeypatch):
    with pytest.raises(UsageError, match="need dataset_size"):
        build_data_shard_service(4)
    with pytest.raises(ValueError, match="batch_size"):
        build_data_shard_service(0, 1, 10)
    service = build_data_shard_service(4, 2, 4)
    service.fetch_shard()
    with pytest.raises(UsageError, match="but 4 that this worker has fetched are not"):
        service.fetch_shard()
    service.report_batch_done()
    assert service.fetch_shard().start == 0
    service._process = -1
    with pytest.raises(UsageError, match="num_workers=0"):
        service.fetch_shard()
    with pytest.raises(UnsupportedError, match="compression='fp16'"):
        DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], lr=1.0), None, "fp16")
    with pytest.raises(UnsupportedError, match="use the controller's"):
        service.get_current_epoch()
    with pytest.raises(UnsupportedError, match="leased for training"):
        build_data_shard_service(4, 1, 10, False, False, TaskType.EVALUATION)
    monkeypatch.setenv("WORKER_NUM", "2")
    with pytest.raises(UsageError, match=r'one worker here, got WORKER_NUM=2.*--job_command "python'):
        create_elastic_controller(4, 1, 10)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(UsageError, match="leased from a master, but there is none"):
        build_data_shard_service(4, 1, 10)
