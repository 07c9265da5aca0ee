"""Loaders as processes, and trainers that take batches from them: numbers, order, ends, errors."""

import errno
import json
import re

import numpy as np
import pytest
import torch
from role_loaders import Loaders, close_all, ids_of, in_threads, take, take_all

import karvan as kv
from karvan.cluster.loader.context import read_share
from karvan.cluster.loader.epoch_service import EpochService
from karvan.data import DataError, synthetic
from karvan.errors import DAMAGED, FAILED, TEMPORARY, code_of
from karvan.wire import RefusedError, Security, Server, WireError

ROWS, BATCH = 103, 5


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3],
)
def loaders(request):
    with Loaders(request.param, "serve", ROWS, BATCH) as made:
        yield made


@pytest.mark.parametrize("ordered", [True, False])
def test_every_record_comes_once_in_every_epoch_and_in_order(loaders, ordered):
    for world in (1, 2, 3):
        streams = loaders.streams(world, ordered=ordered)
        for _ in range(2):
            epoch = take_all(streams)
            assert ids_of(epoch) == list(range(ROWS))
            for rank, taken in enumerate(epoch):
                numbers = [number for number, _ in taken]
                assert all(number % world == rank for number in numbers)
                assert numbers == sorted(numbers) or not ordered
        close_all(streams)


def test_ordered_batches_are_the_same_every_time_and_differ_between_epochs(loaders):
    runs = []
    for _ in range(2):
        (one,) = streams = loaders.streams(1)
        runs.append([take(one), take(one)])
        close_all(streams)
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    # The batches of an epoch do not depend on the number of trainers, only who takes them does.
    streams = loaders.streams(2)
    both = take_all(streams)
    close_all(streams)
    assert sorted(both[0] + both[1]) == runs[0][0]


def test_an_iteration_left_early_goes_on_and_a_state_goes_back(loaders):
    one = loaders.stream()
    first = take(one, 4)
    state = one.state_dict()
    second = take(one, 3)
    one.load_state_dict(state)
    assert take(one, 3) == second
    rest = take(one)
    assert ids_of([first, second, rest]) == list(range(ROWS))
    following = take(one)
    one.load_state_dict(state)
    assert take(one) == second + rest
    assert take(one) == following
    close_all([one])


@pytest.mark.parametrize("ordered", [True, False])
def test_another_number_of_trainers_goes_on_from_a_merged_state(loaders, ordered):
    before, done = loaders.streams(3, ordered=ordered), []
    for world in (2, 1, 3):
        done += in_threads([lambda one=one, n=2 + rank: take(one, n) for rank, one in enumerate(before)])
        state = before[0].merge([one.state_dict() for one in before])
        close_all(before)
        before = loaders.streams(world)
        for one in before:
            one.load_state_dict(state)
    done += take_all(before)
    assert ids_of(done) == list(range(ROWS))
    assert ids_of(take_all(before)) == list(range(ROWS))
    close_all(before)


def test_a_state_at_the_end_gives_nothing_and_then_the_next_epoch(loaders):
    streams = loaders.streams(2)
    take_all(streams)
    state = streams[0].merge([one.state_dict() for one in streams])
    following = take_all(streams)
    close_all(streams)
    streams = loaders.streams(2)
    for one in streams:
        one.load_state_dict(state)
    assert take_all(streams) == [[], []]
    assert take_all(streams) == following
    close_all(streams)


def test_a_state_of_another_number_of_loaders_or_of_one_trainer_is_refused(loaders):
    one = loaders.stream()
    state = one.state_dict()
    with pytest.raises(ValueError, match=f"by roles.loaders: {2 * loaders.count} in the job"):
        one.load_state_dict({**state, "loaders": state["loaders"] * 2})
    with pytest.raises(ValueError, match="its own state or the merged one"):
        one.load_state_dict({**state, "ranks": [1], "trainers": 2})
    with pytest.raises(ValueError, match="all 2 trainers"):
        one.merge([{**state, "ranks": [1], "trainers": 2}])
    with pytest.raises(ValueError, match="of another kind of data, but the data is"):
        one.load_state_dict({"version": 9})
    with pytest.raises(ValueError, match="must have version 1, but has 9"):
        one.load_state_dict({**state, "version": 9})


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"id": kv.Table(dim=4)})
        self.head = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.head(self.embeddings(batch)["id"]).squeeze(1)


