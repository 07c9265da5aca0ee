"""A run moves between a Loader and from_loaders() over the same records, or to another number of loaders."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from role_loaders import Loaders

import karvan as kv

ROWS, BATCH, SHUFFLE = 40, 5, 20
STEPS = ROWS // BATCH
LOADER, ONE, TWO = (
    "a Loader (kv.data.read)",
    "kv.data.from_loaders() of 1 loader",
    "kv.data.from_loaders() of 2 loaders",
)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Functions that make each kind of data, over the same records."""
    folder = tmp_path_factory.mktemp("data")
    pyarrow.parquet.write_table(pa.table({"id": np.arange(ROWS)}), folder / "part-0.parquet")
    options = {"batch_size": BATCH, "shuffle": SHUFFLE}
    job = json.dumps({"files": str(folder), **options})
    command = ["-m", "karvan", "role", "loader"]
    with (
        Loaders(1, command=command, KARVAN_DATA=job) as one,
        Loaders(2, command=command, KARVAN_DATA=job) as two,
    ):
        yield {LOADER: lambda: kv.data.read(str(folder), **options), ONE: one.stream, TWO: two.stream}


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"id": kv.Table(1)})

    def forward(self, batch):
        return self.embeddings(batch)["id"]


def fit(data, folder, stop_at=None, **options):
    """What the fit came to, and the ids of each of its batches."""

    class Stop(kv.callbacks.Callback):
        def on_step_end(self, trainer, logs):
            if logs.step == stop_at:
                trainer.stop("enough")

        def on_epoch_end(self, trainer, epoch):
            if stop_at == "epoch end":
                trainer.stop("enough")

    seen = []

    def loss(output, batch):
        seen.append(batch["id"].tolist())
        return output.sum()

    trainer = kv.Trainer(
        Small(),
        loss=loss,
        sparse_optimizer=kv.optim.SGD(lr=1.0),
        checkpoints=folder,
        callbacks=[Stop()],
        progress="none",
    )
    try:
        return trainer.fit(data, **options), seen
    finally:
        data.close()


def epoch_of(kinds, kind, number):
    """The batches of an epoch of this kind of data that is read from its very start."""
    data = kinds[kind]()
    for _ in range(number + 1):
        found = [batch["id"].tolist() for batch in data]
    data.close()
    return found


CHANGES = [(LOADER, ONE), (ONE, LOADER), (TWO, ONE), (ONE, TWO)]


@pytest.mark.parametrize(("before", "now"), CHANGES)
def test_an_unfinished_epoch_of_another_kind_of_data_says_both_ways_out(kinds, tmp_path, before, now):
    fit(kinds[before](), tmp_path, stop_at=3)
    with pytest.raises(ValueError, match="Epoch 0 cannot be continued") as caught:
        fit(kinds[now](), tmp_path)
    text = str(caught.value)
    assert f"The position is of {before}, but the data is {now}. Finish the epoch with {before}" in text
    assert "drop_unfinished=True" in text
    assert ("roles.loaders: 2 in the job" in text) == (before == TWO)
    result, _ = fit(kinds[before](), tmp_path)  # the first way out
    assert (result.step, result.epoch) == (STEPS, 1)


@pytest.mark.parametrize(("before", "now"), CHANGES)
def test_an_unfinished_epoch_can_be_started_again_with_another_kind_of_data(
    kinds, tmp_path, caplog, before, now
):
    fit(kinds[before](), tmp_path, stop_at=STEPS + 3, epochs=3)
    result, first = fit(kinds[now](), tmp_path, STEPS + 5, epochs=3, drop_unfinished=True)
    assert "Epoch 1 starts again at its first batch: 3 of its batches are trained a second" in caplog.text
    assert (result.epoch, result.trained) == (1, 2)
    result, rest = fit(kinds[now](), tmp_path, epochs=3, drop_unfinished=True)  # which stays in the program
    assert (result.epoch, result.step) == (3, 3 * STEPS + 3)
    assert first + rest == epoch_of(kinds, now, 1) + epoch_of(kinds, now, 2)


