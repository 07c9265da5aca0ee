"""The numbered behaviours of shared/reference/persia.md through the adapter, where no other file has them.

1, 3, 4, 8: test_persia_batches.py. 11: test_persia_global_config.py. 15: test_persia_adult.py. 6 is for
ids that share a table: here groups have tables of their own, so that ids keep all of their bits.
"""

import os
import shutil
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from persia_job import PersiaJob
from torch import nn

from karvan import distributed
from karvan.checkpoint import CheckpointError

SLOTS = "slots_config: {user: {dim: 4}, item: {dim: 4}}\n"
DTYPES = ["bool", "int8", "int16", "int32", "int64", "float32", "float64", "uint8"]
LOADER = """
import numpy as np
from persia.ctx import DataCtx
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch

arrays = [np.arange(6).reshape(3, 2).astype(dtype) for dtype in DTYPES]
with DataCtx() as ctx:
    ctx.send_data(
        PersiaBatch(
            [IDTypeFeatureWithSingleID("user", np.array([1, 2, 2**64 - 1], np.uint64))],
            [NonIDTypeFeature(array) for array in arrays],
            [Label(array) for array in arrays],
            meta=bytes(range(256)),
        )
    )
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two parameter servers and a worker, which a program of this process finds."""
    folder = tmp_path_factory.mktemp("job")
    job = PersiaJob(
        folder,
        {"embedding.yml": SLOTS, "loader.py": f"DTYPES = {DTYPES}\n{LOADER}"},
        KARVAN_CHECKPOINTS=str(folder),
    )
    for index in range(2):
        job.start("embedding-parameter-server", "--port", 0, "--replica-index", index, "--replica-size", 2)
    job.start("embedding-worker", "--port", 0)
    yield job
    job.close()


@pytest.fixture
def join(servers):
    """Has the next context of this process use the servers, or not; the variables are restored."""

    def choose(on_servers=True):
        distributed.disconnect()
        os.environ["KARVAN_REGISTRY"] = ""
        os.environ["PERSIA_NATS_URL"] = servers.registry.address if on_servers else ""

    return choose


def make_batch(**features):
    from persia.embedding.data import IDTypeFeature, Label, PersiaBatch

    samples = len(next(iter(features.values())))
    made = [
        IDTypeFeature(name, [np.array(sample, np.uint64) for sample in data])
        for name, data in features.items()
    ]
    return PersiaBatch(made, labels=[Label(np.ones((samples, 1), np.float32))])


def make_context(net=None, optimizer=None, **options):
    from persia.ctx import TrainCtx
    from persia.embedding.optim import SGD

    net = net or nn.Linear(1, 1)
    return TrainCtx(
        embedding_optimizer=optimizer or SGD(lr=1.0),
        dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        mixed_precision=False,
        **options,
    )


def step(ctx, batch, loss_of):
    """The vectors of a batch, which then is trained on."""
    _, vectors, _ = ctx.prepare_features(ctx.get_embedding_from_data(batch))
    ctx.backward(loss_of(*vectors))
    return [each.detach() for each in vectors]


def values_of(batch):
    """The vectors of a batch, which is not trained on, in the context that is entered."""
    from persia.ctx import eval_ctx

    with eval_ctx() as evaluation:
        return evaluation.prepare_features(evaluation.get_embedding_from_data(batch))[1]


def test_persia_2_eight_dtypes_and_meta_arrive_exactly_from_a_loader(servers, configure, join):
    from persia.data import DataLoader, StreamingDataset

    join()
    loader = servers.start("data-loader", servers.folder / "loader.py")
    expected = [np.arange(6).reshape(3, 2).astype(dtype) for dtype in DTYPES]
    with make_context() as ctx:
        for data in DataLoader(StreamingDataset(2)):
            non_ids, (user,), labels = ctx.prepare_features(data)
            ctx.backward(user.sum())
            assert data.meta == bytes(range(256))
            for received in (non_ids, labels):
                assert [str(tensor.dtype).removeprefix("torch.") for tensor in received] == DTYPES
                assert all(map(np.array_equal, received, expected))
        assert sum(ctx.get_embedding_size()) == 3
    servers.wait(loader)