def fit(data, folder, **options):
    torch.manual_seed(0)
    model = Net()
    trainer = kv.Trainer(
        model,
        loss=lambda output, batch: (output - 1).square().mean(),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        sparse_optimizer=kv.optim.SGD(lr=0.1),
        checkpoints=folder,
        progress="none",
    )
    result = trainer.fit(data, **options)
    return result, [each.tolist() for each in model.parameters()]


def test_fit_trains_on_a_stream_and_goes_on_after_a_stop(loaders, tmp_path):
    streams = [loaders.stream() for _ in range(3)]
    whole, weights = fit(streams[0], tmp_path / "whole", epochs=2)
    streams[0].close()
    assert whole.samples == 2 * ROWS
    part, _ = fit(streams[1], tmp_path / "parts", max_steps=7)
    streams[1].close()
    assert part.step == 7
    rest, same = fit(streams[2], tmp_path / "parts", epochs=2)
    streams[2].close()
    assert (rest.samples, same) == (2 * ROWS, weights)


def test_values_of_all_kinds_arrive_as_they_were():
    from loader_program import of_all_kinds

    with Loaders(1, "kinds", 0, 0) as loaders:
        one = loaders.stream()
        got, expected = list(one), [kv.Batch(each) for each in of_all_kinds(0)]
        assert [batch.samples for batch in got] == [3, 3]
        for batch, sent in zip(got, expected, strict=True):
            assert list(batch) == list(sent)
            for name, entry in sent.items():
                parts = ["values", "offsets", "weights", "inner", "outer"]
                pairs = [(batch[name], entry)]
                if not isinstance(entry, torch.Tensor):
                    pairs = [(getattr(batch[name], p), getattr(entry, p)) for p in parts if hasattr(entry, p)]
                for mine, its in pairs:
                    assert mine.dtype == its.dtype
                    assert torch.equal(mine, its)
        batch["torch.int64"][0] = 5  # what came is the trainer's own
        one.close()


def test_a_loader_reads_no_further_than_its_queues_allow(tmp_path):
    counter = tmp_path / "counter"
    with Loaders(1, "serve", 400, 2, counter) as loaders:
        streams = loaders.streams(2, prefetch=3)
        taken = take_all(streams, 5)
        # For each trainer five were taken, three wait there and three (a queue is at least loaders + 2) here;
        # one more is read and waits for room.
        most = 2 * (5 + 3 + 3) + 1
        seen = 0
        while seen < most - 2:
            seen = counter.stat().st_size
        taken = [a + b for a, b in zip(taken, take_all(streams, 1), strict=True)]
        assert seen <= most
        assert counter.stat().st_size <= most + 2
        taken += take_all(streams)
        assert ids_of(taken) == list(range(400))
        close_all(streams)


def test_a_program_sends_batches_itself_for_as_many_epochs_as_are_asked_for():
    with Loaders(2, "epochs", 30, 4) as loaders:
        one = loaders.stream()
        for epoch in range(3):
            batches = list(one)
            assert sorted(np.concatenate([batch["id"] for batch in batches])) == list(range(30))
            assert {batch.meta["epoch"] for batch in batches} == {epoch}
            assert [batch.meta["number"] * 2 + batch.number % 2 for batch in batches] == [
                batch.number for batch in batches
            ]
        one.close()
        again = loaders.stream()  # back to the first epoch
        assert len(take(again, 2)) == 2
        again.close()
        assert loaders.end(0)[0] == 0


def test_a_program_of_one_epoch_ends_when_its_trainers_have_left():
    with Loaders(1, "once", 30, 4) as loaders:
        one = loaders.stream()
        assert ids_of([take(one)]) == list(range(30))
        with pytest.raises(
            RuntimeError, match=r"loader 0: expected a request for epochs up to 0, .* got 1\. .*data.epochs"
        ):
            take(one)
        one.close()
        code, said = loaders.wait(0)
        assert code == 0, said