@pytest.mark.parametrize(("before", "now"), CHANGES)
@pytest.mark.parametrize("stop_at", [None, "epoch end"])
def test_behind_a_whole_epoch_the_next_one_starts_in_its_own_order(kinds, tmp_path, before, now, stop_at):
    fit(kinds[before](), tmp_path, stop_at, epochs=1 if stop_at is None else 2)
    result, seen = fit(kinds[now](), tmp_path, epochs=2)
    assert seen == epoch_of(kinds, now, 1)
    assert (result.step, result.epoch) == (2 * STEPS, 2)
    assert fit(kinds[before](), tmp_path, epochs=2)[0].trained == 0


def test_a_loop_of_ones_own_moves_too(kinds, tmp_path):
    def loop(data, batches=None, **options):
        model, seen = Small(), []
        with kv.TrainContext(model, sparse_optimizer=kv.optim.SGD(lr=1.0), label=None) as context:
            if batches is None:
                context.load(tmp_path, **options)
            for batch in context.loader(data):
                output, _ = context.forward(batch)
                context.backward(output.sum())
                seen.append(batch["id"].tolist())
                if len(seen) == batches:
                    break
            context.save(tmp_path)
        data.close()
        return seen

    loop(kinds[ONE](), batches=3)
    with pytest.raises(ValueError, match=r"The position is of kv\.data\.from_loaders"):
        loop(kinds[LOADER]())
    assert loop(kinds[LOADER](), drop_unfinished=True) == epoch_of(kinds, LOADER, 0)


def test_a_position_of_a_stream_is_refused_by_a_loader_as_what_it_is(kinds):
    with pytest.raises(
        ValueError, match=r"is of kv.data.from_loaders.. of 1 loader, but the data is a Loader"
    ):
        kinds[LOADER]().load_state_dict(kinds[ONE]().state_dict())
    with pytest.raises(
        ValueError, match=r"is of a Loader .*, but the data is kv.data.from_loaders.. of 2 loaders"
    ):
        kinds[TWO]().load_state_dict(kinds[LOADER]().state_dict())


class Growing:
    """Data that grows, whose position is needed at the end of an epoch too."""

    def __init__(self):
        self.begin = 0

    def identity(self):
        return kv.data.Identity("topic", "a topic", grows=True)

    def __iter__(self):
        for _ in range(3):
            self.begin += 1
            yield {"id": torch.tensor([self.begin])}

    def state_dict(self):
        return {"begin": self.begin}

    def load_state_dict(self, state):
        self.begin = state["begin"]

    def close(self):
        """Nothing is open."""


def test_data_that_grows_needs_its_position_behind_a_whole_epoch(kinds, tmp_path):
    class Topic(Growing):
        def state_dict(self):
            return {"version": 2, "settings": {}, **super().state_dict()}

    fit(Topic(), tmp_path)
    with pytest.raises(ValueError, match="The position is of a Loader"):
        fit(Growing(), tmp_path, epochs=2)
    assert fit(Topic(), tmp_path)[1] == [[4], [5], [6]]


@settings(max_examples=25)
@given(
    epoch=st.integers(0, 4),
    epochs=st.integers(1, 2),
    world=st.integers(1, 3),
    before=st.integers(0, 5),
    steps=st.none() | st.integers(1, 7),
)
def test_a_loader_that_starts_an_epoch_gives_what_it_would_have_given_in_a_row(
    epoch, epochs, world, before, steps
):
    def made():
        return kv.data.read(
            {"id": np.arange(23)},
            4,
            shuffle=8,
            epochs=epochs,
            steps_per_epoch=steps,
            rank=0,
            world_size=world,
        )

    def taken(loader):
        return [batch["id"].tolist() for batch in loader]

    data, straight = made(), made()
    for _, _ in zip(range(before), data, strict=False):
        pass
    data.start_epoch(epoch)
    if steps is None:
        for _ in range(epoch):
            taken(straight)
        assert data.batches_left == len(data)
        assert data.state_dict() == {**straight.state_dict(), "until": epochs * (epoch + 1)}
    for number in range(2):
        assert taken(data) == taken(straight)
        assert data.epoch == epochs * (epoch + number + 1) - 1