def test_persia_5_sqrt_scaling_divides_the_gradient_too(configure):
    configure({"slots_config": {"user": {"dim": 4, "sqrt_scaling": True}}})
    four, each = make_batch(user=[[1, 2, 3, 4]]), make_batch(user=[[1], [2], [3], [4]])
    with make_context() as ctx:
        step(ctx, four, lambda user: user.sum() * 0)
        (before,) = values_of(each)
        step(ctx, four, lambda user: user.sum())
        assert torch.allclose(values_of(each)[0], before - 1 / 2)


@pytest.mark.parametrize("raw", [False, True])
def test_persia_7_hash_stacks_have_the_rows_of_the_golden_buckets(configure, raw):
    stack = {"hash_stack_rounds": 2, "embedding_size": 10}
    slot = {"dim": 2, "hash_stack_config": stack, "embedding_summation": not raw, "sample_fixed_size": 3}
    configure({"slots_config": {"stack": slot}})
    golden = {12: {2, 18}, 23: {5, 10}, 34: {0, 11}, 56: {6, 17}, 78: {7, 12}, 90: {8, 16}}
    with make_context() as ctx:
        table = ctx.open()[1].embeddings.table("stack")
        for key, rows in golden.items():
            ctx.clear_embeddings()
            (found,) = step(ctx, make_batch(stack=[[key]]), lambda vectors: vectors.sum() * 0)
            assert set(table.keys().tolist()) == rows
            total = table.vectors(sorted(rows)).sum(0)
            assert torch.allclose(found[0, 0, :2] if raw else found[0], total)


def test_persia_9_an_id_begins_with_the_same_vector_on_any_number_of_servers(configure, join):
    batch = make_batch(user=[[key] for key in range(50)], item=[[key] for key in range(50)])

    def beginnings():
        with make_context() as ctx:
            ctx.clear_embeddings()
            vectors = step(ctx, batch, lambda user, item: (user.sum() + item.sum()) * 0)
            return vectors, len(ctx.get_embedding_size())

    alone, one = beginnings()
    join()
    on_servers, two = beginnings()
    assert (one, two) == (1, 2)
    assert all(map(torch.equal, alone, on_servers))
    assert not torch.equal(*alone)


@pytest.mark.parametrize("probability", [1, 0])
def test_persia_10_evaluation_and_admission_of_none_insert_nothing(configure, probability):
    from persia.embedding import EmbeddingConfig

    with make_context(embedding_config=EmbeddingConfig(admit_probability=probability)) as ctx:
        (user,) = step(ctx, make_batch(user=[[1]]), lambda user: user.sum())
        assert bool(user.any()) == bool(probability)
        assert ctx.get_embedding_size() == [probability]
        assert not values_of(make_batch(user=[[2]]))[0].any()
        assert ctx.get_embedding_size() == [probability]


def test_persia_12_a_bad_gradient_skips_its_slot_only_and_is_counted(configure):
    net = nn.Linear(1, 1)
    batch = make_batch(user=[[1]], item=[[1]])
    one = torch.ones(1, 1)
    with make_context(net) as ctx:
        step(ctx, batch, lambda user, item: (user + item).sum() * 0 + net(one).sum() * 0)
        user, item = values_of(batch)
        weight = net.weight.item()
        step(ctx, batch, lambda user, item: (user * torch.nan).sum() + item.sum() + net(one).sum())
        assert torch.equal(values_of(batch)[0], user)
        assert torch.allclose(values_of(batch)[1], item - 1)
        assert net.weight.item() == weight - 0.5
        tables = ctx.open()[1].embeddings
        assert [tables.table(name).stats()["skipped_updates"] for name in ("user", "item")] == [1, 0]
        step(ctx, batch, lambda user, item: item.sum() + user.sum() + net(one).sum() * torch.inf)
        assert torch.equal(values_of(batch)[0], user)  # a bad dense gradient skips all
        assert net.weight.item() == weight - 0.5


def test_persia_12_values_stay_within_the_weight_bound(configure):
    from persia.embedding import EmbeddingConfig

    batch = make_batch(user=[[1]])
    for config, bound in ((None, 10), (EmbeddingConfig(weight_bound=0.5), 0.5)):
        with make_context(embedding_config=config) as ctx:
            step(ctx, batch, lambda user: user.sum() * 1000)
            assert torch.equal(values_of(batch)[0], torch.full((1, 4), -float(bound)))
    with make_context(embedding_config=EmbeddingConfig(weight_bound=0)) as ctx:  # no bound
        step(ctx, batch, lambda user: user.sum() * 1000)
        assert float(values_of(batch)[0].max()) < -999


