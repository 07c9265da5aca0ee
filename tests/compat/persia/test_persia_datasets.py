"""Datasets of this process: their batches are those that a context gets, in every form that programs have."""

import numpy as np
import pytest
import torch


def make_batch(key, requires_grad=True):
    from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch

    ids = [IDTypeFeatureWithSingleID("user", np.array([key], np.uint64))]
    label = Label(np.full((1, 1), key, np.float32))
    return PersiaBatch(ids, labels=[label], requires_grad=requires_grad)


def labels_of(dataset, epochs=1, **options):
    """The labels that a training context gets."""
    from persia.ctx import TrainCtx
    from persia.data import DataLoader
    from persia.embedding.optim import SGD

    net = torch.nn.Linear(4, 1)
    loader = DataLoader(dataset, **options)  # outside of the context, as PERSIA's documents have it
    found = []
    with TrainCtx(
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        mixed_precision=False,
    ) as ctx:
        for _ in range(epochs):
            for data in loader:
                _, (user,), (label,) = ctx.prepare_features(data)
                ctx.backward(net(user).sum())
                found.append(int(label))
    return found


def test_datasets_need_no_argument_and_can_be_iterated_twice(configure):
    from persia.data import IterableDataset, StreamingDataset

    class Own(IterableDataset):
        def __init__(self):
            super().__init__()
            self.batches, self.loader = [0, 1, 2], None  # names of its own

        def __iter__(self):
            return map(make_batch, self.batches)

    assert StreamingDataset().buffer_size == Own().buffer_size == 10
    assert labels_of(Own(), epochs=2) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("in_job", [False, True])
def test_a_subclass_of_the_base_gives_its_own_batches_in_a_job_too(configure, monkeypatch, in_job):
    from persia.data import DataLoader, IterableDatasetBase

    class Own(IterableDatasetBase):
        def __iter__(self):
            return map(make_batch, range(3))

    if not in_job:
        assert labels_of(Own()) == [0, 1, 2]
        return
    monkeypatch.setenv("KARVAN_LOADER_COUNT", "1")
    monkeypatch.setenv("KARVAN_REGISTRY", "127.0.0.1:9")  # where nobody answers, so that a stream would fail
    data = DataLoader(Own())._make_data(None)
    assert [int(batch["persia.label.0"]) for batch in data] == [0, 1, 2]


def test_a_dataset_sends_batches_by_a_loop_of_its_own(configure):
    from persia.data import IterableDatasetBase

    class Own(IterableDatasetBase):
        def __iter__(self):
            return map(make_batch, range(5))

        def consume_dataset(self):
            for number, batch in enumerate(self):
                if number % 2:
                    self.sender.send(batch.data)
                    yield number

    assert labels_of(Own()) == [1, 3]


def make_fetching(count, error=None):
    """A dataset of earlier versions."""
    from persia.data import PersiaDataset

    class Fetching(PersiaDataset):
        def __init__(self):
            super().__init__(buffer_size=2)

        def fetch_data(self, persia_sender_channel):
            for key in range(count):
                persia_sender_channel.send(make_batch(key).data)
            if error is not None:
                raise error

        def __len__(self):
            return count

    return Fetching()


def test_a_dataset_of_earlier_versions_fetches_its_batches(configure):
    assert labels_of(make_fetching(7), epochs=2) == [*range(7), *range(7)]
    with pytest.raises(KeyError, match="spoiled"):
        labels_of(make_fetching(7, KeyError("spoiled")))
    with pytest.raises(ValueError, match="requires_grad=True, got one without"):
        labels_of(make_fetching(2), is_training=False)


def test_a_dataset_of_earlier_versions_can_be_left_early(configure):
    from persia.ctx import eval_ctx
    from persia.data import DataLoader

    dataset = make_fetching(7)
    with eval_ctx() as ctx:
        for data in DataLoader(dataset):
            assert ctx.prepare_features(data)[2][0].item() == 0
            break
    assert labels_of(dataset) == [*range(7)]


def test_a_stream_without_a_job_says_what_it_needs_in_persias_words(configure, monkeypatch):
    from persia.data import DataLoader, StreamingDataset

    with pytest.raises(RuntimeError, match=r"persia-launcher nn-worker .* PERSIA_NATS_URL"):
        labels_of(StreamingDataset())
    monkeypatch.setenv("KARVAN_REGISTRY", "127.0.0.1:9")
    monkeypatch.setenv("KARVAN_LOADER_COUNT", "0")
    with pytest.raises(RuntimeError, match=r"the job has none: expected roles\.loaders and loader_entry"):
        DataLoader(StreamingDataset())._make_data(None)
    with pytest.raises(NotImplementedError, match="requires_grad=False"):
        DataLoader(StreamingDataset(), is_training=False)
    overridden = type("Own", (StreamingDataset,), {"__iter__": lambda self: iter(())})
    with pytest.raises(NotImplementedError, match="__iter__ of Own, a StreamingDataset of PERSIA"):
        DataLoader(overridden())
    with pytest.raises(RuntimeError, match="inside of `with TrainCtx"):
        iter(DataLoader(make_fetching(1)))