def test_an_error_of_the_reading_program_comes_behind_its_batches_to_all_trainers():
    with Loaders(1, "fail", 0, 0) as loaders:
        streams = loaders.streams(2)

        def work(one):
            taken = []
            with pytest.raises(RuntimeError, match=r"loader 0: .*LookupError: there is no such shelf"):
                taken.extend(batch.number for batch in one)
            return taken

        in_threads([lambda one=one: work(one) for one in streams])
        code, said = loaders.wait(0)
        assert (code, "LookupError: there is no such shelf" in said) == (1, True)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("expected a page, got noise"), DAMAGED),
        (DataError("the store is away", temporary=True), TEMPORARY),
        (OSError(errno.EIO, "input/output error"), TEMPORARY),
        (ValueError("of the program's own"), FAILED),
    ],
    ids=lambda each: str(each),
)
def test_trainers_end_with_the_code_of_what_a_loader_could_not_read(error, code):
    service = EpochService()
    with Server(service) as server:
        one = kv.data.from_loaders(loaders=[server.address])
        service.fail(error)
        with pytest.raises(RuntimeError, match="could not continue reading") as raised:
            next(iter(one))
        assert code_of(raised.value) == code
        one.close()


def test_unequal_rows_are_refused_where_they_are_sent():
    with Loaders(1, "unequal", 0, 0) as loaders:
        one = loaders.stream()
        with pytest.raises(RuntimeError, match=r"loader 0: .*feature 'a' has 2 and feature 'b' has 3"):
            next(iter(one))
        assert loaders.wait(0)[0] == 1


def test_a_wrong_token_is_refused_and_a_loader_that_never_comes_is_named(tmp_path, monkeypatch):
    (tmp_path / "other").write_text("guess")
    with Server(EpochService(), security=Security(token="secret")) as server:
        monkeypatch.setenv("KARVAN_TOKEN_FILE", str(tmp_path / "other"))
        one = kv.data.from_loaders(loaders=[server.address])
        with pytest.raises(RefusedError, match="loader 0 refused: expected the job's token"):
            next(iter(one))
    one = kv.data.from_loaders(loaders=["127.0.0.1:9"], timeout=0.5)
    with pytest.raises(WireError, match=r"loader 0 expected to answer '(next|stay)' within"):
        next(iter(one))


def test_a_stream_without_loaders_says_what_it_expects(monkeypatch):
    monkeypatch.delenv("KARVAN_LOADER_COUNT", raising=False)
    with pytest.raises(
        ValueError, match=re.escape("expects loaders: a job that has some (KARVAN_LOADER_COUNT)")
    ):
        kv.data.from_loaders()
    with pytest.raises(ValueError, match="prefetch must be at least 1"):
        kv.data.from_loaders(loaders=1, prefetch=0)


def test_karvans_own_loader_reads_what_the_job_says(tmp_path):
    synthetic.ClickLog(seed=1, users=50, items=20).write(str(tmp_path), rows=500, files=2)
    columns = ["label", {"name": "user", "kind": "varlen"}]
    data = {"train": [f"{tmp_path}/*.parquet"], "batch_size": 64, "columns": columns, "eval": "elsewhere"}
    with Loaders(2, command=["-m", "karvan", "role", "loader"], KARVAN_DATA=json.dumps(data)) as loaders:
        one = loaders.stream()
        columns = one.transform_states()[":columns"]  # a trainer compares them to those of the model
        assert {name: kind for name, (kind, _) in columns.items()} == {"label": "numbers", "user": "numbers"}
        expected = list(kv.data.read(str(tmp_path), 64))
        for _ in range(2):
            batches = list(one)
            assert sum(batch.samples for batch in batches) == 500
            assert {name for batch in batches for name in batch} == {"label", "user"}
            users = torch.cat([batch["user"].values for batch in batches]).sort().values
            assert torch.equal(users, torch.cat([batch["user"] for batch in expected]).sort().values)
        one.close()
        assert loaders.end(0)[0] == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "expects files, or train"),
        ({"files": "x", "batchsize": 3}, "got 'batchsize'"),
        ({"files": "x", "features": {"price": ["normalise"]}}, "features are a part of the model"),
        ({"files": {"a": [1]}, "columns": [{"kind": "odd"}]}, "a kind of fixed, varlen, raw"),
        ({"files": {"a": [1]}, "columns": [{"name": "a", "size": 3}]}, "column 'a'"),
    ],
)
def test_wrong_data_of_a_job_is_named(data, said):
    with pytest.raises(ValueError, match=said):
        read_share(data, 0, 1)