@pytest.mark.parametrize("staleness", [1, 3])
def test_persia_13_staleness_is_that_of_the_data_loader(configure, join, staleness):
    from persia.data import DataLoader, IterableDataset

    class Dataset(IterableDataset):
        def __iter__(self):
            return iter([make_batch(user=[[key]]) for key in range(12)])

    join()
    with make_context() as ctx:
        for data in DataLoader(Dataset(4), embedding_staleness=staleness):
            _, (user,), _ = ctx.prepare_features(data)
            ctx.backward(user.sum())
        settings = distributed.current().settings
        assert (settings.staleness, settings.mode.name) == (staleness, "sync" if staleness == 1 else "hybrid")
        DataLoader(Dataset(4), embedding_staleness=3)
        if staleness > 1:
            with pytest.raises(RuntimeError, match="with staleness 3 before this DataLoader asked for 1"):
                DataLoader(Dataset(4), embedding_staleness=1)


def test_persia_14_what_two_servers_saved_one_process_loads_and_trains_on(servers, configure, join):
    from persia.embedding.optim import Adam

    folder = servers.folder / "saved"
    batches = [make_batch(user=[[key, key + 1], [7]], item=[[key], []]) for key in range(6)]

    def train(part, save=None, load=None):
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        with make_context(net, Adam(lr=0.1)) as ctx:
            ctx.clear_embeddings()
            if load is not None:
                ctx.load_checkpoint(load)
            for batch in part:
                step(ctx, batch, lambda user, item: net(user + item).square().sum())
            if save is not None:
                ctx.dump_checkpoint(save)
            found = values_of(make_batch(user=[[key] for key in range(9)], item=[[key] for key in range(9)]))
            return [*found, *(each.detach() for each in net.parameters())]

    whole = train(batches)
    join()
    train(batches[:3], save=folder)
    join(False)
    assert all(map(torch.equal, train(batches[3:], load=folder), whole))
    join()  # and on the servers again
    assert all(map(torch.equal, train(batches[3:], load=folder), whole))
    shutil.rmtree(next(folder.glob("step-*")))
    join(False)
    with pytest.raises(CheckpointError):
        train([], load=folder)


def test_a_dump_outside_of_the_jobs_folder_is_refused_before_training(
    servers, configure, join, tmp_path, monkeypatch
):
    program = tmp_path / "program.py"
    program.write_text('ctx.dump_checkpoint(os.environ.get("TEST_FOLDER", None))\n')
    main = ModuleType("__main__")
    main.__file__, main.os = str(program), os
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setenv("TEST_FOLDER", str(servers.folder / "inside"))
    join()
    with make_context() as ctx:
        ctx.get_embedding_size()
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path / "outside"))
    join()
    with (
        make_context() as ctx,
        pytest.raises(CheckpointError, match=r"dumps there, but .* below .*the job's"),
    ):
        ctx.get_embedding_size()


def test_persia_15_inference_gives_the_outputs_of_training(configure, tmp_path):
    from persia.ctx import eval_ctx, inference_ctx

    net, batch = nn.Linear(4, 1), make_batch(user=[[1], [2, 3], []])
    net.forward, layer = lambda non_ids, embeddings: layer(embeddings[0]), net.forward
    with make_context(net, model=net) as ctx:
        step(ctx, batch, lambda user: layer(user).square().sum())
        ctx.dump_checkpoint(tmp_path / "run")
        with eval_ctx(model=net) as evaluation:
            expected, _ = evaluation.forward(evaluation.get_embedding_from_data(batch))
    distributed.disconnect()
    fresh = nn.Linear(4, 1)
    fresh.forward, other = lambda non_ids, embeddings: other(embeddings[0]), fresh.forward
    with inference_ctx(model=fresh) as ctx:
        ctx.load_checkpoint(tmp_path / "run")
        output, labels = ctx.forward(ctx.get_embedding_from_bytes(batch.to_bytes()))
        assert labels is None
        assert torch.equal(output, expected)
        assert ctx.get_embedding_size() == [3]
